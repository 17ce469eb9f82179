"""Images and labels in the IDX format of MNIST, verified before use.

An IDX file is two zero bytes, the type code (8: unsigned bytes), the number of
dimensions, each dimension as a big-endian 32-bit integer, then the data. The files
are published gzipped; plain ones are read as well.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mamba_cli.data.download import describe_content
from mamba_cli.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
UNSIGNED_BYTES = 0x08


class IdxFile(NamedTuple):
    """What one IDX file must be.

    ``md5`` is that of the *uncompressed* file, because mirrors and archives wrap
    the same content in different gzip headers; ``None`` where none is published.
    """

    name: str
    shape: tuple[int, ...]
    md5: str | None

    @property
    def magic(self) -> int:
        """The first four bytes as a number: 2051 for images, 2049 for labels."""
        return UNSIGNED_BYTES << 8 | len(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the uncompressed file."""
        return 4 + 4 * len(self.shape) + int(np.prod(self.shape))

    def describe(self) -> str:
        """Name and hash, for a message."""
        if self.md5 is None:
            return f"{self.name}.gz ({self.num_bytes:,} bytes uncompressed)"
        return f"{self.name}.gz (MD5 of the uncompressed file: {self.md5})"


def read_idx(path: Path, expected: IdxFile) -> NDArray[np.uint8]:
    """The array in ``path``, ``expected.shape``, bytes.

    Raises
    ------
    DataError
        The file cannot be read, is not gzip or IDX, is truncated, or differs in
        magic number, dimensions, size or MD5 from ``expected``. The message names
        the path, what was expected and found, and what to do.
    """

    def wrong(what: str, wanted: object, found: object) -> DataError:
        return DataError(
            f"{path}: {what}: expected {wanted}, found {found}. "
            f"Remove the file to have it downloaded again, or put the published "
            f"{expected.describe()} in its place."
        )

    content = _read_content(path, expected, wrong)
    header_bytes = 4 + 4 * len(expected.shape)
    if len(content) < header_bytes:
        raise wrong("truncated", f"{expected.num_bytes:,} bytes", f"{len(content):,} bytes")
    (magic,) = struct.unpack(">I", content[:4])
    if magic != expected.magic:
        raise wrong("wrong magic number", expected.magic, magic)
    shape = struct.unpack(f">{len(expected.shape)}I", content[4:header_bytes])
    if shape != expected.shape:
        raise wrong("wrong dimensions", _times(expected.shape), _times(shape))
    if len(content) != expected.num_bytes:
        found = f"{len(content):,} bytes" + (" or more" * (len(content) > expected.num_bytes))
        raise wrong("wrong size", f"{expected.num_bytes:,} bytes", found)
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if expected.md5 is not None and md5 != expected.md5:
        raise wrong("wrong content", f"MD5 {expected.md5} (uncompressed)", f"MD5 {md5}")
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(expected.shape)


def check_labels(path: Path, labels: NDArray[np.uint8], num_classes: int) -> None:
    """Raise ``DataError`` for a label outside 0 ... ``num_classes`` - 1.

    An index out of range would otherwise be clamped silently on its way to a device.
    """
    if labels.size and labels.max() >= num_classes:
        row = int(np.argmax(labels >= num_classes))
        raise DataError(
            f"{path}: wrong label: expected 0 to {num_classes - 1}, found {labels[row]} in row "
            f"{row}. Replace the file by the published one."
        )


def _read_content(path: Path, expected: IdxFile, wrong) -> bytes:  # type: ignore[no-untyped-def]
    """The uncompressed bytes, one more than expected at most."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
        compressed = head.startswith(GZIP_MAGIC)
        if not compressed and (path.suffix == ".gz" or not head.startswith(b"\0\0")):
            raise wrong("wrong content", "a gzipped IDX file", describe_content(head))
        opener = gzip.open if compressed else open
        with opener(path, "rb") as stream:
            # Reading one byte more than wanted reaches the end of a good file, where
            # gzip checks its CRC, and stops early in one that is far too long.
            return bytes(stream.read(expected.num_bytes + 1))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise wrong("truncated or damaged gzip", "a complete file", str(error)) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{n:,}" for n in shape)
