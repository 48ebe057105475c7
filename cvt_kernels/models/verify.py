"""Compares the accuracy and speed of an accelerated model and the restored one, on the user's inputs."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..backends import Backend, requested_backends, requesting
from ..checks import check_flag, check_int, dtype_name
from ..classes import is_fused, original_class
from ..messages import aligned
from ..modes import autocast_dtype
from ..tuning import accuracy, clock
from ..tuning.accuracy import GRADIENT_FACTOR, VALUE_FACTOR
from . import accelerate, give_classes_back
from .blocks import is_stochastic_depth
from .coverage import call_model, check_inputs, coverage, tensors_in, unwrapped
from .matching import find_blocks, find_stages
from .served import is_frozen, is_serving

#: The factor for the difference between the two models in a step with dropout, where the exact result is
#: not known. Other random numbers would make it larger by orders of magnitude.
RANDOM_FACTOR = 10.0

#: The runs of both models besides the first, where an error of that one is larger than allowed, but at most
#: by this factor. The largest error of a run is partly luck, above all where one channel decides it, as in
#: running variances: in a CvT-13, PyTorch's own varies threefold between inputs that differ by roundings.
_MORE_RUNS, _LUCK = 8, 10.0
#: The images that are computed in float64 where only evaluation is compared, in which each is by itself.
_FEW_IMAGES = 2

_logger = logging.getLogger("cvt_kernels")


class Error(NamedTuple):
    """The largest errors against float64, each over the largest exact value, as means over the runs.

    Attributes:
        accelerated: The accelerated model's error.
        eager: The error of the restored model in the same dtype.
        allowed: The limit for ``accelerated``.
        tensor: Of gradients and statistics, the parameter or buffer with the largest error.
        share: How large its exact values are beside the largest ones of the whole model.
    """

    accelerated: float
    eager: float
    allowed: float
    tensor: str = ""
    share: float = 1.0

    @property
    def passed(self) -> bool:
        """True if the accelerated model's error is allowed; NaN is not."""
        return accuracy.Error(self.accelerated, self.eager, self.allowed).passed

    def __str__(self) -> str:
        return f"{self.accelerated:.1e} / {self.eager:.1e}{'' if self.passed else ' !'}"


class LayerErrors(NamedTuple):
    """The errors of one block, accumulated over the model up to it.

    Attributes:
        path: Its name in ``model.named_modules()``; empty for the whole model.
        class_name: Name of its class.
        fused: True if its fused forward ran in evaluation.
        evaluation, training: Errors of its output in evaluation and in a training step.
        gradients: Error of its parameters' gradients.
        statistics: Error of its running statistics after the step; None if it has none.

    What is of a training step is None where only evaluation was compared.
    """

    path: str
    class_name: str
    fused: bool
    evaluation: Error
    training: Error | None
    gradients: Error | None
    statistics: Error | None


class Speed(NamedTuple):
    """Median seconds of the two models, run in turns, and whether other work on the machine disturbed it."""

    accelerated: float
    eager: float
    is_disturbed: bool = False

    def __str__(self) -> str:
        factor = self.eager / self.accelerated
        return (
            f"{1e3 * self.accelerated:.1f} ms, restored {1e3 * self.eager:.1f} ms: {factor:.2f} times as fast"
        )


