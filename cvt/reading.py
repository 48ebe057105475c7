"""Safe reading of JSON, pickles and safetensors from untrusted sources.

No code from a file is run, and reading takes little more memory than the file has bytes: a file that would
unpack to more is refused.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from cvt_kernels.messages import printable

#: The most bytes of a JSON file: names of 250,000 classes. Its objects may take 25 times as much memory.
MOST_JSON = 1 << 24
#: The most tensors of a file, more than a thousand blocks of any kind have.
MOST_TENSORS = 100_000
# The magic number, the protocol, the machine, the content and the storages' keys of a file before torch 1.6.
_PICKLES_OF_OLD_FILES = 5
# Calls that torch.load allows and that make more of their arguments than the file has bytes: zeros, twice
# the length in "hex", a tensor of lists that hold one list twice, or of one number in all places.
_ALLOCATING = re.compile(
    r"(?:__builtin__|builtins)\.(bytearray)|_codecs\.(encode)|torch[.\w]*\.(\w*Tensor|per_channel_\w+)"
    r"|torch\._utils\.(_rebuild_sparse_tensor|_rebuild_device_tensor_from_\w+)"
)
# The most tensors that share their numbers; no model of the paper has as many blocks.
_MOST_SHARING = 32
_ZIP = b"PK\3\4"
_ZIP_HEADER = 30
# The end of an archive's directory. Archives of torch.save, and large ones, have the longer form of it and
# the place of that form before. Last, the bytes of all three.
_ZIP_END, _ZIP_END_PLACE, _ZIP_END_64 = b"PK\5\6", b"PK\6\7", b"PK\6\6"
_ZIP_ENDS = 22 + 20 + 56


class CheckpointError(ValueError):
    """The file is not a readable checkpoint, or not one of this model."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads an object of JSON, of at most :data:`MOST_JSON` bytes."""
    _check_regular(path)
    try:
        if (size := path.stat().st_size) > MOST_JSON:
            raise CheckpointError(f"{path}: has {size} bytes, expected at most {MOST_JSON}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: got a JSON {type(content).__name__}, expected an object")
    return content


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the tensors and the metadata of a file of safetensors."""
    _check_regular(path)
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            if len(names) > MOST_TENSORS:
                raise ValueError(f"has {len(names)} tensors, expected at most {MOST_TENSORS}")
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except Exception as error:  # the library raises errors of many classes
        raise CheckpointError(f"{path}: is not a safetensors file, or damaged: {_line(error)}") from error


def load_pickle(path: Path) -> Any:
    """Reads what ``torch.save`` wrote, onto the CPU, without running code from it."""
    _check_regular(path)
    with open(path, "rb") as file:
        start = file.read(16)
        file.seek(0)
        try:
            (_check_archive if start.startswith(_ZIP) else _check_pickles)(file)
            return torch.load(path, map_location="cpu", weights_only=True)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except Exception as error:  # pickletools and unpickling raise anything for damaged bytes
            if unsafe := re.search(r"GLOBAL (\S{1,100})", str(error)):
                raise CheckpointError(f"{path}: {_holding(_line(unsafe[1]))}") from error
            raise CheckpointError(
                f"{path}: is not a file of torch.save, or damaged; it begins with {start!r}"
            ) from error


def why_larger(tensors: Iterable[Tensor], size: int) -> str | None:
    """Returns how tensors have more elements than a file of ``size`` bytes can hold, or None.

    A file may repeat one number all over a tensor. Tensors may share their numbers, as layers that are one
    module do; each gets a copy when it is loaded, so the sum of all is bounded too.
    """
    total = 0
    held: dict[int, int] = {}
    for tensor in filter(is_plain, tensors):
        storage, needed = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
        total += needed
        held[storage.data_ptr()] = max(held.get(storage.data_ptr(), 0), storage.nbytes(), needed)
    if (once := sum(held.values())) > size:
        return f"has {size} bytes, and its tensors have {once}; expected every number of theirs in the file"
    if total > _MOST_SHARING * size:
        return f"has {size} bytes, and its tensors have {total}, more than {_MOST_SHARING} times as many"
    return None


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is an array in memory, which may repeat its numbers."""
    of_another_kind = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return not of_another_kind and tensor.layout == torch.strided


