"""``cvt export``: export by ``torch.export`` or to ONNX, with a check of the file's outputs.

The file runs without this package.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cvt.extras import require
from cvt.files import replacing
from cvt.model import CvT
from cvt.quantized import quantized_layers
from cvt.segmentation import CvTSegmenter
from cvt_kernels.backends import requesting
from cvt_kernels.checks import dtype_name
from cvt_kernels.ops.linear_int8.modules import QuantizedLayer
from cvt_kernels.records import LEAST, LIMITS

from .common import MODEL, add, load_model, option, print_result
from .paths import OutputPath, add_json_argument, staged

#: Largest accepted difference of the logits, relative to the largest logit.
TOLERANCE = 1e-4
#: The same for a quantized model, by root mean squares: relative to the logits, and to the model's own error.
QUANTIZED_TOLERANCE = 1e-2, 3.0
_IMAGES = 5  # that are compared


class Parity(NamedTuple):
    """The largest difference of an export's logits from the model's, relative to the largest logit.

    ``rounding`` is the same of a quantized model and itself in float64; None for other models. On other
    images the export may differ by about as much, where a number between two integers is rounded.
    """

    difference: float
    rounding: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add(parser, *MODEL, "--token-keep")
    text = "torch.export program (pt2) or ONNX model (onnx)"
    option(parser, "--format", text, required=True, choices=("pt2", "onnx"))
    option(parser, "--output", "file to write", type=OutputPath, required=True, metavar="FILE")
    add_json_argument(parser, "how far the file's outputs are from the model's")
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> None:
    loaded = load_model(arguments)  # on the CPU
    size, config = loaded.image_size, loaded.model.config
    with staged(arguments) as (file, report_json):
        parity = export(loaded.model, file, arguments.format, image_size=size)
        given = {"checkpoint": arguments.checkpoint, "output": arguments.output, "format": arguments.format}
        report_json({**given, "image_size": size, "classes": config.num_classes, **parity._asdict()})
    sides = f", {size}, {size}" if config.head == "segment" else ""
    lines = [
        f"{arguments.output}: images (batch, {config.in_chans}, {size}, {size}) to logits "
        f"(batch, {config.num_classes}{sides}), within {parity.difference:.1e} of the largest logit on "
        f"{_IMAGES} random images"
    ]
    if parity.rounding is not None:
        lines.append(
            f"on others possibly about {parity.rounding:.1e} off, as the model is by its 8-bit numbers"
        )
    print_result(arguments, lines)


def export(
    model: CvT | CvTSegmenter,
    path: str | os.PathLike[str],
    format: str,  # noqa: A002
    *,
    image_size: int,
) -> Parity:
    """Writes a model, in evaluation mode and float32 on the CPU, for any number of images of one size.

    The file takes float32 ``images`` (B, in_chans, image_size, image_size) to the model's ``logits`` by
    PyTorch's or ONNX's own operators. Its format is ``"pt2"``, which ``torch.export.load`` reads, or
    ``"onnx"``. Before it replaces ``path`` it is read back and compared with the model on random images, an
    ONNX file by onnxruntime; what is returned is at most :data:`TOLERANCE`, or :data:`QUANTIZED_TOLERANCE`.

    Raises:
        ValueError: PyTorch cannot export the model, its export differs, or images are too small for it.
        ModuleNotFoundError: For ONNX: the ``export`` extra is not installed.
        OSError: The file cannot be written.
    """
    runtime = None
    if format == "onnx":
        for module in ("onnx", "onnxscript"):  # torch.onnx imports them
            require(module, "export")
        runtime = require("onnxruntime", "export")
    shape = _IMAGES, model.config.in_chans, image_size, image_size
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), replacing(path) as scratch:
        expected = model(images)
        try:
            with requesting("auto"), _quiet():  # requested kernels would become part of the file
                _write(model, images[:2], scratch, format)
                logits = _run(scratch, (images[:1], images[1:]), runtime)
        except OSError:
            raise
        except Exception as error:  # a tracer can stumble over anything
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"model: cannot be exported: {first_line}") from error
        return _compare(model, images, expected, logits)


def _compare(model: CvT | CvTSegmenter, images: Tensor, expected: Tensor, logits: Tensor) -> Parity:
    """Returns how close an export's logits are to the model's; raises ValueError if they are not."""
    tiny = torch.finfo(torch.float32).tiny
    largest = expected.abs().max().clamp_min(tiny)
    difference = ((logits - expected).abs().max() / largest).item()
    if not quantized_layers(model.state_dict()):
        if not difference <= TOLERANCE:
            raise ValueError(
                f"model: its export differs by {difference:.1e} of the largest logit, "
                f"expected at most {TOLERANCE:.0e}"
            )
        return Parity(difference)
    exact = copy.deepcopy(model).double()(images.double())
    parts = expected, logits - expected, exact - expected
    size, distance, error = (part.square().mean().sqrt().item() for part in parts)
    of_logits, of_error = QUANTIZED_TOLERANCE
    most = of_logits * size + of_error * error
    if not distance <= most:
        got, expectation = (each / max(size, tiny) for each in (distance, most))
        raise ValueError(
            f"model: its export differs by {got:.1e} of the logits, expected at most {expectation:.1e}"
        )
    return Parity(difference, ((exact - expected).abs().max() / largest).item())


def _write(model: nn.Module, images: Tensor, path: Path, format: str) -> None:  # noqa: A002
    dynamic_shapes = ({0: torch.export.Dim("batch")},)
    if format == "onnx":
        model = with_nodes(model)
    program = torch.export.export(model, (images,), dynamic_shapes=dynamic_shapes)
    if format == "onnx":
        options: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
        options |= {"dynamic_shapes": dynamic_shapes, "dynamo": True, "verbose": False}
        written: Any = torch.onnx.export(program, **options)
        for node in written.model.graph.all_nodes():
            node.metadata_props.clear()  # where in our source it comes from, at great length
        written.save(path, external_data=False)
    else:
        buffer = io.BytesIO()  # a name would have to end with .pt2
        torch.export.save(program, buffer)
        path.write_bytes(buffer.getbuffer())


def _run(path: Path, batches: tuple[Tensor, ...], onnxruntime: ModuleType | None) -> Tensor:
    if onnxruntime is None:
        with open(path, "rb") as file:
            module = torch.export.load(file).module()
        return torch.cat([module(images) for images in batches])
    # By its content, since not every name of a file can be decoded.
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    logits = [session.run(None, {"images": images.numpy()})[0] for images in batches]
    return torch.cat([torch.from_numpy(part) for part in logits])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences PyTorch's debugging output: graphs that failed to export, missing packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            # Of torch.onnx copying a program, in torch 2.13, and of torch.export.load in 2.11.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


# Quantized layers -----------------------------------------------------------------------------------------

# Their int8 values lie between QuantizeLinear and DequantizeLinear nodes (QDQ), followed by a float32
# product; runtimes may fuse this pattern into integer products.
_LIMIT = LIMITS[torch.int8]


def with_nodes(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose int8 layers ``torch.onnx.export`` turns into nodes."""
    model = copy.deepcopy(model)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, QuantizedLayer):
            if layer.weight.dtype != torch.int8:
                dtype = dtype_name(layer.weight.dtype)
                raise ValueError(f"its layer {path} is of {dtype}, expected int8 for ONNX")
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _Nodes(layer))
    return model


class _Nodes(nn.Module):
    """A int8 layer whose product consists of nodes."""

    def __init__(self, layer: QuantizedLayer):
        super().__init__()
        self.layer = layer
        vars(layer)["product"] = functools.partial(_product, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _product(layer: QuantizedLayer, x: Tensor) -> Tensor:
    """Computes the product of a layer with rows (..., inputs)."""
    rows = x.flatten(0, -2)
    largest = rows.abs().amax(1)  # by -1 onnxruntime would not reduce an empty tensor
    scales = torch.where(largest < LEAST, 1.0, largest / _LIMIT)
    numbers = _node("QuantizeLinear", rows, scales, torch.int8)
    rows = _node("DequantizeLinear", numbers, scales, torch.float32)
    weight = _node("DequantizeLinear", layer.weight, layer.weight_scale, torch.float32)
    return F.linear(rows, weight, layer.bias).unflatten(0, x.shape[:-1])


def _node(name: str, x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Stands for a node that returns ``dtype``, with a scale for each row."""
    inputs = x, scales, torch.zeros_like(scales, dtype=torch.int8)
    return torch.onnx.ops.symbolic(name, inputs, {"axis": 0}, dtype=dtype, shape=x.shape)
