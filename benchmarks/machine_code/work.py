"""The work of a launch: what it must compute and move, and how often the loops of its code run.

There is one function per kernel, which reads the launch's arguments, and ``_WORK`` names them all. Change or
add one where a kernel is new or has other loops. It says:

1. ``outputs``: the elements that the kernel writes, all branches together; for sums over outputs, the outputs
   that it sums.
2. ``bytes``: what must go between the chip and its memory, each element once, whatever programs share.
   Vectors, the weights of depthwise convolutions and attention's bias do not count; but ``_linear`` and
   ``_conv_linear`` count the vectors of their linear layers.
3. ``flops`` and ``scores`` of matrix products, if it has any.
4. ``trips``: one number for each loop of the machine code, in code order, an outer loop before its inner
   ones. It is how often the loop runs each time that it is entered, as the mean over all programs. Where the
   compiler has made one loop two or none, the report says that the numbers of loops differ: an error for a
   kernel with a budget, an empty cell for others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cvt_kernels import machine

from .cuda_kernels import CudaCase


class Work(NamedTuple):
    """The work of one launch.

    Attributes:
        programs: Programs of the launch.
        outputs: Elements that count as its output.
        bytes: Bytes that must be read from memory or written to it.
        trips: Trips of each loop of the code, in code order.
        flops: Operations of matrix products on tensor cores that are asked for, without padding.
        scores: Attention scores that a program computes within loops, padding included.
        conditional: The part of the trips in which a loop runs the code that its others skip, such as the end
            of a tile in a loop over the steps of all tiles.
        speed: The operations of these products in a clock, as a multiple of those in half precision.
    """

    programs: int
    outputs: int
    bytes: int
    trips: tuple[float, ...]
    flops: int = 0
    scores: float = 0
    conditional: float = 1.0
    speed: float = 1.0


def work_of(launch: machine.Launch) -> Work | None:
    """Returns the work of a launch; None for a kernel that nothing here describes."""
    describe = _WORK.get(launch.kernel.__name__)
    return None if describe is None else describe(launch)


def _programs(launch: machine.Launch) -> int:
    programs = 1
    for size in launch.grid:
        programs *= size
    return programs


def _bytes(*tensors: Tensor | Iterable[Tensor]) -> int:
    """Returns the bytes of tensors, given one by one or in tuples."""
    return sum(
        tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else _bytes(*tensor)
        for tensor in tensors
    )


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _mean_trips(size: int, parts: int, step: int) -> float:
    """Returns the mean trips of a loop in steps over one of the ``parts`` shares of ``size``."""
    length = -(-size // parts)
    shares = (max(min(length, size - part * length), 0) for part in range(parts))
    return sum(-(-share // step) for share in shares) / parts


# The projection -------------------------------------------------------------------------------------------


def _each_once(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors of outputs, each of which is given for every summand of its own."""
    return list({id(output): output for output in outputs}.values())


