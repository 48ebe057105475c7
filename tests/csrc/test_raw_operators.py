"""The extension's operators refuse sizes that their public functions never hand them, instead of crashing."""

from tests.checks import needs_extension
from tests.processes import run_python

pytestmark = needs_extension

#: Calls that crashed, read out of bounds or took all memory once, and what they are refused for.
CALLS = {
    "ops.pack_convolution(zeros(4, 1, 1, 9), *[zeros(4)] * 4, 1e-5)": "weight: got float32 (4, 1, 1, 9)",
    "ops.pack_convolution(zeros(4, 0, 1, 3), *[zeros(4)] * 4, 1e-5)": "weight: got float32 (4, 0, 1, 3)",
    "ops.pack_convolution(zeros(13, 1, 4, 5), *[zeros(13)] * 4, 1e-5)": "weight: got float32 (13, 1, 4, 5)",
    "ops.pack_depthwise(zeros(4096, 1, 3, 3), zeros(4096, 0))": "bias: got float32 (4096, 0)",
    "mix(channels=5)": "weight: got float32 (5, 1",
    "mix(width=6)": "x: got float32 (1, 20",
    "mix(bias=zeros(5))": "bias: got float32",
    "mix(gelu='relu')": "activation: got 'relu'",
    "ops.attention_inference(zeros(2, 5, 1, 8), zeros(1, 4, 1, 8), zeros(1, 4, 1, 8), 1.0)": "k: got float32",
    "ops.attention_inference(zeros(2, 5, 1, 8), zeros(2, 4, 1, 8), zeros(2, 3, 1, 8), 1.0)": "v: got float32",
    "ops.layer_norm(zeros(4, 6), zeros(5), None, 1e-5, 'none', torch.float32)": "weight: got float32 (5)",
    "ops.gelu_backward(zeros(4, 6).half(), zeros(4, 6), None, 'none')": "dout: got float16",
    "embed(kernel=2**32)": "got a kernel of 4294967296",
    "embed(padding=2**62)": "got a padding of 4611686018427387904",
    "embed(stride=-(2**63))": "got a stride of -9223372036854775808",
    "convolve(2**61, 8)": "height and width: got 2305843009213693952 · 8",
    "convolve(4, 5, padding=2**62)": "geometry: got a padding of 4611686018427387904",
    "convolve(4, 5, dilation=2**62)": "geometry: got a dilation of 4611686018427387904",
    "ops.depthwise_conv_gelu(zeros(1, 0, 8), 2**32, 2**32, zeros(8, 1, 3, 3), None, 'none')": "height and",
    "ops.gelu_quantize(wide(3, 2**61), None, 'tanh')": "x: got 3 · 2305843009213693952",
    "transform(2**32, 2**32)": "height and width: got 4294967296 · 4294967296",
    "transform(1, 1, scores=True)": "scores: got",
    "reduce(2**32, 2**32)": "height and width: got 4294967296 · 4294967296",
    "ops.layer_norm(zeros(0, 2**61), None, None, 1e-5, 'none', torch.float32)": "x: got 0 · 23058430092",
    "ops.layer_norm(zeros(3, 4), None, None, float('nan'), 'none', torch.float32)": "eps: got nan",
    "ops.scatter_rows(None, zeros(2**40, 0).long(), zeros(2**40, 0, 1), 2**40)": "tokens: got",
    "ops.gather_rows(None, zeros(1, 1).long())": "argument 1: got none",
    "ops.attention_inference(zeros(1, 1, 1, 1), *[wide(1, 2**61, 1, 1)] * 2, 1.0)": "k: got 1 · 23058430092",
    "ops.scatter_rows_(x := zeros(1, 4, 2), torch.arange(2)[None], x[:, :2])": "values: got",
}  # fmt: skip
CODE = """
import torch
from torch import zeros
from cvt_kernels import machine

machine.load_extension()
ops = torch.ops.cvt_kernels


def wide(*shape):
    return torch.zeros(1).as_strided(shape, [0] * len(shape))


def embed(kernel=3, stride=1, padding=0):
    packed = ops.pack_linear(zeros(2, 9))
    return ops.conv_embedding_inference(
        zeros(1, 1, 4, 4), packed, *[zeros(2)] * 3, None, kernel, stride, padding, 1e-5
    )


def convolve(height, width, padding=1, dilation=1):
    x = zeros(1, height * width % 2**64, 4)
    return ops.conv_projection_moments(x, height, width, [zeros(4, 1, 3, 3)], [1, padding, dilation])


def transform(height, width, scores=False):
    conv, vector = ops.pack_convolution(zeros(2, 1, 3, 3), *[zeros(2)] * 4, 1e-5), zeros(2)
    x = zeros(1, height * width % 2**64, 2)
    return ops.transformer_block_(
        x, height, width, [conv] * 3 + [ops.pack_linear(zeros(2, 2))] * 6, [vector] * 10, [3, 1, 1, 1] * 3,
        [2, 2, 1], [zeros(0)] * 6, 1e-5, 1e-5, 1.0, "none", None, *[x[..., 0], "avg"] * scores,
    )


def mix(width=5, channels=6, bias=None, gelu="none"):
    return ops.depthwise_conv_gelu(zeros(1, 20, 6), 4, width, zeros(channels, 1, 3, 3), bias, gelu)


def reduce(height, width):
    layers, x = [ops.pack_linear(zeros(2, 2))] * 6, zeros(1, height * width % 2**64, 2)
    return ops.pyramid_block_packed(
        x, height, width, layers, [], None, [zeros(2)] * 10, [2, 2, 1], [zeros(0)] * 6, [1e-5] * 2,
        1.0, "none",
    )


for call in CALLS:
    try:
        print("returned", flush=True)
        eval(call)
    except RuntimeError as error:
        print("refused", str(error).splitlines()[0], flush=True)
"""


def test_calls_that_crashed_once_are_refused():
    result = run_python(CODE.replace("CALLS", repr([*CALLS])))
    answers = [line for line in result.stdout.splitlines() if line != "returned"]
    assert result.returncode == 0, (answers, result.stderr)
    assert len(answers) == len(CALLS), result.stdout
    for call, answer in zip(CALLS, answers, strict=True):
        assert answer.startswith("refused "), call
        assert CALLS[call] in answer
        assert ", expected " in answer
