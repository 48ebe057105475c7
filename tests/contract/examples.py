"""Example calls of every operator, and of what a backend is asked for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.autotune import accuracy, tuner
from tests.checks import assert_accurate, not_built
from tests.fuzz.cases import CHOICES, Case
from tests.fuzz.judge import call_public
from tests.fuzz.operators import laid_out, make

_ROWS = {"leading": "tokens", "rows": 13, "channels": 40}
_ODD_ROWS = {"rows": 1, "channels": 7}
_MANY_ROWS = {"leading": "tokens", "rows": 501, "channels": 65}
_TINY_ROWS = {"rows": 3, "channels": 5}
_MAP = {"batch": 2, "height": 3, "width": 4, "channels": 20}
_ODD_MAP = {"batch": 1, "height": 1, "width": 1, "channels": 7}
_MANY_PIXELS = {"batch": 3, "height": 23, "width": 19, "channels": 65}
_TINY_MAP = {"batch": 2, "height": 3, "width": 2, "channels": 3}
_3X3 = {"kernel": 3, "padding": 1}
_TOKENS = {"batch": 2, "tokens": 13, "count": 7, "channels": 40, "absent": "some"}
_ODD_TOKENS = {"batch": 1, "tokens": 1, "count": 1, "channels": 7}
_MANY_TOKENS = {"batch": 4, "tokens": 200, "count": 150, "channels": 96}
_TINY_TOKENS = {"batch": 2, "tokens": 4, "count": 3, "channels": 5, "absent": "some"}
_OF_TOKENS = {
    "usual": _TOKENS,
    "odd": _ODD_TOKENS,
    "empty": _TOKENS | {"batch": 0},
    "many": _MANY_TOKENS,
    "tiny": _TINY_TOKENS,
    "no rows": _TOKENS | {"count": 0},
}
_BLOCK = _MAP | _3X3 | {"heads": 2, "head_dim": 8, "hidden": 33}
_PYRAMID = _MAP | {"reduce": "squares", "ratio": 2, "heads": 2, "head_dim": 8, "hidden": 33}


def _of_rows(*names: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """Returns the examples of an operator on rows: the common ones, and one more for each named value."""
    examples = {
        "usual": _ROWS | settings,
        "odd": _ODD_ROWS | settings | ({"outputs": 5} if "outputs" in settings else {}),
        "empty": _ROWS | settings | {"rows": 0},
        "many": _MANY_ROWS | settings,
        "tiny": _TINY_ROWS | settings | ({"outputs": 4} if "outputs" in settings else {}),
    }
    for name in names:
        setting, _, value = name.partition("=")
        choices = {str(choice): choice for choice in (True, False, "tanh", "quick", "float8_e4m3fn", "0.05")}
        examples[name] = _ROWS | settings | {setting: choices.get(value, value)}
    return examples


_SCALED = _ROWS | {"outputs": 33, "scaled": True}
_GELUS = ("approximate=tanh", "approximate=quick")

#: The settings of the examples of each operator (``tests/fuzz/operators.py``), by name. The names that all
#: have are ``usual``; ``odd``, a single row, pixel or token of few channels; ``empty``, no images or rows;
#: ``many``, enough for several threads; and ``tiny``, for derivatives by differences.
EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "conv_projection": {
        "usual": _MAP | _3X3 | {"branches": 2, "class_token": True},
        "odd": _ODD_MAP | _3X3,
        "empty": _MAP | _3X3 | {"batch": 0},
        "many": _MANY_PIXELS | _3X3 | {"branches": 2, "class_token": True},
        "tiny": _TINY_MAP | _3X3 | {"branches": 2, "class_token": True},
        "5x5": _MAP | {"kernel": 5, "padding": 2, "stride": 2, "bare": True},
        "sums": _MAP | _3X3 | {"summands": 2, "branches": 2},
        "training": _MAP | _3X3 | {"branches": 2, "class_token": True, "training": True},
        "mixed": _MAP | _3X3 | {"mixed": True},
    },
    "attention": {
        "usual": {"batch": 2, "queries": 17, "keys": 9, "heads": 2, "channels": 24},
        "odd": {"batch": 1, "queries": 1, "keys": 1, "channels": 7},
        "empty": {"batch": 0, "queries": 5, "keys": 3, "channels": 8},
        "many": {"batch": 4, "queries": 197, "keys": 50, "heads": 3, "channels": 32},
        "tiny": {"batch": 1, "queries": 3, "keys": 4, "heads": 2, "channels": 3, "bias": "full"},
        "bias": {"batch": 2, "queries": 17, "keys": 9, "heads": 2, "channels": 24, "bias": "full"},
        "tiles": {"queries": 17, "keys": 70, "heads": 2, "channels": 16, "bias": "full"},
        "loop": {"queries": 5, "keys": 300, "channels": 16, "bias": "keys"},
        "excluded": {"queries": 9, "keys": 17, "channels": 16, "bias": "matrix", "excluded": "some"},
        "position": {"batch": 2, "position": "table", "height": 4, "width": 3, "key_height": 2,
                     "key_width": 2, "stride": 2, "class_token": True, "heads": 2, "channels": 16},
    },
    "layer_norm": _of_rows("bare=True", "shifted=True", "result=bfloat16"),
    "add_layer_norm": _of_rows("bare=True", "result=bfloat16", "added=False"),
    "gelu": _of_rows(*_GELUS),
    "bias_gelu": _of_rows(*_GELUS),
    "layer_norm_gelu": _of_rows("bare=True", *_GELUS),
    "linear": _of_rows("bare=True", outputs=33),
    "linear_gelu": _of_rows("bare=True", *_GELUS, outputs=33),
    "linear_add": _of_rows("bare=True", "inplace=True", outputs=33) | {
        "scaled": _SCALED, "scaled sum": _SCALED | {"scales_sum": True},
    },
    "linear_add_layer_norm": _of_rows("bare=True", "shifted=True", "inplace=True", outputs=33),
    "layer_norm_mlp": _of_rows("bare=True", "shifted=True", *_GELUS, outputs=33),
    "mlp_add": _of_rows("bare=True", *_GELUS, outputs=33) | {
        "scaled": _SCALED, "scaled sum": _SCALED | {"scales_sum": True},
    },
    "conv_linear": {
        "usual": _MAP | _3X3 | {"branches": 2, "outputs": 33, "class_token": True},
        "odd": _ODD_MAP | _3X3 | {"outputs": 5},
        "empty": _MAP | _3X3 | {"batch": 0, "outputs": 33},
        "many": _MANY_PIXELS | _3X3 | {"outputs": 33},
        "tiny": _TINY_MAP | _3X3 | {"outputs": 4, "branches": 2, "class_token": True},
        "bare": _MAP | _3X3 | {"outputs": 33, "bare": True},
    },
    "conv_embedding": {
        "usual": _MAP | _3X3 | {"inputs": 5, "stride": 2, "class_token": True},
        "odd": _ODD_MAP | _3X3 | {"inputs": 1},
        "empty": _MAP | _3X3 | {"inputs": 3, "batch": 0},
        "many": _MANY_PIXELS | _3X3 | {"inputs": 8},
        "tiny": _TINY_MAP | _3X3 | {"inputs": 2, "stride": 2, "class_token": True},
        "first stage": {"batch": 2, "height": 14, "width": 17, "inputs": 3, "channels": 64, "kernel": 7,
                        "stride": 4, "padding": 2, "class_token": True},
        "later stage": _MAP | _3X3 | {"inputs": 40, "stride": 2, "class_token": True},
        "bare": _MAP | _3X3 | {"inputs": 5, "stride": 2, "bare": True},
        "channels last": _MAP | _3X3 | {"inputs": 5, "stride": 2, "channels_last": True},
    },
    "depthwise_conv_gelu": {
        "usual": _MAP,
        "odd": _ODD_MAP,
        "empty": _MAP | {"batch": 0},
        "many": _MANY_PIXELS,
        "tiny": _TINY_MAP,
        "bare": _MAP | {"bare": True},
        "tanh": _MAP | {"approximate": "tanh"},
        "quick": _MAP | {"approximate": "quick"},
    },
    "segmentation_head": {
        "usual": _MAP | {"inputs": 9, "outputs": 33},
        "odd": _ODD_MAP | {"inputs": 1, "outputs": 5},
        "empty": _MAP | {"inputs": 9, "outputs": 33, "batch": 0},
        "many": _MANY_PIXELS | {"inputs": 8, "outputs": 33},
        "tiny": _TINY_MAP | {"inputs": 2, "outputs": 4},
        "bare": _MAP | {"inputs": 9, "outputs": 33, "bare": True},
        "one map": _MAP | {"inputs": 9, "outputs": 33, "others": 0},
        "channels last": _MAP | {"inputs": 9, "outputs": 33, "channels_last": True},
    },
    "quantize_rows": _of_rows("to=float8_e4m3fn", "one_scale=0.05"),
    "layer_norm_quantize": _of_rows("to=float8_e4m3fn", "one_scale=0.05", "bare=True", "shifted=True"),
    "gelu_quantize": _of_rows("to=float8_e4m3fn", "one_scale=0.05", "bare=True", *_GELUS),
    "linear_int8": _of_rows(
        "to=float8_e4m3fn", "one_scale=0.05", "rounded=True", "bare=True", "added=True", *_GELUS, outputs=33
    ),
    "gather_rows": _OF_TOKENS,
    "gather_add_layer_norm": _OF_TOKENS | {"bare": _TOKENS | {"bare": True}},
    "scatter_rows": _OF_TOKENS | {
        "bare": _TOKENS | {"bare": True},
        "inplace=True": _TOKENS | {"inplace": True},
    },
    "transformer_block": {
        "usual": _BLOCK | {"class_token": True, "stride": 2},
        "odd": _BLOCK | _ODD_MAP | {"heads": 1, "head_dim": 7},
        "empty": _BLOCK | {"batch": 0},
        "many": _BLOCK | _MANY_PIXELS,
        "tiny": _BLOCK | _TINY_MAP | {"head_dim": 2, "hidden": 4},
        "bare": _BLOCK | {"bare": True, "approximate": "quick"},
        "rows": _BLOCK | {"class_token": True, "count": 9, "scores": "cls"},
        "SegFormer": _PYRAMID | {"mixes": True},
        "PVT": _PYRAMID,
        "inplace=True": _BLOCK | {"inplace": True},
    },
    "transformer_blocks": {
        "usual": _BLOCK | {"class_token": True, "stride": 2, "depth": 2},
        "odd": _BLOCK | _ODD_MAP | {"heads": 1, "head_dim": 7},
        "empty": _BLOCK | {"batch": 0},
        "many": _BLOCK | _MANY_PIXELS,
        "tiny": _BLOCK | _TINY_MAP | {"head_dim": 2, "hidden": 4},
        "bare": _BLOCK | {"bare": True, "approximate": "quick", "depth": 2},
        "SegFormer": _PYRAMID | {"mixes": True, "depth": 2},
        "inplace=True": _BLOCK | {"inplace": True, "depth": 2},
    },
}  # fmt: skip

#: Pairs of operator and backend that compute no gradients, and refuse them.
WITHOUT_GRADIENTS = frozenset({
    ("attention", "cpu"),
    ("conv_embedding", "cpu"),
    ("conv_embedding", "triton"),
    ("conv_linear", "gluon"),
    ("conv_linear", "triton"),
    ("layer_norm_mlp", "triton"),
    ("linear", "float32"),
    ("linear_add_layer_norm", "triton"),
    ("segmentation_head", "cpu"),
    ("segmentation_head", "triton"),
    ("transformer_block", "cpu"),
    ("transformer_block", "onednn"),
    ("transformer_blocks", "gluon"),
})  # fmt: skip
#: What a backend needs to serve an example at all.
_NEEDED = {
    ("linear", "float32"): {"dtype": "bfloat16", "bare": True},
    ("linear_int8", "scaled_mm"): {
        "to": "float8_e4m3fn", "dtype": "bfloat16", "channels": 48, "outputs": 32,
    },
}  # fmt: skip
#: What serves the parts of an operator on backends that compose it of others.
_PARTS: dict[str, tuple[ck.Backend, ...]] = dict.fromkeys(("composed", "onednn"), ("cpu", "reference"))
#: The operators that round, and have no gradients.
ROUNDING = ("quantize_rows", "layer_norm_quantize", "gelu_quantize", "linear_int8")


def device_of(operator: str, backend: str) -> str:
    """Returns the device type on which a backend of an operator is tested on this machine."""
    devices = backends.registered(operator, backend).devices or ("cpu",)
    return "cuda" if "cuda" in devices and torch.cuda.is_available() else "cpu"


def _pair(operator: str, backend: str) -> Any:
    devices = backends.registered(operator, backend).devices or ("cpu",)
    needs_gpu = "cpu" not in devices and backend != "triton"
    return pytest.param(
        operator, backend, marks=[pytest.mark.gpu] if needs_gpu else [], id=f"{operator}-{backend}"
    )


def pairs(chosen: Callable[[str, str], bool] = lambda operator, backend: True) -> Any:
    """Parametrizes a test by operators and their chosen backends, as one parameter."""
    found = [
        _pair(operator, backend)
        for operator, known in backends.implementations.items()
        for backend in known
        if chosen(operator, backend)
    ]
    return pytest.mark.parametrize(("operator", "backend"), found)


def has_gradients(operator: str, backend: str) -> bool:
    """Returns whether a backend of an operator computes gradients."""
    return operator not in ROUNDING and (operator, backend) not in WITHOUT_GRADIENTS


def is_ours(operator: str, backend: str) -> bool:
    """Returns whether a backend has kernels of this project."""
    return backend in backends.OURS


class Example(NamedTuple):
    """An example call, and the backend that it is for.

    Attributes:
        operator: The operator.
        backend: The backend.
        call: The arguments, on the device of the backend.
        upstream: The layout of the gradients of outputs.
    """

    operator: str
    backend: str
    call: tuner.Call
    upstream: str

    def douts(self, outputs: list[Tensor]) -> list[Tensor]:
        """Returns the gradients of outputs, the same numbers every time; none where there is no backward."""
        generator = torch.Generator().manual_seed(1)
        numbers = [
            torch.randn(out.shape, generator=generator, dtype=torch.float64)
            for out in outputs
            if self.call.gradient
        ]
        return [
            laid_out(dout.to(out.dtype), self.upstream).to(out.device)
            for dout, out in zip(numbers, outputs, strict=False)
        ]

    def public(self, record: backends.Record) -> Any:
        """Calls the public function with the arguments of a record, served by the backend."""
        with ck.use_backend(self.backend, *_PARTS.get(self.backend, ())):
            return call_public(self.operator, record)

    def leaves(self) -> list[Tensor]:
        """Returns the tensors that require a gradient."""
        return [tensor for tensor in self.call.tensors() if tensor.requires_grad]

    def of_leaves(self, *leaves: Tensor) -> Any:
        """Calls the public function with other tensors in the places of those that require a gradient."""
        given = dict(zip(map(id, self.leaves()), leaves, strict=True))
        return self.public(
            pytree.tree_map_only(Tensor, lambda t: given.get(id(t), t), self.call.map(lambda t: t).record)
        )

    def why_refused(self) -> str | None:
        """Says why the backend cannot serve the call; None if it can."""
        with torch.set_grad_enabled(self.call.gradient), ck.use_backend(self.backend):
            return backends.why_unsupported(self.operator, self.backend, self.call.record)


def example(operator: str, backend: str, name: str, **settings: Any) -> Example:
    """Makes an example; skips where this machine lacks the backend.

    Args:
        operator: The operator.
        backend: The backend.
        name: The name of the example.
        settings: Other settings (``tests/fuzz/operators.py``).
    """
    device = device_of(operator, backend)
    with ck.use_backend(backend):
        reason = backends.why_unavailable(operator, backend, device)
    if reason is not None:
        assert backend != "cpu" or not_built(), reason
        pytest.skip(reason)
    choices = {key: values[0] for key, values in CHOICES[operator].items()}
    chosen = choices | EXAMPLES[operator][name] | _NEEDED.get((operator, backend), {}) | settings
    layout = chosen["layout"]
    if layout != "expanded":  # parameters that repeat would let LayerNorms divide by nothing
        chosen["layout"] = "contiguous"
    call = make(Case(operator, {key: chosen[key] for key in choices}, 0)).call
    call = call.map(lambda tensor: _laid_out(tensor, layout))
    if device != "cpu":
        call = call.map(lambda tensor: _moved(tensor, device))
    return Example(operator, backend, call, chosen.get("upstream", "contiguous"))


def served(operator: str, backend: str, name: str, **settings: Any) -> Example:
    """Makes an example that the backend serves; skips where it refuses it, as some refuse a dtype."""
    made = example(operator, backend, name, **settings)
    if (reason := made.why_refused()) is not None:
        pytest.skip(reason)
    return made


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Returns a tensor in a layout; integers stay as they are."""
    if not tuner._is_fine(tensor) or layout in ("contiguous", "expanded"):
        return tensor
    return laid_out(tensor.detach(), layout).requires_grad_(tensor.requires_grad)


