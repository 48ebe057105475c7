"""The operators that torch.compile sees, each as a call of a public operator makes it: PyTorch's opcheck."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cvt_kernels as ck
from cvt_kernels import backends
from tests.cvt_kernels.test_backends import USUAL, make_sample


class _Seen(TorchDispatchMode):
    """Notes the calls of operators of this project, once per operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if getattr(function, "namespace", "") == "cvt_kernels":
            copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            self.calls.setdefault(function, (tuple(copies), dict(kwargs or {})))
        return function(*args, **(kwargs or {}))


def seen(operator, backend, monkeypatch, *, gradient):
    """Returns the calls that a function of a backend makes where torch.compile traces it."""
    sample = make_sample(operator, **USUAL | {"gradient": gradient})
    call = backends.operators[operator].bind(*sample.args, **sample.kwargs)
    try:
        backends.operators[operator].check(call)
    except ValueError as error:
        pytest.skip(str(error))  # as for a gradient of rounding
    with ck.use_backend(backend), monkeypatch.context() as patch, _Seen() as mode:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        if (reason := backends.why_unsupported(operator, backend, call)) is not None:
            pytest.skip(reason)
        out = backends.registered(operator, backend).load().function(call)
        out = [t for t in (out if isinstance(out, tuple | list) else [out]) if t.requires_grad]
        if out:
            torch.autograd.backward(out, [torch.ones_like(t) for t in out])
    return mode.calls


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("operator", "backend"),
    [
        (operator, backend)
        for operator, known in backends.implementations.items()
        for backend in backends.OURS
        if backend in known
    ],
)
def test_operators_are_registered_right(operator, backend, gradient, monkeypatch):
    calls = seen(operator, backend, monkeypatch, gradient=gradient)
    assert calls, "torch.compile would trace into the kernels"
    for function, (args, kwargs) in calls.items():
        torch.library.opcheck(
            function,
            args,
            kwargs,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