class Verification(NamedTuple):
    """The result of :func:`verify`; as a string, a report.

    Attributes:
        heading: The model, its dtype and device, and the shapes of the inputs.
        layers: The blocks in the model's order, then the whole model.
        runs: The runs of each model over which errors are averaged: 1, or 9 where one error was too large;
            then errors in evaluation, or all in training, are still of 1 run if none of them was.
        random: With dropout and drop path active and the same random numbers, the difference between the
            outputs of the two models, over the largest value; None if the model has neither, or only
            evaluation was compared.
        evaluation: Speed of a forward in evaluation without gradients.
        training: Speed of a training step, without an optimizer's; None if only evaluation was compared.
    """

    heading: str
    layers: tuple[LayerErrors, ...]
    runs: int
    random: float | None
    evaluation: Speed
    training: Speed | None

    @property
    def failures(self) -> list[str]:
        """One line for each error that is larger than allowed."""
        failures = [
            f"{layer.path or 'model'}, {name}: {error}{_where(name, error)}"
            for layer in self.layers
            for name in _COMPARED
            if (error := getattr(layer, name)) is not None and not error.passed
        ]
        whole = self.layers[-1].training
        if self.random is not None and whole is not None:
            allowed = RANDOM_FACTOR * max(whole.eager, whole.allowed)
            if not self.random <= allowed:
                failures.append(f"model, with random numbers: differs by {self.random:.1e}")
        return failures

    @property
    def passed(self) -> bool:
        """True if all errors are allowed by the accuracy rule."""
        return not self.failures

    def __str__(self) -> str:
        compared = _COMPARED if self.training is not None else ("evaluation",)
        rows = [["block", "class", *compared]]
        for layer in self.layers:
            errors = (getattr(layer, name) for name in compared)
            rows.append(
                [layer.path or "(model)", layer.class_name, *("" if e is None else str(e) for e in errors)]
            )
        averaged = f", mean of {self.runs} runs on inputs that differ by roundings" if self.runs > 1 else ""
        lines = [
            self.heading,
            f"largest error against float64 over the largest value, accelerated / restored{averaged}",
            "",
            *aligned(rows),
            "",
            f"forward        {self.evaluation}",
        ]
        if self.training is not None:
            lines.append(f"training step  {self.training}")
        if self.evaluation.is_disturbed or (self.training is not None and self.training.is_disturbed):
            lines.append(clock.DISTURBED)
        if self.random is not None:
            lines.append(f"with the same random numbers, outputs differ by {self.random:.1e}")
        if self.failures:
            lines += ["less accurate than allowed:", *(f"  {failure}" for failure in self.failures)]
            lines += _WHAT_TO_DO
        else:
            lines.append("as accurate as it was")
        return "\n".join(lines)


#: What the report advises where something failed.
_WHAT_TO_DO = (
    'what to do: until it is mended, `with cvt_kernels.use_backend("reference"):` around your calls, or',
    "`cvt_kernels.restore(model)`, computes by PyTorch's operators. An error in a gradient that is tiny",
    "beside the model's largest ones hardly changes a step of an optimizer with one learning rate for all.",
    "Please file an issue with this report.",
)


def _where(name: str, error: Error) -> str:
    """Returns which tensor has an error, and how large it is; nothing for outputs."""
    if not error.tensor:
        return ""
    values = "gradient is" if name == "gradients" else "values are"
    return f" in {error.tensor}, whose {values} {error.share:.1g} of the model's largest"


@torch.inference_mode(False)
@torch.enable_grad()
def verify(
    model: nn.Module,
    inputs: Any,
    *,
    rounds: int = 5,
    progress: bool = True,
    evaluation_only: bool = False,
) -> Verification:
    """Compares the accuracy and speed of the accelerated and the restored model, in evaluation and training.

    It compares the errors of both against the restored model in float64, block by block: outputs, gradients
    of the sum of the outputs' sines, and BatchNorm's running statistics. Dropout and drop path are off for
    this, because they draw other random numbers in float64; one more step compares the two models with them.
    An error that is larger than allowed, but less than ten times, may be chance: then both models run eight
    more times with other roundings in the inputs, and the accuracy rule applies to the means. Only what had
    such an error runs again, forwards in evaluation or training steps.

    That takes about 16 forwards and 17 training steps, one of each in float64, and up to 16 more of both;
    with ``evaluation_only`` no training steps, and at most two images in float64.

    A frozen stage or layer calls no blocks. So for a frozen model, the evaluation errors of stages, layers in
    no stage and the whole model are measured frozen, all others without freezing. Quantized layers stay
    quantized in all models, but in float64 they do not round their inputs.

    It works on copies: the model, its gradients and buffers, its modes and the random number generators stay
    as they are. (Your own hooks are copied, and run.) ``torch.autocast`` applies to both models.

    Args:
        model: A model with blocks that :func:`~cvt_kernels.accelerate` supports, accelerated or not. If it is
            in training mode, the training step keeps the modes of its parts, such as frozen BatchNorms.
        inputs: The arguments of the model: one tensor, a tuple of positional or a dict of keyword arguments.
        rounds: Timed runs of each model.
        progress: Show a bar over the runs on stderr, with the time that is left, if that is a terminal. In
            any case each run is logged, at the level INFO of the logger ``cvt_kernels``.
        evaluation_only: Compare forwards in evaluation alone, for a model that serves.

    Returns:
        A :class:`Verification`: print it, or use ``passed``.

    Raises:
        TypeError: An argument of the wrong type, or there is no tensor of floating point in ``inputs``.
        ValueError: It has no supported block, no parameters that are trained (but with ``evaluation_only``),
            or ``rounds`` is below 1.
    """
    check_int("rounds", rounds, 1)
    check_flag("progress", progress)
    check_flag("evaluation_only", evaluation_only)
    coverage(model)  # raises unless there is something to verify
    check_inputs(inputs)
    model = unwrapped(model)
    if not evaluation_only and not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "model: has no parameter that requires a gradient, expected some for the training step"
        )
    if any(
        (entry.forward is not None or entry.is_only_served) and not is_fused(block)
        for _, block, entry in find_blocks(model)
    ):
        model = accelerate(copy.deepcopy(model))
    stages = _served_paths(model)
    serving = copy.deepcopy(model) if stages else None
    accelerated = copy.deepcopy(model)
    for _, stage, _ in find_stages(accelerated):
        stage.__class__ = original_class(type(stage))
    accelerate(accelerated, freeze=False)
    eager = give_classes_back(copy.deepcopy(model))
    exact = _in_float64(give_classes_back(copy.deepcopy(model)))
    wide = _mapped(lambda t: t.double() if t.is_floating_point() else t, inputs)
    paths = tuple(dict.fromkeys(("", *stages, *(path for path, _, _ in find_blocks(model)))))
    runs = [
        _Run(accelerated, inputs, requested_backends(), paths, serving),
        _Run(eager, inputs, ("reference",), paths),
    ]
    oracle = _Run(exact, wide, ("reference",), paths)
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    # Each model is recorded, and both are timed, in evaluation and training, after a run that warms up.
    total = 3 + (2 if evaluation_only else 4) * (rounds + 1)
    random = training = None
    with torch.random.fork_rng(devices=cuda), _bar_of(total, progress) as bar:
        samples = _samples(runs, oracle, bar, evaluation_only)
        if not evaluation_only and _random_modules(model):
            random = _random_difference(*runs)
        evaluation = _speed([run.evaluate for run in runs], rounds, model, bar)
        if not evaluation_only:
            training = _speed([run.train for run in runs], rounds, model, bar)
    rows = coverage((serving or accelerated).eval())
    layers = [_compare(row.path, row.class_name, row.fused, *samples) for row in rows]
    layers.append(_compare("", type(model).__name__, any(layer.fused for layer in layers), *samples))
    heading = _heading(model, inputs)
    return Verification(heading, tuple(layers), len(samples[0]), random, evaluation, training)


