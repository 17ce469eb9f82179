"""MovieLens 100K (Harper and Konstan 2015) and its five published folds.

100,000 ratings of 1 to 5 by 943 users of 1,682 items. Fold k trains on ``uk.base``
(80,000 ratings) and tests on ``uk.test`` (20,000); together they are ``u.data``. The
licence forbids redistribution: every user's copy comes from GroupLens.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mamba_cli.data.download import DataDir, describe_content, fetch, resolve_data_dir
from mamba_cli.errors import ConfigError, DataError

ARCHIVE = "ml-100k.zip"
ADDRESSES = ("https://files.grouplens.org/datasets/movielens/ml-100k.zip",)
FOLDS = (1, 2, 3, 4, 5)
MAX_RATING = 5


class MovieLensFiles(NamedTuple):
    """What the data set must be; the defaults are the published values."""

    num_users: int = 943
    num_items: int = 1_682
    num_ratings: int = 100_000
    archive_md5: str = "0e33842e24a9c977be4e0107933c0723"

    @property
    def num_test(self) -> int:
        """Ratings in the test part of a fold."""
        return self.num_ratings // len(FOLDS)


PUBLISHED = MovieLensFiles()


class Ratings(NamedTuple):
    """Triples: ``users`` and ``items`` count from 0, ``ratings`` are 1 to 5; ``[num_ratings]``."""

    users: NDArray[np.int32]
    items: NDArray[np.int32]
    ratings: NDArray[np.int8]


class Fold(NamedTuple):
    """One fold: every user-item pair occurs at most once, in one of the two parts."""

    train: Ratings
    test: Ratings
    num_users: int
    num_items: int


class _Source(NamedTuple):
    """Where the files are read from: the bytes of a file by its name, and its path for messages."""

    read: Callable[[str], bytes]
    path: Callable[[str], str]


def load_movielens(
    fold: int = 1,
    data_dir: DataDir = None,
    *,
    addresses: Sequence[str] = ADDRESSES,
    files: MovieLensFiles = PUBLISHED,
) -> Fold:
    """Read a fold in place, downloading the archive if there is nothing to read.

    Looked for in this order: the extracted files in ``ml-100k/`` of ``data_dir`` or
    directly in it, then ``ml-100k.zip`` in ``data_dir`` or in its ``ml-100k/``, which is
    read without extracting it; without ``data_dir`` in the per-user cache.

    Parameters
    ----------
    fold
        1 to 5.
    addresses
        Full addresses of the archive, tried in order.
    files
        Sizes and the MD5 of the archive to verify against.

    Raises
    ------
    ConfigError
        ``fold`` is not 1 to 5.
    DataError
        Missing without a way to download it, or not what it should be: hash of the
        archive, number of rows, ids, ratings, a pair that occurs twice, or a fold
        that together is not ``u.data``.
    """
    if fold not in FOLDS:
        raise ConfigError(f"model.fold={fold}: expected one of 1, 2, 3, 4, 5")
    names = ("u.data", f"u{fold}.base", f"u{fold}.test")
    source = _find(resolve_data_dir(data_dir), names, addresses, files)
    num_test = files.num_test
    sizes = (files.num_ratings, files.num_ratings - num_test, num_test)
    complete, base, test = (
        _parse(source.read(name), source.path(name), size, files)
        for name, size in zip(names, sizes, strict=True)
    )
    _check_partition(complete, base, test, [source.path(name) for name in names], files)
    return Fold(_triples(base), _triples(test), files.num_users, files.num_items)


def _find(
    root: Path, names: Sequence[str], addresses: Sequence[str], files: MovieLensFiles
) -> _Source:
    for folder in (root / "ml-100k", root):
        if all((folder / name).is_file() for name in names):
            return _folder_source(folder)
    for archive in (root / ARCHIVE, root / "ml-100k" / ARCHIVE):
        if archive.is_file():
            _check_archive(archive, files)
            return _archive_source(archive)
    archive = fetch(
        ARCHIVE,
        addresses,
        root,
        lambda arrived: _check_archive(arrived, files),
        f"{ARCHIVE} (MD5 {files.archive_md5}), or the files {', '.join(names)} from it "
        f"in {root / 'ml-100k'}",
    )
    return _archive_source(archive)


def _folder_source(folder: Path) -> _Source:
    def read(name: str) -> bytes:
        try:
            return (folder / name).read_bytes()
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{folder / name} cannot be read: {reason}") from error

    return _Source(read, lambda name: str(folder / name))


def _archive_source(archive: Path) -> _Source:
    def read(name: str) -> bytes:
        try:
            with zipfile.ZipFile(archive) as opened:
                return opened.read(f"ml-100k/{name}")
        except (KeyError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{archive}: cannot read ml-100k/{name} from it: {error}. Replace the archive "
                f"by the published one ({ADDRESSES[0]})."
            ) from error

    return _Source(read, lambda name: f"{archive}:ml-100k/{name}")


def _check_archive(archive: Path, files: MovieLensFiles) -> None:
    """Raise ``DataError`` unless the archive has the published MD5."""
    try:
        content = archive.read_bytes()
    except OSError as error:
        raise DataError(f"{archive} cannot be read: {error.strerror or error}") from error
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 != files.archive_md5:
        looks = "" if content.startswith(b"PK") else f", {describe_content(content[:512])}"
        raise DataError(
            f"{archive}: wrong content: expected MD5 {files.archive_md5}, found MD5 {md5}{looks}. "
            f"Remove the file to have it downloaded again, or put {ADDRESSES[0]} in its place."
        )


def _parse(content: bytes, path: str, num_rows: int, files: MovieLensFiles) -> NDArray[np.int64]:
    """Rows ``(user, item, rating, timestamp)`` as in the file, verified, ``[num_rows, 4]``."""
    remedy = f"Replace it by the file of the same name in {ADDRESSES[0]}."

    def wrong(what: str, wanted: object, found: object) -> DataError:
        return DataError(f"{path}: {what}: expected {wanted}, found {found}. {remedy}")

    lines = content.splitlines()
    four_integers = "four integers (user, item, rating, timestamp)"
    if content.lstrip()[:1] == b"<":
        raise wrong("wrong content", four_integers, describe_content(content[:512]))
    try:
        tokens = [line.split() for line in lines]
        table = np.array(tokens, dtype=np.int64)
    except (ValueError, OverflowError):
        number, line = next((i, line) for i, line in enumerate(lines, 1) if not _is_row(line))
        shown = repr(line[:60].decode("latin-1"))
        raise wrong(f"wrong format in line {number}", four_integers, shown) from None
    if len(table) != num_rows:
        raise wrong("wrong number of rows", f"{num_rows:,}", f"{len(table):,}")
    if table.ndim != 2 or table.shape[1] != 4:
        raise wrong("wrong format in line 1", four_integers, f"{table.shape[-1]} in each line")
    limits = (("user id", files.num_users), ("item id", files.num_items), ("rating", MAX_RATING))
    for column, (what, largest) in enumerate(limits):
        outside = (table[:, column] < 1) | (table[:, column] > largest)
        if outside.any():
            row = int(np.argmax(outside))
            found = int(table[row, column])
            raise wrong(f"wrong {what} in line {row + 1}", f"1 to {largest:,}", found)
    return table


def _is_row(line: bytes) -> bool:
    fields = line.split()
    return len(fields) == 4 and all(field.isdigit() and len(field) < 19 for field in fields)


def _check_partition(
    complete: NDArray[np.int64],
    base: NDArray[np.int64],
    test: NDArray[np.int64],
    paths: Sequence[str],
    files: MovieLensFiles,
) -> None:
    """Raise ``DataError`` unless the parts are disjoint and together the complete data."""

    def pairs(table: NDArray[np.int64]) -> NDArray[np.int64]:
        return table[:, 0] * (files.num_items + 1) + table[:, 1]

    complete_path, base_path, test_path = paths
    for table, path in ((complete, complete_path), (base, base_path), (test, test_path)):
        repeated = len(table) - len(np.unique(pairs(table)))
        if repeated:
            raise DataError(
                f"{path}: expected every user-item pair once, found {repeated:,} repeated. "
                f"Replace it by the file of the same name in {ADDRESSES[0]}."
            )
    common = np.intersect1d(pairs(base), pairs(test)).size
    if common:
        raise DataError(
            f"{base_path} and {test_path}: expected disjoint parts, found {common:,} user-item "
            f"pairs in both. Replace them by the files of the same names in {ADDRESSES[0]}."
        )
    together = np.concatenate([base, test])
    different = (
        together[np.argsort(pairs(together))] != complete[np.argsort(pairs(complete))]
    ).any(1)
    if different.any():
        raise DataError(
            f"{base_path} and {test_path}: expected the rows of {complete_path}, found "
            f"{int(different.sum()):,} that differ. Replace them by the files of the same names "
            f"in {ADDRESSES[0]}."
        )


def _triples(table: NDArray[np.int64]) -> Ratings:
    return Ratings(
        (table[:, 0] - 1).astype(np.int32),
        (table[:, 1] - 1).astype(np.int32),
        table[:, 2].astype(np.int8),
    )
