"""Sequences of changes to accelerated models, each forward compared with an untouched twin's."""

from __future__ import annotations

import copy
import math
import random
import statistics
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import cvt_kernels as ck
from cvt_kernels.tuning import accuracy
from tests import upstream
from tests.changes import CHANGES, Source, steps
from tests.tape import forget_tapes, taped

from .worker import Answer

if TYPE_CHECKING:
    from .cases import Case

_FAMILIES = (
    upstream.huggingface,
    upstream.microsoft,
    upstream.ours,
    upstream.segformer,
    upstream.pvt,
    upstream.pvt_v2,
    upstream.pvt_v2_linear,
    upstream.glpn,
    upstream.vit,
    upstream.dinov2,
    upstream.clip,
    *upstream.TIMMS,
)
_KERNELS_FIRST = {
    "cpu": ("cpu", "sdpa", "reference"),
    "reference": ("reference",),
}
#: Seeds the CPU alone: ``torch.manual_seed`` formats the stack of its caller, for GPUs that may yet be found.
_seed = torch.default_generator.manual_seed
_FROZEN_REFUSES = "is frozen for serving and cannot train"
_TOLERANCE = 1e-4  # of the largest value of the twin
#: How far the accelerated model may be from float64, or from its twin, where the twin loses as much: of
#: forwards, by the bytes of their dtype.
_MOST_LOST = {2: 0.25, 4: 5e-4, 8: 5e-4}
_MOST_OFF = 1e-3  # of the largest gradient
_DRAWS = 15  # of images


# Changes of a model ---------------------------------------------------------------------------------------

#: Those of the table that are made step by step, and are not for both models at once, as words of a case.
_NAMES = {
    name.replace(" ", "_"): name
    for name, each in CHANGES.items()
    if not each.is_long and not each.is_global and each.only != ("pruned",)
}


def _changed(tensor: Tensor, source: random.Random) -> Tensor:
    """Returns a tensor whose numbers are multiplied by ones between 0.7 and 1.3."""
    generator = torch.Generator().manual_seed(source.randrange(2**31))
    factors = 0.7 + 0.6 * torch.rand(tensor.shape, generator=generator)
    return tensor.detach() * factors.to(tensor.dtype)


#: What is done besides: with the accelerated model alone, or with both in a way of its own.
_DEEDS = ("train", "accelerate_again", "functional_call", "in_a_thread", "under_autocast")
_PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")

#: The settings of a case.
CHOICES: dict[str, tuple[Any, ...]] = {
    "family": tuple(family.__name__ for family in _FAMILIES),
    "mode": ("live", "frozen"),
    "backend": tuple(_KERNELS_FIRST),
    "no_grad": ("no_grad", "inference_mode", "grad"),
    **dict.fromkeys(_PLACES, (*dict.fromkeys(("nothing", *_NAMES, *_DEEDS)),)),
    "graphed": (False, True),  # by a tape in the place of CUDA
}


# Comparison -----------------------------------------------------------------------------------------------


