"""The memory that Triton kernels touch in the interpreter: every load and store, and what is wrong with them.

A GPU runs the programs of a launch in any order and at the same time; the interpreter runs them one by one,
and the lanes of a program in their order, so that a wrong kernel may well compute what is right. Here the
addresses tell: see :class:`Accesses` for what counts as a fault.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton import language
from triton.runtime import interpreter

from cvt_kernels.launch import launching

# What is logged -------------------------------------------------------------------------------------------


class Lanes(NamedTuple):
    """The lanes of all loads, or of all stores, of a launch, in the order in which the interpreter ran them.

    Attributes:
        address: Where each begins.
        width: Its bytes.
        program: The program that it belongs to.
        time: The index of its load or store within the launch.
        phase: How many barriers of the launch were before it.
    """

    address: np.ndarray
    width: np.ndarray
    program: np.ndarray
    time: np.ndarray
    phase: np.ndarray


class _Log:
    """The loads and stores of a launch while it runs."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._storages = {(_start(t), _start(t) + t.untyped_storage().nbytes()) for t in tensors}
        self.loads: list[tuple[Any, ...]] = []
        self.stores: list[tuple[Any, ...]] = []
        self.atomics = 0
        self.phase = 0
        self._time = 0

    def note(self, kind: list[tuple[Any, ...]], builder: Any, pointers: Any, mask: Any) -> Any:
        """Notes a load or a store; returns the mask of the lanes that do no harm."""
        address, is_on = pointers.data, np.broadcast_to(_data(mask), pointers.data.shape).astype(bool)
        width = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        (x, y, z), (_, ny, nz) = builder.grid_idx, builder.grid_dim
        self._time += 1
        touched = address[is_on]
        kind.append((touched, width, (x * ny + y) * nz + z, self._time, self.phase))
        if touched.size:
            first, last = int(touched.min()), int(touched.max()) + width
            if not any(start <= first and last <= end for start, end in self._storages):
                is_on = is_on & self._is_inside(address, width)
        return interpreter.TensorHandle(is_on, language.int1)

    def _is_inside(self, address: np.ndarray, width: int) -> np.ndarray:
        is_inside = np.zeros(address.shape, bool)
        for start, end in self._storages:
            is_inside |= (address >= start) & (address + width <= end)
        return is_inside


def _data(mask: Any) -> np.ndarray:
    return mask if isinstance(mask, np.ndarray) else mask.data


def _lanes(accesses: list[tuple[Any, ...]]) -> Lanes:
    sizes = [access[0].size for access in accesses]
    address = np.concatenate([access[0] for access in accesses]) if accesses else np.zeros(0, np.uint64)
    others = (np.repeat(np.array([access[i] for access in accesses], np.int64), sizes) for i in range(1, 5))
    return Lanes(address.astype(np.int64), *others)


# The memory of a launch -----------------------------------------------------------------------------------