def _check_regular(path: Path) -> None:
    """Raises for a device, which has no end, and a pipe, which would be waited for."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: is no regular file")


def _line(error: object) -> str:
    """Returns the message of an error, which may quote the file, as one line of at most 300 characters."""
    return printable(" ".join(str(error).split()))[:300]


def _holding(name: str) -> str:
    return f"holds pickled code or objects ({name:.100}), expected tensors only; not loaded"


# Bounds that torch.load lacks -----------------------------------------------------------------------------


def _check_archive(file: BinaryIO) -> None:
    """Raises CheckpointError unless an archive of zip is one that ``torch.save`` wrote.

    It writes every member once, one after the other and not compressed. ``torch.load`` checks none of this,
    and no checksum either: a flipped bit in a weight would go unnoticed. ``torch.save`` can be told to
    compute none; then all are 0.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _check_members(archive)
            _check_directory(archive, file)
            if not any(member.CRC for member in archive.infolist()):
                for member in archive.infolist():
                    member.CRC = None  # type: ignore[assignment]  # zipfile compares none then
            if (damaged := archive.testzip()) is not None:
                raise CheckpointError(f"is damaged: wrong checksum of {damaged!r:.100}")
            for member in archive.infolist():
                # torch.load ignores case, and the name that an extra field may have put in place of this one.
                if member.orig_filename.lower().endswith(".pkl"):
                    _check_pickles(io.BytesIO(archive.read(member)))
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises errors of many classes for damaged archives
        raise CheckpointError(f"is not a file of torch.save, or damaged: {_line(error)}") from error


def _check_members(archive: zipfile.ZipFile) -> None:
    """Raises for members that are compressed or overlap, and for anything before the first."""
    end = 0
    for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise CheckpointError(
                f"is compressed ({member.filename!r:.100}), which torch.save never does; not unpacked"
            )
        if member.header_offset < end or (not end and member.header_offset):
            raise CheckpointError(
                f"is damaged: its member {member.filename!r:.100} overlaps another or is not in its place"
            )
        end = member.header_offset + _ZIP_HEADER + len(member.filename) + member.compress_size


def _check_directory(archive: zipfile.ZipFile, file: BinaryIO) -> None:
    """Raises if torch.load may find another directory in an archive than zipfile.

    It goes by the places that the end of the archive names; zipfile assumes that the directory and the longer
    form of the end are right before that.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(max(size - _ZIP_ENDS, 0))
    ends = file.read()
    if archive.comment or ends[-22:-18] != _ZIP_END:
        raise CheckpointError("is damaged: has bytes after its end")
    place, is_found = ends[-6:-2], True
    if ends[-42:-38] == _ZIP_END_PLACE:
        is_found = ends[:4] == _ZIP_END_64 and int.from_bytes(ends[-34:-26], "little") == size - _ZIP_ENDS
        place = ends[48:56]
    if not is_found or int.from_bytes(place, "little") != archive.start_dir:
        raise CheckpointError("is damaged: its directory is not in its place")


def _check_pickles(file: BinaryIO) -> None:
    """Raises CheckpointError if pickles at the start of a file may take memory that the file does not.

    Raises:
        Exception: The bytes are no whole pickles; torch.load must not read them either.
    """
    for _ in range(_PICKLES_OF_OLD_FILES):
        start = file.tell()
        if not file.read(1):
            break
        file.seek(start)
        for opcode, argument, _ in pickletools.genops(file):
            # Joined as torch.load does, which does not care where the module ends and the name begins.
            call = opcode.name == "GLOBAL" and _ALLOCATING.fullmatch(str(argument).replace(" ", "."))
            if call:
                raise CheckpointError(_holding(call[call.lastindex or 0]))
