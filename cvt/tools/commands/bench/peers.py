"""The peers of ``cvt bench`` that are other runtimes for CPUs, of the extra ``peers``."""

from __future__ import annotations

import io
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cvt.extras import require


def logits_of(outputs: Any) -> Tensor:
    """Returns the logits, the depth, or the embeddings of images, in what a model returns."""
    names = "logits", "predicted_depth", "image_embeds"
    return next((getattr(outputs, name) for name in names if hasattr(outputs, name)), outputs)


class Runtime(nn.Module):
    """Hugging Face's model in another runtime, converted anew for every batch size.

    ``packages`` are those that it needs, ``dtypes`` those in which it computes, from and to float32;
    ``load_seconds`` is what loading the weights and converting the model took the last time.
    """

    packages: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32",)

    def __init__(self, make: Callable[[], nn.Module], dtype: str):
        """Creates it; ``make`` returns the model in float32, which is not kept."""
        super().__init__()
        self._make, self._dtype = make, dtype
        self._shape = self._images = self._array = self._run = None  # type: Any
        self.load_seconds = 0.0
        self.eval()

    def converted(self, model: nn.Module, images: Tensor) -> Any:
        """Returns the model in the runtime's own format, for images of this shape."""
        raise NotImplementedError

    def compiled(self, converted: Any) -> Callable[[Any], Any]:
        """Returns a function from an array of images to an array of logits."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits."""
        if images.shape != self._shape:
            self._run = None  # frees the memory first
            start = time.perf_counter()
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # of tracing
                model = self.converted(_Logits(self._make()).eval(), images.float())
            self.load_seconds = time.perf_counter() - start
            self._run, self._shape = self.compiled(model), images.shape
        if images is not self._images:  # PyTorch's threads would wait for more work beside the runtime's own
            self._images, self._array = images, images.float().numpy()
        return torch.from_numpy(self._run(self._array))


class _Logits(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return logits_of(self.model(images))


class OpenVINO(Runtime):
    """OpenVINO, with the hint LATENCY."""

    packages: tuple[str, ...] = ("openvino",)
    dtypes = ("float32", "bfloat16")

    def converted(self, model: nn.Module, images: Tensor) -> Any:
        """Returns OpenVINO's model."""
        shape = [tuple(images.shape)]
        return require("openvino", "peers").convert_model(model, example_input=images, input=shape)

    def compiled(self, converted: Any) -> Callable[[Any], Any]:
        """Returns a function of the compiled model."""
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        settings |= {"INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[self._dtype]}
        core = require("openvino", "peers").Core()
        request = core.compile_model(converted, "CPU", settings).create_infer_request()
        return lambda images: request.infer([images])[0].copy()


class OpenVINOInt8(OpenVINO):
    """OpenVINO, quantized by NNCF, which the first images calibrate."""

    packages = ("openvino", "nncf")
    _quantized: Any = None

    def converted(self, model: nn.Module, images: Tensor) -> Any:
        """Returns OpenVINO's model with layers of 8-bit integers, which the first call makes."""
        openvino, nncf = require("openvino", "peers"), require("nncf", "peers")
        if self._quantized is None:
            shape = (-1, *images.shape[1:])
            plain = openvino.convert_model(model, example_input=images, input=[shape])
            nncf.set_log_level(logging.ERROR)
            dataset = nncf.Dataset([image.numpy() for image in images.split(1)])
            self._quantized = nncf.quantize(plain, dataset, model_type=nncf.ModelType.TRANSFORMER)
        result = self._quantized.clone()
        result.reshape(list(images.shape))
        return result


class OnnxRuntime(Runtime):
    """ONNX Runtime."""

    packages = ("onnxruntime", "onnx")

    def converted(self, model: nn.Module, images: Tensor) -> Any:
        """Returns the bytes of a file of ONNX."""
        buffer: Any = io.BytesIO()
        # The older exporter needs no other package, and ONNX Runtime is as fast with what it writes.
        torch.onnx.export(model, (images,), buffer, dynamo=False, opset_version=18, input_names=["images"])
        return buffer.getvalue()

    def compiled(self, converted: Any) -> Callable[[Any], Any]:
        """Returns a function of a session."""
        onnxruntime = require("onnxruntime", "peers")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(converted, options, providers=["CPUExecutionProvider"])
        return lambda images: session.run(None, {"images": images})[0]


RUNTIMES = {"openvino": OpenVINO, "openvino-int8": OpenVINOInt8, "onnxruntime": OnnxRuntime}


def why_not(key: str, *, device: torch.device, dtype: str, train: bool) -> str | None:
    """Returns why a runtime is not measured in this way, or None."""
    for package in RUNTIMES[key].packages:
        require(package, "peers")
    if train:
        return "it has no training step"
    if device.type != "cpu":
        return "it is measured on a CPU only"
    dtypes = RUNTIMES[key].dtypes
    return None if dtype in dtypes else f"it is measured in {' and '.join(dtypes)} only"
