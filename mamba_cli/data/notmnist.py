"""notMNIST: images of the letters A to J in MNIST's format, for out-of-distribution tests.

The files have no published address with hashes, so the user places them by hand and
only their format and size are verified.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mamba_cli.data.download import DataDir, first_existing, resolve_data_dir
from mamba_cli.data.idx import IdxFile, read_idx
from mamba_cli.errors import DataError

LETTERS = IdxFile("t10k-images-idx3-ubyte", (10_000, 28, 28), None)


def has_letters(data_dir: DataDir = None, *, file: IdxFile = LETTERS) -> bool:
    """Whether the letters are there to be loaded."""
    return _locate(resolve_data_dir(data_dir), file.name) is not None


def load_letters(data_dir: DataDir = None, *, file: IdxFile = LETTERS) -> NDArray[np.uint8]:
    """The letters as bytes, ``[num_images, num_pixels]``.

    They are looked for in the folder ``notmnist/`` alone, never beside the MNIST files,
    whose names they share.

    Raises
    ------
    DataError
        Missing, or not images of the expected size.
    """
    root = resolve_data_dir(data_dir)
    path = _locate(root, file.name)
    if path is None:
        raise DataError(
            f"notMNIST is not in {root / 'notmnist'}: expected {file.describe()}, images of "
            "letters in MNIST's IDX format. Put the file there by hand, or do without the "
            "out-of-distribution metrics."
        )
    return read_idx(path, file).reshape(file.shape[0], -1)


def _locate(root: Path, name: str) -> Path | None:
    return first_existing(root / "notmnist" / f"{name}{end}" for end in (".gz", ""))
