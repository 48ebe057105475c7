"""The card of an operator: what tests and tools need to know of it beside its declaration.

A family's cards are in ``card.py`` in its folder, as ``CARDS``, by operator. Nothing but tests and tools
imports them. A call is made from *settings*, such as ``{"rows": 13, "channels": 40, "dtype": "float32"}``,
and a seed: by the card's ``call``, which takes a :class:`Maker`, whose attributes are the settings. The
contract's examples and the fuzzer's cases are settings.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import backends, reference
from ..launch import launching
from ..records import ConvBatchNorm, Linear, Norm, QuantizedLinear, QuantizedRows
from ..tuning import tuner


class Card(NamedTuple):
    """An operator as tests and tools see it."""

    # Makes the positional and the keyword arguments of a call with a :class:`Maker`
    call: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
    choices: Mapping[str, tuple[Any, ...]]  # The choices of every setting, the simplest first
    # Settings of examples by name. All have ``usual``; ``odd``, a single row, pixel or token of few channels;
    # ``empty``, no images or rows; ``many``, enough for several threads; and ``tiny``, for derivatives by
    # differences. With ``inplace=True`` it can write in place.
    examples: Mapping[str, dict[str, Any]]
    without_gradients: tuple[str, ...] = ()  # The backends that compute no gradients, and refuse them
    rounds: bool = False  # Whether it rounds to 8 bits, or to a class, and has no gradients at all
    normalizes: bool = False  # Whether it has a LayerNorm
    multiplies: bool = True  # Whether it multiplies matrices or convolves, which counters of operations count
    needed: Mapping[str, dict[str, Any]] = {}  # Backend → settings without which it serves no example
    # Tensor of the example ``usual`` → wrong shapes of it, where the usual ones do not do
    wrong: Mapping[str, tuple[tuple[int, ...], ...]] = {}
    # What a stage of a model calls of it, by name: the shapes of the benchmarks, and for Triton's kernels the
    # launches of ``cvt compile``
    stages: Mapping[str, Launches] = {}
    # Kernel, without ``_`` before and ``_kernel`` behind → what a launch has to move and to multiply
    work: Mapping[str, Callable[[dict[str, Any]], Work]] = {}
    # Start of kernels' names → their tensors whose bytes are no work, without ``_ptr``
    uncounted: Mapping[str, str] = {}
    # Calls of Triton's kernels, without full tiles, whose accesses are checked, by name
    accesses: Mapping[str, Accesses] = {}
    # Settings of larger ones for the emulator, which runs them in each dtype unless they have one, by name
    emulated: Mapping[str, str] = {}
    # The parameters that Triton's kernels multiply in TF32 where PyTorch allows it for float32
    factors: tuple[str, ...] = ()
    # Launch configurations to time on a GPU, by name of the job, whose first word is in ``stages``
    sweeps: Mapping[str, Sweep] = {}
    found: tuple[str, ...] = ()  # Cases of the fuzzer that failed once, as it has shrunk them

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings ``given``, and the simplest choice of each of the others.

        Raises:
            KeyError: There is no such setting.
        """
        if unknown := given.keys() - self.choices.keys():
            raise KeyError(f"settings: got {', '.join(unknown)}, expected {', '.join(self.choices)}")
        return {name: given.get(name, values[0]) for name, values in self.choices.items()}


class Accesses(NamedTuple):
    """A call by Triton whose accesses are checked."""

    kernels: str  # The kernels that it launches, without ``_`` before and ``_kernel`` behind
    words: str  # Its settings, as of :func:`worded`
    capability: int = 90  # The GPU that it is planned for
    is_dense: bool = True  # Whether the launches read all rows of their tensors


