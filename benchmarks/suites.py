"""The calls of operators that the suites time, their contenders, and how pytest-benchmark times them.

The calls follow from the operators' cards: what each stage of the models calls. On a GPU a call is captured
in a CUDA graph, whose replays are timed by events after a flush of L2, so that neither the host nor a warm
cache counts. On a CPU it is the wall clock, with the caches as the call before left them.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import cvt_kernels as ck
from cvt.tools.commands.compile import launches
from cvt_kernels import backends, machine
from cvt_kernels.autotune import clock, tuner
from cvt_kernels.cards import Embedding, Stage, Step, all_cards, bytes_of, call_public, tensors_of

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
#: Whether shapes are those of a smoke test; ``conftest.py`` sets it before the suites are collected.
tiny = False
#: Images of a call on a GPU and on a CPU, and pixels of their sides.
MODELS = {
    "cvt_13": (256, 8, 224),
    "cvt_w24": (32, 1, 384),
    "segformer_b0": (16, 1, 512),
    "pvt_v2_b2": (64, 4, 224),
}
_TINY_STAGES = {
    "cvt_13": [Stage((4, 3), 64, 1, Embedding((8, 6), 32, 3, 2, 1))],
    "segformer_b0": [Stage((4, 4), 64, 0, Embedding((4, 4), 16, 2, 2, 0), 16, 2)],
}
#: What serves the parts of an operator on a backend that composes it of others.
_PARTS: dict[str, tuple[ck.Backend, ...]] = dict.fromkeys(("composed", "onednn"), ("cpu", "reference"))


# Calls ----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A call of an operator at a stage of a model; ``number`` tells those of one stage apart, from 0 on."""

    operator: str
    launches: str
    model: str
    stage: int
    number: int
    dtype: torch.dtype
    training: bool

    def __str__(self) -> str:
        """Returns its name, without spaces."""
        words = [self.operator, *([self.launches] if self.launches != self.operator else []), self.model]
        words += [f"stage{self.stage + 1}", *([f"call{self.number + 1}"] if self.number else [])]
        direction = "forward+backward" if self.training else "forward"
        return "-".join([*words, str(self.dtype).removeprefix("torch."), direction])

    def batch(self) -> int:
        """Returns the number of images."""
        return 2 if tiny else MODELS[self.model][0 if CUDA else 1]

    def made(self, device: str = DEVICE) -> tuner.Call:
        """Makes the call, with the same numbers every time."""
        return _calls(self, device)[self.number]


class _Noted(Step):
    """A step whose calls of one operator are noted and not made, on random tensors."""

    def __init__(self, case: Case, device: str):
        super().__init__(_stages()[case.model][case.stage], case.dtype, case.batch(), case.training, device)
        self.operator = case.operator
        self.calls: list[tuner.Call] = []
        self._generator = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if not tensor.is_floating_point():
            return tensor.zero_()
        # Vectors may be variances; weights keep the size of what they multiply.
        if tensor.ndim < 2:
            tensor.uniform_(0.5, 1.5, generator=self._generator)
        else:
            tensor.normal_(std=1.0 if tensor.ndim == 3 else tensor[0].numel() ** -0.5, generator=self._generator)
        return tensor.requires_grad_(self.training)

    def call(
        self, operator: str, *args: Any, backward: bool = True, backend: str = "", **settings: Any
    ) -> None:
        if operator == self.operator:
            declared = backends.operators[operator]
            record = declared.bind(*args, **settings)
            gradient = any(tensor.requires_grad for tensor in tensors_of(record))
            self.calls.append(tuner.Call(record, gradient, declared.score))


def _calls(case: Case, device: str) -> list[tuner.Call]:
    """Makes the calls of a case's stage."""
    step = _Noted(case, device)
    with torch.set_grad_enabled(case.training):
        all_cards()[case.operator].stages[case.launches].run(step)
    return step.calls


@functools.cache
def _stages() -> dict[str, list[Stage]]:
    if tiny:
        return _TINY_STAGES
    return {model: launches.stages_of(model, size) for model, (*_, size) in MODELS.items()}