def _bar_of(total: int, shown: bool) -> Any:
    """Returns a bar over a number of runs; it is drawn on a terminal only."""
    from tqdm import tqdm  # not needed where nothing is verified

    file = sys.stderr if shown and sys.stderr.isatty() else io.StringIO()
    settings = {"desc": "verify", "unit": "run", "leave": False, "mininterval": 0}  # each run is drawn
    return tqdm(total=total, file=file, disable=False, **settings)


def _note_run(bar: Any) -> None:
    bar.update()
    _logger.info("verify: run %d of %d, after %.0f seconds", bar.n, bar.total, time.time() - bar.start_t)


def _served_paths(model: nn.Module) -> list[str]:
    """Returns the paths of what runs as one, without what is within it: a hook there would prevent that."""
    found: list[str] = []
    for path, stage, _ in find_stages(model):
        is_within = path.startswith(tuple(f"{each}." if each else "" for each in found))
        if (is_frozen(stage) or is_serving(stage)) and not is_within:
            found.append(path)
    return found


def _in_float64(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm) and type(module).__name__ == "LayerNorm":
            module.__class__ = nn.LayerNorm  # Microsoft's would cast to float32, and fail on its weights
        elif isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(_straighten_gradient)
    return model.double()


def _straighten_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    """Gives the gradient of an output the usual strides.

    With the strides of upstream's views of one image, batch_norm on a CPU computes wrong gradients (seen in
    torch 2.13), which must not count against the accelerated model.
    """
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.clone(memory_format=torch.contiguous_format))


def _random_modules(model: nn.Module) -> list[nn.Module]:
    dropouts = nn.modules.dropout._DropoutNd
    return [each for each in model.modules() if isinstance(each, dropouts) or is_stochastic_depth(each)]


#: What is compared of a block: fields of :class:`LayerErrors`.
_COMPARED = ("evaluation", "training", "gradients", "statistics")
#: The tensors of one run by what they are and by the path of the block that they belong to, each with the
#: name of its parameter or buffer; outputs have numbers.
_Record = dict[tuple[str, str], dict[str, Tensor]]


