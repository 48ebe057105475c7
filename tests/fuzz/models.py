"""Sequences of changes to accelerated models, each forward compared with an untouched twin's."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import cvt_kernels as ck
from tests import upstream
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
)
_KERNELS_FIRST = {
    "cpu": ("cpu", "sdpa", "reference"),
    "reference": ("reference",),
}
_FROZEN_REFUSES = "is frozen for serving and cannot train"
_TOLERANCE = 1e-4  # of the largest value of the twin
_PARTS = (nn.Linear, nn.LayerNorm, nn.Conv2d, nn.BatchNorm2d)


class _Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.2 * x


def _scale_output(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 0.9 * out


# Changes of a model ---------------------------------------------------------------------------------------
# Each is made of the model and of its twin, with equal random numbers; one that returns a model replaces it.

_Change = Callable[[nn.Module, random.Random], nn.Module | None]


def _part(model: nn.Module, source: random.Random, *kinds: type, needs: str = "weight") -> Any:
    """Returns a part with a plain parameter of its own."""
    parts = [
        m for m in model.modules() if type(m) in (kinds or _PARTS) and m._parameters.get(needs) is not None
    ]
    return source.choice(parts)


def _places(model: nn.Module, part: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns the parents and names of the parts of one kind with a weight of one shape."""
    return [(parent, name) for parent in model.modules() for name, m in parent._modules.items()
            if type(m) is type(part) and m._parameters.get("weight") is not None
            and m.weight.shape == part.weight.shape]  # fmt: skip


def _parameter(model: nn.Module, source: random.Random) -> nn.Parameter:
    return source.choice(list(model.parameters()))


def _changed(tensor: Tensor, source: random.Random) -> Tensor:
    """Returns a tensor whose numbers are multiplied by ones between 0.7 and 1.3."""
    generator = torch.Generator().manual_seed(source.randrange(2**31))
    factors = 0.7 + 0.6 * torch.rand(tensor.shape, generator=generator)
    return tensor.detach() * factors.to(tensor.dtype)


@torch.no_grad()
def _in_place(model: nn.Module, source: random.Random) -> None:
    parameter = _parameter(model, source)
    parameter.copy_(_changed(parameter, source))


def _buffer_in_place(model: nn.Module, source: random.Random) -> None:
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if buffers:
        buffer = source.choice(buffers)
        buffer.copy_(_changed(buffer, source))


def _load(model: nn.Module, source: random.Random) -> None:
    state = {
        name: _changed(t, source) if t.is_floating_point() else t for name, t in model.state_dict().items()
    }
    model.load_state_dict(state, assign=source.random() < 0.5)


def _replace_parameter(model: nn.Module, source: random.Random) -> None:
    part = _part(model, source)
    part.weight = nn.Parameter(_changed(part.weight, source), requires_grad=part.weight.requires_grad)


def _replace_buffer(model: nn.Module, source: random.Random) -> None:
    norms = [m for m in model.modules() if type(m) is nn.BatchNorm2d]
    if norms:
        norm = source.choice(norms)
        norm.running_mean = norm.running_mean + 0.1


def _replace_module(model: nn.Module, source: random.Random) -> None:
    part = copy.deepcopy(_part(model, source))
    with torch.no_grad():
        part.weight.copy_(_changed(part.weight, source))

    facts = [part.bias is None, getattr(part, "stride", 0)]
    places = [(parent, name) for parent, name in _places(model, part) for m in [parent._modules[name]]
              if [m.bias is None, getattr(m, "stride", 0)] == facts]  # fmt: skip
    if places:
        parent, name = source.choice(places)
        parent._modules[name] = part


def _assign_data(model: nn.Module, source: random.Random) -> None:
    parameter = _parameter(model, source)
    parameter.data = _changed(parameter, source)


def _write_unnoticed(model: nn.Module, source: random.Random) -> None:
    parameter = _parameter(model, source)
    values, way = _changed(parameter, source).contiguous(), source.randrange(5)
    if not parameter.is_contiguous() or parameter.storage_offset() or way == 0:
        parameter.data.copy_(values)
    elif way == 1:
        parameter.detach().numpy()[...] = values.numpy()
    elif way == 2:
        torch.from_dlpack(parameter.detach()).copy_(values)
    elif way == 3:
        torch.empty(0, dtype=values.dtype).set_(parameter.untyped_storage(), 0, values.shape).copy_(values)
    else:
        np.from_dlpack(parameter.detach())[...] = values.numpy()
    ck.refresh(model)