def _spatial_bytes(arguments: dict[str, Any], tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors (B, T, C) without their class tokens."""
    tokens = arguments["CLASS_TOKEN"]
    return sum(_bytes(tensor) // tensor.shape[1] * (tensor.shape[1] - tokens) for tensor in tensors)


def _inputs_bytes(arguments: dict[str, Any]) -> int:
    """Returns the bytes of x and, in the backward, of the gradients of the outputs, without class tokens."""
    return _spatial_bytes(arguments, [arguments["x_ptr"], *_each_once(arguments.get("dy_ptrs", ()))])


def _region_trips(arguments: dict[str, Any], *, rows_of_lane: bool) -> tuple[float, ...]:
    """Returns the trips of each branch's loops over the tiles of a region: rows, then columns."""
    trips: list[float] = []
    pixels = arguments["TILE"].pixels
    for branch, height, width in zip(
        arguments["BRANCHES"], arguments["out_heights"], arguments["out_widths"], strict=True
    ):
        if "y_ptrs" in arguments and branch.summands == 0:  # made with the output that it is added to
            continue
        rows = pixels // branch.columns * (branch.rows if rows_of_lane else 1)
        trips.append(_mean_trips(height, arguments["strips"], rows))
        trips.append(_mean_trips(width, arguments["col_blocks"], branch.columns))
    return tuple(trips)


def _projection_trips(arguments: dict[str, Any], *, rows_of_lane: bool) -> tuple[float, ...]:
    """Returns the trips of the loops of a walk, or of a kernel over regions."""
    if "WALK" in arguments:
        return _walk_trips(arguments)
    return _region_trips(arguments, rows_of_lane=rows_of_lane)


def _convolution_outputs(arguments: dict[str, Any]) -> int:
    """Returns the elements of all branches' convolutions, without the class token."""
    batch, _, channels = arguments["x_ptr"].shape
    if "WALK" in arguments:
        sizes = ((arguments["height"], arguments["width"], stride) for stride in arguments["STRIDES"])
        grids = [(-(-height // stride), -(-width // stride)) for height, width, stride in sizes]
    else:
        grids = list(zip(arguments["out_heights"], arguments["out_widths"], strict=True))
    return batch * channels * sum(height * width for height, width in grids)


def _projection_forward(launch: machine.Launch) -> Work:
    arguments = launch.arguments
    outs = _each_once(arguments["y_ptrs"])
    return Work(
        programs=_programs(launch),
        outputs=_elements(outs),
        bytes=_bytes(arguments["x_ptr"], outs),
        trips=_projection_trips(arguments, rows_of_lane=True),
    )


def _walk_trips(arguments: dict[str, Any]) -> tuple[float, ...]:
    """Returns the trips of a walk's loops: the images of a program, then the pairs of rows of its strip."""
    return (
        arguments["batch"] / arguments["groups"],
        _mean_trips(-(-arguments["height"] // 2), arguments["strips"], 1),
    )


def _projection_statistics(launch: machine.Launch) -> Work:
    arguments = launch.arguments
    return Work(
        programs=_programs(launch),
        outputs=_convolution_outputs(arguments),
        bytes=_inputs_bytes(arguments) + _bytes(arguments["partial_ptr"], arguments["counts_ptr"]),
        trips=_projection_trips(arguments, rows_of_lane=True),
    )


def _projection_backward_sums(launch: machine.Launch) -> Work:
    arguments = launch.arguments
    return Work(
        programs=_programs(launch),
        outputs=_convolution_outputs(arguments),
        bytes=_inputs_bytes(arguments) + _bytes(arguments["partial_ptr"]),
        trips=_projection_trips(arguments, rows_of_lane=True),
    )


def _projection_backward_convolution(launch: machine.Launch) -> Work:
    arguments = launch.arguments
    dconvs = arguments["dconv_ptrs"]
    return Work(
        programs=_programs(launch),
        outputs=_elements(dconvs),
        bytes=_inputs_bytes(arguments) + _bytes(dconvs, arguments["partial_ptr"]),
        trips=_projection_trips(arguments, rows_of_lane=False),
    )


def _projection_backward_input(launch: machine.Launch) -> Work:
    arguments = launch.arguments
    dx, dys = arguments["dx_ptr"], _each_once(arguments["dy_ptrs"])
    size = _bytes(dx, arguments["dconv_ptrs"])
    size += _bytes(dys) - _spatial_bytes(arguments, dys)  # class tokens, whose gradients are copied
    return Work(
        programs=_programs(launch),
        outputs=dx.numel(),
        bytes=size,
        trips=_walk_trips(arguments) if "WALK" in arguments else _block_trips(arguments),
    )


def _block_trips(arguments: dict[str, Any]) -> tuple[float, ...]:
    """Returns the trips of the loops over blocks of input pixels: rows, then columns."""
    block, columns = arguments["BLOCK"], arguments["COLS"]
    rows, cols = (-(-arguments[name] // block) for name in ("height", "width"))
    return (
        _mean_trips(rows, arguments["strips"], arguments["TILE"].pixels // columns),
        _mean_trips(cols, arguments["col_blocks"], columns),
    )


def _merge_statistics(launch: machine.Launch) -> Work:
    arguments = launch.arguments
    results = arguments["mean_ptr"], arguments["var_ptr"]
    trips = -(-arguments["regions"] // arguments["TILE"].pixels)
    return Work(
        programs=_programs(launch),
        outputs=_elements(results),
        bytes=_bytes(arguments["partial_ptr"], arguments["counts_ptr"], results),
        trips=(trips,),
    )


def _sum_regions(launch: machine.Launch) -> Work:
    arguments = launch.arguments
    return Work(
        programs=_programs(launch),
        outputs=arguments["sum_ptr"].numel(),
        bytes=_bytes(arguments["partial_ptr"], arguments["sum_ptr"]),
        trips=(-(-arguments["regions"] // arguments["TILE"].pixels),),
    )


# Depthwise convolution and GELU ---------------------------------------------------------------------------


def _conv_gelu(launch: machine.Launch, results: tuple[str, ...]) -> Work:
    """Describes a walk that reads the first tensors and writes ``results``, the first of which counts."""
    arguments = launch.arguments
    moved = [arguments[name] for name in ("x_ptr", "dy_ptr", *results) if name in arguments]
    return Work(
        programs=_programs(launch),
        outputs=arguments[results[0]].numel(),
        bytes=_bytes(moved),
        trips=_walk_trips(arguments),
    )


# The projection with its linear layers --------------------------------------------------------------------


def _conv_linear(launch: machine.Launch) -> Work:
    """Describes the forward, whose loops are those of the class tokens, then those of each group.

    The former are a loop over blocks of images and, unless there is one chunk of channels, one over chunks
    for each branch; the latter one over tiles, and one over chunks. A program runs the loops of one group.
    """
    arguments = launch.arguments
    x, outs = arguments["x_ptr"], arguments["y_ptrs"]
    spec, groups, batch = arguments["SPEC"], arguments["GROUPS"], arguments["batch"]
    programs = _programs(launch)
    chunks = (spec.chunks,) if spec.chunks > 1 else ()
    trips: tuple[float, ...] = ()
    if spec.class_tokens:
        trips += (-(-batch // spec.class_rows) / programs, *len(outs) * chunks)
    for group in groups:
        strips = batch * group.strip_rows * group.strip_columns
        trips += (-(-strips // arguments["WALK"].pairs) / programs, *chunks)
    is_exact = x.dtype == torch.float32 and spec.precision == "ieee"
    return Work(
        programs=programs,
        outputs=_elements(outs),
        bytes=_bytes(x, outs, arguments["linear_ptrs"]),
        trips=trips,
        flops=0 if is_exact else 2 * x.shape[2] * _elements(outs),
    )


# Attention ------------------------------------------------------------------------------------------------


def _product_flops(arguments: dict[str, Any], products: int) -> int:
    """Returns the operations of products of all queries with all keys; 0 without tensor cores."""
    q = arguments["q_ptr"]
    if q.dtype == torch.float32 and arguments["SPEC"].precision == "ieee":
        return 0
    return 2 * products * q.numel() * arguments["keys"]


def _attention_forward(launch: machine.Launch) -> Work:
    """Describes the forward with all keys on the chip; its loop goes over tiles of queries."""
    arguments = launch.arguments
    block_q, keys = arguments["BLOCK_Q"], sum(arguments["TILES"].widths)
    tiles = -(-arguments["queries"] // block_q) / arguments["blocks"]  # of a program, which has whole tiles
    return _attention_work(launch, ("q", "k", "v", "out", "stats"), 2, (tiles,), tiles * block_q * keys)


def _attention_forward_loop(launch: machine.Launch) -> Work:
    return _attention_over_keys(launch, ("q", "k", "v", "out", "stats"), products=2)


def _attention_backward_queries(launch: machine.Launch) -> Work:
    return _attention_over_keys(launch, ("q", "k", "v", "out", "dout", "stats", "delta", "dq"), products=3)


def _attention_over_keys(launch: machine.Launch, tensors: tuple[str, ...], products: int) -> Work:
    """Describes a loop over whole tiles of keys; a masked last one is apart, or in the loop."""
    arguments = launch.arguments
    block_kv, keys = arguments["BLOCK_KV"], arguments["keys"]
    tiles = -(-keys // block_kv) if arguments["TAIL"] == block_kv else keys // block_kv
    return _attention_work(launch, tensors, products, (tiles,), tiles * arguments["BLOCK_Q"] * block_kv)


def _attention_backward_keys(launch: machine.Launch) -> Work:
    return _attention_over_queries(launch, ("q", "k", "v", "dout", "stats", "delta", "dk", "dv"), products=4)


def _attention_backward(launch: machine.Launch) -> Work:
    return _attention_over_queries(
        launch, ("q", "k", "v", "dout", "stats", "delta", "dq", "dk", "dv"), products=5
    )


def _attention_over_queries(launch: machine.Launch, tensors: tuple[str, ...], products: int) -> Work:
    """Describes a kernel that owns a tile of keys and loops over the queries."""
    arguments = launch.arguments
    block_q, block_kv = arguments["BLOCK_Q"], arguments["BLOCK_KV"]
    tiles = -(-arguments["queries"] // block_q)
    return _attention_work(launch, tensors, products, (tiles,), tiles * block_q * block_kv)


def _attention_backward_bias(launch: machine.Launch) -> Work:
    """Describes the bias's gradient, whose loop goes over the tiles that share the bias."""
    arguments = launch.arguments
    parts = arguments["shared_images"] * arguments["shared_heads"] * arguments["shared_blocks"]
    tiles = _mean_trips(parts, arguments["splits"], 1)
    scores = tiles * arguments["BLOCK_Q"] * arguments["BLOCK_KV"]
    return _attention_work(launch, ("q", "k", "v", "dout", "stats", "delta", "dbias"), 2, (tiles,), scores)


def _attention_backward_table(launch: machine.Launch) -> Work:
    """Describes the gradient of a bias by position; its loop goes over a split's images and pairs of rows."""
    arguments = launch.arguments
    places = arguments["SPEC"].position
    images = _mean_trips(arguments["images"], arguments["splits"], 1)
    pairs = images * places.height * places.key_height / places.table_height
    scores = pairs * arguments["BLOCK_Q"] * arguments["BLOCK_KV"]
    return _attention_work(launch, ("q", "k", "v", "dout", "stats", "delta", "dtiles"), 2, (pairs,), scores)


def _attention_work(
    launch: machine.Launch, tensors: tuple[str, ...], products: int, trips: tuple[float, ...], scores: float
) -> Work:
    """Returns the work of a kernel of attention.

    Args:
        launch: The launch.
        tensors: The parameters of its tensors without ``_ptr``; one that the launch lacks is not counted.
        products: Products of all queries with all keys.
        trips: Trips of its loops.
        scores: Scores that a program computes in these loops.
    """
    given = {name: launch.arguments.get(f"{name}_ptr") for name in tensors}
    if not launch.arguments.get("STORE_STATS", True):
        del given["stats"]
    moved = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
    outputs = [moved[name] for name in ("out", "dq", "dk", "dv", "dbias", "dtiles") if name in moved]
    if "dout" in moved and "out" in moved:  # bwd_dq reads it
        outputs.remove(moved["out"])
    return Work(
        programs=_programs(launch),
        outputs=_elements(outputs),
        bytes=_bytes(*moved.values()),
        trips=trips,
        flops=_product_flops(launch.arguments, products),
        scores=scores,
    )


# The MLP --------------------------------------------------------------------------------------------------


def _layer_norm_mlp(launch: machine.Launch) -> Work:
    """Describes both kernels: the loop over tiles of rows and, where weights are streamed, over chunks."""
    arguments = launch.arguments
    x, weights = arguments["x_ptr"], (arguments["fc1_weight_ptr"], arguments["fc2_weight_ptr"])
    tiles = -(-arguments["rows"] // arguments["BLOCK_ROWS"]) / _programs(launch)
    chunks = -(-arguments["SPEC"].hidden // arguments["BLOCK_HIDDEN"])
    multiplies = x.dtype != torch.float32 or arguments["SPEC"].precision != "ieee"
    return Work(
        programs=_programs(launch),
        outputs=x.numel(),
        bytes=_bytes(x, arguments["out_ptr"], weights),
        trips=(tiles,) if "resident" in launch.kernel.__name__ else (tiles, chunks),
        flops=2 * arguments["rows"] * _elements(weights) if multiplies else 0,
    )


# Linear layers --------------------------------------------------------------------------------------------


def _linear(launch: machine.Launch, results: tuple[str, ...]) -> Work:
    """Returns the work of a linear layer: a loop over the inputs, or one over the inputs of all tiles.

    Args:
        launch: The launch.
        results: The parameters of what it writes, the first of which counts as its output.
    """
    arguments = launch.arguments
    spec = arguments["SPEC"]
    written = [_matrix(arguments[name]) for name in results if arguments[name] is not None]
    read = [_matrix(arguments[name]) for name in ("x", "weight")]
    read += [value for name, value in arguments.items() if name.endswith("_ptr") and value is not None]
    steps = -(-spec.inputs // spec.block_k)
    trips: tuple[float, ...] = () if steps == 1 else (steps,)
    conditional = 1.0
    if spec.is_persistent:
        trips, conditional = (steps * arguments["tiles"] / arguments["programs"],), 1 / steps
    has_tensor_cores = read[0].element_size() <= 2 or spec.precision == "tf32"
    return Work(
        programs=_programs(launch),
        outputs=written[0].numel(),
        bytes=_bytes(read, written),
        trips=trips,
        flops=2 * written[0].numel() * spec.inputs if has_tensor_cores else 0,
        conditional=conditional,
        speed=2.0 if read[0].element_size() == 1 else 1.0,
    )


def _matrix(argument: Tensor | TensorDescriptor) -> Tensor:
    return argument.base if isinstance(argument, TensorDescriptor) else argument


# Numbers of 8 bits ----------------------------------------------------------------------------------------


def _rounding(launch: machine.Launch) -> Work:
    arguments = launch.arguments
    moved = [arguments[name] for name in ("x_ptr", "values_ptr", "scales_ptr")]
    return Work(programs=_programs(launch), outputs=moved[1].numel(), bytes=_bytes(moved), trips=())


# Rows of tokens -------------------------------------------------------------------------------------------


def _gathered_rows(launch: machine.Launch) -> Work:
    arguments = launch.arguments
    rows, out = arguments["rows_ptr"], arguments["out_ptr"]
    size = _bytes(rows, out, out)
    return Work(programs=_programs(launch), outputs=out.numel(), bytes=size, trips=())


def _gathered_and_normalized_rows(launch: machine.Launch) -> Work:
    rows, *moved = (launch.arguments[f"{name}_ptr"] for name in ("rows", "branch", "h", "y"))
    size = _bytes(rows, moved) + moved[0].numel() * launch.arguments["x_ptr"].element_size()
    return Work(programs=_programs(launch), outputs=sum(t.numel() for t in moved[1:]), bytes=size, trips=())


def _inverted_index(launch: machine.Launch) -> Work:
    """Describes the kernel whose loops go over the tokens and over the index of an image."""
    rows, places = launch.arguments["rows_ptr"], launch.arguments["places_ptr"]
    trips = tuple(-(-tensor.shape[1] // launch.arguments["CHUNK"]) for tensor in (places, rows))
    size = _bytes(rows, places)
    return Work(programs=_programs(launch), outputs=places.numel(), bytes=size, trips=trips)


def _scattered_rows(launch: machine.Launch) -> Work:
    arguments = launch.arguments
    x, places, values, branch, out = (
        arguments[f"{name}_ptr"] for name in ("x", "places", "values", "branch", "out")
    )
    size = _bytes(places, out, *(tensor for tensor in (values, branch) if tensor is not None))
    if x is not None:  # but for the tokens of the index
        size += (x.shape[1] - arguments["count"]) * _bytes(x) // x.shape[1]
    return Work(programs=_programs(launch), outputs=out.numel(), bytes=size, trips=())


def _scattered_rows_in_place(launch: machine.Launch) -> Work:
    rows, *values = (launch.arguments[f"{name}_ptr"] for name in ("rows", "values", "branch"))
    size = _bytes(rows, values) + _bytes(values[0])
    return Work(programs=_programs(launch), outputs=values[0].numel(), bytes=size, trips=())


def _normalized_rows_backward(launch: machine.Launch) -> Work:
    """Describes the kernel whose loop goes over a program's tiles."""
    moved = [launch.arguments[f"{name}_ptr"] for name in ("dy", "dh", "h", "out", "sums")]
    programs = _programs(launch)
    trips = (launch.arguments["tiles"] / programs,)
    return Work(programs=programs, outputs=moved[3].numel(), bytes=_bytes(moved), trips=trips)


# The embedding --------------------------------------------------------------------------------------------


def _embedding_in_one(launch: machine.Launch) -> Work:
    """Describes the kernel that convolves too; its loop goes over a program's tiles of an image."""
    arguments = launch.arguments
    image, weight, out = (arguments[f"{name}_ptr"] for name in ("image", "w", "out"))
    return Work(
        programs=_programs(launch),
        outputs=out.numel(),
        bytes=_bytes(image, weight, out),
        trips=(_mean_trips(arguments["tiles"], arguments["splits"], 1),),
        flops=2 * weight.numel() * image.shape[0] * arguments["tokens"],
    )


def _embedding_normalization(launch: machine.Launch) -> Work:
    x, out = launch.arguments["x_ptr"], launch.arguments["out_ptr"]
    return Work(programs=_programs(launch), outputs=out.numel(), bytes=_bytes(x, out), trips=())


# LayerNorm and GELU ---------------------------------------------------------------------------------------

#: The rows that these kernels are counted for: the activations of CvT-13's first stage at 224² and batch 256.
_ELEMENTS = 256 * 56 * 56 * 64
_CUDA_THREADS = 128
# Each thread adds up its rows' sums with 3 shuffles in a loop, since 8 lanes share a row; the loop after it
# adds up warps, for rows that no warp holds, which 8 elements of a thread never are. Both sums do so.
_SUM_TRIPS, _SUM_TRIPS_OF_WARPS = (3,), (3, 0)


def cuda_work(kernel: str, case: CudaCase | None, dtype: str) -> Work | None:
    """Returns the work of a CUDA kernel on rows that 8 threads share; None where nothing here describes it.

    These are the rows of CvT's widths: 64 and 192 elements, and 384 except for one more shuffle.
    """
    if case is None or kernel not in ("layer_norm", "gelu") or case.vector == 1 or case.result:
        return None
    elements = case.vector * case.vectors
    trips: tuple[int, ...] = ()
    if kernel == "layer_norm":
        trips = 2 * (_SUM_TRIPS if elements <= 8 else _SUM_TRIPS_OF_WARPS)
        elements *= 3 if elements <= 8 else 1  # rows_of_thread in csrc/layer_norm_gelu/cuda_launches.h
    size = 4 if dtype == "float32" else 2
    return Work(
        programs=-(-_ELEMENTS // (_CUDA_THREADS * elements)),
        outputs=_ELEMENTS,
        bytes=2 * size * _ELEMENTS,
        trips=trips,
    )


_WORK: dict[str, Callable[[machine.Launch], Work]] = {
    "_conv_projection_fwd_kernel": _projection_forward,
    "_conv_projection_walk_fwd_kernel": _projection_forward,
    "_conv_projection_walk_stats_kernel": _projection_statistics,
    "_conv_projection_stats_kernel": _projection_statistics,
    "_conv_projection_walk_bwd_sums_kernel": _projection_backward_sums,
    "_conv_projection_walk_bwd_conv_kernel": _projection_backward_convolution,
    "_conv_projection_walk_bwd_input_kernel": _projection_backward_input,
    "_conv_projection_bwd_sums_kernel": _projection_backward_sums,
    "_conv_projection_bwd_conv_kernel": _projection_backward_convolution,
    "_conv_projection_bwd_input_kernel": _projection_backward_input,
    "_merge_stats_kernel": _merge_statistics,
    "_sum_regions_kernel": _sum_regions,
    "_conv_embedding_embed_kernel": _embedding_in_one,
    "_conv_embedding_normalize_kernel": _embedding_normalization,
    "_conv_linear_fwd_kernel": _conv_linear,
    "_depthwise_conv_gelu_fwd_kernel": functools.partial(_conv_gelu, results=("y_ptr",)),
    "_depthwise_conv_gelu_bwd_conv_kernel": functools.partial(_conv_gelu, results=("da_ptr", "partial_ptr")),
    "_attention_fwd_kernel": _attention_forward,
    "_attention_fwd_loop_kernel": _attention_forward_loop,
    "_attention_bwd_kernel": _attention_backward,
    "_attention_bwd_dq_kernel": _attention_backward_queries,
    "_attention_bwd_dkdv_kernel": _attention_backward_keys,
    "_attention_bwd_bias_kernel": _attention_backward_bias,
    "_attention_bwd_table_kernel": _attention_backward_table,
    "_layer_norm_mlp_fwd_kernel": _layer_norm_mlp,
    "_layer_norm_mlp_fwd_resident_kernel": _layer_norm_mlp,
    "_linear_gelu_kernel": functools.partial(_linear, results=("out", "pre")),
    "_linear_add_kernel": functools.partial(_linear, results=("out",)),
    "_linear_int8_kernel": functools.partial(_linear, results=("out",)),
    "_quantize_rows_kernel": _rounding,
    "_layer_norm_quantize_kernel": _rounding,
    "_gelu_quantize_kernel": _rounding,
    "_gather_rows_kernel": _gathered_rows,
    "_gather_add_layer_norm_kernel": _gathered_and_normalized_rows,
    "_gather_add_layer_norm_backward_kernel": _normalized_rows_backward,
    "_scatter_rows_kernel": _scattered_rows,
    "_scatter_rows_places_kernel": _inverted_index,
    "_scatter_rows_inplace_kernel": _scattered_rows_in_place,
    "_linear_add_layer_norm_kernel": functools.partial(_linear, results=("h", "y")),
}