def dtypes() -> list[torch.dtype]:
    """Returns the dtypes worth timing: bfloat16 is far slower than float32 on a CPU without it."""
    if CUDA:
        return [torch.bfloat16]
    flags = Path("/proc/cpuinfo")
    known = flags.read_text(encoding="utf-8") if flags.exists() else ""
    has_bfloat16 = any(flag in known for flag in ("avx512_bf16", "amx_bf16", " bf16 "))
    return [torch.float32, torch.bfloat16] if has_bfloat16 or tiny else [torch.float32]


def cases() -> Iterator[Case]:
    """Yields the calls of every operator that has a card, each with another shape."""
    for operator, card in all_cards().items():
        seen: set[str] = set()
        for training in (False, True) if not card.rounds else (False,):
            for name, model in ((name, model) for model in _stages() for name in card.stages):
                if card.stages[name].of_pyramids != (model in launches.PYRAMIDS):
                    continue
                for stage, dtype in ((s, d) for s in range(len(_stages()[model])) for d in dtypes()):
                    first = Case(operator, name, model, stage, 0, dtype, training)
                    for number, call in enumerate(_calls(first, "meta")):
                        described = f"{training} {pytree.tree_map_only(Tensor, _shape, call.record)}"
                        if described not in seen and call.gradient == training:
                            seen.add(described)
                            yield first._replace(number=number)


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


# Contenders -----------------------------------------------------------------------------------------------

COMPILED = "torch.compile"


def contenders(operator: str) -> list[str]:
    """Lists the contenders: the reference, the same under torch.compile, and every other backend."""
    others = [name for name in backends.implementations[operator] if name != "reference"]
    return ["reference", *([] if tiny else [COMPILED]), *others]


def why_absent(operator: str, contender: str) -> str | None:
    """Returns why a contender cannot run on this machine."""
    if contender in ("reference", COMPILED):
        return None
    with backends.requesting(contender):
        return backends.why_unavailable(operator, contender, DEVICE)


def why_not(case: Case, contender: str, call: tuner.Call) -> str | None:
    """Returns why a contender does not serve a call."""
    if contender in ("reference", COMPILED):
        return None
    with torch.set_grad_enabled(case.training), backends.requesting(contender):
        return backends.why_unsupported(case.operator, contender, call.record)


def function(operator: str, contender: str) -> Callable[[Any], Any]:
    """Returns a contender as a function of the record of a call."""
    reference = backends.operators[operator].reference
    if contender == "reference":
        return reference
    if contender == COMPILED:
        return torch.compile(reference, dynamic=False)

    def serve(record: Any) -> Any:
        with backends.requesting(contender, *_PARTS.get(contender, ())):
            return call_public(operator, record)

    return serve


class Timed(NamedTuple):
    """A call that can be made again and again, and what it has to do.

    Attributes:
        run: Makes the call, with its backward in training.
        moved: Bytes of all tensors that are read or written, each once.
        flops: Operations of matrix products and convolutions, a multiplication and an addition being two.
    """

    run: Callable[[], Any]
    moved: int
    flops: int


def timed(case: Case, contender: str, call: tuner.Call) -> Timed:
    """Returns a checked contender's call, to be timed."""
    serve = function(case.operator, contender)
    leaves = [tensor for tensor in call.tensors() if tensor.requires_grad]
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(case.training):
        outs = _flat(backends.operators[case.operator].reference(call.map(tuner._copied).record))
    moved, flops = bytes_of(call.record, outs), counter.get_total_flops()
    if not case.training:

        def forward() -> Any:
            with torch.inference_mode():
                return serve(call.record)

        return Timed(forward, moved, flops)
    douts = [torch.ones_like(out) for out in outs]

    def step() -> Any:
        return torch.autograd.grad(_flat(serve(call.record)), leaves, douts, allow_unused=True)

    # The backward reads all that the forward has, the gradients of its results, and writes gradients. It has
    # two products for each of the forward's.
    return Timed(step, moved + bytes_of(call.record, douts, leaves), 3 * flops)


def _flat(outs: Any) -> list[Tensor]:
    return list(outs) if isinstance(outs, tuple | list) else [outs]


# Checking -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _expected(case: Case) -> tuner.Expected:
    """Returns the results in float64 and PyTorch's; the contenders of a case follow one another."""
    declared = backends.operators[case.operator]
    with tuner.undisturbed(torch.device(DEVICE)):
        return tuner.Expected.of(declared.reference, case.made(), declared.exact, declared.unrounded)