class _Run:
    """One of the models, with its inputs and the backends that it asks for.

    ``paths`` are those of what is compared, and ``serving`` is the model with its stages and layers frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        backends: tuple[Backend, ...],
        paths: tuple[str, ...],
        serving: nn.Module | None = None,
    ):
        self.model, self.inputs, self.backends, self.paths = model, inputs, backends, paths
        self.serving = serving
        if not model.training:
            model.train()
        self.modes = [(module, module.training) for module in model.modules()]
        self.buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def evaluate(self) -> Any:
        """Runs a forward in evaluation, where there is one of the model that serves."""
        return self._evaluate(self.model if self.serving is None else self.serving)

    def _evaluate(self, model: nn.Module) -> Any:
        model.eval()
        with torch.no_grad():
            return self._forward(model)

    def train(self, random: bool = True) -> Any:
        """Runs a forward and a backward; ``random`` says whether with dropout and drop path."""
        for module, mode in self.modes:
            module.training = mode
        for module in [] if random else _random_modules(self.model):
            module.training = False
        self.model.zero_grad()
        outputs = self._forward(self.model)
        wide = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors_in(outputs))
        loss = torch.stack([t.sin().sum() for t in wide]).sum()
        # Checkpointing computes the forward again: in this thread on a CPU. Those of a GPU follow no block.
        with requesting(*self.backends):
            loss.backward()
        return outputs

    def _forward(self, model: nn.Module) -> Any:
        with requesting(*self.backends):
            return call_model(model, self.inputs)

    def of(self, function: Callable[[Tensor], Tensor]) -> _Run:
        """Returns the same run with ``function`` applied to its inputs."""
        run = copy.copy(self)
        run.inputs = _mapped(function, self.inputs)
        return run

    def record(self, *, evaluation: bool = True, training: bool = True) -> _Record:
        """Evaluates, and trains without random numbers, with the buffers that the model had at first."""
        with torch.no_grad():
            for buffer, first in self.buffers:
                buffer.copy_(first)
        record: _Record = {}
        with _outputs_of(self.model, self.paths) as seen:
            if evaluation:
                self._evaluate(self.model)
                record |= {("evaluation", path): outputs for path, outputs in seen.items()}
            if training:
                self.train(random=False)
                record |= {("training", path): outputs for path, outputs in seen.items()}
        if self.serving is not None and evaluation:
            with _outputs_of(self.serving, ["", *_served_paths(self.serving)]) as seen:
                self._evaluate(self.serving)
            record |= {("evaluation", path): outputs for path, outputs in seen.items()}
        for path in self.paths if training else ():
            block = self.model.get_submodule(path)
            record["gradients", path] = _detached(
                (name, torch.zeros_like(p) if p.grad is None else p.grad)
                for name, p in block.named_parameters()
                if p.requires_grad
            )
            record["statistics", path] = _detached(
                (name, b) for name, b in block.named_buffers() if b.is_floating_point()
            )
        return record


@contextlib.contextmanager
def _outputs_of(model: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Gathers what the modules at some paths return within a block, by their paths."""
    seen: dict[str, dict[str, Tensor]] = {}
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: seen.__setitem__(path, _outputs(output))
        )
        for path in paths
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(function, item) for key, item in value.items()}
    return tuple(_mapped(function, item) for item in value) if isinstance(value, tuple) else value


@torch.no_grad()
def _nudge(seed: int, tensor: Tensor) -> Tensor:
    """Returns a tensor with two thirds of its numbers off by one or two units in the last place.

    Equal images stay equal. Under autocast the units are its dtype's if they are larger, because its first
    cast would round smaller differences away.
    """
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-1, 2, tensor.shape[1:], generator=generator).to(tensor)
    dtypes = tensor.dtype, autocast_dtype(tensor) or tensor.dtype
    return tensor * (1 + max(torch.finfo(dtype).eps for dtype in dtypes) * steps)


def _detached(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors}


def _outputs(value: Any) -> dict[str, Tensor]:
    return _detached((str(i), t) for i, t in enumerate(tensors_in(value)))


class _Sample(NamedTuple):
    """The largest error of one run in one place over the largest exact value, and what it is an error of.

    ``values`` counts those of the tensor that has it: of all gradients of a block, a classifier's with a few
    labels may decide, whose error is then a matter of luck. ``largest`` is its largest exact value.
    """

    error: float
    dtype: torch.dtype
    values: int
    tensor: str
    largest: float


#: The errors of a run, likewise.
_Errors = dict[tuple[str, str], _Sample]


