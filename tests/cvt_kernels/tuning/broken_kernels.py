"""Kernels with flaws, for the processes of ``tune``: each serves GELU of its own number of channels."""

import os
import signal
import time

import torch

from cvt_kernels import backends, reference
from tests.checks import implementation


def wrong_element(x):
    out = reference.gelu(x, approximate="none").detach()
    out.view(-1)[-1] += 0.01
    return out


def writes_beyond(x):
    out = torch.empty_like(x).copy_(reference.gelu(x, approximate="none"))
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
    return out


def raising(x):
    raise RuntimeError("has no such kernel\nsecond line")


def hanging(x):
    time.sleep(1000)


def killed(x):
    os.kill(os.getpid(), signal.SIGKILL)


def exiting(x):
    os._exit(3)


def slow(x):
    time.sleep(0.02)
    return reference.gelu(x, approximate="none")


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return reference.gelu(x, approximate="none")

    @staticmethod
    def backward(ctx, dout):
        return 1.01 * dout


_calls = 0


def _is_first_call():
    global _calls
    _calls += 1
    return _calls == 1


def hanging_when_timed(x):
    return reference.gelu(x, approximate="none") if _is_first_call() else time.sleep(1000)


def dying_when_timed(x):
    return reference.gelu(x, approximate="none") if _is_first_call() else os.abort()


_rounded = 0


def racing(x):
    global _rounded
    _rounded += 1
    out = reference.gelu(x, approximate="none").clone()
    out.view(-1)[0] *= 1 + (_rounded > 4) * torch.finfo(x.dtype).eps  # the last bit of later calls
    return out


#: Kernels by the number of channels, from 1 on.
KERNELS = (
    None, wrong_element, writes_beyond, hanging, killed, exiting, slow, _WrongBackward.apply,
    hanging_when_timed, dying_when_timed, racing, raising,
)  # fmt: skip


def gelu(x, bias=None, *, approximate):
    return KERNELS[x.shape[-1]](x)


def register():
    """Registers the kernels, and a form of PyTorch's that kills the process."""
    backends.register("gelu", "triton", implementation("gelu", gelu))
    backends.register("attention", "sdpa", implementation("attention", lambda *args, **kwargs: os._exit(4)))


def register_reference_that_hangs():
    backends.register("gelu", "reference", implementation("gelu", lambda *args, **kwargs: time.sleep(1000)))


def _register_failing_kernel(error):
    def function(x, bias=None, *, approximate):
        raise error

    backends.register("gelu", "triton", implementation("gelu", function))


def register_kernel_without_memory():
    _register_failing_kernel(torch.OutOfMemoryError("CUDA out of memory"))


def register_kernel_without_host_memory():
    error = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"
    _register_failing_kernel(RuntimeError(error))


def register_killed_compiler():
    _register_failing_kernel(RuntimeError("`ptxas` failed with error code -9"))


def register_wrong_gelu():
    """Registers a GELU with its bias that is wrong in any shape."""
    backends.register("gelu", "triton", implementation("gelu", lambda x, bias, **_: wrong_element(x + bias)))


def die():
    os._exit(5)