def _step(model: nn.Module, source: random.Random) -> None:
    """Takes a step of any optimizer with some of the parameters, and gradients that are given."""
    kind, mode = source.choice(_OPTIMIZERS)
    parameters = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
    if kind is torch.optim.Muon:
        parameters = [p for p in parameters if p.ndim == 2]
    parameters = source.sample(parameters, max(1, round(len(parameters) * source.choice((0.1, 1.0)))))
    before = [p.grad for p in parameters]
    generator = torch.Generator().manual_seed(source.randrange(2**31))
    for parameter in parameters:
        parameter.grad = 0.1 * torch.randn(parameter.shape, generator=generator)
        if kind is torch.optim.SparseAdam:
            parameter.grad = parameter.grad.to_sparse()
    optimizer = kind(parameters, lr=0.01, **mode)
    optimizer.step(*([lambda: torch.tensor(1.0)] if kind is torch.optim.LBFGS else []))
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient


def _optimizers() -> list[tuple[Any, dict[str, bool]]]:
    """Returns every optimizer of PyTorch in each of its modes."""
    base = torch.optim.Optimizer
    kinds = {k for k in vars(torch.optim).values() if inspect.isclass(k) and issubclass(k, base)} - {base}
    modes = []
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        taken = inspect.signature(kind).parameters
        modes += [(kind, {}), *((kind, {name: True}) for name in ("foreach", "fused") if name in taken)]
    return modes


_OPTIMIZERS = _optimizers()


def _swap(model: nn.Module, source: random.Random) -> None:
    parameter = _parameter(model, source)
    torch.utils.swap_tensors(parameter, nn.Parameter(_changed(parameter, source), parameter.requires_grad))


def _convert(model: nn.Module, source: random.Random) -> None:
    torch.__future__.set_swap_module_params_on_conversion(source.random() < 0.5)
    try:
        model.to(source.choice((torch.bfloat16, torch.float64))).float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _pickle(model: nn.Module, source: random.Random) -> nn.Module:
    if source.random() < 0.5:
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _hook(model: nn.Module, source: random.Random) -> None:
    _part(model, source).register_forward_hook(_scale_output)


def _unhook(model: nn.Module, source: random.Random) -> None:
    for module in model.modules():
        module._forward_hooks.clear()


def _requires_grad(model: nn.Module, source: random.Random) -> None:
    parameter = _parameter(model, source)
    if parameter.is_leaf:
        parameter.requires_grad_(not parameter.requires_grad)


def _mask(model: nn.Module, source: random.Random) -> None:
    torch.manual_seed(source.randrange(2**31))
    prune.random_unstructured(_part(model, source, nn.Linear), "weight", 0.5)


def _parametrize(model: nn.Module, source: random.Random) -> None:
    part = _part(model, source, nn.Linear)
    if source.random() < 0.5:
        parametrize.register_parametrization(part, "weight", _Scaled())
    else:
        parametrizations.weight_norm(part)


def _tie(model: nn.Module, source: random.Random) -> None:
    part = _part(model, source)
    parent, name = source.choice(_places(model, part))
    parent._modules[name].weight = part.weight


def _shadow(model: nn.Module, source: random.Random) -> None:
    part = _part(model, source, nn.Linear, nn.LayerNorm, needs="bias")
    vars(part)["bias"] = _changed(part._parameters["bias"], source) + 0.1


def _unshadow(model: nn.Module, source: random.Random) -> None:
    for module in model.modules():
        vars(module).pop("bias", None)


def _set(model: nn.Module, source: random.Random) -> None:
    _part(model, source, nn.LayerNorm, nn.BatchNorm2d).eps = source.choice((1e-3, 1e-2))


def _train_a_part(model: nn.Module, source: random.Random) -> None:
    _part(model, source).train()


def _named(*changes: _Change) -> dict[str, _Change]:
    return {change.__name__.removeprefix("_"): change for change in changes}


_CHANGES: dict[str, _Change] = {
    "nothing": lambda model, source: None,
    **_named(_step, _in_place, _buffer_in_place, _load, _replace_parameter, _replace_buffer, _replace_module),
    **_named(_assign_data, _write_unnoticed, _swap, _convert),
    "copy": lambda model, source: copy.deepcopy(model),
    **_named(_pickle, _hook, _unhook, _requires_grad, _mask, _parametrize, _tie, _shadow, _unshadow, _set),
    **_named(_train_a_part),
    "evaluate": lambda model, source: model.eval(),
    "release": lambda model, source: ck.release_memory(),
    "threads": lambda model, source: torch.set_num_threads(source.choice((1, 2))),
}

#: Changes of attributes, which graphs do not look at: docs/serving.md.
_UNGRAPHED = ("shadow", "unshadow", "set")
#: Changes that may swap tensors, which none may refer to: a tape has views of weights, a CUDA graph has not.
_SWAPPING = ("swap", "convert")
#: What is done besides: with the accelerated model alone, or with both in a way of its own.
_DEEDS = ("train", "accelerate_again", "functional_call", "in_a_thread", "under_autocast")
_PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")

