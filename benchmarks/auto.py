"""Times ``auto`` against PyTorch's own forms of every operator, at all shapes of CvT-13, as JSON.

``python -m benchmarks.auto FILE``. Each call runs once before, which autotunes the kernels if the cache has
no entry yet; then the public function and PyTorch's own backends, called directly, run in turns. A call is
judged by the median of the rounds' own ratios. A call that looks slow is measured again at the end, for
longer: a disturbance by other programs is over by then, a wrong choice is not. A call that raises costs the
others nothing. The exit status is 1 if one remains slow or raises.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import cvt_kernels as ck
from cvt.commands.bench.results import ratio
from cvt_kernels import backends
from cvt_kernels.autotune import clock
from cvt_kernels.tables import aligned

from . import suites

SCHEMA, VERSION = "benchmarks auto", 1
#: A call is slow if PyTorch's time divided by ours is below this. Autotuning takes up to 10 % for
#: noise (``tuner.MARGIN``), and so does this.
TOLERANCE = 0.9
#: Seconds that a call may lose all the same: the public functions check their arguments and look the entry
#: up. Where ``auto`` took the very function that it is compared with, that was 6 to 21 µs on two cores of a
#: Xeon; at batch 1 there are calls of 60 µs.
DISPATCH = 25e-6
#: Rounds of a call, at least and at most, and the seconds that they may take in between.
FEWEST, MOST, SECONDS = 11, 201, 1.0
WORST = 10  # rows that are printed


class Setting(NamedTuple):
    """The settings that all operators share in a row.

    Attributes:
        dtype: The dtype of the activations.
        images: The batch size.
        backward: Whether the backward belongs to the call.
    """

    dtype: torch.dtype
    images: int
    backward: bool


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        operator: Name of the operator.
        bind: Turns an implementation of it into a function of the leaves.
        leaves: Tensors; with ``douts`` their gradients are computed.
        douts: Gradients of the outputs; None for a forward.
    """

    operator: str
    bind: Callable[[Callable[..., Any]], Callable[..., Any]]
    leaves: Sequence[torch.Tensor]
    douts: list[torch.Tensor] | None

    def runner(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """Returns the function to time for an implementation."""
        call = self.bind(function)
        if self.douts is None:
            return functools.partial(call, *self.leaves)
        return functools.partial(suites.results, call, self.leaves, self.douts)


class Case(NamedTuple):
    """A row to be measured.

    Attributes:
        setting: Its settings.
        name: The rest of its name beside the operator's: the stage, and what else tells it from others.
        make: Makes the call of a setting.
    """

    setting: Setting
    name: str
    make: Callable[[Setting], Call]


class Measurement(NamedTuple):
    """The times of a call, as they are in its row of the report.

    Attributes:
        chosen: The backend that served under ``auto``; several with `` and `` between them.
        seconds: ``auto`` and PyTorch's own backends → the median seconds of the call.
        best_of_pytorch: The fastest one of PyTorch's own backends.
        ratio: The median over rounds of its seconds divided by ``auto``'s.
        quartiles: The lower and the upper quartile of these ratios.
        rounds: Number of rounds.
    """

    chosen: str
    seconds: dict[str, float]
    best_of_pytorch: str
    ratio: float
    quartiles: tuple[float, float]
    rounds: int


# Calls ----------------------------------------------------------------------------------------------------


def settings() -> list[Setting]:
    """Lists the settings, the most informative first, since time may run out."""
    dtypes = suites.dtypes()[:1] if suites.CUDA else [torch.float32, torch.bfloat16]
    batches = (suites.batch(), 1)
    forward = [Setting(dtype, images, False) for images in batches for dtype in dtypes]
    return [*forward, Setting(dtypes[0], batches[0], True)]


def makers() -> Iterator[tuple[str, functools.partial[Call]]]:
    """Yields the name of each case and the function that makes its call."""
    # Not above, since the shapes of a suite depend on what main sets.
    from . import test_fused, test_layer_norm_gelu, test_linear

    for stage in suites.stages():
        yield stage, functools.partial(conv_projection, stage)
        yield stage, functools.partial(attention, stage)
        for operator, approximate in test_layer_norm_gelu.CALLS:
            name = stage if approximate is None else f"{stage}, {approximate}"
            yield name, functools.partial(layer_norm_gelu, stage, operator, approximate)
        for layer in test_linear.LAYERS:
            yield f"{stage}, {layer}", functools.partial(linear, stage, layer)
            yield f"{stage}, {layer}", functools.partial(linear_int8, stage, layer)
        for make in test_fused.CASES:
            name = f"{stage}, SegFormer" if make is test_fused.segformer_block else stage
            yield name, functools.partial(fused, stage, make.__name__)
        for operator in OF_8_BITS:
            yield stage, functools.partial(rows_of_8_bits, stage, operator)


def cases() -> list[Case]:
    """Lists the rows; quantized operators have no gradients."""
    return [
        Case(setting, name, make)
        for setting in settings()
        for name, make in makers()
        if not (setting.backward and _is_forward_only(make))
    ]


def _is_forward_only(make: functools.partial[Call]) -> bool:
    """Returns whether a maker, unwrapped from its partial, is of a quantized operator."""
    return make.func in (linear_int8, rows_of_8_bits)


def conv_projection(stage: str, setting: Setting) -> Call:
    """Returns the projection of a stage; with the backward it takes the statistics of the batch."""
    from . import test_conv_projection as suite

    x, grid, branches = suite.setting(stage, setting.dtype, setting.images)
    douts = suite.gradients(x, grid, branches) if setting.backward else None

    def bind(function: Callable[..., Any]) -> Callable[..., Any]:
        return suite.contender(function, grid, branches, setting.backward)

    return Call("conv_projection", bind, suite.leaves_of(x, branches), douts)


def attention(stage: str, setting: Setting) -> Call:
    """Returns the attention of a stage."""
    from . import test_attention as suite

    *leaves, dout = suite.make(stage, setting.dtype, setting.images)
    bind = functools.partial(suite.contender, q=leaves[0])
    return Call("attention", bind, leaves, [dout] if setting.backward else None)


def layer_norm_gelu(stage: str, operator: str, approximate: str | None, setting: Setting) -> Call:
    """Returns a call of LayerNorm, GELU or one of their fusions at the shape of a stage."""
    from . import test_layer_norm_gelu as suite

    leaves = suite.make(operator, stage, setting.dtype, setting.images)
    douts = suite.gradients(operator, leaves[0]) if setting.backward else None
    keywords = {} if approximate is None else {"approximate": approximate}
    return Call(operator, lambda function: functools.partial(function, **keywords), leaves, douts)


def linear(stage: str, layer: str, setting: Setting) -> Call:
    """Returns a linear layer of a stage."""
    from . import test_linear as suite

    *leaves, dout = suite.make(layer, stage, setting.dtype, setting.images)
    return Call("linear", lambda function: function, leaves, [dout] if setting.backward else None)


def linear_int8(stage: str, layer: str, setting: Setting) -> Call:
    """Returns a linear layer with a weight of 8-bit integers, with what follows it in a block."""
    from . import test_linear as suite

    x, weight, bias, residual = suite.make(layer, stage, setting.dtype, setting.images)
    values, scales = ck.reference.quantize_rows(weight)
    hidden = layer == "fc1"
    follows: dict[str, Any] = {"approximate": "quick" if hidden else None}
    follows |= {"residual": None if hidden else residual, "dtype": setting.dtype}
    bind = functools.partial(functools.partial, **follows)
    return Call("linear_int8", bind, [x, values, scales.flatten(), bias], None)


def rows_of_8_bits(stage: str, operator: str, setting: Setting) -> Call:
    """Returns a call that rounds the tokens of a stage, or for GELU the hidden channels of its MLPs."""
    from . import test_fused, test_linear

    layer = "fc2" if operator == "gelu_quantize" else "fc1"
    x, *_ = test_linear.make(layer, stage, setting.dtype, setting.images)
    weight, bias = test_fused.vectors_of(x)
    leaves, settings = {
        "quantize_rows": ([x], {}),
        "layer_norm_quantize": ([x, weight, bias], {"eps": 1e-5, "shift": None}),
        "gelu_quantize": ([x, bias], {"approximate": "quick"}),
    }[operator]
    bind = functools.partial(functools.partial, **settings, scale=None, dtype=torch.int8)
    return Call(operator, bind, leaves, None)


def fused(stage: str, case: str, setting: Setting) -> Call:
    """Returns the call of an operator that reaches over several layers, in evaluation."""
    from . import test_fused

    make = getattr(test_fused, case)
    operator = test_fused.operator_of(make)
    leaves, call = make(stage, setting.dtype, setting.images)
    outputs = suites.results(functools.partial(call, getattr(ck.reference, operator)), leaves)
    douts = [suites.randn(*out.shape, dtype=out.dtype, seed=6 + i) for i, out in enumerate(outputs)]
    bind = functools.partial(functools.partial, call)
    return Call(operator, bind, leaves, douts if setting.backward else None)


#: The operators that make 8-bit numbers of activations.
OF_8_BITS = ("quantize_rows", "layer_norm_quantize", "gelu_quantize")


# Measuring ------------------------------------------------------------------------------------------------


def measured(call: Call, seconds: float) -> Measurement:
    """Times a call under ``auto`` and by PyTorch's own backends, for about ``seconds``."""
    with torch.inference_mode(call.douts is None):
        ours = call.runner(getattr(ck, call.operator))
        chosen = suites.backends_serving(ours).get(call.operator, ["reference"])
        others = {name: call.runner(function) for name, function in pytorchs_own(call).items()}
        runners = [ours, *others.values()]
        once = sum(itertools.chain(*clock.seconds_in_turns(runners, 1, suites.DEVICE)))
        rounds = 1 if suites.TINY else max(FEWEST, min(MOST, int(seconds / once)))
        times, *theirs = clock.seconds_in_turns(runners, rounds, suites.DEVICE)
    medians = dict(zip(others, map(statistics.median, theirs), strict=True))
    best = min(medians, key=medians.__getitem__)
    share = ratio(times, theirs[list(others).index(best)])
    seconds_of = {"auto": statistics.median(times), **medians}
    quartiles = (share.low, share.high)
    return Measurement(" and ".join(chosen), seconds_of, best, share.median, quartiles, rounds)


#: Backends that are no form of PyTorch's: kernels of this project, and other operators one after the other.
_NOT_PYTORCHS = (*backends.OURS, "composed")


def pytorchs_own(call: Call) -> dict[str, Callable[..., Any]]:
    """Returns PyTorch's own implementations that can serve a call, by the name of the backend."""
    leaves = [t.detach().requires_grad_(call.douts is not None) for t in call.leaves]
    record = backends.operators[call.operator].bind

    def serving(name: str) -> Callable[..., Any]:
        function = backends.registered(call.operator, name).load().function
        return lambda *args, **kwargs: function(record(*args, **kwargs))

    bound = call.bind(record)(*leaves)
    return {
        name: serving(name)
        for name in backends.BACKENDS
        if name not in _NOT_PYTORCHS and backends.why_unsupported(call.operator, name, bound) is None
    }


def is_slow(row: dict[str, Any]) -> bool:
    """Returns whether ``auto`` is slower than PyTorch's own by more than noise and its own dispatch."""
    seconds = row["seconds"]
    lost = seconds["auto"] - seconds[row["best_of_pytorch"]]
    return row["ratio"] < TOLERANCE and lost > DISPATCH


# Script ---------------------------------------------------------------------------------------------------


def main() -> int:
    """Measures all calls, the slow ones twice, and prints those with the worst ratios."""
    parser = suites.script_parser("auto", __doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="for everything (default: 1800)")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    suites.TINY = options.tiny
    rows = cases()
    report = empty_report(len(rows))
    write_report = functools.partial(suites.write_report, options.path, report)
    done = measure_all(rows, report, deadline, write_report)
    remeasure_slow(done, report["rows"], deadline, write_report)
    print_worst(report)
    print_failures(report)
    slow = any(map(is_slow, report["rows"])) and not suites.TINY
    return 1 if slow or report["failures"] else 0


def empty_report(calls: int) -> dict[str, Any]:
    """Returns the report on a number of calls, before the first is measured."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "device": suites.device_name(),
        "device_type": suites.DEVICE,
        "threads": torch.get_num_threads(),
        "cvt_kernels": ck.__version__,
        "torch": torch.__version__,
        "tolerance": TOLERANCE,
        "dispatch_seconds": DISPATCH,
        "calls": calls,
        "rows": [],
        "failures": [],
    }


def measure_all(
    cases: Sequence[Case], report: dict[str, Any], deadline: float, write_report: Callable[[], None]
) -> list[Case]:
    """Measures cases until the deadline (of ``time.monotonic``), and writes the report after each.

    The report gets a row for each case that is measured, and a failure for each that raises. Returns the
    cases that have rows, in their order.
    """
    done = []
    for case in cases:
        if time.monotonic() > deadline:
            break
        try:
            call = case.make(case.setting)
            row = {"operator": call.operator, "case": case.name, **_facts(case.setting)}
            row |= measured(call, seconds_per_call())._asdict()
        except Exception as error:  # which must not cost the others their rows
            report["failures"].append(named(case) | {"error": f"{type(error).__name__}: {error}"})
        else:
            report["rows"].append(row)
            done.append(case)
        write_report()
    return done


def named(case: Case) -> dict[str, Any]:
    """Returns what tells a case from the others, though its call cannot be made."""
    name = " ".join([case.make.func.__name__, *map(str, case.make.args)])
    return {"case": name, **_facts(case.setting)}


def print_failures(report: dict[str, Any]) -> None:
    """Prints the calls that raise, each with the first line of its error."""
    for row in report["failures"]:
        facts = ", ".join(str(row[name]) for name in ("case", "dtype", "batch", "direction"))
        print(f"failed: {facts}: {row['error'].splitlines()[0]}")


def remeasure_slow(
    cases: Sequence[Case], rows: list[dict[str, Any]], deadline: float, write_report: Callable[[], None]
) -> None:
    """Measures again, for longer, the calls that look slow; their rows keep the first ratio too."""
    for row, case in zip(rows, cases, strict=True):
        if is_slow(row) and time.monotonic() < deadline:
            first = row["ratio"]
            row |= measured(case.make(case.setting), 4 * seconds_per_call())._asdict()
            row["first_ratio"] = first
            write_report()


def seconds_per_call() -> float:
    """Returns the seconds that the measurement of a call may take."""
    return 0.1 if suites.CUDA else SECONDS


def _facts(setting: Setting) -> dict[str, Any]:
    return {
        "direction": "forward+backward" if setting.backward else "forward",
        "dtype": suites.short(setting.dtype),
        "batch": setting.images,
    }


def print_worst(report: dict[str, Any]) -> None:
    """Prints the calls in which ``auto`` gains the least on PyTorch's own, or loses the most."""
    rows = sorted(report["rows"], key=lambda row: row["ratio"])
    table = [["worst", "dtype", "batch", "direction", "auto took", "auto µs", "PyTorch's µs", "ratio", ""]]
    for row in rows[:WORST]:
        seconds, best = row["seconds"], row["best_of_pytorch"]
        low, high = row["quartiles"]
        facts = [f"{row['operator']}, {row['case']}", row["dtype"], str(row["batch"]), row["direction"]]
        times = [f"{1e6 * seconds['auto']:.0f}", f"{1e6 * seconds[best]:.0f} ({best})"]
        ratios = [f"{row['ratio']:.2f} ({low:.2f}–{high:.2f})", "slow" if is_slow(row) else ""]
        table.append([*facts, row["chosen"], *times, *ratios])
    print("\n".join(aligned(table, right=(2, 5, 6, 7))))
    slow = sum(map(is_slow, rows))
    print(
        f"{len(rows)} of {report['calls']} calls measured: {slow} slower than {TOLERANCE} of PyTorch's speed "
        f"and by more than {1e6 * DISPATCH:.0f} µs"
    )


if __name__ == "__main__":
    sys.exit(main())
