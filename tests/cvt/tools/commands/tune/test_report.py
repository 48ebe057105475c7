"""The table and the lines below it, for results of every kind."""

import json

import pytest

from cvt.tools.commands.tune import report
from cvt.tools.commands.tune.cache_keys import Workload
from cvt.tools.commands.tune.tuning import Result
from cvt_kernels.autotune import Cache, Entry, Measurement

KEY = "gelu, forward+backward, float32 under autocast to bfloat16, quick, 4+ elements, 3 channels"


def measurement(microseconds=None, flaw=None, error=1e-7, host=None):
    seconds = None if microseconds is None else microseconds / 1e6
    return Measurement(error, 2e-7, seconds, None if host is None else host / 1e6, flaw)


def result(chosen, chosen_in_graphs=None, **measurements):
    return Result(KEY, Entry(chosen, chosen_in_graphs or chosen, measurements))


@pytest.fixture
def cache(cache):
    return Cache({"device": "cpu"})


def row(result):
    """Returns the cells of the only result in a table, by the names of their columns."""
    _, *lines = report.table([result])
    heading, line = ([cell.strip() for cell in line.split("  ") if cell] for line in lines)
    return dict(zip(heading, line, strict=True))


def test_a_block_for_each_operator_direction_and_dtype():
    attention = "attention, forward, float32, 4+ images × heads of 64 channels, 512+ queries, 128+ keys"
    faster = Entry("cpu", "cpu", {"cpu": measurement(1000), "sdpa": measurement(2000)})
    case, geometry = "4+ images of 512+ pixels, 192 channels", ", kernel/stride/padding/dilation 3x3/1/1/1"
    results = [
        Result(attention, faster),
        result(
            "cpu",
            triton=measurement(30.4, host=8),
            cpu=measurement(12, host=20),
            reference=measurement(50),
        ),
        Result(attention.replace("4+", "1+"), faster),
        Result(f"conv_projection, forward, float32, {case}{geometry}", None, "there is not enough memory"),
    ]
    assert report.table(results) == [
        "attention, forward, float32 (times in µs)",
        "case                                                        cpu  sdpa  error / allowed  chosen",
        "4+ images × heads of 64 channels, 512+ queries, 128+ keys  1000  2000              0.5  cpu",
        "1+ images × heads of 64 channels, 512+ queries, 128+ keys  1000  2000              0.5  cpu",
        "",
        "gelu, forward+backward, float32 → bfloat16 (times in µs)",
        "case                            triton  cpu  reference  error / allowed  chosen",
        "quick, 4+ elements, 3 channels      30   20         50              0.5  cpu",
        "",
        "conv_projection, forward, float32 (times in µs)",
        "case                                    error / allowed  chosen",
        "4+ images of 512+ pixels, 192 channels                –  not tuned",
    ]


@pytest.mark.parametrize(
    ("flaw", "word"),
    [
        ("wrong: output is off by 1.0e-02", "wrong"),
        ("fails here: OSError: no", "fails here"),
    ],
)
def test_a_flaw_is_a_word_in_the_table_and_a_line_below(flaw, word, cache):
    flawed = result("reference", triton=measurement(flaw=flaw, error=None), reference=measurement())
    shown = row(flawed)
    assert (shown["triton"], shown["reference"], shown["chosen"]) == (word, "right", "reference")
    assert not flawed.is_good
    lines = report.summary([flawed], cache)
    assert lines[0] == f"triton, {KEY}: {flaw}"
    assert lines[1].startswith("What fails here is not remembered") == (word == "fails here")
    assert any(line.startswith("No kernel with a flaw is used. Please report") for line in lines[1:3])


def test_another_choice_in_graphs():
    shown = row(result("cpu", "triton", triton=measurement(1), cpu=measurement(1)))
    assert shown["chosen"] == "cpu, triton in graphs"


def test_what_is_not_tuned(cache):
    untuned = Result(KEY, None, "there is not enough memory")
    assert report.table([untuned])[-1].endswith("not tuned")
    assert report.summary([untuned], cache)[:2] == [
        f"not tuned, {KEY}: there is not enough memory",
        "1 cache keys, 0 tuned; chosen: nothing",
    ]


def test_a_flaw_of_pytorch_is_told_without_a_request_to_report_it(cache):
    lines = report.summary([result("cpu", sdpa=measurement(flaw="fails: no"), cpu=measurement())], cache)
    assert lines[0] == f"sdpa, {KEY}: fails: no"
    assert lines[1] == "1 cache keys, 1 tuned; chosen: cpu 1"


def test_choices_of_a_busy_machine_are_told(cache):
    busy = result("cpu", cpu=measurement(1)._replace(is_disturbed=True), reference=measurement(2))
    assert cache.advice() not in report.summary([busy], cache)
    cache.remember({KEY: busy.entry})
    assert cache.advice() in report.summary([busy], cache)


def test_json_has_no_numbers_that_json_does_not_have(cache):
    workload = Workload("cvt_13", 224, [1], ["float32"], train=False)
    infinite = result(
        "reference", triton=measurement(flaw="wrong: …", error=float("inf")), reference=measurement()
    )
    content = json.loads(json.dumps(report.as_json([infinite], workload, cache), allow_nan=False))
    assert content["cache_keys"][0]["measurements"]["triton"]["error"] is None
    assert content["workload"]["model"] == "cvt_13"