class _Memory:
    """The storages of a launch's tensors in one row of granules, the widest units that no access splits."""

    def __init__(self, tensors: Iterable[Tensor], granule: int) -> None:
        self.granule = granule
        storages = {_start(tensor): tensor.untyped_storage() for tensor in tensors}
        self.starts = np.array(sorted(storages), np.int64)
        sizes = np.array([storages[start].nbytes() for start in sorted(storages)], np.int64)
        self.ends = self.starts + sizes
        self.bases = np.concatenate([[0], np.cumsum(-(-sizes // granule))])

    def places(self, lanes: Lanes) -> tuple[np.ndarray, np.ndarray]:
        """Returns the granules of lanes, −1 outside of all storages, and the lane of each."""
        count = lanes.width // self.granule
        lane = np.repeat(np.arange(count.size), count)
        nth = np.arange(lane.size) - np.repeat(np.cumsum(count) - count, count)
        address = lanes.address[lane] + nth * self.granule
        storage = np.searchsorted(self.starts, address, side="right") - 1
        place = self.bases[storage] + (address - self.starts[storage]) // self.granule
        return np.where((storage >= 0) & (address < self.ends[storage]), place, -1), lane

    def span(self, tensor: Tensor) -> slice:
        """Returns the granules of a tensor's storage."""
        storage = int(np.searchsorted(self.starts, _start(tensor)))
        return slice(int(self.bases[storage]), int(self.bases[storage + 1]))

    def elements(self, tensors: Iterable[Tensor]) -> np.ndarray:
        """Returns which granules are elements of tensors."""
        mask = np.zeros(int(self.bases[-1]), bool)
        for tensor in tensors:
            mask[self.span(tensor)] |= _elements(tensor, self.granule)
        return mask


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _elements(tensor: Tensor, granule: int) -> np.ndarray:
    """Returns which granules of its storage are elements of a tensor."""
    size, item = tensor.untyped_storage().nbytes(), tensor.element_size()
    mask = np.zeros(-(-size // item), bool)
    own = np.lib.stride_tricks.as_strided(mask[tensor.storage_offset() :], tensor.shape, tensor.stride())
    own[...] = True
    return np.repeat(mask, item // granule)[: -(-size // granule)]


class Traffic(NamedTuple):
    """The bytes that a launch moved.

    Attributes:
        launch: The launch.
        memory: The memory of its tensors.
        loaded, stored: Which granules of it were loaded and stored.
        total: Bytes loaded and stored, repeated ones included.
    """

    launch: launching.Launch
    memory: _Memory
    loaded: np.ndarray
    stored: np.ndarray
    total: int

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Returns the bytes of tensors that were loaded and those that were stored, each once."""
        mask = self.memory.elements(tensors)
        return self.memory.granule * int((self.loaded & mask).sum() + (self.stored & mask).sum())


def tensors_of(arguments: Any) -> list[Tensor]:
    """Returns the tensors with elements among a launch's arguments, also those in tuples and descriptors."""
    leaves = pytree.tree_leaves(arguments)
    tensors = [leaf.base if launching.is_descriptor(leaf) else leaf for leaf in leaves]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.numel()]


# Faults ---------------------------------------------------------------------------------------------------


class Accesses:
    """The launches of a block, what each moved, and the faults.

    These are faults:

    1. A program writes what another program of the launch writes.
    2. A program reads what another program of the launch writes.
    3. A lane that is not masked off touches what is no element of a tensor that the launch was given, such as
       the gap between two rows of a slice; or it is not aligned to its own width.
    4. Something is read that nothing wrote before, or an output is not written as a whole by the end of the
       block: a tensor that the block allocated and that a launch writes.
    5. A program reads or writes again what it wrote, without a barrier since: its threads do not wait for
       each other's stores.
    6. An atomic operation.

    Attributes:
        traffic: What each launch moved.
        faults: A sentence for each.
    """

    def __init__(self) -> None:
        self.traffic: list[Traffic] = []
        self.faults: list[str] = []
        self._allocated: dict[int, tuple[Tensor, np.ndarray]] = {}  # by where they begin; bytes written
        self._outputs: set[int] = set()

    def note_allocation(self, tensor: Tensor) -> None:
        """Notes that PyTorch allocated a tensor without writing it."""
        if tensor.numel():
            self._allocated[_start(tensor)] = tensor, np.zeros(tensor.untyped_storage().nbytes(), bool)

    def note_write(self, tensor: Tensor) -> None:
        """Notes that PyTorch wrote a tensor."""
        if (written := self.written_bytes(tensor)) is not None:
            written |= _elements(tensor, 1)

    def note_read(self, tensor: Tensor, by: str) -> None:
        """Notes that PyTorch read a tensor."""
        written = self.written_bytes(tensor)
        if written is not None and (_elements(tensor, 1) & ~written).any():
            self.faults.append(f"{by} reads what nothing has written, of a tensor {tuple(tensor.shape)}")

    def written_bytes(self, tensor: Tensor) -> np.ndarray | None:
        """Returns which bytes of a tensor's storage are written; None if it is older than the block."""
        if not tensor.numel() or tensor.device.type != "cpu":
            return None
        _, written = self._allocated.get(_start(tensor), (None, None))
        return written

    def note_output(self, tensor: Tensor) -> None:
        """Notes that a launch writes a tensor."""
        self._outputs.add(_start(tensor))

    def check_outputs(self) -> None:
        """Notes the outputs that are not written as a whole."""
        for start in self._outputs:
            tensor, written = self._allocated[start]
            missing = int((_elements(tensor, 1) & ~written).sum())
            if missing:
                self.faults.append(f"{missing} bytes of an output {tuple(tensor.shape)} are never written")

    def check_launch(self, launch: launching.Launch, log: _Log) -> None:
        """Notes what a launch moved, and its faults."""
        _LaunchCheck(self, launch, log).run()


class _LaunchCheck:
    """The checks of one launch, which is over."""

    def __init__(self, accesses: Accesses, launch: launching.Launch, log: _Log) -> None:
        self._accesses, self._launch, self._log = accesses, launch, log
        self._tensors = tensors_of(launch.arguments)
        self._loads, self._stores = _lanes(log.loads), _lanes(log.stores)
        widths = {tensor.element_size() for tensor in self._tensors}
        widths |= {int(width) for lanes in (self._loads, self._stores) for width in np.unique(lanes.width)}
        self._memory = _Memory(self._tensors, math.gcd(*widths))
        self._inside = self._memory.elements(self._tensors)

    def run(self) -> None:
        """Records the accesses."""
        if self._log.atomics:
            self._fault("has atomic operations")
        loads, read = self._within(self._loads, "reads")
        stores, written = self._within(self._stores, "writes")
        size = int(self._memory.bases[-1])
        is_loaded, is_stored = np.zeros(size, bool), np.zeros(size, bool)
        is_loaded[loads], is_stored[stores] = True, True
        self._writer = np.full(size, -1, np.int64)
        self._writer[stores] = written.program
        self._check_programs("writes", stores, written.program)
        self._check_programs("reads", loads, read.program)
        self._check_repeated_writes(stores, written)
        self._check_own_writes(loads, read, stores, written)
        self._check_initialized(loads, read, stores, written)
        total = int(self._loads.width.sum() + self._stores.width.sum())
        self._accesses.traffic.append(Traffic(self._launch, self._memory, is_loaded, is_stored, total))
        self._note_written(is_stored)

    def _fault(self, words: str) -> None:
        self._accesses.faults.append(f"{self._launch.kernel.__name__} {words}")

    def _within(self, lanes: Lanes, verb: str) -> tuple[np.ndarray, Lanes]:
        """Returns the granules of lanes within tensors, and the lane of each."""
        if (lanes.address % lanes.width).any():
            self._fault(f"{verb} at an address that is not a multiple of the width")
        place, lane = self._memory.places(lanes)
        is_inside = place >= 0
        is_inside[is_inside] = self._inside[place[is_inside]]
        if not is_inside.all():
            program, size = lanes.program[lane[~is_inside]][0], (~is_inside).sum() * self._memory.granule
            self._fault(f"{verb} {size} bytes outside of its tensors, first in program {program}")
        lane = lane[is_inside]
        return place[is_inside], Lanes(*(values[lane] for values in lanes))

    def _check_programs(self, verb: str, place: np.ndarray, program: np.ndarray) -> None:
        writer = self._writer[place]
        is_foreign = (writer >= 0) & (writer != program)
        if is_foreign.any():
            i = int(np.argmax(is_foreign))
            name = self._name_of(place[i])
            self._fault(f"{verb} {name} in program {program[i]} where program {writer[i]} writes")

    def _check_repeated_writes(self, stores: np.ndarray, written: Lanes) -> None:
        order = np.lexsort((written.time, stores))
        place, program, phase = stores[order], written.program[order], written.phase[order]
        again = place[1:] == place[:-1]
        again &= (program[1:] == program[:-1]) & (phase[1:] == phase[:-1])
        if again.any():
            name = self._name_of(place[1:][again][0])
            self._fault(f"writes {name} twice in one program without a barrier in between")

    def _check_own_writes(self, loads: np.ndarray, read: Lanes, stores: np.ndarray, written: Lanes) -> None:
        for step in (-1, 1):  # the first writes, then the last ones
            time, phase = np.full(self._writer.size, -1, np.int64), np.full(self._writer.size, -1, np.int64)
            time[stores[::step]], phase[stores[::step]] = written.time[::step], written.phase[::step]
            is_own = (self._writer[loads] == read.program) & (time[loads] < read.time)
            is_own &= phase[loads] == read.phase
            if is_own.any():
                name = self._name_of(loads[is_own][0])
                self._fault(f"reads {name} where the same program wrote, without a barrier in between")
                return

    def _check_initialized(self, loads: np.ndarray, read: Lanes, stores: np.ndarray, written: Lanes) -> None:
        since = np.full(self._writer.size, -1, np.int64)
        for tensor in self._tensors:
            if (state := self._accesses.written_bytes(tensor)) is not None:
                since[self._memory.span(tensor)][~state[:: self._memory.granule]] = np.iinfo(np.int64).max
        unwritten = since[stores[::-1]] >= 0
        since[stores[::-1][unwritten]] = written.time[::-1][unwritten]
        is_early = since[loads] > read.time
        if is_early.any():
            self._fault(f"reads {self._name_of(loads[is_early][0])} where nothing has been written")

    def _note_written(self, is_stored: np.ndarray) -> None:
        for tensor in self._tensors:
            state, own = self._accesses.written_bytes(tensor), is_stored[self._memory.span(tensor)]
            if state is not None and own.any():
                state |= np.repeat(own, self._memory.granule)[: state.size]
                self._accesses.note_output(tensor)

    def _name_of(self, place: int) -> str:
        """Returns the arguments that a granule belongs to."""
        arguments = {name: tensors_of(value) for name, value in self._launch.arguments.items()}
        return " and ".join(
            name for name, tensors in arguments.items() if self._memory.elements(tensors)[place]
        )


# Logging --------------------------------------------------------------------------------------------------


class _Allocations(TorchDispatchMode):
    """Tells what PyTorch allocates, writes and reads."""

    def __init__(self, accesses: Accesses) -> None:
        super().__init__()
        self._accesses = accesses

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [
            (argument, tensor)
            for i, argument in enumerate(function._schema.arguments)
            for tensor in pytree.tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
            if isinstance(tensor, Tensor)
        ]
        is_allocation = function.overloadpacket in _ALLOCATIONS
        is_view = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        if not is_allocation and not is_view and function.overloadpacket not in _LIKE:
            for argument, tensor in given:
                if not _is_written(argument):
                    self._accesses.note_read(tensor, str(function))
        result = function(*args, **kwargs)
        for argument, tensor in given:
            if _is_written(argument):
                self._accesses.note_write(tensor)
        if is_allocation:
            self._accesses.note_allocation(result)
        return result


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
#: What takes a tensor without reading it.
_LIKE = {
    _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros, _aten.new_ones, _aten.new_full,
}  # fmt: skip


@contextlib.contextmanager
def recorded_accesses() -> Iterator[Accesses]:
    """Records the launches of a block in Triton's interpreter, and their faults."""
    accesses = Accesses()
    log = _Log()
    run_launch = interpreter.GridExecutor.__call__
    builder = interpreter.InterpreterBuilder
    load, store, barrier = builder.create_masked_load, builder.create_masked_store, builder.create_barrier
    cas, rmw = builder.create_atomic_cas, builder.create_atomic_rmw

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal log
        names = inspect.getfullargspec(executor.fn).args
        given = inspect.getcallargs(executor.fn, *args, **{k: v for k, v in kwargs.items() if k in names})
        log = _Log(tensors_of(given))
        with _disable_current_modes():
            run_launch(executor, *args, **kwargs)
            accesses.check_launch(launching.Launch(executor.fn, executor.grid, given, {}), log)

    def logged_load(self: Any, pointers: Any, mask: Any, *others: Any, **named: Any) -> Any:
        return load(self, pointers, log.note(log.loads, self, pointers, mask), *others, **named)

    def logged_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any, **named: Any) -> Any:
        return store(self, pointers, value, log.note(log.stores, self, pointers, mask), *others, **named)

    def logged_barrier(self: Any) -> Any:
        log.phase += 1
        return barrier(self)

    def counted(atomic: Any) -> Any:
        def logged_atomic(self: Any, *args: Any) -> Any:
            log.atomics += 1
            return atomic(self, *args)

        return logged_atomic

    with contextlib.ExitStack() as stack:
        replace = stack.enter_context(pytest.MonkeyPatch.context()).setattr
        replace(interpreter.GridExecutor, "__call__", launch)
        replace(builder, "create_masked_load", logged_load)
        replace(builder, "create_masked_store", logged_store)
        replace(builder, "create_barrier", logged_barrier)
        replace(builder, "create_atomic_cas", counted(cas))
        replace(builder, "create_atomic_rmw", counted(rmw))
        stack.enter_context(_Allocations(accesses))
        yield accesses
    accesses.check_outputs()
