"""The CUDA kernels of LayerNorm and GELU: on the host under sanitizers, and as machine code."""

import importlib.util
import io
import re
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cvt_kernels import reference
from cvt_kernels.machine import load_extension
from tests.checks import TRAPS, assert_accurate, compiled, compiler, not_built

TESTS = Path(__file__).parent
CSRC = TESTS.parents[1] / "csrc"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PROGRAM = ("layer_norm", "layer_norm_backward", "gelu", "gelu_backward", "a_row_too_many")
ACTIVATIONS = ("identity", "none", "tanh", "quick")
#: AddressSanitizer finds accesses at null and beyond an object too; compiling them twice takes longer.
SANITIZE = (
    "-O0 -g1 -Wall -Wextra -Werror -Wno-unknown-pragmas -fsanitize=address,undefined "
    f"-fno-sanitize=null,object-size {TRAPS}"
)

pytestmark = pytest.mark.skipif(not_built(), reason="there is no C++ compiler")


class KernelCall(NamedTuple):
    """A call of one kernel; see simt_layer_norm_gelu.cpp."""

    operation: str
    x: Tensor
    addend: Tensor | None = None  # a branch that is added to x, in the dtype of the result; of a backward, dh
    weight: Tensor | None = None
    bias: Tensor | None = None
    more: tuple[Tensor, ...] = ()  # of a backward: mean, rstd of LayerNorm; dout
    activation: str = "identity"
    misalignment: int = 0
    multiprocessors: int = 1
    backwards: bool = False
    eps: float = 1e-5
    result: torch.dtype | None = None  # the dtype of the LayerNorm and its gradient; None for x's
    shift: Tensor | None = None  # of a LayerNorm without an addend and without an activation

    def pack(self) -> bytes:
        """Returns the call as the program reads it."""
        parameters = [t for t in (self.weight, self.bias) if t is not None]
        numbers = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
        header = (
            PROGRAM.index(self.operation),
            numbers[self.x.dtype],
            numbers[self.result or self.x.dtype],
            ACTIVATIONS.index(self.activation),
            self.x.numel() // self.x.shape[-1],
            self.x.shape[-1],
            self.misalignment,
            self.multiprocessors,
            self.backwards,
            *(t is not None for t in (self.addend, self.shift, self.weight, self.bias)),
            any(t.dtype == torch.float32 for t in parameters),
            self.shift is not None and self.shift.dtype == torch.float32,
        )
        tensors = (self.x, self.addend, self.shift, self.weight, self.bias, *self.more)
        arrays = [t for t in tensors if t is not None]
        return struct.pack("15qd", *header, self.eps) + b"".join(map(to_bytes, arrays))

    def results(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Returns the shapes and dtypes of the tensors that the program writes."""
        like_x = (self.x.shape, self.x.dtype)
        like_out = (self.x.shape, self.result or self.x.dtype)
        both = self.addend is not None and like_out != like_x
        statistics = (self.x.shape[:-1], torch.float32)
        parameters = [t for t in (self.weight, self.bias) if t is not None]
        vector = (self.x.shape[-1:], parameters[0].dtype if parameters else self.x.dtype)
        return {
            "layer_norm": [like_x] * (self.addend is not None) + [like_out] + [statistics] * 2,
            "layer_norm_backward": [like_x] + [like_out] * both + [vector] * len(parameters),
            "gelu": [like_x],
            "gelu_backward": [like_x] + [vector] * len(parameters),
        }[self.operation]


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def unpack(calls, output: bytes) -> list[list[Tensor]]:
    stream = io.BytesIO(output)
    results = [[from_bytes(stream, *result) for result in call.results()] for call in calls]
    assert not stream.read()
    return results


@pytest.fixture(scope="module")
def run():
    """Returns a function that runs calls on the host and returns the results of each."""
    command = [*compiler(), "-std=c++20", *SANITIZE.split(), "-fno-sanitize-recover=all", "-I", str(CSRC)]
    folders = CSRC / "common", CSRC / "layer_norm_gelu", TESTS
    sources = [path for folder in folders for path in sorted(folder.glob("*.[ch]*"))]
    program = compiled([*command, str(TESTS / "simt_layer_norm_gelu.cpp")], sources)

    def run(*calls: KernelCall) -> list[list[Tensor]]:
        done = subprocess.run([program], input=b"".join(call.pack() for call in calls), capture_output=True)
        # By a signal without a message, it is UBSan: compiled without TRAPS, the program says where.
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr.decode()}"
        return unpack(calls, done.stdout)

    return run


def from_bytes(stream: io.BytesIO, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    data = bytearray(stream.read(shape.numel() * dtype.itemsize))
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def make(operation, shape, dtype, activation="identity", *, addend=False, weight=True, bias=True,
         parameters=None, result=None, shift=None, **more):  # fmt: skip
    """Returns a call with random arguments; ``parameters`` is the dtype of weight and bias."""
    x, added, dout = (2 * torch.randn(3, *shape, dtype=torch.float64)).unbind()
    x, dout = x.to(dtype), dout.to(result or dtype)
    added = added.to(dtype if operation == "layer_norm_backward" else result or dtype)
    vectors = torch.randn(2, shape[-1], dtype=torch.float64).to(parameters or dtype).unbind()
    statistics = ()
    if operation == "layer_norm_backward":
        statistics = tuple(t.float() for t in mean_and_rstd(x.double(), 1e-5))
    return KernelCall(
        operation, x, added if addend else None, vectors[0] if weight and "norm" in operation else None,
        vectors[1] if bias else None, (*statistics, dout) if "backward" in operation else (), activation,
        result=result, shift=None if shift is None else torch.randn(shape[-1], dtype=torch.float64).to(shift),
        **more,
    )  # fmt: skip


def expected(call: KernelCall, dtype: torch.dtype) -> list[Tensor]:
    """Returns the results of PyTorch's own operators in ``dtype``, in the order of the program's results."""
    tensors = (call.x, call.addend, call.weight, call.bias)
    x, addend, weight, bias = (None if t is None else t.to(dtype).requires_grad_() for t in tensors)

    def act(t):
        return t if call.activation == "identity" else reference.gelu(t, approximate=call.activation)

    if "gelu" in call.operation:
        out = act(x if bias is None else x + bias)
        inputs = [t for t in (x, bias) if t is not None]
    else:
        h = x if addend is None or call.more else x + addend
        if call.shift is not None:
            h = x + call.shift.to(dtype)
        out = act(reference.layer_norm(h, weight, bias, eps=call.eps))
        inputs = [t for t in (x, weight, bias) if t is not None]
    if call.more:
        gradients = torch.autograd.grad(out, inputs, call.more[-1].to(dtype))
        if addend is None:
            return list(gradients)
        both = call.result not in (None, call.x.dtype)
        return [gradients[0] + addend] * (1 + both) + list(gradients[1:])
    if call.operation == "gelu":
        return [out.detach()]
    stored = (h if addend is None else h.to(call.x.dtype)).double()  # of what is stored
    return [t.detach() for t in ([out] if addend is None else [h, out])] + mean_and_rstd(stored, call.eps)


def mean_and_rstd(x: Tensor, eps: float) -> list[Tensor]:
    mean = x.mean(-1)
    return [mean, ((x - mean[..., None]).square().mean(-1) + eps).rsqrt()]


def of_calls(*calls):
    """Parametrizes by operations and activations."""
    return pytest.mark.parametrize(("operation", "activation"), calls, ids=map("-".join, calls))


every_call = of_calls(
    *((operation, activation) for operation in PROGRAM[:2] for activation in ACTIVATIONS),
    *((operation, activation) for operation in PROGRAM[2:4] for activation in ACTIVATIONS[1:]),
)
every_operation = of_calls(
    ("layer_norm", "quick"), ("layer_norm_backward", "quick"), ("gelu", "none"), ("gelu_backward", "none")
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def adds(operation, activation):
    """Returns whether a kernel takes an addend: no operator activates the LayerNorm of a sum."""
    return operation == "layer_norm_backward" or (operation == "layer_norm" and activation == "identity")


def assert_results_accurate(call, results, dtype):
    """Compares with PyTorch's own operators in a dtype, rounded to the results' dtype."""
    exact, theirs = expected(call, torch.float64), expected(call, dtype)
    for got, same, right in zip(results, theirs, exact, strict=True):
        if got.shape == call.x.shape[:-1]:  # mean or rstd: kept in float32, whatever PyTorch does
            torch.testing.assert_close(got.double(), right, rtol=1e-6, atol=1e-6)
        else:
            assert_accurate(got, same.to(got.dtype), right, factor=3 if call.more else 2)


@every_call
@every_dtype
def test_accuracy_at_channels_of_cvt(run, operation, activation, dtype):
    may_add = adds(operation, activation)
    calls = [
        make(operation, (rows, channels), dtype, activation, addend=rows % 2 == 1 and may_add)
        for rows, channels in ((150, 64), (49, 192), (25, 384), (10, 1024))
    ]
    for call, results in zip(calls, run(*calls), strict=True):
        assert_results_accurate(call, results, dtype)


MIXED = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32),
         (torch.float16, torch.float32)]  # fmt: skip


@pytest.mark.parametrize("operation", ["layer_norm", "layer_norm_backward"])
@pytest.mark.parametrize(("dtype", "result"), MIXED, ids=str)
def test_results_of_another_dtype(run, operation, dtype, result):
    """A stream of float32 beside branches of 16 bits; a convolution of 16 bits before a stream of float32."""
    calls = [
        make(operation, (rows, channels), dtype, addend=adds, parameters=torch.float32, result=result)
        for rows, channels in ((150, 64), (49, 192), (25, 384), (5, 65), (3, 1100), (3, 8192))
        for adds in (False, *[True] * (dtype == torch.float32))
    ]
    for call, results in zip(calls, run(*calls), strict=True):
        assert_results_accurate(call, results, torch.float32)


@every_dtype
@pytest.mark.parametrize("float_shift", [False, True])
def test_a_shift(run, dtype, float_shift):
    """At every layout, for every dtype of the result; its vector ends where the memory does."""
    shift = torch.float32 if float_shift else dtype
    shapes = ((150, 64), (49, 192), (25, 384), (10, 1024), (3, 8192), (5, 9), (5, 65), (3, 1100), (0, 64))
    results = {None, *DTYPES} if dtype == torch.float32 else {None, torch.float32}
    calls = [
        make("layer_norm", shape, dtype, shift=shift, parameters=result and torch.float32, result=result)
        for result in results
        for shape in shapes
    ]
    calls.append(make("layer_norm", (37, 64), dtype, shift=shift, weight=False, bias=False))
    calls.append(make("layer_norm", (37, 64), dtype, shift=shift, misalignment=1))
    for call, results in zip(calls, run(*calls), strict=True):
        if call.x.numel():
            assert_results_accurate(call, results, torch.float32 if call.result else dtype)


@every_operation
@every_dtype
def test_every_layout_of_channels_in_threads_and_numbers_of_rows(run, operation, activation, dtype):
    """Some leave threads to spare and some do not; some rows are aligned and some are not.

    There is no row, one, a block that is not full; or several turns of the blocks that stay.
    """
    channels = (3, 8, 9, 24, 40, 65, 300, 768, 1030, 2000, 2048, 3001, 4096, 8191, 8192)
    calls = [make(operation, (3, count), dtype, activation) for count in channels]
    calls += [make(operation, (3, count), dtype, activation, misalignment=1) for count in (8, 192, 1024)]
    calls += [make(operation, (rows, 64), dtype, activation) for rows in (0, 1, 37, 97)]
    calls += [make(operation, shape, dtype, activation) for shape in ((700, 48), (40, 1100))]
    if "norm" in operation:
        calls += [make(operation, (rows, 64), dtype, addend=True) for rows in (0, 1, 37, 97)]
    epsilon = 256 * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps
    for call, results in zip(calls, run(*calls), strict=True):
        for got, exact in zip(results, expected(call, torch.float64), strict=True):
            scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
            torch.testing.assert_close(got.double(), exact, rtol=0, atol=epsilon * scale)


@every_operation
def test_order_of_threads_does_not_matter(run, operation, activation):
    """A barrier that is missing would show; so would a sum whose order is left to chance."""
    for channels in (40, 200, 1500, 5000):
        call = make(operation, (30, channels), torch.bfloat16, activation)
        forwards, backwards = run(call, call._replace(backwards=True))
        assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))


def next_number(channels, dtype):
    """Returns rows of equal values but for one, which is the next number: no row has less variance."""
    x = torch.full((4, channels), 1000.0, dtype=dtype)
    x[range(4), [0, 1, 5, channels - 1]] = torch.tensor(1000.0).mul(1 + 2 * torch.finfo(dtype).eps).to(dtype)
    return x


#: Rows that lose accuracy where they are summed plainly; the first value of a row is its origin.
HARD = {
    "tiny variance": lambda channels: 1e4 + 1e-3 * torch.randn(16, channels),
    "first value far off": lambda channels: torch.randn(16, channels) + 1e4 * (torch.arange(channels) == 0),
    "bfloat16": lambda channels: next_number(channels, torch.bfloat16),
    "float16": lambda channels: next_number(channels, torch.float16),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("channels", [64, 384, 2000, 8192])
def test_accuracy_of_hard_rows(run, name, channels):
    x = HARD[name](channels)
    ((got, _, _),) = run(KernelCall("layer_norm", x))
    factor = 1 if name == "tiny variance" else 2
    assert_accurate(got, reference.layer_norm(x), reference.layer_norm(x.double()), factor=factor)


@every_operation
def test_nan_and_infinities_stay_in_their_rows(run, operation, activation):
    call = make(operation, (6, 32), torch.float32, activation)
    clean = run(call)[0][0]
    call.x[0, 3], call.x[1, 4], call.x[2, 5] = torch.nan, torch.inf, -torch.inf
    got, exact = run(call)[0][0], expected(call, torch.float64)[0]
    assert torch.equal(got[3:], clean[3:])
    if "backward" not in operation:
        torch.testing.assert_close(got.double(), exact, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_the_sanitizers_report_a_row_too_many(run):
    call = make("layer_norm", (5, 64), torch.float32)
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        run(call._replace(operation="a_row_too_many"))


# As machine code, in the extension that was built -----------------------------------------------------------


def cuobjdump(*options: str) -> str:
    """Returns what cuobjdump prints of the extension; Triton brings the program along."""
    if not load_extension().cuda:
        pytest.skip("the extension was built without a CUDA toolkit")
    program = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin/cuobjdump"
    extension = importlib.util.find_spec("cvt_kernels._C").origin
    return subprocess.run([program, *options, extension], capture_output=True, text=True, check=True).stdout


def test_no_kernel_spills():
    usage = re.findall(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", cuobjdump("--dump-resource-usage"))
    assert usage
    assert all((stack, local) == ("0", "0") for stack, local in usage)


@pytest.mark.parametrize(
    "layout", ["NS_8BFloat16ELNS0_10ActivationE1ELi8ELi3ES3_", "fLNS0_10ActivationE1ELi4ELi6Ef"]
)
def test_accesses_are_of_16_bytes(layout):
    """Activations and parameters move so at the widths of CvT; mean and rstd are single floats."""
    call = "LNS1_6AddendE0EEEvNS0_18LayerNormForwardOfIifEEi"  # without an addend
    name = f"_ZN11cvt_kernels15layer_norm_gelu4cuda17layer_norm_kernelI{layout}{call}"
    code = cuobjdump("--dump-sass", "--function", name)
    reads, writes = re.findall(r"LDG\S*", code), re.findall(r"STG\S*", code)
    assert reads
    assert all(".128" in read for read in reads)
    assert [write for write in writes if ".128" not in write] == ["STG.E"] * 2 * code.count("Function :")
