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
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cvt_kernels import launching

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


def work_of(launch: launching.Launch) -> Work | None:
    """Returns the work of a launch; None for a kernel that nothing here describes."""
    name = launch.kernel.__name__.removeprefix("_").removesuffix("_kernel")
    describe = _WORK.get(name.replace("_sliding_", "_"))  # both kinds of kernels move the same
    return None if describe is None else describe(launch)


def _programs(launch: launching.Launch) -> int:
    return math.prod(launch.grid)


def _work(
    launch: launching.Launch, outputs: int, size: int, trips: tuple[float, ...] = (), *, flops: int = 0,
    scores: float = 0, conditional: float = 1.0, speed: float = 1.0,
) -> Work:  # fmt: skip
    return Work(_programs(launch), outputs, size, trips, flops, scores, conditional, speed)


def _pointers(launch: launching.Launch, *names: str) -> list[Any]:
    """Returns the tensors of the parameters ``<name>_ptr``."""
    return [launch.arguments[f"{name}_ptr"] for name in names]


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
    """Returns the tensors of outputs, which are passed once per summand, once each."""
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
    """Returns the trips of the loops of a sliding-row kernel, or of one over regions."""
    if "LANES" in arguments:
        return _sliding_trips(arguments)
    return _region_trips(arguments, rows_of_lane=rows_of_lane)


