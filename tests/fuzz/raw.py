"""Calls of the extension's raw operators with arguments that the public functions never hand them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import math
import mmap
import random
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cvt_kernels import machine, ops, proofs

from .worker import Answer

if TYPE_CHECKING:
    from .cases import Case

_MEMORY = 2**31  # bytes that a call may take beside what the process has
_FEW = 2**24  # bytes of results for which there is memory in any case
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPES = (
    *_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
)  # fmt: skip
_MOST = 2**63 - 1
_INTEGERS = (
    0, 1, 2, 3, 5, 7, 9, 16, 17, 64, 65, 129, 257, 1000, 2**16 + 1, 2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**32,
    2**33, 2**40, 2**40 + 1, 2**59, 2**60, 2**61, 2**62, _MOST, -1, -2, -16, -(2**31), -(2**32), -(2**62),
    -_MOST - 1,
)  # fmt: skip
_REALS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-300, 1e38, 1e300, math.inf, -math.inf, math.nan)
_WORDS = ("", "none", "tanh", "quick", "identity", "relu", "cls", "avg", "é", "none\0", "x" * 5000)
_SIZES = (0, 1, 2, 3, 4, 5, 8, 9, 13, 16, 17, 33, 64)
_HUGE = (2**20 + 1, 2**31, 2**32, 2**40, 2**52, 2**60, 2**61, 2**62)


# Right calls ----------------------------------------------------------------------------------------------


class _Draw:
    """Draws sizes and tensors of a call."""

    def __init__(self, seed: int):
        self.source = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        _load()
        self.ops = torch.ops.cvt_kernels
        self.dtype = self.source.choice(_FLOATS[:3])
        self.any_dtype = self.source.choice(_FLOATS)
        self.batch = self.source.choice((1, 1, 2, 3, 0))
        self.height, self.width = self.source.choice((1, 2, 4, 5)), self.source.choice((1, 2, 4, 7))
        self.channels = self.source.choice((1, 2, 3, 8, 16, 17, 33))
        self.class_tokens = self.source.choice((0, 1))
        self.activation = self.source.choice(("none", "tanh", "quick"))

    @property
    def tokens(self) -> int:
        return self.height * self.width

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def vector(self, size: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.tensor(self.channels if size is None else size, dtype=dtype).abs_()

    def maybe(self, value: Any) -> Any:
        return value if self.source.random() < 0.6 else None

    def rows(self, tokens: int, count: int) -> Tensor:
        made = torch.full((self.batch, count), -1)
        for row in made:
            chosen = sorted(self.source.sample(range(tokens), min(tokens, count)))
            row[: len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        return made

    def accumulator(self) -> torch.dtype:
        return torch.float64 if self.any_dtype == torch.float64 else torch.float32

    def linears(self, sizes: list[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
        packed = [self.ops.pack_linear(self.tensor(*size)) for size in sizes]
        return packed, [self.vector(outputs) for outputs, _ in sizes]


def _layer_norm(draw: _Draw) -> list[Any]:
    c, dtype = draw.channels, draw.any_dtype
    x = draw.tensor(draw.batch, 5, c, dtype=dtype)
    return [x, draw.maybe(draw.vector(dtype=dtype)), draw.maybe(draw.vector()), 1e-5, draw.activation, dtype]


def _add_layer_norm(draw: _Draw) -> list[Any]:
    x, weight, bias, eps, _, dtype = _layer_norm(draw)
    return [x, x.clone(), weight, bias, eps, dtype]


def _layer_norm_backward(draw: _Draw) -> list[Any]:
    x, weight, bias, _, activation, _ = _layer_norm(draw)
    mean = draw.tensor(*x.shape[:-1], dtype=draw.accumulator())
    dh = draw.maybe(x.clone())
    return [x.clone(), dh, x, mean, mean.abs() + 1, weight, bias, activation, False]


def _gelu(draw: _Draw) -> list[Any]:
    x, weight, _, _, activation, _ = _layer_norm(draw)
    return [x, weight, activation]


def _gather(draw: _Draw) -> tuple[Tensor, Tensor, Tensor]:
    x = draw.tensor(draw.batch, 6, draw.channels, dtype=draw.any_dtype)
    rows = draw.rows(6, 4)
    return x, rows, draw.tensor(draw.batch, 4, draw.channels, dtype=draw.any_dtype)


def _gather_add_layer_norm(draw: _Draw) -> list[Any]:
    weight, bias = (draw.maybe(draw.vector(dtype=draw.accumulator())) for _ in range(2))
    return [*_gather(draw), weight, bias, 1e-5, draw.source.random() < 0.5]


def _scatter_rows(draw: _Draw) -> list[Any]:
    x, rows, values = _gather(draw)
    x, other = draw.maybe(x), draw.maybe(values.clone())
    return [x, rows, values, other, 6]


def _scatter_rows_inplace(draw: _Draw) -> list[Any]:
    x, rows, values = _gather(draw)
    return [x, rows, values, draw.maybe(values.clone())]


def _attention(draw: _Draw) -> list[Any]:
    heads, head_dim, keys = draw.source.choice((1, 2)), draw.channels, draw.source.choice((1, 4, 35))
    q = draw.tensor(draw.batch, 6, heads, head_dim, dtype=draw.any_dtype)
    k, v = (draw.tensor(draw.batch, keys, heads, head_dim, dtype=draw.any_dtype) for _ in range(2))
    return [q, k, v, 0.3]


def _attention_by_position(draw: _Draw) -> list[Any]:
    heads, stride, keys = 2, draw.source.choice((1, 2)), (2, 2)
    q = draw.tensor(draw.batch, draw.tokens + draw.class_tokens, heads, 8, dtype=draw.any_dtype)
    k, v = (draw.tensor(draw.batch, 4 + draw.class_tokens, heads, 8, dtype=q.dtype) for _ in range(2))
    table = draw.tensor(heads, draw.height + stride, draw.width + stride, dtype=draw.accumulator())
    rows = draw.maybe(draw.rows(q.shape[1], q.shape[1]))
    return [q, k, v, 0.3, table, rows, *keys, stride]


def _conv_projection(draw: _Draw, norm: int, dtype: torch.dtype) -> list[Any]:
    count = draw.source.choice((1, 2, 3))
    x = draw.tensor(max(1, draw.batch), draw.tokens + draw.class_tokens, draw.channels, dtype=draw.any_dtype)
    kernels = [draw.source.choice((1, 3)) for _ in range(count)]
    weights = [draw.tensor(draw.channels, 1, k, k, dtype=x.dtype) for k in kernels]
    norms = [draw.vector(dtype=dtype) for _ in range(norm * count)]
    geometry = [n for k in kernels for n in (draw.source.choice((1, 2)), k // 2, 1)]
    return [x, draw.height, draw.width, weights, norms, geometry, [1e-5] * count]


def _conv_projection_gradients(draw: _Draw) -> list[Any]:
    x, height, width, weights, norms, geometry, eps = _conv_projection(draw, 3, draw.accumulator())
    statistics = [t for i in range(0, len(norms), 3) for t in (norms[i], *norms[i : i + 3])]
    arguments = [x, height, width, weights, statistics, geometry, eps]
    douts = draw.ops.conv_projection_inference(*arguments)
    constant = [draw.source.choice((0, 1))] * len(weights)
    return [douts, x, height, width, weights, norms, geometry, eps, constant]


def _depthwise(draw: _Draw) -> list[Any]:
    x = draw.tensor(draw.batch, draw.tokens, draw.channels, dtype=draw.any_dtype)
    weight, bias = draw.tensor(draw.channels, 1, 3, 3, dtype=x.dtype), draw.maybe(draw.vector(dtype=x.dtype))
    return [x, draw.height, draw.width, weight, bias, draw.activation]


def _layer_norm_quantize(draw: _Draw) -> list[Any]:
    x = draw.tensor(draw.batch, 5, draw.channels)
    vectors = [draw.maybe(draw.vector()) for _ in range(3)]
    return [x, vectors[0], vectors[1], 1e-5, vectors[2], draw.maybe(torch.tensor(0.1))]


def _weight_of_8_bits(draw: _Draw, outputs: int, inputs: int) -> Tensor:
    return torch.randint(-127, 128, (outputs, inputs), generator=draw.generator, dtype=torch.int8)


def _linear_int8(draw: _Draw) -> list[Any]:
    outputs, x = draw.source.choice((1, 8, 33, 40)), draw.tensor(draw.batch, 5, draw.channels)
    packed = draw.ops.pack_linear_int8(_weight_of_8_bits(draw, outputs, draw.channels))
    residual = draw.maybe(draw.tensor(draw.batch, 5, outputs))
    bias, scale = draw.maybe(draw.vector(outputs)), draw.maybe(torch.tensor(0.1))
    given = draw.ops.quantize_rows(x, scale) if draw.source.random() < 0.5 else (x, None)
    return [*given, packed, draw.vector(outputs), bias, scale, residual, "identity", draw.dtype]


def _pack_convolution(draw: _Draw) -> list[Any]:
    kernel = draw.source.choice((1, 3, 5))
    return [draw.tensor(draw.channels, 1, kernel, kernel), *(draw.vector() for _ in range(4)), 1e-5]


def _transformer_block(draw: _Draw) -> list[Any]:
    c, heads, hidden = draw.channels, draw.source.choice((1, 2)), draw.source.choice((1, 8, 40))
    projected, tokens = heads * draw.source.choice((1, 8)), draw.tokens + draw.class_tokens
    strides = (1, *[draw.source.choice((1, 2))] * 2)
    norms = [draw.vector() for _ in range(4)]
    conv = draw.ops.pack_convolution(draw.tensor(c, 1, 3, 3), *norms, 1e-5)
    sizes = [*[(projected, c)] * 3, (c, projected), (hidden, c), (c, hidden)]
    packed, biases = draw.linears(sizes)
    count = draw.source.choice((1, tokens, tokens + 1))
    rows = draw.maybe(draw.rows(tokens, count))
    scores, query = None, ""
    if rows is None and draw.source.random() < 0.5:
        keys = draw.class_tokens + math.prod(-(-n // strides[1]) for n in (draw.height, draw.width))
        scores, query = torch.empty(draw.batch, keys), "cls" if draw.class_tokens else "avg"
    return [
        draw.tensor(draw.batch, tokens, c), draw.height, draw.width, [conv] * 3 + packed, norms + biases,
        [n for stride in strides for n in (3, stride, 1, 1)], [projected, hidden, heads],
        [torch.empty(0)] * 6, [0.0] * 6, 1e-5, 1e-5, 0.3, draw.activation, rows, scores, query,
    ]  # fmt: skip


def _pyramid_block(draw: _Draw) -> list[Any]:
    c, heads, hidden = draw.channels, draw.source.choice((1, 2)), draw.source.choice((1, 8, 40))
    projected, ratio = heads * draw.source.choice((1, 8)), draw.source.choice((0, 0, 1))
    packed, biases = draw.linears([*[(projected, c)] * 3, (c, projected), (hidden, c), (c, hidden)])
    vectors = [draw.vector() for _ in range(4)] + biases + [draw.vector() for _ in range(3 * ratio)]
    conv = draw.ops.pack_depthwise(draw.tensor(hidden, 1, 3, 3), None)
    reduction = [draw.ops.pack_linear(draw.tensor(c, c)) for _ in range(ratio)]
    return [
        draw.tensor(draw.batch, draw.tokens, c), draw.height, draw.width, packed, reduction, draw.maybe(conv),
        vectors, [projected, hidden, heads], [1e-5] * (2 + ratio), 0.3, draw.activation,
    ]  # fmt: skip


def _conv_embedding(draw: _Draw) -> list[Any]:
    c, kernel, inputs = draw.channels, draw.source.choice((1, 3, 7)), draw.source.choice((1, 3))
    image = draw.tensor(draw.batch, inputs, 9, 8)
    packed = draw.ops.pack_linear(draw.tensor(c, inputs * kernel * kernel))
    vectors = [draw.vector() for _ in range(3)]
    token = draw.maybe(draw.vector())
    return [
        image, packed, *vectors, token, kernel, draw.source.choice((1, 2, 4)), kernel // 2,
        draw.source.random() < 0.5, 1e-5,
    ]  # fmt: skip


#: Makes the arguments of a right call of each operator.
_RIGHT: dict[str, Callable[[_Draw], list[Any]]] = {
    "layer_norm": _layer_norm,
    "layer_norm_inference": lambda draw: [*_layer_norm(draw), draw.maybe(draw.vector())],
    "add_layer_norm": _add_layer_norm,
    "add_layer_norm_inference": _add_layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "gelu": _gelu,
    "gelu_backward": lambda draw: [*_gelu(draw)[:1], *_gelu(draw)],
    "gather_rows": lambda draw: [*_gather(draw)[:2]],
    "gather_add_layer_norm": _gather_add_layer_norm,
    "scatter_rows": _scatter_rows,
    "scatter_rows_": _scatter_rows_inplace,
    "attention_inference": _attention,
    "attention_by_position": _attention_by_position,
    "conv_projection_inference": lambda draw: _conv_projection(draw, 4, torch.float32),
    "conv_projection_moments": lambda draw: [
        value for i, value in enumerate(_conv_projection(draw, 0, torch.float32)) if i not in (4, 6)
    ],
    "conv_projection_gradients": _conv_projection_gradients,
    "depthwise_conv_gelu": _depthwise,
    "depthwise_conv_gelu_backward": lambda draw: [(right := _depthwise(draw))[0].clone(), *right],
    "pack_linear": lambda draw: [draw.tensor(draw.channels, 9)],
    "quantize_rows": lambda draw: [draw.tensor(draw.batch, draw.channels), draw.maybe(torch.tensor(0.1))],
    "layer_norm_quantize": _layer_norm_quantize,
    "gelu_quantize": lambda draw: [
        draw.tensor(draw.batch, draw.channels), draw.maybe(draw.vector()), draw.activation, None
    ],
    "pack_linear_int8": lambda draw: [_weight_of_8_bits(draw, draw.channels, 9)],
    "linear_int8_packed": _linear_int8,
    "pack_convolution": _pack_convolution,
    "transformer_block_": _transformer_block,
    "pack_depthwise": lambda draw: [
        draw.tensor(draw.channels, 1, 3, 3), draw.maybe(draw.vector(dtype=draw.dtype))
    ],
    "pyramid_block_packed": _pyramid_block,
    "conv_embedding_inference": _conv_embedding,
}  # fmt: skip


# Mutations ------------------------------------------------------------------------------------------------


def _integers(source: random.Random, value: int) -> int:
    return source.choice((*_INTEGERS, value - 1, value + 1, 2 * value, -value))


def _shaped(source: random.Random, tensor: Tensor) -> Tensor:
    """Returns a tensor of another shape, perhaps larger than any memory: its numbers are then the same."""
    shape, kind = list(tensor.shape), source.randrange(6)
    if kind == 0:
        shape.insert(source.randrange(len(shape) + 1), source.choice(_SIZES))
    elif shape:
        place = source.randrange(len(shape))
        if kind == 1:
            del shape[place]
        elif kind == 2:
            shape[place] = source.choice((*_SIZES, shape[place] + 1, 2 * shape[place]))
        elif kind == 3:
            source.shuffle(shape)
        elif kind == 4:
            shape[place] = source.choice(_HUGE)
        else:
            shape[place], shape[source.randrange(len(shape))] = source.choice(_HUGE), 0
    numbers = math.prod(shape)
    if 0 < numbers <= 2**20:
        flat = tensor.reshape(-1) if tensor.numel() else tensor.new_ones(1)
        return flat[torch.arange(numbers) % flat.numel()].reshape(shape)
    return tensor.new_ones(1).as_strided(shape, [0] * len(shape))


def _laid_out(source: random.Random, tensor: Tensor) -> Tensor:
    kind = source.randrange(4)
    if kind == 0 and tensor.ndim > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == 1 and tensor.ndim:
        return torch.stack([tensor, tensor], -1)[..., 0]
    if kind == 2 and tensor.numel():
        return tensor.reshape(-1)[:1].as_strided(tensor.shape, [0] * tensor.ndim)
    return torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].reshape(tensor.shape)


def _with_values(source: random.Random, tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    if changed.is_floating_point() and changed.numel():
        changed.view(-1)[source.randrange(changed.numel())] = source.choice(_REALS)
    elif changed.numel():
        limits = torch.iinfo(changed.dtype)
        value = min(max(source.choice(_INTEGERS), limits.min), limits.max)
        changed.view(-1)[source.randrange(changed.numel())] = value
    return changed


def _mutated_leaf(kind: str, source: random.Random, value: Any, leaves: list[Any]) -> Any:
    if kind == "number" or not isinstance(value, Tensor):
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return _integers(source, value)
        if isinstance(value, float):
            return source.choice(_REALS)
        if isinstance(value, str):
            return source.choice(_WORDS)
        if isinstance(value, torch.dtype):
            return source.choice(_DTYPES)
        return value
    if kind == "shape":
        return _shaped(source, value)
    if value.numel() > 2**20:  # of one number, which copies would need memory for
        return value
    if kind == "dtype":
        return value.to(source.choice(_DTYPES))
    if kind == "layout":
        return _laid_out(source, value)
    if kind == "values":
        return _with_values(source, value) if value.is_contiguous() and not value.is_complex() else value
    if kind == "device":
        return value.to("meta")
    assert kind == "alias"
    others = [
        t
        for t in leaves
        if isinstance(t, Tensor) and value.numel() <= t.numel() <= 2**20 and t.dtype == value.dtype
    ]
    return source.choice(others).reshape(-1)[: value.numel()].reshape(value.shape)


def _mutate(kind: str, source: random.Random, arguments: list[Any]) -> list[Any]:
    leaves, spec = pytree.tree_flatten(arguments)
    is_tensor = kind not in ("number", "grid", "list", "absent")
    places = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) == is_tensor and leaf is not None
    ]
    if kind == "grid":  # two numbers whose product wraps around
        places = [i for i in range(len(leaves) - 1) if type(leaves[i]) is type(leaves[i + 1]) is int]
    if kind == "list":
        places = [i for i, value in enumerate(arguments) if isinstance(value, list)]
    if kind == "absent":
        places = [*range(len(arguments))]
    if not places:
        return arguments
    place = source.choice(places)
    if kind == "list":
        value = arguments[place]
        changed = source.choice((value[:-1], value[1:], [], value + value, value[::-1]))
        return [*arguments[:place], changed, *arguments[place + 1 :]]
    if kind == "absent":
        return [*arguments[:place], None, *arguments[place + 1 :]]
    if kind == "grid":
        product = source.choice((0, leaves[place] * leaves[place + 1], 1))
        pairs = [(2**32, 2**32), (2**61, 8), (8, 2**61), (2**62, 4)]
        odd = source.choice((3, 2**31 + 1, 2**40 + 1, _MOST))
        inverse = product * pow(odd, -1, 2**64) % 2**64
        pairs += [(odd, inverse - 2**64 if inverse > _MOST else inverse)] * 3
        leaves[place], leaves[place + 1] = source.choice(pairs)
        if source.random() < 0.5:  # tokens that such a product seems to be the number of
            wrapped = leaves[place] * leaves[place + 1] % 2**64
            leaves = [_of_tokens(leaf, wrapped) for leaf in leaves]
    else:
        leaves[place] = _mutated_leaf(kind, source, leaves[place], leaves)
    return pytree.tree_unflatten(leaves, spec)


def _of_tokens(value: Any, tokens: int) -> Any:
    return value[:, :tokens] if isinstance(value, Tensor) and value.ndim == 3 else value


_MUTATIONS = (
    "none", "number", "shape", "grid", "list", "absent", "dtype", "layout", "values", "alias", "device",
)  # fmt: skip
#: The settings of a case: an operator, and up to three mutations of the arguments of a right call.
CHOICES: dict[str, tuple[Any, ...]] = {
    "operator": tuple(_RIGHT),
    "first": _MUTATIONS,
    "second": _MUTATIONS,
    "third": _MUTATIONS,
}


def arguments_of(case: Case) -> list[Any]:
    """Returns the arguments of a case."""
    arguments = _RIGHT[case.settings["operator"]](_Draw(case.seed))
    source = random.Random(case.seed)
    for name in ("first", "second", "third"):
        if case.settings[name] != "none":
            # What is too large for memory is left as it is, and so is what PyTorch does not make.
            with contextlib.suppress(RuntimeError, TypeError, NotImplementedError, ZeroDivisionError):
                arguments = _mutate(case.settings[name], source, arguments)
    return arguments


# The judge ------------------------------------------------------------------------------------------------


def judge(case: Case) -> Answer:
    """Calls an operator: it has to refuse its arguments by a sentence, or to return what its fake says.

    Its arguments end where a page begins that nobody may touch, and may not be written to unless its schema
    says so; its results lie in guarded memory where this can be told apart. It has little memory.
    """
    if machine.why_native_unavailable("cpu") is not None:
        return Answer([], 0)
    _load()
    name = case.settings["operator"]
    overload = getattr(torch.ops.cvt_kernels, name).default
    written = [argument.is_write for argument in overload._schema.arguments]
    arguments = arguments_of(case)
    expected = _expected(overload, arguments)
    large = _bytes_of(arguments) + (_MEMORY if expected is None else _bytes_of(expected)) > _FEW
    is_plain = _is_plain(arguments)
    guards = proofs.guarded_memory if is_plain and not large else contextlib.nullcontext
    arguments = _before_guard_pages(arguments, written)
    try:
        with _little_memory(), guards() as memory:
            results = overload(*arguments)
    except Exception as error:
        if not is_plain:  # of the fake, which takes what its operator does
            return Answer([], 0)
        if not isinstance(error, RuntimeError | ValueError | TypeError):
            return Answer([f"raises {proofs.describe_error(error)}"])
        return Answer(_flaws_of_refusal(name, str(error), large), 0)
    if memory is not None and memory.is_overwritten():
        return Answer(["writes outside of its tensors"])
    made = [t for t in pytree.tree_leaves(results) if t is not None]
    if expected is not None and list(map(_form, made)) != list(map(_form, expected)):
        return Answer([f"returns {list(map(_form, made))}, expected {list(map(_form, expected))}"])
    return Answer([])


@functools.cache
def _load() -> None:
    """Imports the modules that register the operators and their fakes."""
    for family in (path.parent.name for path in Path(ops.__path__[0]).glob("*/native.py")):
        importlib.import_module(f"{ops.__name__}.{family}.native")


def _flaws_of_refusal(name: str, text: str, large: bool) -> list[str]:
    first = (text.splitlines() or [""])[0]
    if "API call failed" in first or first.startswith("std::"):
        return [f"does not say why it fails: {first[:200]}"]
    is_ours = first.startswith(f"{name}: ")
    memory = is_ours and ("out of memory" in first or "memory for a copy" in first)
    if memory and not large:
        return [f"has no memory for a small result: {first[:200]}"]
    if is_ours and not memory and (": got " not in first or ", expected " not in first):
        return [f"does not say what came and what was expected: {first[:200]}"]
    return []


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype)


def _bytes_of(values: Any) -> int:
    tensors = (t for t in pytree.tree_leaves(values) if isinstance(t, Tensor))
    return sum(math.prod(t.shape) * t.element_size() for t in tensors)


def _is_plain(arguments: list[Any]) -> bool:
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
    return bool(tensors) and all(t.is_cpu for t in tensors)


def _expected(overload: Any, arguments: list[Any]) -> list[Tensor] | None:
    """Returns what the operator's fake says; None without one, or where it takes other arguments only."""
    if overload._schema.name == "cvt_kernels::pyramid_block_packed" and isinstance(arguments[0], Tensor):
        return [arguments[0].to("meta")]
    try:
        results = overload(*pytree.tree_map_only(Tensor, lambda t: t.to("meta"), arguments))
    except Exception:  # a fake may fail in any way where the operator refuses the arguments
        return None
    return [t for t in pytree.tree_leaves(results) if t is not None]


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _before_guard_pages(arguments: list[Any], written: list[bool]) -> list[Any]:
    """Returns copies that share memory as the arguments do, each before a page that nobody may touch.

    Those that are not written to are in memory that cannot be.
    """
    writable = {
        _place(t) for t in pytree.tree_leaves([a for a, w in zip(arguments, written, strict=False) if w])
    }
    made: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_meta or not storage.nbytes():
            return tensor
        place = _place(tensor)
        if place not in made:
            made[place] = _guarded(storage, place in writable)
        guarded = torch.empty(0, dtype=tensor.dtype)
        guarded.set_(made[place].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return guarded

    return pytree.tree_map_only(Tensor, copy, arguments)


def _place(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


_PROTECTIONS = {False: mmap.PROT_READ, True: mmap.PROT_READ | mmap.PROT_WRITE}


def _guarded(storage: torch.UntypedStorage, writable: bool) -> Tensor:
    size = storage.nbytes()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + mmap.PAGESIZE)
    copy = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=room - size)
    copy.untyped_storage().copy_(storage)
    start = copy.data_ptr() - (room - size)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for address, length, protection in (
        (start, room, _PROTECTIONS[writable]),
        (start + room, mmap.PAGESIZE, 0),
    ):
        if protect(ctypes.c_void_p(address), ctypes.c_size_t(length), protection):
            raise OSError(ctypes.get_errno(), "mprotect")
    return copy