class _Pair:
    """A model and its accelerated twin, through a sequence of changes."""

    def __init__(self, case: Case):
        self.family = family = next(f for f in _FAMILIES if f.__name__ == case.settings["family"])
        _seed(case.seed)
        self.own = family().eval()
        self.freeze = case.settings["mode"] == "frozen" and family is not upstream.pvt_v2_linear
        self.accelerated = ck.accelerate(copy.deepcopy(self.own), freeze=self.freeze)
        self.is_graphed = bool(case.settings["graphed"])
        if self.is_graphed:
            ck.graphed(self.accelerated)
        self.source = random.Random(case.seed)
        size = 70 if family is upstream.pvt else self.source.choice((64, 70))
        size = 32 if family in (upstream.vit, upstream.clip, upstream.timm_vit) else size
        self.images = torch.randn(self.source.choice((1, 2)), 3, size, size)
        self.mode = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
            case.settings["no_grad"], torch.enable_grad
        )
        self.compared = 0
        self.open: list[Any] = []

    def change(self, word: str) -> None:
        """Changes both models alike, or does what only one of them or another call can do."""
        seed = self.source.randrange(2**31)
        if word in _DEEDS:
            getattr(self, f"_{word}")(seed)
            return
        name = _NAMES[word]
        change = CHANGES[name]
        way = f"{'frozen' if self.freeze else 'live'} {'gradients' if self.mode is torch.enable_grad else ''}"
        is_here = change.only is None or self.family.__name__ in change.only
        if not is_here or any(part in way for part in change.not_in):
            return
        if self.is_graphed and "graphed" in change.not_in:
            ck.graphed(self.accelerated)
            forget_tapes()  # which have views of the weights
        steps_of = [
            steps(name, self.own, Source(seed, self.images)),
            steps(name, self.accelerated, Source(seed, self.images, self._serve)),
        ]
        self.open.extend(steps_of)  # what is begun may stay as it is
        may_stay = change.tolerance == _TOLERANCE and self.source.random() < 0.5
        for _ in range(1 if may_stay else 99):
            own, accelerated = self._run_both(lambda model: next(steps_of[model is not self.own], None))
            if own is None:
                return
            self.own, self.accelerated = own, accelerated
            # Graphs do not look at attributes: docs/serve.md.
            if self.is_graphed and ("graphed" in change.not_in or change.kind == "settings"):
                ck.graphed(self.accelerated)
            self.compare_as_served(2 * change.tolerance)  # others before it round, too

    def _serve(self, model: nn.Module) -> nn.Module:
        try:
            ck.accelerate(model, freeze=self.freeze)
        except ValueError:  # what was changed can no longer be accelerated
            raise _End from None
        return ck.graphed(model) if self.is_graphed else model

    def compare_as_served(self, tolerance: float = _TOLERANCE) -> None:
        """Compares without a graph, by a capture, and by a replay."""
        for _ in range(3 if self.is_graphed else 1):
            self.compare(tolerance=tolerance)

    def _run_both(self, run: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        """Returns what a function gives for the model and for its twin.

        Raises:
            _End: The twin raises too, or a frozen model refuses to train.
            _Flaw: One of both raises.
        """
        results = []
        for model in (self.own, self.accelerated):
            _seed(0)
            try:
                results.append(run(model))
            except _End:
                raise
            except Exception as error:
                results.append(error)
        expected, actual = results
        if isinstance(expected, Exception):
            if not isinstance(actual, Exception):
                raise _Flaw(f"works where the twin raises {expected!r:.200}")
            raise _End
        if isinstance(actual, Exception):
            if _FROZEN_REFUSES in str(actual):
                raise _End
            raise _Flaw(f"raises {actual!r:.300}, the twin does not")
        return expected, actual

    def compare(
        self, run: Callable[[nn.Module, Tensor], Any] | None = None, tolerance: float = _TOLERANCE
    ) -> None:
        """Compares the results of a forward, of a model and images.

        Where changes have made scores of attention so large that the twin itself loses as much, the accuracy
        rule says which differences are allowed.
        """

        def results_of(model: nn.Module) -> Tensor:
            with self.mode():
                images = self.images.to(next(model.parameters()).dtype)
                out = model(images) if run is None else run(model, images)
            return upstream.logits(out).detach().double()

        expected, actual = self._run_both(results_of)
        self.compared += 1
        if not expected.isfinite().all():
            raise _End
        largest = expected.abs().max().clamp_min(1e-30).item()
        error = (actual - expected).abs().max().item() / largest
        if error <= tolerance:
            return
        ours, twins, allowed = self._lost(results_of, error)
        is_near = min(ours, error) <= _MOST_LOST[next(self.own.parameters()).itemsize]
        if not (is_near and ours <= allowed):
            flaw = f"is off by {error:.2e} of the largest value, and by {ours:.2e} of float64's"
            raise _Flaw(f"{flaw}, the twin by {twins:.2e}")

    def _lost(self, results_of: Callable[[nn.Module], Tensor], error: float) -> tuple[float, float, float]:
        """Returns our error, the twin's and the allowed one, of the largest value of the twin in float64.

        Where they are too large for the images, they are medians over several: of few numbers the error is a
        matter of luck. Where the twin cannot be copied or run in float64, ours is ``error``.
        """
        images, errors = self.images, list[tuple[float, float, float]]()
        for _ in range(_DRAWS):
            expected, actual = self._run_both(results_of)
            exact, dtype = self._exact(results_of), next(self.own.parameters()).dtype
            if exact is None:
                return error, 0.0, math.inf
            largest = exact.abs().max().clamp_min(1e-30).item()
            each = accuracy.compare(actual, expected, exact, dtype=dtype)
            errors.append((each.ours / largest, each.pytorchs / largest, each.allowed / largest))
            if each.passed and len(errors) == 1:
                break
            self.images = _changed(images, self.source)
        self.images = images
        ours, twins, allowed = map(statistics.median, zip(*errors, strict=True))
        return ours, twins, allowed

    def _exact(self, results_of: Callable[[nn.Module], Any]) -> Any:
        """Returns what a function gives for the twin in float64, or None likewise."""
        try:
            precise = upstream.in_float64(copy.deepcopy(self.own))
            _seed(0)
            return results_of(precise)
        except Exception:
            return None

    def _train(self, seed: int) -> None:
        """Compares the gradients of a step in training mode.

        Where the two differ, the accuracy rule says which differences from float64's are allowed: of channels
        that hardly vary, PyTorch's batch_norm has gradients with errors of up to 5 %.
        """
        if self.freeze or (self.family in upstream.UPSTREAMS and len(self.images) == 1):
            return  # of one image PyTorch's batch_norm computes wrong gradients: tests/upstream.py

        def gradients_of(model: nn.Module) -> list[Tensor | None]:
            model.train()
            model.zero_grad()
            images = self.images.to(next(model.parameters()).dtype)
            upstream.logits(model(images)).sin().mean().backward()
            model.eval()
            return [p.grad for p in model.parameters()]

        def difference(mine: list[Tensor | None], theirs: list[Tensor | None]) -> float:
            known = [(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None]
            largest = max((b.abs().max().item() for _, b in known), default=0.0)
            worst = max(((a - b).abs().max().item() for a, b in known), default=0.0)
            return worst / largest if largest else worst

        theirs, ours = self._run_both(gradients_of)
        if [each is None for each in theirs] != [each is None for each in ours]:
            raise _Flaw("has other gradients than the twin")
        error = difference(ours, theirs)
        if error <= _MOST_OFF:
            return
        exact = self._exact(gradients_of)
        allowed = 0.0 if exact is None else accuracy.GRADIENT_FACTOR * difference(theirs, exact)
        if exact is None or not difference(ours, exact) <= max(allowed, _MOST_OFF):
            raise _Flaw(f"has gradients that are off by {error:.2e} of the largest")

    def _accelerate_again(self, seed: int) -> None:
        self._serve(ck.restore(self.accelerated))

    def _functional_call(self, seed: int) -> None:
        source = random.Random(seed)
        name = source.choice([name for name, _ in self.own.named_parameters()])
        value = _changed(dict(self.own.named_parameters())[name], source)
        self.compare(
            lambda model, images: torch.func.functional_call(model, {name: value.to(images)}, (images,))
        )

    def _in_a_thread(self, seed: int) -> None:
        errors: list[Exception] = []
        backends = ck.backends.requested_backends()

        def run() -> None:
            try:
                with ck.use_backend(*backends):
                    self.compare()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def _under_autocast(self, seed: int) -> None:
        """Runs both without a comparison: bfloat16 has its own roundings."""
        with torch.autocast("cpu", torch.bfloat16), self.mode():
            self._run_both(lambda model: model(self.images))


class _End(Exception):  # noqa: N818 (it is no error)
    """The twin itself does not go on."""


class _Flaw(Exception):  # noqa: N818 (likewise)
    """A difference from the twin."""


def judge(case: Case) -> Answer:
    """Makes the changes of a case, and compares the forwards after each."""
    threads, flaws, done = torch.get_num_threads(), [], []
    pair = _Pair(case)
    try:
        with ck.use_backend(*_KERNELS_FIRST[case.settings["backend"]]), taped():
            for place in _PLACES:
                done.append(case.settings[place])
                pair.change(done[-1])
                pair.compare_as_served()
    except _End:
        pass
    except _Flaw as flaw:
        changes = ", ".join(name for name in done if name != "nothing") or "no change"
        kind = f"{case.settings['mode']}{' and graphed' if pair.is_graphed else ''}"
        flaws.append(f"a {kind} {case.settings['family']}, after {changes}, {flaw}")
    finally:
        torch.set_num_threads(threads)
    return Answer(flaws, pair.compared)
