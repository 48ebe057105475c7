"""Safe reading of JSON, pickles and safetensors from untrusted sources: no code from a file is run."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from cvt_kernels.messages import printable

#: The most bytes of a JSON file: names of 250,000 classes. Its objects may take 25 times as much memory.
MOST_JSON = 1 << 24


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
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except Exception as error:  # the library raises errors of many classes
        raise CheckpointError(f"{path}: is not a safetensors file, or damaged: {_line(error)}") from error


def load_pickle(path: Path) -> Any:
    """Reads what ``torch.save`` wrote, onto the CPU, without running code from it."""
    _check_regular(path)
    with open(path, "rb") as file:
        start = file.read(16)
    try:
        if zipfile.is_zipfile(path):
            _check_sums(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # unpickling raises anything for damaged bytes
        if unsafe := re.search(r"GLOBAL (\S{1,100})", str(error)):
            holds = f"holds pickled code or objects ({_line(unsafe[1])}), expected tensors only; not loaded"
            raise CheckpointError(f"{path}: {holds}") from error
        raise CheckpointError(
            f"{path}: is not a file of torch.save, or damaged; it begins with {start!r}"
        ) from error


def _check_sums(path: Path) -> None:
    """Raises CheckpointError for a wrong checksum of an archive, which ``torch.load`` does not compare.

    ``torch.save`` can be told to compute none; then all are 0.
    """
    with zipfile.ZipFile(path) as archive:
        if any(member.CRC for member in archive.infolist()) and (damaged := archive.testzip()) is not None:
            raise CheckpointError(f"{path}: is damaged: wrong checksum of {damaged!r:.100}")


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
