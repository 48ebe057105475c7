"""A tape of PyTorch's operators in the place of CUDA graphs, on a CPU.

The tape, like a graph, computes what was recorded from the memory that was recorded, whatever has become of
the model since.
"""

import contextlib
from typing import ClassVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cvt_kernels import graphs


class Tape(TorchDispatchMode):
    """A recording of operators, which replays them into the memory of the recorded results."""

    def __init__(self):
        super().__init__()
        self.calls, self.made, self.replays = [], set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        leaves, form = pytree.tree_flatten((args, kwargs or {}))
        # An alias of the weights: it does not follow the parameter to other memory.
        leaves = [self._kept(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.made.update(id(each) for each in pytree.tree_leaves(outputs))
        self.calls.append((function, leaves, form, outputs))
        return outputs

    def _kept(self, tensor):
        return tensor if id(tensor) in self.made else tensor.detach()

    def replay(self):
        self.replays += 1
        for function, leaves, form, outputs in self.calls:
            args, kwargs = pytree.tree_unflatten(leaves, form)
            again = function(*args, **kwargs)
            if all(each.alias_info is None for each in function._schema.returns):
                for old, new in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


class FakeCapture:
    """A stand-in for the calls of CUDA, which takes CPU tensors and notes what is asked of it."""

    device_type = "cpu"
    tapes: ClassVar[list[Tape]] = []
    released: ClassVar[list[Tape]] = []

    def __init__(self, device):
        self.device = device

    def record(self, *functions):
        outputs = ()
        for function in functions:
            outputs = (function(*outputs),)
        recorded = []
        for function in functions:
            before = [outputs for outputs, _ in recorded[-1:]]
            with Tape() as tape:
                recorded.append((function(*before), tape))
            self.tapes.append(tape)
        return recorded

    def random_state(self):
        return torch.get_rng_state()

    def set_random_state(self, state):
        torch.set_rng_state(state)

    @contextlib.contextmanager
    def turn(self, memory):
        yield

    def release(self, *tapes):
        self.released.extend(tapes)


@contextlib.contextmanager
def taped():
    """Puts the tape in the place of CUDA within a block; yields the class that counts."""
    forget_tapes()  # of tests that put it there themselves
    own, graphs._CudaCapture = graphs._CudaCapture, FakeCapture
    try:
        yield FakeCapture
    finally:
        graphs._CudaCapture = own
        forget_tapes()


def forget_tapes():
    """Drops what tests count, and with it the tensors that the tapes refer to."""
    FakeCapture.tapes.clear()
    FakeCapture.released.clear()