class Sweep(NamedTuple):
    """The launch configurations of a kernel that are worth trying."""

    part: str  # The part of ``make gpu`` that times them, without ``sweep_``
    stages: tuple[int, ...]  # The stages of CvT-13 whose launches this part times
    kernel: str  # Its name in ``cvt_kernels/launch``
    record: type  # The class of the configuration
    values: dict[str, tuple[int, ...]]  # Field of the configuration → values
    launched: str = ""  # The kernel that is timed, if it has another name
    training: bool = False  # Whether the kernel is one of training

    def configurations(self) -> list[Any]:
        """Returns every combination of the values."""
        return [
            self.record(**dict(zip(self.values, values, strict=True)))
            for values in itertools.product(*self.values.values())
        ]


#: Values of the tiles of products in sweeps.
TILES = {"block_m": (16, 64, 128), "width": (64, 128), "block_k": (64, 128), "num_warps": (4, 8)}


def worded(words: str) -> dict[str, Any]:
    """Returns settings from words, as ``"rows=13 dtype=float16 inplace=True scale=0.1"``."""
    pairs = (word.split("=", 1) for word in words.split())
    return {name: _value_of(text) for name, text in pairs}


def _value_of(text: str) -> Any:
    """Returns the number or the constant of Python that a word is, or the word itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def card_of(operator: str) -> Card:
    """Returns the card of an operator, from ``card.py`` in the package that declares it.

    Raises:
        ImportError: The package has no cards.
        KeyError: There is none of this operator.
    """
    package = backends.operators[operator].package
    cards: dict[str, Card] = importlib.import_module(f"{package}.card").CARDS
    return cards[operator]


def all_cards() -> dict[str, Card]:
    """Returns the cards of all operators by name."""
    return {operator: card_of(operator) for operator in backends.operators}


class Made(NamedTuple):
    """A call with its tensors."""

    call: tuner.Call  # The arguments of the implementations
    douts: Callable[[Tensor], Tensor]  # Makes the gradient of an output, given one like it
    ignored: Tensor | None = None  # (B, K) of the rows of the first output that mean nothing; None for none


def make(operator: str, settings: Mapping[str, Any], seed: int = 0) -> Made:
    """Makes a call of an operator from settings, one for each of the card's ``choices``."""
    card = card_of(operator)
    maker = Maker(card, settings, seed)
    args, kwargs = card.call(maker)
    declared = backends.operators[operator]
    call = tuner.Call(declared.bind(*args, **kwargs), False, declared.score)
    call = call._replace(gradient=any(tensor.requires_grad for tensor in call.tensors()))
    return Made(call, maker.dout, maker.ignored)


def call_public(operator: str, call: backends.Record) -> Any:
    """Calls the public function of an operator with the arguments of its implementations."""
    arguments = call._asdict()
    if operator == "linear_int8" and (scales := arguments.pop("x_scales")) is not None:
        arguments["x"] = QuantizedRows(call.x, scales)
    declared: Any = backends.operators[operator]
    return getattr(sys.modules["cvt_kernels"], operator, declared.public)(**arguments)


# Tensors --------------------------------------------------------------------------------------------------