def _moved(tensor: Tensor, device: str) -> Tensor:
    flat = tensor.detach().as_strided((tuner._extent(tensor),), (1,)).to(device)
    return flat.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)


def tensors_of(results: Any) -> list[Tensor]:
    """Returns the tensors that an operator returned."""
    return list(results) if isinstance(results, tuple | list) else [results]


def same_bits(ours: tuner.Results | list[Tensor], others: tuner.Results | list[Tensor]) -> bool:
    """Returns whether results are equal in every bit."""
    flat, other = (pytree.tree_leaves(list(each)) for each in (ours, others))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(flat, other, strict=True))


def standards(made: Example) -> Iterator[tuple[tuner.Results, tuner.Results]]:
    """Yields what results may be compared with: PyTorch's in the same dtype, and those in float64.

    Where backends need not round between the parts of an operator, there is a pair for that too. After a pair
    with a result of a single number comes one that has it from float64, of arguments that roundings perturb:
    the tuner does so too, since PyTorch's error in one number may be small by luck.
    """
    described = backends.operators[made.operator]
    functions = [(described.reference, described.exact or described.reference)]
    functions += [] if described.unrounded is None else [(described.unrounded, described.unrounded)]
    for plain, exact in functions:
        call = made.call.map(tuner._copied)
        outputs = tuner.run(plain, call._replace(gradient=False).map(tuner._copied), []).outputs
        douts = made.douts(outputs)
        right = tuner._run_in_float64(exact, made.call.map(tuner._in_float64), douts)
        same = tuner.run(plain, call, douts)
        if _misses_numbers(same, right):
            # torch 2.13: oneDNN's gradient of a bfloat16 convolution's weight reads memory that nobody has
            # written where the output is one pixel wide and the stride 4. PyTorch's own kernels do not.
            with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
                same = tuner.run(plain, made.call.map(tuner._copied), douts)
        yield same, right
        if any(each.numel() == 1 for kind in same for each in kind):
            nudge = functools.partial(
                tuner._nudged, generator=torch.Generator(made.call.device).manual_seed(2)
            )
            nudged = tuner._run_in_float64(exact, made.call.map(nudge), douts)
            yield tuner.Results(*map(_with_single_numbers, same, nudged)), right


