"""The header of a GGUF file, and its tensors by rows.

``gguf.GGUFReader`` makes an array object for each part of each string, which takes
two seconds for an ordinary vocabulary. The header is simple enough to be read
straight; constants, block sizes and the dequantiser are the package's.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from specjax.weights._assemble import StoredTensor

_VERSIONS = (2, 3)
_SCALARS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}


class GgufFile(NamedTuple):
    """What a GGUF file says about itself.

    Attributes:
      fields: metadata as plain Python values, by full name.
      tensors: its tensors by name, not read yet.
    """

    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a GGUF file.

    Args:
      path: the file.

    Returns:
      Metadata and tensors.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no GGUF file of a known version, or it is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != struct.pack("<I", gguf.GGUF_MAGIC):
            raise ValueError(f"{path} is no GGUF file (or a big-endian one).")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read_header(path, data, size)
            except (struct.error, UnicodeDecodeError) as error:
                raise ValueError(
                    f"{path} is damaged or cut short ({size} bytes): {error}"
                ) from error


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4

    def take(self, code: str, count: int = 1) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        if self.at + size > len(self.data):
            raise struct.error("the header ends early")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        stop = self.at + length
        if stop > len(self.data):
            raise struct.error("a string ends beyond the file")
        text = self.data[self.at : stop].decode("utf-8")
        self.at = stop
        return text

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[gguf.GGUFValueType(kind)])[0]
        if kind == gguf.GGUFValueType.STRING:
            return self.string()
        if kind != gguf.GGUFValueType.ARRAY:
            raise struct.error(f"there is no value type {kind}")
        item, (length,) = self.take("I")[0], self.take("Q")
        if length > len(self.data) - self.at:
            raise struct.error("an array ends beyond the file")
        if item in _SCALARS:
            return list(self.take(_SCALARS[gguf.GGUFValueType(item)], length))
        return [self.value(item) for _ in range(length)]


def _read_header(path: Path, data: mmap.mmap, size: int) -> GgufFile:
    cursor = _Cursor(data)
    (version,) = cursor.take("I")
    if version not in _VERSIONS:
        raise ValueError(
            f"{path} is GGUF version {version}; versions {_VERSIONS} are supported."
        )
    n_tensors, n_fields = cursor.take("Q", 2)
    fields: dict[str, Any] = {}
    for _ in range(n_fields):
        name = cursor.string()
        if name in fields:
            raise ValueError(f"{path} has the field {name} twice.")
        fields[name] = cursor.value(cursor.take("I")[0])
    if fields.get("split.count", 0) > 1:
        raise ValueError(
            f"{path} is one of {fields['split.count']} parts; join them first with "
            "llama.cpp's `llama-gguf-split --merge`."
        )
    infos = []
    for _ in range(n_tensors):
        name = cursor.string()
        shape = cursor.take("Q", cursor.take("I")[0])[::-1]
        kind, offset = cursor.take("I")[0], cursor.take("Q")[0]
        infos.append((name, shape, kind, offset))
    align = fields.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    base = -(-cursor.at // align) * align
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ValueError(f"{path} has the tensor {name} twice.")
        tensors[name] = _tensor(path, name, shape, kind, base + offset, size)
    return GgufFile(fields, tensors)


def _tensor(
    path: Path,
    name: str,
    shape: tuple[int, ...],
    kind: int,
    offset: int,
    size: int,
) -> StoredTensor:
    if not shape or 0 in shape:
        raise ValueError(f"{path}: {name} has the shape {list(shape)}.")
    if kind not in list(gguf.GGMLQuantizationType):
        return StoredTensor(shape, f"type number {kind}", False, _no_rows)
    kind = gguf.GGMLQuantizationType(kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(
            f"{path}: the rows of {name} have {shape[-1]} numbers, no multiple of the "
            f"{block} of a {kind.name} block."
        )
    row_bytes = shape[-1] // block * block_bytes
    n_rows = int(np.prod(shape[:-1], dtype=np.int64))
    if offset + n_rows * row_bytes > size:
        raise ValueError(
            f"{path} is cut short: {name} ends at byte {offset + n_rows * row_bytes} "
            f"of {size}. Download it again."
        )

    def rows(start: int, stop: int) -> np.ndarray:
        if len(shape) == 1:  # one row to GGUF
            return read(0, 1).reshape(-1)[start:stop]
        return read(start, stop)

    def read(start: int, stop: int) -> np.ndarray:
        # Read, not mapped: mapped pages would count as memory in use.
        raw = np.fromfile(
            os.fspath(path),
            np.uint8,
            (stop - start) * row_bytes,
            offset=offset + start * row_bytes,
        )
        return gguf.quants.dequantize(raw.reshape(stop - start, row_bytes), kind)

    return StoredTensor(shape, kind.name, _readable(kind), rows)


def _no_rows(start: int, stop: int) -> np.ndarray:
    raise AssertionError("check_tensors refuses this tensor")


def _readable(kind: gguf.GGMLQuantizationType) -> bool:
    """Asks the dequantiser itself, on one block of zeros."""
    zeros = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    try:
        gguf.quants.dequantize(zeros, kind)
    except NotImplementedError:
        return False
    return True