class Maker:
    """Makes the tensors of a call, one after the other; its settings are attributes."""

    # What some operators have no setting for.
    gradient, upstream, training = "none", "contiguous", False

    def __init__(self, card: Card, settings: Mapping[str, Any], seed: int):
        self.__dict__.update(settings)
        self.dtype = getattr(torch, settings["dtype"])
        self.ignored: Tensor | None = None
        self._generator = torch.Generator().manual_seed(seed)
        if settings.get("inplace"):
            self.gradient, self.layout = "none", "contiguous"
        if card.normalizes and 1 in (settings["channels"], settings.get("outputs")):
            self.gradient = "none"  # a LayerNorm of one channel does not depend on it: all would be rounding

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the card's choices have no setting {name!r}")

    def activation(self, *shape: int) -> Tensor:
        """Returns numbers of the kind and in the layout that the case names."""
        return self._tensor(KINDS[self.values](self._randn(*shape), self.dtype), self.layout)

    def parameter(self, *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: Any = None) -> Tensor:
        """Returns a parameter; all are laid out alike."""
        numbers = KINDS[self.parameters](self._randn(*shape) * scale + shift, dtype or self.dtype)
        return self._tensor(numbers, "offset" if self.layout == "offset" else "contiguous", dtype)

    def optional(self, *shape: int, **options: Any) -> Tensor | None:
        """Returns a parameter, or None where the case has none of those that may be left out."""
        return None if self.bare else self.parameter(*shape, **options)

    def matrix(self, outputs: int, inputs: int) -> Tensor:
        """Returns the weight of a linear layer."""
        return self.parameter(outputs, inputs, scale=inputs**-0.5)

    def linear(self, outputs: int, inputs: int) -> Linear:
        """Returns a linear layer."""
        return Linear(self.matrix(outputs, inputs), self.optional(outputs))

    def norm(self, channels: int) -> Norm:
        """Returns the parameters of a LayerNorm."""
        return Norm(self.optional(channels, scale=0.25, shift=1.0), self.optional(channels), self.eps)

    def conv(self, channels: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> ConvBatchNorm:
        """Returns a convolution with BatchNorm, whose statistics may be float32 beside half precision."""
        dtype = torch.float32 if self.mixed and self.dtype.itemsize == 2 else self.dtype
        mean, variance = self._randn(channels).to(dtype), self._randn(channels).abs().add(0.1).to(dtype)
        tracked = self.statistics != "none"
        weight = self.parameter(channels, 1, kernel, kernel, scale=1 / kernel)
        scale = self.optional(channels, scale=0.25, shift=1.0, dtype=dtype)
        statistics: tuple[Any, Any, Any] = (
            (mean, variance, torch.tensor(3)) if tracked else (None, None, None)
        )
        momentum = None if self.statistics == "averaged" else 0.1
        shift = self.optional(channels, dtype=dtype)
        return ConvBatchNorm(weight, scale, shift, *statistics, stride, padding, dilation, momentum, self.eps)

    def index(
        self, batch: int, tokens: int, count: int, *, ascending: bool = False, first: bool = False
    ) -> Tensor:
        """Returns ``count`` tokens of each image, with -1 among them, and with token 0 if ``first``."""
        drawn = [torch.randperm(tokens, generator=self._generator)[:count] for _ in range(batch)]
        rows = torch.stack(drawn) if drawn else torch.zeros(0, count, dtype=torch.int64)
        share = {"none": 0.0, "some": 0.3, "all": 1.0}[self.absent]
        rows[torch.rand(rows.shape, generator=self._generator) < share] = -1
        if ascending:
            rows = torch.where(rows < 0, tokens, rows).sort(1).values
            if first:
                rows = torch.where(rows == rows.new_tensor(0), tokens, rows)
                rows[:, 0] = 0
                rows = rows.sort(1).values
            rows[rows == tokens] = -1
        return rows

    def quantized(self, outputs: int, inputs: int, dtype: torch.dtype) -> QuantizedLinear:
        """Returns a linear layer of 8-bit numbers."""
        weight = self._randn(outputs, inputs).float() * inputs**-0.5
        values, scales = reference.quantize_rows(weight, dtype=dtype)
        return QuantizedLinear(values, scales.flatten(), self.optional(outputs))

    def integers(self, most: int, *shape: int) -> Tensor:
        """Returns random integers of at least 0 and less than ``most``."""
        return torch.randint(most, shape, generator=self._generator)

    def dout(self, out: Tensor) -> Tensor:
        """Returns a random gradient of an output; float64 numbers, rounded to its dtype."""
        return laid_out(self._randn(*out.shape).to(out.dtype), self.upstream)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def _tensor(self, numbers: Tensor, layout: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = laid_out(numbers.to(dtype or self.dtype), layout)
        wanted = self.gradient == "all" or (self.gradient == "some" and bool(self.integers(2)))
        return tensor.requires_grad_(wanted)


def _with_one(value: float) -> Callable[[Tensor, torch.dtype], Tensor]:
    def change(numbers: Tensor, dtype: torch.dtype) -> Tensor:
        if numbers.numel():
            numbers.view(-1)[numbers.numel() // 2] = value
        return numbers

    return change


def _with_row(value: float) -> Callable[[Tensor, torch.dtype], Tensor]:
    def change(numbers: Tensor, dtype: torch.dtype) -> Tensor:
        if numbers.numel():
            numbers.view(-1, numbers.shape[-1])[-1] = value
        return numbers

    return change


def _largest(dtype: torch.dtype) -> float:
    """Returns a number whose square float32, or what sums of this dtype are in, still holds."""
    return {torch.float16: 2.0**12, torch.float64: 2.0**100}.get(dtype, 2.0**40)


#: What numbers may be.
KINDS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "normal": lambda numbers, dtype: numbers,
    "zeros": lambda numbers, dtype: torch.zeros_like(numbers),
    "constant": lambda numbers, dtype: numbers[..., :1].expand(numbers.shape).contiguous(),
    "shifted": lambda numbers, dtype: numbers + 100,
    "sparse": lambda numbers, dtype: numbers * (numbers > 1),
    "large": lambda numbers, dtype: numbers * 30,
    "small": lambda numbers, dtype: numbers * 2.0**-10,
    "tiny": lambda numbers, dtype: numbers * (torch.finfo(dtype).tiny / 4),
    "huge": lambda numbers, dtype: numbers * _largest(dtype),
    "infinite": _with_one(math.inf),
    "minus_infinite": _with_row(-math.inf),
    "nan": _with_one(math.nan),
    "nan_row": _with_row(math.nan),
    "largest": lambda numbers, dtype: numbers.sign() * torch.finfo(dtype).max,
}


def laid_out(numbers: Tensor, layout: str) -> Tensor:
    """Returns a tensor of these numbers in some order in memory; what lies between them is NaN."""
    if layout == "expanded" and numbers.ndim > 1:
        return numbers[:1].expand(numbers.shape)
    if layout == "transposed" and numbers.ndim > 1:
        return numbers.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "permuted" and numbers.ndim > 2:
        return numbers.transpose(1, 2).contiguous().transpose(1, 2)
    if layout in ("sliced", "chunk", "offset", "steps") and numbers.ndim:
        *others, last = numbers.shape
        size, places = {
            "sliced": ([*others, last + 1], (..., slice(last))),  # begins at 16 bytes, its rows do not
            "chunk": ([*others, 2 * last], (..., slice(last))),  # aligned rows
            "offset": ([numbers.numel() + 1], (slice(1, None),)),
            "steps": ([*others, 2 * last], (..., slice(0, None, 2))),
        }[layout]
        place = torch.full(size, math.nan, dtype=numbers.dtype)[places]
        return place.view(numbers.shape).copy_(numbers) if layout == "offset" else place.copy_(numbers)
    return numbers.contiguous()


def image_of(m: Any, channels: int, height: int, width: int) -> Tensor:
    """Returns a batch of images or maps, whose channels lie last where the case says so."""
    image = m.activation(m.batch, channels, height, width)
    if not m.channels_last:
        return image
    return image.detach().contiguous(memory_format=torch.channels_last).requires_grad_(image.requires_grad)


# Choices of settings --------------------------------------------------------------------------------------

FEW = (1, 2, 3, 0)
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 23, 31, 32, 33)
WIDE = (*SIZES, 47, 48, 63, 64, 65, 96, 97, 127, 128, 129)
WIDEST = (*WIDE, 191, 192, 255, 256, 257, 383, 384, 385, 511, 513)
BOTH = (False, True)
VARIANTS = ("none", "tanh", "quick")
FORWARD: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "values": tuple(KINDS),
    "parameters": ("normal", "zeros", "large", "tiny"),
    "layout": ("contiguous", "offset", "sliced", "transposed", "permuted", "expanded", "steps", "chunk"),
    "threads": (1, 2, 3),
    "autocast": BOTH,
}
COMMON = FORWARD | {
    "gradient": ("none", "all", "some"),
    "upstream": ("contiguous", "transposed", "sliced", "expanded", "steps"),
}
NORM = {"eps": (1e-5, 1e-12, 1e-3, 1.0), "bare": BOTH}
TOKENS = {"batch": FEW, "tokens": SIZES, "channels": WIDEST}
LEADING = {"leading": ("rows", "tokens", "none", "grid"), "rows": (*WIDE, 0), "channels": WIDEST}
GRID = {"batch": FEW, "height": (1, 2, 3, 4, 5, 7, 8, 9, 14), "width": (1, 2, 3, 4, 5, 7, 8, 9, 17)}
IMAGE: dict[str, tuple[Any, ...]] = GRID | {
    "inputs": (1, 2, 3, 5, 8, 17, 64), "channels": WIDE, "bare": BOTH, "channels_last": BOTH,
}  # fmt: skip
CONV = {
    "kernel": (1, 2, 3, 4, 5, 7), "stride": (1, 2, 3, 4), "padding": (0, 1, 2, 3), "dilation": (1, 2, 3),
}  # fmt: skip
APPROXIMATE = {"approximate": VARIANTS}
RESULT = {"result": ("none", "float32", "bfloat16", "float16")}
ABSENT = {"absent": ("none", "some", "all")}
OUTPUTS = {"outputs": WIDE}
LAYER = COMMON | LEADING | OUTPUTS
SHIFTED = {"shifted": BOTH}
INPLACE = {"inplace": BOTH}