def _samples(runs: list[_Run], oracle: _Run, bar: Any, evaluation_only: bool) -> list[list[_Errors]]:
    """Returns the errors of each model's run, or of more runs where chance may have made one too large."""

    def record(run: _Run, **parts: bool) -> _Record:
        record = run.record(**parts)
        _note_run(bar)
        return record

    def errors_of(record: _Record) -> _Errors:
        places = [place for place, oracle in exact.items() if oracle and place in record]
        return {place: _sample(record[place], exact[place]) for place in places}

    wanted = {"training": not evaluation_only}
    first = [record(run, **wanted) for run in runs]
    images = None if not evaluation_only else _images_of(oracle.inputs, first[0])
    if images is not None:
        oracle = oracle.of(lambda t: t[:_FEW_IMAGES] if t.ndim and len(t) == images else t)
    exact = record(oracle, **wanted)
    samples = [[errors_of(made)] for made in first]
    del first
    failed = {place: error for place in samples[0][0] if not (error := _error(*place, *samples)).passed}
    if failed and all(error.accelerated <= _LUCK * error.allowed for error in failed.values()):
        names = {name for name, _ in failed}
        parts = {"evaluation": "evaluation" in names, "training": names != {"evaluation"}}
        bar.total += len(runs) * _MORE_RUNS
        for run, known in zip(runs, samples, strict=True):
            for seed in range(_MORE_RUNS):
                known.append(errors_of(record(run.of(functools.partial(_nudge, seed)), **parts)))
    return samples


def _images_of(inputs: Any, record: _Record) -> int | None:
    """Returns the number of images, if all inputs and outputs have it as their first size; else None."""
    outputs = [t for tensors in record.values() for t in tensors.values()]
    sizes = {t.shape[0] if t.ndim else None for t in (*tensors_in(inputs), *outputs)}
    return sizes.pop() if len(sizes) == 1 else None


def _sample(results: dict[str, Tensor], oracle: dict[str, Tensor]) -> _Sample:
    """Compares tensors with exact ones, which may be of the first images only."""
    scale = _largest(oracle.values()) or 1.0
    coarsest = max((t.dtype for t in results.values()), key=lambda dtype: torch.finfo(dtype).eps)
    errors = {
        name: (results[name][: len(e)] if e.ndim else results[name]).double() - e
        for name, e in oracle.items()
        if e.numel()
    }
    largest = {name: error.abs().max() for name, error in errors.items()}
    worst = list(largest)[int(torch.stack(list(largest.values())).argmax())]
    values = errors[worst].numel()
    return _Sample(largest[worst].item() / scale, coarsest, values, worst, _largest([oracle[worst]]))


def _compare(
    path: str, class_name: str, fused: bool, accelerated: list[_Errors], eager: list[_Errors]
) -> LayerErrors:
    errors = {
        name: _error(name, path, accelerated, eager) if (name, path) in eager[0] else None
        for name in _COMPARED
    }
    return LayerErrors(path, class_name, fused, **errors)  # type: ignore[arg-type]  # all but statistics exist


def _error(name: str, path: str, accelerated: list[_Errors], eager: list[_Errors]) -> Error:
    """Returns the mean errors of both models in one place, over the runs that have it."""
    place = name, path
    ours, theirs = (
        statistics.mean(errors[place].error for errors in samples if place in errors)
        for samples in (accelerated, eager)
    )
    _, dtype, values, tensor, largest = accelerated[0][place]
    factor = GRADIENT_FACTOR if name == "gradients" else VALUE_FACTOR
    allowed = accuracy.allowed_error(theirs, 1.0, dtype, factor=factor, units=accuracy.usual_units(values))
    if name not in ("gradients", "statistics"):
        return Error(ours, theirs, allowed)
    of_model = max(sample.largest for other, sample in accelerated[0].items() if other[0] == name)
    return Error(ours, theirs, allowed, tensor, largest / of_model if of_model else 1.0)


def _largest(tensors: Iterable[Tensor]) -> float:
    return torch.stack([t.abs().max() for t in tensors if t.numel()]).max().item()


def _random_difference(accelerated: _Run, eager: _Run) -> float:
    outputs = []
    for run in (accelerated, eager):
        torch.manual_seed(0)
        outputs.append(list(_outputs(run.train()).values()))
    ours, theirs = outputs
    return _largest(a.double() - b.double() for a, b in zip(ours, theirs, strict=True)) / _largest(theirs)


def _speed(functions: list[Callable[[], Any]], rounds: int, model: nn.Module, bar: Any) -> Speed:
    device = next(model.parameters()).device
    ours, theirs = clock.times_in_turns(functions, rounds, device, before_run=lambda i: _note_run(bar))
    return Speed(ours.median, theirs.median, ours.is_disturbed or theirs.is_disturbed)


def _heading(model: nn.Module, inputs: Any) -> str:
    weight = next(model.parameters())
    shapes = ", ".join("×".join(map(str, t.shape)) for t in tensors_in(inputs))
    return f"{type(model).__name__}, {dtype_name(weight.dtype)} on {weight.device}, inputs {shapes}"