def _with_single_numbers(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Returns tensors, but those of one number from others."""
    return [b.to(a.dtype) if a.numel() == 1 else a for a, b in zip(tensors, others, strict=True)]


def _misses_numbers(same: tuner.Results, right: tuner.Results) -> bool:
    """Returns whether a result or a gradient is not finite where the exact one is."""
    pairs = (
        (a, b)
        for kind in same._fields
        for a, b in zip(getattr(same, kind), getattr(right, kind), strict=True)
    )
    return any(bool((~a.double().isfinite() & b.double().isfinite()).any()) for a, b in pairs)


def assert_right(made: Example, ours: tuner.Results, *, dtype: torch.dtype | None = None) -> None:
    """Fails unless results, gradients and what is left in the arguments are right by the accuracy rule.

    Args:
        made: The example.
        ours: Its results.
        dtype: The dtype in whose units the rule counts, where results are wider, as under autocast.
    """
    errors = []
    for same, exact in standards(made):
        # Q's and K's gradients of whole blocks are small differences of large ones, whose roundings PyTorch's
        # composition and ours share by chance only: what the tuner and the fuzzer allow is allowed here too.
        others = max((t.abs().max().item() for t in exact.gradients), default=0.0) if _is_block(made) else 0.0
        try:
            _assert_near(ours, same, exact, dtype, tuner._UNITS_OF_OTHERS * others)
            return
        except AssertionError as error:
            errors.append(error)
    raise errors[0]


def _is_block(made: Example) -> bool:
    return made.operator.startswith("transformer_block") and bool(made.call.gradient)


def _assert_near(
    ours: tuner.Results, same: tuner.Results, exact: tuner.Results, dtype: torch.dtype | None, others: float
) -> None:
    """Compares results; ``others`` times float32's unit is allowed in addition for gradients."""
    for kind, factor in zip(ours._fields, (2.0, accuracy.GRADIENT_FACTOR, 2.0), strict=True):
        for got, theirs, right in zip(*(getattr(each, kind) for each in (ours, same, exact)), strict=True):
            assert (got.dtype, got.shape) == (theirs.dtype, theirs.shape)
            if not got.numel() or torch.equal(got, theirs):
                continue
            if got.dtype == torch.float64:  # in which the reference is no more exact
                torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
                continue
            floor = 4.0
            if dtype is not None and got.dtype.itemsize > dtype.itemsize:
                floor *= torch.finfo(dtype).eps / torch.finfo(got.dtype).eps
            if kind == "gradients" and (largest := right.abs().max().item()) > 0:
                units = torch.finfo(torch.float32).eps / torch.finfo(got.dtype).eps
                floor += units * others / largest
            assert_accurate(got, theirs, right, factor=factor, floor=floor)