#: The settings of a case.
CHOICES: dict[str, tuple[Any, ...]] = {
    "family": tuple(family.__name__ for family in _FAMILIES),
    "mode": ("live", "frozen"),
    "backend": tuple(_KERNELS_FIRST),
    "no_grad": ("no_grad", "inference_mode", "grad"),
    **dict.fromkeys(_PLACES, (*_CHANGES, *_DEEDS)),
    "graphed": (False, True),  # by a tape in the place of CUDA
}


# Comparison -----------------------------------------------------------------------------------------------


class _Pair:
    """A model and its accelerated twin, through a sequence of changes."""

    def __init__(self, case: Case):
        self.family = family = next(f for f in _FAMILIES if f.__name__ == case.settings["family"])
        torch.manual_seed(case.seed)
        self.own = family().eval()
        self.freeze = case.settings["mode"] == "frozen" and family is not upstream.pvt_v2_linear
        self.accelerated = ck.accelerate(copy.deepcopy(self.own), freeze=self.freeze)
        self.is_graphed = bool(case.settings["graphed"])
        if self.is_graphed:
            ck.graphed(self.accelerated)
        self.source = random.Random(case.seed)
        size = 70 if family is upstream.pvt else self.source.choice((64, 70))
        self.images = torch.randn(self.source.choice((1, 2)), 3, size, size)
        self.mode = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
            case.settings["no_grad"], torch.enable_grad
        )
        self.compared = 0

    def change(self, name: str) -> None:
        """Changes both models alike, or does what only one of them or another call can do."""
        seed = self.source.randrange(2**31)
        if name in _DEEDS:
            getattr(self, f"_{name}")(seed)
            return
        change = _CHANGES[name]
        if self.is_graphed and name in _SWAPPING:
            ck.graphed(self.accelerated)
            forget_tapes()
        self.own, self.accelerated = self._run_both(lambda model: change(model, random.Random(seed)) or model)
        if self.is_graphed and name in _UNGRAPHED:
            ck.graphed(self.accelerated)

    def _run_both(self, run: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        """Returns what a function gives for the model and for its twin.

        Raises:
            _End: The twin raises too, or a frozen model refuses to train.
            _Flaw: One of both raises.
        """
        results = []
        for model in (self.own, self.accelerated):
            torch.manual_seed(0)
            try:
                results.append(run(model))
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

    def compare(self, run: Callable[[nn.Module], Any] | None = None) -> None:
        """Compares the results of a forward."""

        def results_of(model: nn.Module) -> Tensor:
            with self.mode():
                out = model(self.images) if run is None else run(model)
            return upstream.logits(out).detach().double()

        expected, actual = self._run_both(results_of)
        self.compared += 1
        if not expected.isfinite().all():
            raise _End
        error = ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
        if not error <= _TOLERANCE:
            raise _Flaw(f"is off by {error:.2e} of the largest value")

    def _train(self, seed: int) -> None:
        """Compares the gradients of a step in training mode."""
        if self.freeze or (self.family in upstream.UPSTREAMS and len(self.images) == 1):
            return  # of one image PyTorch's batch_norm computes wrong gradients: tests/upstream.py

        def gradients_of(model: nn.Module) -> list[Tensor | None]:
            model.train()
            model.zero_grad()
            upstream.logits(model(self.images)).sin().mean().backward()
            model.eval()
            return [p.grad for p in model.parameters()]

        pairs = list(zip(*self._run_both(gradients_of), strict=True))
        if any((mine is None) != (theirs is None) for mine, theirs in pairs):
            raise _Flaw("has other gradients than the twin")
        known = [(mine, theirs) for mine, theirs in pairs if mine is not None]
        largest = max((mine.abs().max().item() for mine, _ in known), default=0.0)
        worst = max(((mine - theirs).abs().max().item() for mine, theirs in known), default=0.0)
        if not worst <= 1e-3 * largest:
            raise _Flaw(f"has gradients that are off by {worst / largest:.2e} of the largest")

    def _accelerate_again(self, seed: int) -> None:
        ck.restore(self.accelerated)
        try:
            ck.accelerate(self.accelerated, freeze=self.freeze)
        except ValueError:  # what was changed can no longer be accelerated
            raise _End from None
        if self.is_graphed:
            ck.graphed(self.accelerated)

    def _functional_call(self, seed: int) -> None:
        source = random.Random(seed)
        name = source.choice([name for name, _ in self.own.named_parameters()])
        value = _changed(dict(self.own.named_parameters())[name], source)
        self.compare(lambda model: torch.func.functional_call(model, {name: value}, (self.images,)))

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
                for _ in range(3 if pair.is_graphed else 1):  # without a graph, by a capture, by a replay
                    pair.compare()
    except _End:
        pass
    except _Flaw as flaw:
        changes = ", ".join(name for name in done if name != "nothing") or "no change"
        kind = f"{case.settings['mode']}{' and graphed' if pair.is_graphed else ''}"
        flaws.append(f"a {kind} {case.settings['family']}, after {changes}, {flaw}")
    finally:
        torch.set_num_threads(threads)
    return Answer(flaws, pair.compared)