def shape_of(m: Any) -> tuple[int, ...]:
    """Returns the shape of rows of channels, with some of the usual dimensions before these."""
    return {
        "rows": (m.rows, m.channels),
        "tokens": (2, m.rows, m.channels),
        "none": (m.channels,),
        "grid": (1, 2, m.rows, m.channels),
    }[m.leading]


def result_of(m: Any) -> torch.dtype | None:
    """Returns the dtype of a LayerNorm's result that the case names, or None."""
    return None if m.result == "none" else getattr(torch, m.result)


# Settings of examples -------------------------------------------------------------------------------------

ROWS = {"leading": "tokens", "rows": 13, "channels": 40}
MAP = {"batch": 2, "height": 3, "width": 4, "channels": 20}
ODD_MAP = {"batch": 1, "height": 1, "width": 1, "channels": 7}
MANY_PIXELS = {"batch": 3, "height": 23, "width": 19, "channels": 65}
TINY_MAP = {"batch": 2, "height": 3, "width": 2, "channels": 3}
K3X3 = {"kernel": 3, "padding": 1}
GELUS = ("approximate=tanh", "approximate=quick")


def of_rows(*names: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """Returns the examples of an operator on rows: the common ones, and one more for each named value."""
    has_outputs = "outputs" in settings
    examples = {
        "usual": ROWS | settings,
        "odd": {"rows": 1, "channels": 7} | settings | ({"outputs": 5} if has_outputs else {}),
        "empty": ROWS | settings | {"rows": 0},
        "many": {"leading": "tokens", "rows": 501, "channels": 65} | settings,
        "tiny": {"rows": 3, "channels": 5} | settings | ({"outputs": 4} if has_outputs else {}),
    }
    return examples | {name: ROWS | settings | worded(name) for name in names}


def of_maps(
    *names: str, odd: str = "", many: str = "", tiny: str = "", **settings: Any
) -> dict[str, dict[str, Any]]:
    """Returns the examples of an operator on maps likewise, with other settings of some in words."""
    examples = {
        "usual": MAP | settings,
        "odd": ODD_MAP | settings | worded(odd),
        "empty": MAP | settings | {"batch": 0},
        "many": MANY_PIXELS | settings | worded(many),
        "tiny": TINY_MAP | settings | worded(tiny),
    }
    return examples | {name: MAP | settings | worded(name) for name in names}


# What a stage of a model calls ----------------------------------------------------------------------------


class Embedding(NamedTuple):
    """The convolutional token embedding at the start of a stage, of images or maps of ``size``."""

    size: tuple[int, int]
    in_channels: int
    kernel_size: int
    stride: int
    padding: int


class Stage(NamedTuple):
    """The shape that the blocks of a stage work on."""

    grid: tuple[int, int]  # Height and width, in tokens
    channels: int  # Channels of a token; of a pyramid, those between the two linear layers of the Mix-FFN
    class_tokens: int  # 1 where a class token precedes the grid, else 0
    # What makes these tokens; of a pyramid, what makes fewer of them for keys and values, or None
    embedding: Embedding | None
    decoder: int = 0  # Channels of the decode head whose logits have this grid, or 0
    heads: int = 0  # Of attention; 0 for one of each 64 channels


class Step:
    """A step of a stage: makes tensors, by default without memory, and calls Triton's operators on them."""

    def __init__(self, stage: Stage, dtype: torch.dtype, batch: int, training: bool, device: str = "meta"):
        self.stage, self.dtype, self.batch, self.training = stage, dtype, batch, training
        self.device = device
        self.channels = stage.channels
        self.tokens = math.prod(stage.grid) + stage.class_tokens

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a tensor, by default of the dtype of the step; in training it requires a gradient."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if self.device != "meta":  # numbers that every operator takes
            tensor = tensor.uniform_(0.1, 1) if tensor.is_floating_point() else tensor.zero_()
        return tensor.requires_grad_(self.training and tensor.is_floating_point())

    def x(self) -> Tensor:
        """Returns the tokens of the stage."""
        return self.tensor(self.batch, self.tokens, self.channels)

    def linear(self, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns x, weight, bias and residual of a linear layer, its widths in multiples of the channels."""
        rows, inputs, outputs = self.batch * self.tokens, inputs * self.channels, outputs * self.channels
        layer = self.tensor(rows, inputs), self.tensor(outputs, inputs), self.tensor(outputs)
        return *layer, self.tensor(rows, outputs)

    def call(
        self, operator: str, *args: Any, backward: bool = True, backend: str = "triton", **settings: Any
    ) -> None:
        """Calls an operator if a backend's kernels serve such a call, in training with the ``backward``."""
        implementation = backends.implementations[operator][backend].load()
        call = backends.operators[operator].bind(*args, **settings)
        if implementation.why_unsupported(call) is not None:
            return
        results = implementation.function(call)
        if self.training and backward:
            results = results if isinstance(results, tuple) else (results,)
            torch.autograd.backward(results, [torch.empty_like(each) for each in results])


class Launches(NamedTuple):
    """Calls of a stage, which launch kernels."""

    run: Callable[[Step], None]  # Makes calls with a :class:`Step`
    of_pyramids: bool = False  # Whether SegFormer, PVT and PVT v2 make them, rather than CvT


# What a launch has to move and to multiply ----------------------------------------------------------------


class Work(NamedTuple):
    """The least that a launch has to move and to multiply."""

    # Bytes that must be read from memory or written to it, each once, whatever programs share. Vectors, the
    # weights of depthwise convolutions and attention's bias do not count, but those of linear layers do.
    bytes: int
    # Operations of matrix products on tensor cores, without padding. Two of 8-bit numbers count as one, since
    # they take as long.
    flops: int = 0


def tensors_of(values: Any) -> list[Tensor]:
    """Returns the tensors in values."""
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def bytes_of(*values: Any) -> int:
    """Returns the bytes of the tensors in values; what is expanded lies in memory once."""
    return sum(
        tensor.element_size()
        * math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        for tensor in tensors_of(values)
    )


def each_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns tensors, of which some are passed several times, once each."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def matrix(argument: Any) -> Any:
    """Returns the tensor of a descriptor; any other argument as it is."""
    return argument.base if launching.is_descriptor(argument) else argument


def once(arguments: dict[str, Any], names: str) -> Work:
    """Describes a kernel that reads or writes each element of its tensors once; one named twice, twice."""
    return Work(sum(bytes_of(arguments.get(f"{name}_ptr")) for name in names.split()))
