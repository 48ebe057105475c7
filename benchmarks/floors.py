"""The floor of every launch: the least time in which a GPU moves its bytes and multiplies its matrices.

:func:`work_of` says what a launch of a Triton kernel has to move and to multiply, by a function for each
kernel. :class:`Recorder` notes all launches of a block, PyTorch's too, on a GPU or on tensors without memory.
:func:`forward_launches` lists those of a frozen CvT's forward without a GPU, :func:`pyramid_launches` those
of SegFormer, PVT and PVT v2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from cvt.config import default_image_size
from cvt.factory import create_model
from cvt.tools.commands.compile.gpus import LIMITS
from cvt.tools.commands.pyramids import PYRAMIDS, build_pyramid
from cvt_kernels import accelerate, backends, launching
from cvt_kernels.acceleration.class_token import with_class_token_only
from cvt_kernels.ops import weight_cache


class Ceilings(NamedTuple):
    """The rates that a GPU reaches: bytes per second of a copy, operations per second of a large product."""

    copy: float
    product: float


#: As measured on 2026-11-26; the product is of bfloat16.
H200 = Ceilings(4.27e12, 8.0e14)


class Work(NamedTuple):
    """The least that a launch has to move and to multiply.

    Attributes:
        bytes: Bytes that must be read from memory or written to it, each once, whatever programs share.
            Vectors, the weights of depthwise convolutions and attention's bias do not count, but those of
            linear layers do.
        flops: Operations of matrix products on tensor cores, without padding. Two of 8-bit numbers count as
            one, since they take as long.
    """

    bytes: int
    flops: int = 0


class ForwardLaunch(NamedTuple):
    """One launch.

    Attributes:
        part: Where it is: ``"stage 1"`` and so on, ``"head"``, or ``""``.
        operator: The operator of this project that makes it, or ``"PyTorch"``.
        kernel: The kernel of this project, or PyTorch's operator.
        bytes: As of :class:`Work`; of PyTorch's operators, all tensors that come in or go out.
        flops: As of :class:`Work`.
    """

    part: str
    operator: str
    kernel: str
    bytes: int
    flops: int

    def __str__(self) -> str:
        """Returns the kernel, after the operator that it is not named after."""
        if self.kernel.startswith(self.operator):
            return self.kernel
        return f"{self.operator}: {self.kernel}"

    def floor(self, ceilings: Ceilings = H200) -> float:
        """Returns the microseconds that memory or tensor cores need at their full rate, the longer ones."""
        return 1e6 * max(self.bytes / ceilings.copy, self.flops / ceilings.product)


# Recording ------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Notes the launches of a block: ``with recorder.recording(): …``.

    Attributes:
        launches: The launches, in their order.
        part: Where the next ones are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[ForwardLaunch] = []
        self.part = ""
        self._operator: str | None = None

    @contextlib.contextmanager
    def recording(self, chip: launching.Chip | None = None) -> Iterator[None]:
        """Notes the launches of a block, which run. Planned for a ``chip``, they do not."""
        with (
            backends.replaced(self._noting),
            launching.intercepted_launches(functools.partial(self._take, start=chip is None), chip),
            self,
        ):
            yield

    @contextlib.contextmanager
    def without_packing(self) -> Iterator[None]:
        """Leaves out what packs weights, which tensors without memory cannot keep."""
        packed = weight_cache.packed

        def unnoted(*args: Any, **settings: Any) -> Any:
            noted = len(self.launches)
            made = packed(*args, **settings)
            del self.launches[noted:]
            return made

        weight_cache.packed = unnoted
        try:
            yield
        finally:
            weight_cache.packed = packed

    def _noting(
        self, operator: str, backend: str, implementation: backends.Implementation
    ) -> backends.Implementation:
        """Returns an implementation that notes whose launches they are."""

        def serve(call: backends.Record) -> Any:
            outer, self._operator = self._operator, operator
            try:
                return implementation.load().function(call)
            finally:
                self._operator = outer

        return dataclasses.replace(implementation, function=serve)

    def _take(self, launch: launching.Launch, *, start: bool) -> None:
        work = work_of(launch)
        self._note(kernel_name(launch.kernel.__name__), *(work or Work(0)))
        if start:
            launch.start()

    def _note(self, kernel: str, size: int, flops: int) -> None:
        self.launches.append(ForwardLaunch(self.part, self._operator or "PyTorch", kernel, size, flops))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        noted = len(self.launches)
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        # An operator around Triton kernels has been noted by their launches.
        if not function.is_view and name not in _WITHOUT_LAUNCH and len(self.launches) == noted:
            read = args[1:] if name in _OVERWRITING else args
            size = sum(_bytes(tensor) for tensor in _tensors((read, kwargs, result)))
            if name == "convolution" and result.is_meta:  # as cuDNN's lies for maps with channels last
                result = result.contiguous(memory_format=torch.channels_last)
            count = flop_registry.get(getattr(torch.ops.aten, name.rstrip("_"), None))
            self._note(name, size, count(*args, **kwargs, out_val=result) if count is not None else 0)
        return result


def kernel_name(function: str) -> str:
    """Returns the name of a kernel of this project by that of its function in Triton."""
    return function.strip("_").removesuffix("_kernel")


#: PyTorch's operators that are not views and launch nothing all the same, and those that do not read their
#: first argument.
_WITHOUT_LAUNCH = (
    "_reshape_alias", "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "lift_fresh",
    "new_empty", "new_empty_strided", "promote_types",
)  # fmt: skip
_OVERWRITING = ("copy_", "fill_", "zero_")


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _bytes(*values: Any) -> int:
    """Returns the bytes of the tensors in values; what is expanded lies in memory once."""
    return sum(
        tensor.element_size()
        * math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        for tensor in _tensors(values)
    )


# A forward without a GPU ----------------------------------------------------------------------------------


def forward_launches(
    model: str = "cvt_13",
    *,
    batch: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    arch: int = 90,
    image_size: int | None = None,
) -> list[ForwardLaunch]:
    """Lists the launches of a frozen model's forward, with this project's kernels wherever they can serve.

    Args:
        model: A name of ``PRESETS``.
        batch: Images of the batch.
        dtype: Of weights and images.
        arch: Compute capability of the GPU, 90 for sm_90.
        image_size: Pixels of a side; None for the model's own.
    """
    size = image_size or default_image_size(model)
    recorder = Recorder()
    with torch.device("meta"):
        built = accelerate(create_model(model).to(dtype).eval(), freeze=True)
        images = torch.empty(batch, 3, size, size, dtype=dtype)
    stages = built._built_stages()
    last = stages[-1], stages[-1].blocks[-1]
    for number, stage in enumerate(stages, start=1):
        stage.register_forward_pre_hook(lambda *_, part=f"stage {number}": setattr(recorder, "part", part))
        stage.register_forward_hook(lambda *_: setattr(recorder, "part", "head"))
    chip = launching.Chip(arch, LIMITS[arch].multiprocessors)
    with torch.no_grad(), backends.replaced(_serving_everywhere), backends.requesting(*_OURS):
        with launching.intercepted_launches(lambda launch: None, chip):
            built(images)  # folds the weights
        with recorder.recording(chip), recorder.without_packing():
            with_class_token_only(*last, lambda: built(images))  # in spite of the hooks
    return recorder.launches


def pyramid_launches(
    model: str = "segformer_b0",
    *,
    batch: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    arch: int = 90,
    freeze: bool | None = True,
) -> list[ForwardLaunch]:
    """Lists the launches of a warm forward of a model of transformers, by this project's kernels.

    Args:
        model: A name of ``cvt.tools.commands.pyramids.PYRAMIDS``.
        batch: Images of the batch.
        dtype: Of weights and images.
        arch: Compute capability of the GPU, 90 for sm_90.
        freeze: As of ``accelerate``; None for a live model in evaluation.
    """
    size = PYRAMIDS[model].image_size
    built = accelerate(build_pyramid(model, None, size).to(dtype).eval(), freeze=freeze).to("meta")
    images = torch.empty(batch, 3, size, size, dtype=dtype, device="meta")
    recorder, chip = Recorder(), launching.Chip(arch, LIMITS[arch].multiprocessors)
    with torch.no_grad(), backends.replaced(_serving_everywhere), backends.requesting(*_OURS):
        with launching.intercepted_launches(lambda launch: None, chip):
            built(images)  # examines the modules
        with mock.patch.object(weight_cache, "packed", _packed_before), recorder.recording(chip):
            built(images)
    return recorder.launches


def _packed_before(weight: Tensor, key: Any, make: Callable[[], Any], others: Any = ()) -> Any:
    """Returns a packed copy without noting launches; by their addresses those on meta are not told apart."""
    with _disable_current_modes():
        return make()


_OURS: tuple[backends.Backend, ...] = ("gluon", "triton", "cuda", "composed", "reference")


def _serving_everywhere(
    operator: str, backend: str, implementation: backends.Implementation
) -> backends.Implementation:
    """Returns an implementation that serves tensors without memory."""
    if backend not in _OURS:
        return implementation
    loaded = implementation.load()
    return backends.Implementation(loaded.function, why_unsupported=loaded.why_unsupported)


# The work of each kernel ----------------------------------------------------------------------------------


def work_of(launch: launching.Launch) -> Work | None:
    """Returns the work of a launch; None for a kernel that nothing here describes."""
    name = kernel_name(launch.kernel.__name__)
    describe = _WORK.get(name.replace("_sliding_", "_"))  # both kinds of kernels move the same
    return None if describe is None else describe(launch.arguments)


def _each_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns tensors, of which some are passed several times, once each."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _spatial_bytes(arguments: dict[str, Any], tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors (B, T, C) without their class tokens."""
    tokens = arguments["CLASS_TOKEN"]
    return sum(_bytes(tensor) // tensor.shape[1] * (tensor.shape[1] - tokens) for tensor in tensors)


def _inputs_bytes(arguments: dict[str, Any]) -> int:
    """Returns the bytes of x and, in the backward, of the gradients of the outputs, without class tokens."""
    return _spatial_bytes(arguments, [arguments["x_ptr"], *_each_once(arguments.get("dy_ptrs", ()))])


def _projection_forward(arguments: dict[str, Any]) -> Work:
    statistics = arguments.get("statistics_ptr")  # of a LayerNorm that it applies
    return Work(_bytes(arguments["x_ptr"], _each_once(arguments["y_ptrs"]), statistics))


def _projection_sums(arguments: dict[str, Any]) -> Work:
    """Describes sums over outputs, for the statistics of the batch and for the backward."""
    sums = [arguments.get("partial_ptr"), arguments.get("counts_ptr")]
    return Work(_inputs_bytes(arguments) + _bytes(sums))


def _projection_backward_convolution(arguments: dict[str, Any]) -> Work:
    return Work(_inputs_bytes(arguments) + _bytes(arguments["dconv_ptrs"], arguments["partial_ptr"]))


def _projection_backward_input(arguments: dict[str, Any]) -> Work:
    dys = _each_once(arguments["dy_ptrs"])
    class_tokens = _bytes(dys) - _spatial_bytes(arguments, dys)  # whose gradients are copied
    return Work(_bytes(arguments["dx_ptr"], arguments["dconv_ptrs"]) + class_tokens)


def _conv_linear(arguments: dict[str, Any]) -> Work:
    x, outs, spec = arguments["x_ptr"], arguments["y_ptrs"], arguments["SPEC"]
    is_exact = x.dtype == torch.float32 and spec.precision == "ieee"
    flops = 0 if is_exact else 2 * x.shape[2] * sum(out.numel() for out in outs)
    return Work(_bytes(x, outs, arguments["linear_ptrs"]), flops)


def _attention(arguments: dict[str, Any], names: str, products: int) -> Work:
    """Describes a kernel of attention.

    Args:
        arguments: Of the launch.
        names: Its tensors without ``_ptr``; one that the launch lacks is not counted.
        products: Products of all queries with all keys.
    """
    given = {name: arguments.get(f"{name}_ptr") for name in names.split()}
    if not arguments.get("STORE_STATS", True):
        del given["stats"]
    q = arguments["q_ptr"]
    is_exact = q.dtype == torch.float32 and arguments["SPEC"].precision == "ieee"
    return Work(_bytes(given), 0 if is_exact else 2 * products * q.numel() * arguments["keys"])


def _layer_norm_mlp(arguments: dict[str, Any]) -> Work:
    x, weights = arguments["x_ptr"], (arguments["fc1_weight_ptr"], arguments["fc2_weight_ptr"])
    multiplies = x.dtype != torch.float32 or arguments["SPEC"].precision != "ieee"
    flops = 2 * arguments["rows"] * sum(weight.numel() for weight in weights) if multiplies else 0
    return Work(_bytes(x, arguments["out_ptr"], weights), flops)


def _linear(arguments: dict[str, Any], results: str) -> Work:
    """Returns the work of a linear layer that writes ``results``."""
    spec = arguments["SPEC"]
    written = [matrix(arguments[name]) for name in results.split() if arguments[name] is not None]
    read = [matrix(arguments[name]) for name in ("x", "weight")]
    read += [value for name, value in arguments.items() if name.endswith("_ptr")]
    size = read[0].element_size()
    flops = 2 * written[0].numel() * spec.inputs if size <= 2 or spec.precision == "tf32" else 0
    return Work(_bytes(read, written), flops // (2 if size == 1 else 1))


def _pingpong_product(arguments: dict[str, Any]) -> Work:
    spec, out = arguments["SPEC"], matrix(arguments["out"])
    moved = [matrix(arguments["x"]), matrix(arguments["weight"]), out]
    moved += [matrix(arguments["residual"])] if spec.has_residual else []
    moved += [arguments["sums_ptr"]] if spec.has_sums else []
    moved += [arguments["statistics_ptr"]] if spec.norm_width else []
    return Work(_bytes(moved), 2 * out.numel() * spec.inputs)


def matrix(argument: Any) -> Any:
    """Returns the tensor of a descriptor; any other argument as it is."""
    return argument.base if launching.is_descriptor(argument) else argument


def _embedding_in_one(arguments: dict[str, Any]) -> Work:
    image, weight, out = (arguments[f"{name}_ptr"] for name in ("image", "w", "out"))
    return Work(_bytes(image, weight, out), 2 * weight.numel() * image.shape[0] * arguments["tokens"])


def _embedding_of_patches(arguments: dict[str, Any]) -> Work:
    image, weight, out = (arguments[f"{name}_ptr"] for name in ("image", "w", "out"))
    return Work(_bytes(image, weight, out), 2 * weight.numel() * arguments["rows"])


def _segmentation_head(arguments: dict[str, Any]) -> Work:
    x, spec = arguments["x_ptr"], arguments["SPEC"]
    tensors = [arguments[f"{name}_ptr"] for name in ("w", "classifier", "out")]
    flops = 2 * x.numel() // spec.inputs * spec.channels * (spec.inputs + spec.classes)
    is_exact = x.dtype == torch.float32 and spec.precision == "ieee"
    return Work(_bytes(x, arguments["map_ptrs"], tensors), 0 if is_exact else flops)


def _once(arguments: dict[str, Any], names: str) -> Work:
    """Describes a kernel that reads or writes each element of its tensors once; one named twice, twice."""
    return Work(sum(_bytes(arguments.get(f"{name}_ptr")) for name in names.split()))


def _gathered_and_normalized_rows(arguments: dict[str, Any]) -> Work:
    x, branch = arguments["x_ptr"], arguments["branch_ptr"]
    return Work(_once(arguments, "rows branch h y").bytes + branch.numel() * x.element_size())


def _scattered_rows(arguments: dict[str, Any]) -> Work:
    size, x = _once(arguments, "places out values branch").bytes, arguments["x_ptr"]
    if x is not None:  # but for the tokens of the index
        size += (x.shape[1] - arguments["count"]) * _bytes(x) // x.shape[1]
    return Work(size)


_ROUNDING = functools.partial(_once, names="x scales values")
_STATISTICS = functools.partial(_once, names="partial counts mean var")
_OF_QUERIES = "q k v dout stats delta"
#: The description of each kernel, by its name.
_WORK: dict[str, Callable[[dict[str, Any]], Work]] = {
    "conv_projection_fwd": _projection_forward,
    "conv_projection_stats": _projection_sums,
    "conv_projection_bwd_sums": _projection_sums,
    "conv_projection_bwd_conv": _projection_backward_convolution,
    "conv_projection_bwd_input": _projection_backward_input,
    "merge_stats": _STATISTICS,
    "sum_regions": functools.partial(_once, names="partial sum"),
    "conv_embedding_embed": _embedding_in_one,
    "conv_embedding_patches": _embedding_of_patches,
    "conv_embedding_normalize": functools.partial(_once, names="x out"),
    "conv_linear_fwd": _conv_linear,
    "segmentation_head": _segmentation_head,
    "depthwise_conv_gelu_fwd": functools.partial(_once, names="x y"),
    "depthwise_conv_gelu_bwd_conv": functools.partial(_once, names="x dy da partial"),
    "attention_fwd": functools.partial(_attention, names="q k v out stats", products=2),
    "attention_fwd_loop": functools.partial(_attention, names="q k v out stats", products=2),
    "attention_bwd": functools.partial(_attention, names=f"{_OF_QUERIES} dq dk dv", products=5),
    "attention_bwd_dq": functools.partial(_attention, names=f"{_OF_QUERIES} out dq", products=3),
    "attention_bwd_dkdv": functools.partial(_attention, names=f"{_OF_QUERIES} dk dv", products=4),
    "attention_bwd_bias": functools.partial(_attention, names=f"{_OF_QUERIES} dbias", products=2),
    "attention_bwd_table": functools.partial(_attention, names=f"{_OF_QUERIES} dtiles", products=2),
    "layer_norm_mlp_fwd": _layer_norm_mlp,
    "layer_norm_mlp_fwd_resident": _layer_norm_mlp,
    "linear_gelu": functools.partial(_linear, results="out pre"),
    "linear_add": functools.partial(_linear, results="out"),
    "grouped_linear": functools.partial(_linear, results="out"),
    "linear_ends": functools.partial(_once, names="product residual out"),
    "linear_starts": functools.partial(_once, names="dout pre dproduct dresidual activated partial"),
    "linear_add_layer_norm": functools.partial(_linear, results="h y"),
    "pingpong_product": _pingpong_product,
    "linear_int8": functools.partial(_linear, results="out"),
    "quantize_rows": _ROUNDING,
    "layer_norm_quantize": _ROUNDING,
    "gelu_quantize": _ROUNDING,
    "gather_rows": functools.partial(_once, names="rows out out"),
    "gather_add_layer_norm": _gathered_and_normalized_rows,
    "gather_add_layer_norm_backward": functools.partial(_once, names="dy dh h out sums"),
    "scatter_rows": _scattered_rows,
    "scatter_rows_places": functools.partial(_once, names="rows places"),
    "scatter_rows_inplace": functools.partial(_once, names="rows values values branch"),
}
