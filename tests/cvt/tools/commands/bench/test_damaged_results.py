"""Files of results from which something is missing, or in which something is absurd."""

import copy
import json

import pytest

from cvt.tools.commands import main
from cvt.tools.commands.bench.compare import comparison
from cvt.tools.commands.bench.results import read
from tests.checks import bad
from tests.cvt.tools.commands.bench.test_bench import made

_ROW = {"seconds": [0.5, 0.25, 0.5, 0.25], "peak_bytes": 1, "parity": {}}
_PARITY = {"error": 1e-6, "largest": 1.0, "top5": 5, "of": 5, "gradient_error": None}
_FIRST = {"batch_size": 1, "load": None, "seconds": 0.5, "untuned_seconds": 1.5}
RESULTS = {
    **made(),
    "contenders": {
        "hf": {"about": "theirs", "ours": False, "note": None, "first": _FIRST},
        "cvt": {"about": "ours", "ours": True, "note": None},
    },
    "batches": [
        {
            "batch_size": 1,
            "operations": 2,
            "product": {"n": 2, "operations": 16, "seconds": [0.5, 0.25, 0.5, 0.25]},
            "rows": [{"contender": key, **_ROW, "parity": _PARITY} for key in ("hf", "cvt")],
        }
    ],
}
_ABSENT = object()
_ABSURD = (_ABSENT, None, [], {}, "x", -1, 0, 1e300, float("nan"), float("inf"), 10**400, True)


def _places(node, path=()):
    """Yields the way to every value."""
    for key in node if isinstance(node, dict) else range(len(node)):
        yield (*path, key)
        if isinstance(node[key], dict | list):
            yield from _places(node[key], (*path, key))


def _damaged(path, value):
    results = copy.deepcopy(RESULTS)
    node = results
    for key in path[:-1]:
        node = node[key]
    if value is _ABSENT:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return results


def test_whole_results_are_compared(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(RESULTS))
    assert main(["bench", "--compare", *[str(tmp_path / "a.json")] * 2]) == 0
    assert "within noise" in capsys.readouterr().out


@pytest.mark.parametrize("value", _ABSURD, ids=lambda value: "absent" if value is _ABSENT else str(value))
def test_damaged_results_are_refused_or_do_no_harm(value, tmp_path, capsys):
    path, refused = tmp_path / "bad.json", []
    for place in _places(RESULTS):
        path.write_text(json.dumps(_damaged(place, value)))
        try:
            found = read(path)
        except ValueError:
            refused.append(path.read_text())
        else:
            words = {word for old, new in ((RESULTS, found), (found, RESULTS)) for word in _words(old, new)}
            assert not {"nan", "inf"} & words, place
    path.write_text(refused[-1])
    assert "error: " in bad(capsys, main, "bench", "--compare", path, path)


def test_damaged_results_say_what_was_expected(tmp_path):
    for place, value, message in (
        (("batches", 0, "batch_size"), 0, "batch_size: got 0, expected an integer from 1 to 1048576"),
        (("batches", 0, "rows", 0, "seconds", 0), 1e300, "seconds: got 1e.300, expected 1e-09 to 1e.09"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(_damaged(place, value)))
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "bad.json")


def _words(old, new):
    """Returns the words of a comparison; none where there is none, since one is of another model or size."""
    try:
        text = comparison(old, new)
    except ValueError as error:
        if "results cannot be compared: " not in str(error):
            raise
        return []
    return text.replace("(", " ").replace("–", " ").replace(")", " ").split()
