"""Cases: a subject, a choice for each of its settings, and the seed of its random numbers.

A line of text names a case: ``attention:123`` is what that seed draws, ``attention keys=17 seed=3`` has the
simplest choice of every setting that is not named.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from cvt_kernels.ops import cards

from . import commands, files, models, raw

#: The choices of every setting of a subject, the simplest first.
CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    **{operator: dict(card.choices) for operator, card in cards.all_cards().items()},
    "raw": raw.CHOICES,
    "models": models.CHOICES,
    "commands": commands.CHOICES,
    "files": files.CHOICES,
}
_SIMPLEST = 0.4  # how often a setting is the simplest, whatever the others
# How often these are.
_RARE = {"autocast": 0.9, "parameters": 0.7, "layout": 0.5, "values": 0.5, "operator": 0.0}


class Case(NamedTuple):
    """A case.

    Attributes:
        subject: An operator, ``"raw"``, ``"models"``, ``"commands"`` or ``"files"``.
        settings: The choice for every setting.
        seed: Of the random numbers.
    """

    subject: str
    settings: dict[str, Any]
    seed: int

    def __str__(self) -> str:
        """Returns the line that names it."""
        choices = CHOICES[self.subject]
        words = [f"{name}={value}" for name, value in self.settings.items() if value != choices[name][0]]
        return " ".join([self.subject, *words, f"seed={self.seed}"])


def parsed(line: str) -> Case:
    """Returns the case that a line names.

    Raises:
        ValueError: There is no such subject, setting or choice.
    """
    subject, *words = line.split() or [""]
    subject, _, seed = subject.partition(":")
    if subject not in CHOICES:
        raise ValueError(f"case: got {subject!r}, expected one of {', '.join(CHOICES)}")
    if seed:
        return _drawn(subject, _number(seed))
    choices = CHOICES[subject]
    for word in words:
        if "=" not in word:
            raise ValueError(f"case: got {word!r}, expected a setting and its choice, such as seed=1")
    given = dict(word.split("=", 1) for word in words)
    number = _number(given.pop("seed", "0"))
    settings = {name: values[0] for name, values in choices.items()}
    for name, text in given.items():
        named = {str(value): value for value in choices.get(name, ())}
        if text not in named:
            raise ValueError(f"case: got {name}={text} for {subject}, expected one of {choices}")
        settings[name] = named[text]
    return Case(subject, settings, number)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"case: got the seed {text!r}, expected an integer of at least 0")
    return int(text)


def _drawn(subject: str, seed: int) -> Case:
    source = random.Random(f"{subject}:{seed}")
    settings = {
        name: choices[0] if source.random() < _RARE.get(name, _SIMPLEST) else source.choice(choices)
        for name, choices in CHOICES[subject].items()
    }
    return Case(subject, settings, seed)


def simpler(line: str) -> Iterator[str]:
    """Yields the lines of cases that are simpler by a single setting, the simplest first."""
    case = parsed(line)
    for name, choices in CHOICES[case.subject].items():
        place = choices.index(case.settings[name])
        for other in dict.fromkeys((0, place // 2, place - 1)):
            if 0 <= other < place:
                yield str(case._replace(settings=case.settings | {name: choices[other]}))
    if case.seed:
        yield str(case._replace(seed=0))
