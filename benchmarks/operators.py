"""The calls of operators that the suite times, their contenders, and how they are checked and timed.

The calls follow from the operators' cards: what each stage of the models calls. On a GPU a call is captured
in a CUDA graph, whose replays are timed by events after a flush of L2, so that neither the host nor a warm
cache counts. On a CPU it is the wall clock, with the caches as the call before left them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from cvt.tools.commands.bench.workers import of_extension
from cvt.tools.commands.compile import launches
from cvt_kernels import backends
from cvt_kernels.ops.cards import Embedding, Stage, Step, all_cards, bytes_of, call_public, tensors_of
from cvt_kernels.tuning import ceilings, clock, tuner

from .models import CUDA, DEVICE, dtypes

#: Pixels of a side, and images of a call on a GPU and on a CPU.
MODELS = {
    "cvt_13": (224, 256, 8),
    "cvt_w24": (384, 32, 1),
    "segformer_b0": (512, 16, 1),
    "pvt_v2_b2": (224, 64, 4),
}
#: Those of a smoke test.
_TINY = {
    "cvt_13": [Stage((4, 3), 64, 1, Embedding((8, 6), 32, 3, 2, 1))],
    "segformer_b0": [Stage((4, 4), 64, 0, Embedding((4, 4), 16, 2, 2, 0), 16, 2)],
}
#: On a CPU, where each shape takes torch.compile some 4 s, the models whose shapes it gets.
_COMPILED_ON_CPU = ("cvt_13", "segformer_b0")
COMPILED = "torch.compile"
#: What serves the parts of an operator on a backend that composes it of others.
_PARTS: dict[str, tuple[backends.Backend, ...]] = {"composed": ("cpu", "reference")}


# Calls ----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A call of an operator in a stage of a model, with its backward in ``training``.

    ``launches`` is the name of its calls in the card, of which this is number ``call``, from 0 on, in stage
    ``number``, from 1 on. The batch is of images, the dtype of activations and weights.
    """

    operator: str
    launches: str
    model: str
    number: int
    stage: Stage
    batch: int
    call: int
    dtype: torch.dtype
    training: bool

    def __str__(self) -> str:
        """Returns its name, without spaces."""
        words = [self.operator, *([self.launches] if self.launches != self.operator else []), self.model]
        words += [f"stage{self.number}", *([f"call{self.call + 1}"] if self.call else [])]
        direction = "forward+backward" if self.training else "forward"
        return "-".join([*words, str(self.dtype).removeprefix("torch."), direction])

    def calls(self, device: str) -> list[tuner.Call]:
        """Makes all calls of the stage, with the same numbers every time."""
        step = _Noted(self, device)
        with torch.set_grad_enabled(self.training):
            all_cards()[self.operator].stages[self.launches].run(step)
        return step.calls


class _Noted(Step):
    """A step whose calls of one operator are noted and not made, on random tensors."""

    def __init__(self, case: Case, device: str):
        super().__init__(case.stage, case.dtype, case.batch, case.training, device)
        self.operator = case.operator
        self.calls: list[tuner.Call] = []
        self._generator = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if not tensor.is_floating_point():
            return tensor.zero_()
        if tensor.ndim < 2:  # such as a variance
            tensor.uniform_(0.5, 1.5, generator=self._generator)
        else:  # weights keep the size of what they multiply
            deviation = 1.0 if tensor.ndim == 3 else tensor[0].numel() ** -0.5
            tensor.normal_(std=deviation, generator=self._generator)
        return tensor.requires_grad_(self.training)

    def call(
        self, operator: str, *args: Any, backward: bool = True, backend: str = "", **settings: Any
    ) -> None:
        if operator == self.operator:
            declared = backends.operators[operator]
            record = declared.bind(*args, **settings)
            gradient = any(tensor.requires_grad for tensor in tensors_of(record))
            self.calls.append(tuner.Call(record, gradient, declared.score))


def cases(*, tiny: bool) -> Iterator[Case]:
    """Yields the calls of every operator that has a card, each of another shape."""
    stages = _TINY if tiny else {name: launches.stages_of(name, size) for name, (size, *_) in MODELS.items()}
    kinds = [getattr(torch, name) for name in (dtypes()[:1] if tiny else ("bfloat16",) if CUDA else dtypes())]
    for operator, card in all_cards().items():
        seen: set[str] = set()
        for training in (False,) if card.rounds else (False, True):
            for name, each in card.stages.items():
                for model in (model for model in stages if each.of_pyramids == (model in launches.PYRAMIDS)):
                    batch = 2 if tiny else MODELS[model][1 if CUDA else 2]
                    for number, stage in enumerate(stages[model], start=1):
                        for dtype in kinds:
                            case = Case(operator, name, model, number, stage, batch, 0, dtype, training)
                            yield from _new_calls(case, seen)


