"""MNIST: handwritten digits (LeCun, Cortes and Burges 2010), 60,000 + 10,000.

The MD5s are those of the uncompressed published files. The two mirrors serve the
gzipped files whose own MD5s are f68b3c2d..., d53e105e..., 9fb629c4..., ec29112d...
(torchvision); only the content counts here, so other gzip wrappers are fine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mamba_cli.data.download import DataDir, fetch, first_existing, resolve_data_dir
from mamba_cli.data.idx import IdxFile, check_labels, read_idx

NUM_CLASSES = 10
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


class MnistFiles(NamedTuple):
    """The four files of a data set in MNIST's layout."""

    train_images: IdxFile
    train_labels: IdxFile
    test_images: IdxFile
    test_labels: IdxFile


PUBLISHED = MnistFiles(
    IdxFile("train-images-idx3-ubyte", (60_000, 28, 28), "6bbc9ace898e44ae57da46a324031adb"),
    IdxFile("train-labels-idx1-ubyte", (60_000,), "a25bea736e30d166cdddb491f175f624"),
    IdxFile("t10k-images-idx3-ubyte", (10_000, 28, 28), "2646ac647ad5339dbf082846283269ea"),
    IdxFile("t10k-labels-idx1-ubyte", (10_000,), "27ae3e4e09519cfbb04c329615203637"),
)


class Mnist(NamedTuple):
    """Images as bytes ``[num_images, num_pixels]`` (0 ... 255), labels ``[num_images]``."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


def load_mnist(
    data_dir: DataDir = None,
    *,
    mirrors: Sequence[str] = MIRRORS,
    files: MnistFiles = PUBLISHED,
) -> Mnist:
    """Read MNIST in place, downloading what is missing.

    Each file is looked for, gzipped or plain, in ``mnist/`` and ``MNIST/raw/`` of
    ``data_dir`` and directly in it; without ``data_dir`` in the per-user cache. A
    missing one is downloaded into ``mnist/`` there.

    Parameters
    ----------
    mirrors
        Base addresses that end in a slash, tried in order.
    files
        Names, shapes and MD5s to verify against.

    Raises
    ------
    DataError
        Missing without a way to download it, or not the published content.
    """
    root = resolve_data_dir(data_dir)

    def load(file: IdxFile) -> tuple[Path, NDArray[np.uint8]]:
        path = _locate(root, file.name)
        if path is None:
            path = fetch(
                f"{file.name}.gz",
                [f"{mirror}{file.name}.gz" for mirror in mirrors],
                root / "mnist",
                lambda arrived: read_idx(arrived, file),
                ", ".join(each.describe() for each in files),
            )
        return path, read_idx(path, file)

    arrays = []
    for file in files:
        path, array = load(file)
        if len(file.shape) == 1:
            check_labels(path, array, NUM_CLASSES)
        arrays.append(array.reshape(len(array), -1) if array.ndim > 1 else array)
    return Mnist(*arrays)


def _locate(root: Path, name: str) -> Path | None:
    """Where the file ``name`` lies under ``root``, gzipped or plain."""
    folders = (root / "mnist", root / "MNIST" / "raw", root)
    return first_existing(folder / f"{name}{end}" for folder in folders for end in (".gz", ""))