def check(case: Case, contender: str) -> dict[str, float | None]:
    """Compares a contender's results and gradients with float64 by the accuracy rule, in guarded memory.

    Returns:
        The largest error, the one that is allowed, and PyTorch's.

    Raises:
        AssertionError: An error is larger than the rule allows, or the contender writes where it must not.
    """
    expected, serve = _expected(case), function(case.operator, contender)
    with tuner.undisturbed(torch.device(DEVICE)):
        if contender == COMPILED:  # whose buffers no guard sees
            call = expected.sample.map(tuner._copied)
            found = tuner._compare(tuner.run(serve, call, expected.douts), expected)
        else:
            found = tuner.check(serve, expected)
        pytorchs = tuner.check(expected.reference, expected)
    assert found.flaw is None, f"{case}: {contender}: {found.flaw}; it was not timed"
    return {"error": found.error, "allowed": found.allowed, "error_of_pytorch": pytorchs.error}


# Timing ---------------------------------------------------------------------------------------------------

_SECONDS, _LEAST, _MOST = 0.3, 5, 50  # of the rounds of a contender, and how many
_gpu_clock = clock.DeviceClock()
#: What pytest-benchmark is told of the clock.
TIMER: dict[str, Any] = {"timer": _gpu_clock.read} if CUDA else {}


def record(benchmark: Any, call: Timed, facts: dict[str, Any]) -> None:
    """Times a checked call, measures its memory, and notes facts in ``extra_info``."""
    if benchmark.disabled:
        benchmark.pedantic(call.run)
        return
    run, how, arm = call.run, "wall", None
    peak = clock.peak_bytes(run, DEVICE) + workspace_bytes()
    if CUDA:
        replay = clock.graph_replay(run)
        run, how, arm = (run, "launches", _gpu_clock.arm) if replay is None else (replay, "graph", _gpu_clock.arm)
    start = clock.now(DEVICE)
    run()
    rounds = int(max(_LEAST, min(_MOST, _SECONDS / (clock.now(DEVICE) - start))))
    waited, start = clock.waited_seconds(), clock.now(DEVICE)
    benchmark.pedantic(run, setup=arm, rounds=rounds, warmup_rounds=1)
    share = (clock.waited_seconds() - waited) / (clock.now(DEVICE) - start)
    seconds = benchmark.stats.stats.median
    reached = {"copy": call.moved / seconds, "product": call.flops / seconds}
    ceilings = {"copy": copy_rate(), "product": product_rate(facts["dtype"])}
    benchmark.extra_info |= facts | {
        "device": machine.cpu_name() if not CUDA else torch.cuda.get_device_name(),
        "clock": how,
        "bytes": call.moved,
        "flops": call.flops,
        "gigabytes_per_second": reached["copy"] / 1e9,
        "teraflop_per_second": reached["product"] / 1e12,
        "percent_of_ceiling": 100 * max(reached[name] / ceilings[name] for name in reached),
        "peak_bytes": peak,
        "is_disturbed": share > 0.1,
    }


def workspace_bytes() -> int:
    """Returns the bytes that our kernels for CPUs keep between calls, unseen by PyTorch's allocator."""
    with contextlib.suppress(machine.ExtensionError):
        if machine.why_extension_unavailable("cpu") is None:
            return int(machine.load_extension().workspace_bytes())
    return 0


@functools.cache
def copy_rate() -> float:
    """Measures the bytes per second of a large copy, once in a process."""
    return clock.copy_bandwidth(DEVICE)


@functools.cache
def product_rate(dtype: str) -> float:
    """Measures the operations per second of a large matrix product, once in a process."""
    return clock.product_rate(DEVICE, getattr(torch, dtype))


# This machine ---------------------------------------------------------------------------------------------


def facts_of_machine() -> dict[str, Any]:
    """Returns what the figures depend on, for the JSON."""
    return {
        **machine.facts()._asdict(),
        "cvt_kernels": ck.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if CUDA else machine.cpu_name(),
        "device_type": DEVICE,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "tiny": tiny,
    }