def _new_calls(case: Case, seen: set[str]) -> Iterator[Case]:
    """Yields the calls of a stage whose shapes and settings no call before them has."""

    def facts(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.shape, tensor.stride()

    for i, call in enumerate(case.calls("meta")):
        described = f"{case.training} {pytree.tree_map_only(Tensor, facts, call.record)}"
        if described not in seen and call.gradient == case.training:
            seen.add(described)
            yield case._replace(call=i)


# Contenders -----------------------------------------------------------------------------------------------


def contenders(case: Case, *, tiny: bool) -> list[str]:
    """Lists the contenders: the reference, the same under torch.compile, and every other backend."""
    others = [name for name in backends.implementations[case.operator] if name != "reference"]
    compiles = not tiny and (CUDA or case.model in _COMPILED_ON_CPU)
    return ["reference", *([COMPILED] if compiles else []), *others]


def why_absent(operator: str, contender: Any) -> str | None:
    """Returns why a contender cannot run on this machine."""
    if contender in ("reference", COMPILED):
        return None
    with backends.requesting(contender):
        return backends.why_unavailable(operator, contender, DEVICE.type)


def _declared(operator: str) -> Any:
    return backends.operators[operator]


def function(operator: str, contender: Any) -> Callable[[Any], Any]:
    """Returns a contender as a function of the record of a call."""
    reference = _declared(operator).reference
    if contender == "reference":
        return reference
    if contender == COMPILED:
        return torch.compile(reference, dynamic=False)

    def serve(record: Any) -> Any:
        with backends.requesting(contender, *_PARTS.get(contender, ())):
            return call_public(operator, record)

    return serve


class Prepared:
    """A case with its tensors, and what its contenders have to compute, move and multiply.

    Attributes:
        call: The call.
        expected: Its results in float64, and PyTorch's.
        moved: Bytes of all tensors that are read or written, each once.
        flops: Operations of matrix products and convolutions, a multiplication and an addition being two.
    """

    def __init__(self, case: Case):
        self.case, declared = case, _declared(case.operator)
        call = case.calls(DEVICE.type)[case.call]
        self.call = call.map(tuner._copied)  # timed calls may change it, such as running statistics
        self.expected = tuner.Expected.of(declared.reference, call, declared.exact, declared.unrounded)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            outs = _flat(declared.reference(call.map(tuner._copied).record))
        self.moved, self.flops = bytes_of(call.record, outs), counter.get_total_flops()
        self._leaves = [tensor for tensor in self.call.tensors() if tensor.requires_grad]
        self._douts = list(map(torch.ones_like, outs))
        if case.training:
            # The backward reads all that the forward has and the gradients of its results, and writes
            # gradients. It has two products for each of the forward's.
            self.moved += bytes_of(call.record, self._douts, self._leaves)
            self.flops *= 3

    def why_not(self, contender: Any) -> str | None:
        """Returns why a contender does not serve the call."""
        if contender in ("reference", COMPILED):
            return None
        with torch.set_grad_enabled(self.case.training), backends.requesting(contender):
            return backends.why_unsupported(self.case.operator, contender, self.call.record)

    def check(self, serve: Callable[[Any], Any], contender: Any) -> dict[str, float | None]:
        """Compares results and gradients with float64 by the accuracy rule, in guarded memory.

        Returns:
            The largest error, the one that is allowed, and PyTorch's.

        Raises:
            AssertionError: An error is larger than allowed, or something is written beside the tensors.
        """
        if contender == COMPILED:  # whose buffers no guard sees
            results = tuner.run(serve, self.expected.sample.map(tuner._copied), self.expected.douts)
            found = tuner._compare(results, self.expected)
        else:
            found = tuner.check(serve, self.expected)
        pytorchs = tuner.check(self.expected.reference, self.expected)
        assert found.flaw is None, f"{self.case}: {contender}: {found.flaw}; it was not timed"
        return {"error": found.error, "error_allowed": found.allowed, "error_of_pytorch": pytorchs.error}

    def run(self, serve: Callable[[Any], Any]) -> Any:
        """Makes the call, with its backward in training."""
        if not self.case.training:
            with torch.inference_mode():
                return serve(self.call.record)
        outs = _flat(serve(self.call.record))
        return torch.autograd.grad(outs, self._leaves, self._douts, allow_unused=True)


#: The contenders of a case follow one another.
prepared = functools.lru_cache(maxsize=1)(Prepared)


def _flat(outs: Any) -> list[Tensor]:
    return list(outs) if isinstance(outs, tuple | list) else [outs]


# Timing ---------------------------------------------------------------------------------------------------

_SECONDS, _LEAST, _MOST = 0.3, 5, 50  # of the rounds of a contender, and how many
_gpu_clock = clock.DeviceClock()
#: What pytest-benchmark is told of the clock.
TIMER: dict[str, Any] = {"timer": _gpu_clock.read} if CUDA else {}


def time(benchmark: BenchmarkFixture, run: Callable[[], Any], made: Prepared) -> None:
    """Times a call that was checked, and notes its memory and its rates in ``extra_info``."""
    if benchmark.disabled:
        benchmark.pedantic(run)
        return
    peak = ceilings.peak_bytes(run, DEVICE) + (of_extension("workspace_bytes") or 0)
    replay = clock.graph_replay(run) if CUDA else None
    timed, how = (run, "launches" if CUDA else "wall") if replay is None else (replay, "graph")
    start = clock.now(DEVICE)
    timed()
    rounds = int(max(_LEAST, min(_MOST, _SECONDS / (clock.now(DEVICE) - start))))
    waited, start = clock.waited_seconds(), clock.now(DEVICE)
    benchmark.pedantic(timed, setup=_gpu_clock.arm if CUDA else None, rounds=rounds, warmup_rounds=1)
    share_waited = (clock.waited_seconds() - waited) / (clock.now(DEVICE) - start)
    seconds = benchmark.stats.stats.median
    copied, multiplied = made.moved / seconds, made.flops / seconds
    product = product_rate(DEVICE, made.case.dtype)
    benchmark.extra_info |= {
        "clock": how,
        "bytes": made.moved,
        "flops": made.flops,
        "gigabytes_per_second": copied / 1e9,
        "teraflop_per_second": multiplied / 1e12,
        "percent_of_ceiling": 100 * max(copied / copy_rate(DEVICE), multiplied / product),
        "peak_bytes": peak,
        "is_disturbed": share_waited > 0.1,
    }


#: The ceilings, each measured once in a process.
copy_rate, product_rate = functools.cache(ceilings.copy_bandwidth), functools.cache(ceilings.product_rate)