def _convolution_outputs(arguments: dict[str, Any]) -> int:
    """Returns the elements of all branches' convolutions, without the class token."""
    batch, _, channels = arguments["x_ptr"].shape
    if "LANES" in arguments:
        sizes = ((arguments["height"], arguments["width"], stride) for stride in arguments["STRIDES"])
        grids = [(-(-height // stride), -(-width // stride)) for height, width, stride in sizes]
    else:
        grids = list(zip(arguments["out_heights"], arguments["out_widths"], strict=True))
    return batch * channels * sum(height * width for height, width in grids)


def _projection_forward(launch: launching.Launch) -> Work:
    arguments = launch.arguments
    outs = _each_once(arguments["y_ptrs"])
    trips = _projection_trips(arguments, rows_of_lane=True)
    return _work(launch, _elements(outs), _bytes(arguments["x_ptr"], outs), trips)


def _sliding_trips(arguments: dict[str, Any]) -> tuple[float, ...]:
    """Returns the trips of a sliding-row kernel's loops: over images, then over pairs of rows of a strip."""
    return (
        arguments["batch"] / arguments["groups"],
        _mean_trips(-(-arguments["height"] // 2), arguments["strips"], 1),
    )


def _projection_sums(launch: launching.Launch) -> Work:
    """Describes sums over outputs, for the statistics of the batch and for the backward."""
    arguments = launch.arguments
    sums = [arguments[name] for name in ("partial_ptr", "counts_ptr") if name in arguments]
    trips = _projection_trips(arguments, rows_of_lane=True)
    return _work(launch, _convolution_outputs(arguments), _inputs_bytes(arguments) + _bytes(sums), trips)


def _projection_backward_convolution(launch: launching.Launch) -> Work:
    arguments = launch.arguments
    dconvs = arguments["dconv_ptrs"]
    size = _inputs_bytes(arguments) + _bytes(dconvs, arguments["partial_ptr"])
    return _work(launch, _elements(dconvs), size, _projection_trips(arguments, rows_of_lane=False))


def _projection_backward_input(launch: launching.Launch) -> Work:
    arguments = launch.arguments
    dx, dys = arguments["dx_ptr"], _each_once(arguments["dy_ptrs"])
    size = _bytes(dx, arguments["dconv_ptrs"])
    size += _bytes(dys) - _spatial_bytes(arguments, dys)  # class tokens, whose gradients are copied
    trips = _sliding_trips(arguments) if "LANES" in arguments else _block_trips(arguments)
    return _work(launch, dx.numel(), size, trips)


def _block_trips(arguments: dict[str, Any]) -> tuple[float, ...]:
    """Returns the trips of the loops over blocks of input pixels: rows, then columns."""
    block, columns = arguments["BLOCK"], arguments["COLS"]
    rows, cols = (-(-arguments[name] // block) for name in ("height", "width"))
    return (
        _mean_trips(rows, arguments["strips"], arguments["TILE"].pixels // columns),
        _mean_trips(cols, arguments["col_blocks"], columns),
    )


def _over_regions(launch: launching.Launch, read: tuple[str, ...], results: tuple[str, ...]) -> Work:
    """Describes a kernel that adds up what the regions have left."""
    written = _pointers(launch, *results)
    trips = (-(-launch.arguments["regions"] // launch.arguments["TILE"].pixels),)
    return _work(launch, _elements(written), _bytes(_pointers(launch, *read), written), trips)


# Depthwise convolution and GELU ---------------------------------------------------------------------------


def _conv_gelu(launch: launching.Launch, results: tuple[str, ...]) -> Work:
    """Describes a sliding-row kernel that writes ``results``; the first of them counts."""
    arguments = launch.arguments
    moved = [arguments[name] for name in ("x_ptr", "dy_ptr", *results) if name in arguments]
    return _work(launch, arguments[results[0]].numel(), _bytes(moved), _sliding_trips(arguments))


# The projection with its linear layers --------------------------------------------------------------------


def _conv_linear(launch: launching.Launch) -> Work:
    """Describes the forward, with loops over the class tokens, then over each group.

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
        trips += (-(-strips // arguments["LANES"].pairs) / programs, *chunks)
    is_exact = x.dtype == torch.float32 and spec.precision == "ieee"
    flops = 0 if is_exact else 2 * x.shape[2] * _elements(outs)
    return _work(launch, _elements(outs), _bytes(x, outs, arguments["linear_ptrs"]), trips, flops=flops)


# Attention ------------------------------------------------------------------------------------------------


def _product_flops(arguments: dict[str, Any], products: int) -> int:
    """Returns the operations of products of all queries with all keys; 0 without tensor cores."""
    q = arguments["q_ptr"]
    if q.dtype == torch.float32 and arguments["SPEC"].precision == "ieee":
        return 0
    return 2 * products * q.numel() * arguments["keys"]


def _attention_forward(launch: launching.Launch) -> Work:
    """Describes the forward with all keys on the chip; its loop goes over tiles of queries."""
    arguments = launch.arguments
    block_q, keys = arguments["BLOCK_Q"], sum(arguments["TILES"].widths)
    tiles = -(-arguments["queries"] // block_q) / arguments["blocks"]  # of a program, which has whole tiles
    return _attention_work(launch, ("q", "k", "v", "out", "stats"), 2, (tiles,), tiles * block_q * keys)


def _attention_over_keys(launch: launching.Launch, tensors: tuple[str, ...], products: int) -> Work:
    """Describes a loop over whole tiles of keys; a masked last one is apart, or in the loop."""
    arguments = launch.arguments
    block_kv, keys = arguments["BLOCK_KV"], arguments["keys"]
    tiles = -(-keys // block_kv) if arguments["TAIL"] == block_kv else keys // block_kv
    return _attention_work(launch, tensors, products, (tiles,), tiles * arguments["BLOCK_Q"] * block_kv)


def _attention_over_queries(launch: launching.Launch, tensors: tuple[str, ...], products: int) -> Work:
    """Describes a kernel that owns a tile of keys and loops over the queries."""
    arguments = launch.arguments
    block_q, block_kv = arguments["BLOCK_Q"], arguments["BLOCK_KV"]
    tiles = -(-arguments["queries"] // block_q)
    return _attention_work(launch, tensors, products, (tiles,), tiles * block_q * block_kv)


def _attention_backward_bias(launch: launching.Launch) -> Work:
    """Describes the bias's gradient, whose loop goes over the tiles that share the bias."""
    arguments = launch.arguments
    parts = arguments["shared_images"] * arguments["shared_heads"] * arguments["shared_blocks"]
    tiles = _mean_trips(parts, arguments["splits"], 1)
    scores = tiles * arguments["BLOCK_Q"] * arguments["BLOCK_KV"]
    return _attention_work(launch, ("q", "k", "v", "dout", "stats", "delta", "dbias"), 2, (tiles,), scores)


def _attention_backward_table(launch: launching.Launch) -> Work:
    """Describes the gradient of a bias by position; its loop goes over a split's images and pairs of rows."""
    arguments = launch.arguments
    places = arguments["SPEC"].position
    images = _mean_trips(arguments["images"], arguments["splits"], 1)
    pairs = images * places.height * places.key_height / places.table_height
    scores = pairs * arguments["BLOCK_Q"] * arguments["BLOCK_KV"]
    return _attention_work(launch, ("q", "k", "v", "dout", "stats", "delta", "dtiles"), 2, (pairs,), scores)


def _attention_work(
    launch: launching.Launch, tensors: tuple[str, ...], products: int, trips: tuple[float, ...], scores: float
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
    flops = _product_flops(launch.arguments, products)
    return _work(launch, _elements(outputs), _bytes(*moved.values()), trips, flops=flops, scores=scores)


# The MLP --------------------------------------------------------------------------------------------------


def _layer_norm_mlp(launch: launching.Launch) -> Work:
    """Describes both kernels: the loop over tiles of rows and, where weights are streamed, over chunks."""
    arguments = launch.arguments
    x, weights = arguments["x_ptr"], (arguments["fc1_weight_ptr"], arguments["fc2_weight_ptr"])
    tiles = -(-arguments["rows"] // arguments["BLOCK_ROWS"]) / _programs(launch)
    chunks = -(-arguments["SPEC"].hidden // arguments["BLOCK_HIDDEN"])
    multiplies = x.dtype != torch.float32 or arguments["SPEC"].precision != "ieee"
    trips = (tiles,) if "resident" in launch.kernel.__name__ else (tiles, chunks)
    flops = 2 * arguments["rows"] * _elements(weights) if multiplies else 0
    return _work(launch, x.numel(), _bytes(x, arguments["out_ptr"], weights), trips, flops=flops)


# Linear layers --------------------------------------------------------------------------------------------


def _linear(launch: launching.Launch, results: tuple[str, ...]) -> Work:
    """Returns the work of a linear layer: a loop over the inputs, or one over the inputs of all tiles.

    Args:
        launch: The launch.
        results: The parameters that it writes; the first counts as its output.
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
    outputs = written[0].numel()
    flops = 2 * outputs * spec.inputs if has_tensor_cores else 0
    speed = 2.0 if read[0].element_size() == 1 else 1.0
    return _work(
        launch, outputs, _bytes(read, written), trips, flops=flops, conditional=conditional, speed=speed
    )


def _matrix(argument: Tensor | TensorDescriptor) -> Tensor:
    return argument.base if isinstance(argument, TensorDescriptor) else argument


# Numbers of 8 bits, and rows of tokens --------------------------------------------------------------------


def _once(launch: launching.Launch, read: tuple[str, ...], results: tuple[str, ...]) -> Work:
    """Describes a kernel without loops that reads and writes each element of its tensors once."""
    written = _pointers(launch, *results)
    return _work(launch, _elements(written), _bytes(_pointers(launch, *read), written))


def _gathered_rows(launch: launching.Launch) -> Work:
    rows, out = _pointers(launch, "rows", "out")
    return _work(launch, out.numel(), _bytes(rows, out, out))


def _gathered_and_normalized_rows(launch: launching.Launch) -> Work:
    x, rows, *moved = _pointers(launch, "x", "rows", "branch", "h", "y")
    size = _bytes(rows, moved) + moved[0].numel() * x.element_size()
    return _work(launch, _elements(moved[1:]), size)


def _inverted_index(launch: launching.Launch) -> Work:
    """Describes the kernel whose loops go over the tokens and over the index of an image."""
    rows, places = _pointers(launch, "rows", "places")
    trips = tuple(-(-tensor.shape[1] // launch.arguments["CHUNK"]) for tensor in (places, rows))
    return _work(launch, places.numel(), _bytes(rows, places), trips)


def _scattered_rows(launch: launching.Launch) -> Work:
    x, places, values, branch, out = _pointers(launch, "x", "places", "values", "branch", "out")
    size = _bytes(places, out, *(tensor for tensor in (values, branch) if tensor is not None))
    if x is not None:  # but for the tokens of the index
        size += (x.shape[1] - launch.arguments["count"]) * _bytes(x) // x.shape[1]
    return _work(launch, out.numel(), size)


def _scattered_rows_in_place(launch: launching.Launch) -> Work:
    rows, *values = _pointers(launch, "rows", "values", "branch")
    return _work(launch, values[0].numel(), _bytes(rows, values, values[0]))


def _normalized_rows_backward(launch: launching.Launch) -> Work:
    """Describes the kernel whose loop goes over a program's tiles."""
    moved = _pointers(launch, "dy", "dh", "h", "out", "sums")
    trips = (launch.arguments["tiles"] / _programs(launch),)
    return _work(launch, moved[3].numel(), _bytes(moved), trips)


# The embedding --------------------------------------------------------------------------------------------


def _embedding_in_one(launch: launching.Launch) -> Work:
    """Describes the kernel that convolves too; its loop goes over a program's tiles of an image."""
    arguments = launch.arguments
    image, weight, out = _pointers(launch, "image", "w", "out")
    trips = (_mean_trips(arguments["tiles"], arguments["splits"], 1),)
    flops = 2 * weight.numel() * image.shape[0] * arguments["tokens"]
    return _work(launch, out.numel(), _bytes(image, weight, out), trips, flops=flops)


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


_ROUNDING = functools.partial(_once, read=("x", "scales"), results=("values",))
_STATISTICS = functools.partial(_over_regions, read=("partial", "counts"), results=("mean", "var"))
_OF_QUERIES = ("q", "k", "v", "dout", "stats", "delta")
#: The description of each kernel, by its name without ``_kernel``.
_WORK: dict[str, Callable[[launching.Launch], Work]] = {
    "conv_projection_fwd": _projection_forward,
    "conv_projection_stats": _projection_sums,
    "conv_projection_bwd_sums": _projection_sums,
    "conv_projection_bwd_conv": _projection_backward_convolution,
    "conv_projection_bwd_input": _projection_backward_input,
    "merge_stats": _STATISTICS,
    "sum_regions": functools.partial(_over_regions, read=("partial",), results=("sum",)),
    "conv_embedding_embed": _embedding_in_one,
    "conv_embedding_normalize": functools.partial(_once, read=("x",), results=("out",)),
    "conv_linear_fwd": _conv_linear,
    "depthwise_conv_gelu_fwd": functools.partial(_conv_gelu, results=("y_ptr",)),
    "depthwise_conv_gelu_bwd_conv": functools.partial(_conv_gelu, results=("da_ptr", "partial_ptr")),
    "attention_fwd": _attention_forward,
    "attention_fwd_loop": functools.partial(
        _attention_over_keys, tensors=("q", "k", "v", "out", "stats"), products=2
    ),
    "attention_bwd": functools.partial(
        _attention_over_queries, tensors=(*_OF_QUERIES, "dq", "dk", "dv"), products=5
    ),
    "attention_bwd_dq": functools.partial(
        _attention_over_keys, tensors=(*_OF_QUERIES, "out", "dq"), products=3
    ),
    "attention_bwd_dkdv": functools.partial(
        _attention_over_queries, tensors=(*_OF_QUERIES, "dk", "dv"), products=4
    ),
    "attention_bwd_bias": _attention_backward_bias,
    "attention_bwd_table": _attention_backward_table,
    "layer_norm_mlp_fwd": _layer_norm_mlp,
    "layer_norm_mlp_fwd_resident": _layer_norm_mlp,
    "linear_gelu": functools.partial(_linear, results=("out", "pre")),
    "linear_add": functools.partial(_linear, results=("out",)),
    "linear_add_layer_norm": functools.partial(_linear, results=("h", "y")),
    "linear_int8": functools.partial(_linear, results=("out",)),
    "quantize_rows": _ROUNDING,
    "layer_norm_quantize": _ROUNDING,
    "gelu_quantize": _ROUNDING,
    "gather_rows": _gathered_rows,
    "gather_add_layer_norm": _gathered_and_normalized_rows,
    "gather_add_layer_norm_backward": _normalized_rows_backward,
    "scatter_rows": _scattered_rows,
    "scatter_rows_places": _inverted_index,
    "scatter_rows_inplace": _scattered_rows_in_place,
}
