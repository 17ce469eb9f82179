"""A user's own data: read from .npz, .npy, .csv or .parquet, and checked before anything runs.

Whatever the source, the result is a pytree of arrays that share their leading axis, one row a
datum. Floating-point arrays become float32 and integers int32, the precision chains run in.

An array that is memory-mapped and already in that precision stays in its file: compiled programs
read the mapped pages where they lie, and the system keeps as many of them as it has memory for.
Nothing is read, drawn or computed in another way than from memory, so that results are the same bit
for bit. The file must not change while it is used.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from mamba_cli.errors import ConfigError, DataError, first_line
from mamba_cli.types import PyTree

SUFFIXES = (".npz", ".npy", ".csv", ".parquet")

COPIES_IN_MEMORY = 3
"""The rows, the same cut into blocks for the MAP and the ground truth, and room to convert."""

ROWS_PER_CHECK, CHECK_BYTES = 1 << 16, 16 << 20
"""Rows looked at together at most, and their bytes."""

LOST_SHARE, CONSTANT_TO = 0.01, 1e-10
"""Rounding errors that are refused, as a share of a column's range; ranges that are none."""

ALIGNMENT = 64
"""Of arrays that programs read where they lie: that of XLA's own, and of the data in a .npy."""

KINDS: dict[str, type] = {"f": np.float32, "i": np.int32, "u": np.int32, "b": np.bool_}
"""What an array becomes, by the kind of its values."""

FREES_MEMORY = (
    "In a .npy of float32, int32 or bool rows stay in the file, so that they may be more than fit "
    "into memory; np.load(..., mmap_mode='r') and np.lib.format.open_memmap(..., dtype='float32') "
    "convert one in parts, and model.data= may be a folder of several."
)

Columns = Mapping[str, str | Sequence[str]]


def read_data(path: str | Path, columns: Columns | None = None) -> PyTree:
    """Read a data file.

    Parameters
    ----------
    path
        ``.npz``: its arrays by name. ``.npy``: the array, memory-mapped (a structured array: its
        fields by name). A folder: the arrays of its ``.npy`` files by name. ``.csv`` and
        ``.parquet``: the columns by name.
    columns
        For tables: which array is made of which columns, ``{"x": ["age", "dose"], "y": "ill"}``.
        One name gives an array ``[num_rows]``, a list a matrix ``[num_rows, num_columns]``.

    Returns
    -------
    A dict of arrays, or the one array of a ``.npy``; not checked yet, see :func:`checked_rows`.

    Raises
    ------
    ConfigError
        The file is of another kind, ``columns`` names a column that is not there, or is given for
        a file that has none.
    DataError
        The file is missing or cannot be read.
    """
    path = Path(path).expanduser()
    if path.suffix not in SUFFIXES and not path.is_dir():
        raise ConfigError(
            f"model.data={str(path)!r} is not allowed: it must end in {', '.join(SUFFIXES)}, or be "
            "a folder of .npy files."
        )
    is_table = path.suffix in (".csv", ".parquet")
    if columns is not None and not is_table:
        raise ConfigError(
            f"model.columns={dict(columns)!r} is not allowed with {path.name}: only .csv and "
            ".parquet have columns; the arrays of .npz have their own names."
        )
    try:
        if is_table:
            return _from_table(_read_table(path), path, columns)
        if path.is_dir():
            return {file.stem: _from_numpy(file) for file in files_of(path)}
        return _from_numpy(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; model.data= names the data file.") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"cannot read {path}: {first_line(error)}") from error


def files_of(path: Path) -> list[Path]:
    """The files that data are read from: itself, or the ``.npy`` files of a folder, in order."""
    return sorted(path.glob("*.npy")) if path.is_dir() else [path]


def _from_numpy(path: Path) -> PyTree:
    if path.suffix == ".npz":
        # Opened here: of a damaged archive NumPy would leave the file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return array if array.dtype.names is None else {name: array[name] for name in array.dtype.names}


def _read_table(path: Path) -> pd.DataFrame:
    if path.suffix == ".csv":
        return pd.read_csv(path)
    try:
        return pd.read_parquet(path)
    except ImportError as error:
        raise ConfigError(
            f"model.data={str(path)!r}: reading Parquet needs pyarrow, which is not installed: "
            "pip install pyarrow, or convert the file to .csv or .npz."
        ) from error


def _from_table(table: pd.DataFrame, path: Path, columns: Columns | None) -> dict[str, np.ndarray]:
    chosen: Columns = {str(name): str(name) for name in table.columns}
    if columns is not None:
        chosen = columns
    arrays = {}
    for name, source in chosen.items():
        listed = [source] if isinstance(source, str) else list(source)
        parts = [_column(table, column, name, path) for column in listed]
        arrays[name] = parts[0] if isinstance(source, str) else np.stack(parts, axis=1)
    return arrays


def _column(table: pd.DataFrame, column: str, name: str, path: Path) -> np.ndarray:
    if column not in table.columns:
        known = ", ".join(map(str, table.columns))
        raise ConfigError(
            f"model.columns.{name}={column!r}: {path} has no such column. It has {known}."
        )
    return _values_of(table[column], column, str(path))


def _values_of(values: pd.Series, column: str, source: str) -> np.ndarray:
    missing = np.flatnonzero(values.isna().to_numpy())
    if len(missing):
        raise DataError(
            f"{source}: column {column}, row {missing[0]} (counted from 0) is empty or NaN, "
            f"{len(missing)} such values in all; every row needs a value."
        )
    if not (pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values)):
        raise DataError(
            f"{source}: column {column} holds text (row 0: {values.iloc[0]!r}); expected numbers. "
            "Code categories as whole numbers 0, 1, ..., or choose columns with model.columns."
        )
    return values.to_numpy()


def checked_rows(data: PyTree, source: str) -> PyTree:
    """``data`` as arrays of one leading axis in the precision of chains, everything finite.

    Parameters
    ----------
    data
        A pytree of arrays, or of nested lists of numbers. A DataFrame in it is its columns by name.
    source
        Where it comes from, for messages: ``data.npz``, ``my_model.py, data``.

    Returns
    -------
    The same pytree; an array that can stay in its file is the ``np.memmap`` that was given.

    Raises
    ------
    DataError
        There is no array or no row; lengths differ; a value is not a finite number (its row and
        column are named); single precision does not hold it, or rounds the differences between
        rows away; what has to be in memory does not fit.
    """
    data = jax.tree.map(
        lambda leaf: _columns_of(leaf, source), data, is_leaf=lambda node: _is_list_of_numbers(node)
    )
    leaves, structure = jax.tree_util.tree_flatten_with_path(data, is_leaf=_is_list_of_numbers)
    named = [(_name_of(path), _as_array(leaf, _name_of(path), source)) for path, leaf in leaves]
    if not named:
        raise DataError(f"{source}: there is no array in it; expected at least one.")
    for name, array in named:
        if array.ndim == 0:
            raise DataError(
                f"{source}: {name} is a single number; expected an array whose first axis is rows."
            )
    first_name, first = named[0]
    for name, array in named:
        if len(array) != len(first):
            raise DataError(
                f"{source}: {first_name} has {len(first):,} rows and {name} has {len(array):,}; "
                "expected the same number of rows (first axis) in every array."
            )
    if not len(first):
        raise DataError(f"{source}: it is empty (no rows); expected at least one.")
    _check_memory([array for _, array in named], source)
    converted = [_converted(array, name, source) for name, array in named]
    return jax.tree_util.tree_unflatten(structure, converted)


def _columns_of(leaf: Any, source: str) -> Any:
    """A DataFrame as a dict of its columns; anything else as it is."""
    if not isinstance(leaf, pd.DataFrame):
        return leaf
    return {str(name): _values_of(leaf[name], str(name), source) for name in leaf.columns}


def _is_list_of_numbers(node: Any) -> bool:
    """Whether a list is an array written out, and not a structure of arrays."""
    return isinstance(node, list) and all(isinstance(item, int | float | list) for item in node)


def _name_of(path: tuple[Any, ...]) -> str:
    """A leaf's place in its pytree as a reader says it: ``x``, ``0.weights``; ``data`` alone."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "the array"


def _as_array(leaf: Any, name: str, source: str) -> np.ndarray:
    try:
        array = np.asanyarray(leaf)
    except ValueError as error:
        raise DataError(f"{source}: {name} is not an array: {first_line(error)}") from error
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"{source}: {name} holds {array.dtype} values; expected real numbers (floating-point, "
            "integer or boolean)."
        )
    return array


def on_device(rows: PyTree) -> PyTree:
    """The arrays of :func:`checked_rows` as JAX's; those that are mapped stay in their files.

    Programs take a buffer of the host as it is where it is aligned, and keep the mapping open.
    """

    def placed(leaf: np.ndarray) -> jax.Array:
        # As an ndarray: JAX copies what is of a subclass.
        is_mapped = isinstance(leaf, np.memmap)
        return jax.device_put(np.asarray(leaf)) if is_mapped else jnp.asarray(leaf)

    return jax.tree.map(placed, rows)


def _can_stay(array: np.ndarray) -> bool:
    """Whether programs can read an array in its file, as it lies."""
    return (
        isinstance(array, np.memmap)
        and array.dtype == KINDS[array.dtype.kind]
        and array.flags.c_contiguous
        and array.ctypes.data % ALIGNMENT == 0
        and jax.default_backend() == "cpu"
    )


def _check_memory(arrays: Sequence[np.ndarray], source: str) -> None:
    in_memory = [array for array in arrays if not _can_stay(array)]
    require_memory(
        sum(COPIES_IN_MEMORY * 4 * array.size for array in in_memory),
        f"{source}: {len(arrays[0]):,} rows",
        f"Take fewer rows, or a machine with more memory. {FREES_MEMORY}",
    )


def require_memory(num_bytes: int, what: str, advice: str) -> None:
    """Refuse what does not fit into memory. Raises ``DataError``."""
    free = _available_bytes()
    if free is not None and num_bytes > free:
        raise DataError(
            f"{what} need about {num_bytes / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB "
            f"are free. {advice}"
        )


def _available_bytes() -> int | None:
    """Memory that can be had, of the system and of the group that limits this process, if any."""
    known = [size for size in (_free_bytes(), _free_bytes_of_group()) if size is not None]
    return min(known, default=None)


def _free_bytes() -> int | None:
    """What the system can give without swapping, its cache of files included."""
    for line in _lines(Path("/proc/meminfo")):
        name, _, size = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(size.split()[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _free_bytes_of_group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the control group of a container or job leaves (cgroup v2); ``None`` without a limit."""
    limit, used = (_lines(root / name) for name in ("memory.max", "memory.current"))
    if not limit or not used or limit[0] == "max":
        return None
    statistics = dict(line.split() for line in _lines(root / "memory.stat"))
    reclaimable = int(statistics.get("inactive_file", 0))
    return max(0, int(limit[0]) - int(used[0]) + reclaimable)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []


def _converted(array: np.ndarray, name: str, source: str) -> np.ndarray:
    """In the precision chains run in, checked a part of the rows at a time."""
    kind = KINDS[array.dtype.kind]
    stays = _can_stay(array)
    result: np.ndarray = array if stays else np.empty(array.shape, kind)
    rounding = _Rounding(array.shape[1:])
    num_rows = max(1, min(ROWS_PER_CHECK, CHECK_BYTES * len(array) // max(array.nbytes, 1)))
    for start in range(0, len(array), num_rows):
        part = np.asarray(array[start : start + num_rows])
        with np.errstate(over="ignore", invalid="ignore"):
            chunk: np.ndarray = part.astype(kind, copy=False)
        is_good = np.isfinite(chunk) if array.dtype.kind == "f" else chunk == part
        if not is_good.all():
            at = tuple(int(i) for i in np.argwhere(~is_good)[0])
            raise DataError(
                f"{source}: {name}, row {start + at[0]}{_column_of(at)} (counted from 0) is "
                f"{part[at]!s}; expected a finite number that single precision holds."
            )
        if not stays:
            result[start : start + len(part)] = chunk
        if chunk.dtype != part.dtype and part.dtype.kind == "f":
            rounding.add(part, chunk)
    rounding.check(name, source)
    return result


class _Rounding:
    """What rounding to single precision leaves of the differences between rows, by column."""

    def __init__(self, columns: tuple[int, ...]) -> None:
        self.smallest = np.full(columns, np.inf)
        self.largest = np.full(columns, -np.inf)
        self.error = np.zeros(columns)

    def add(self, part: np.ndarray, rounded: np.ndarray) -> None:
        self.smallest = np.minimum(self.smallest, part.min(axis=0))
        self.largest = np.maximum(self.largest, part.max(axis=0))
        self.error = np.maximum(self.error, np.abs(part - rounded).max(axis=0))

    def check(self, name: str, source: str) -> None:
        """Raises ``DataError`` where rows that differ would come out alike."""
        span = np.where(np.isfinite(self.largest), self.largest - self.smallest, 0.0)
        size = np.maximum(np.abs(self.smallest), np.abs(self.largest))
        # A column that varies by the rounding of double precision alone is a constant.
        varies = span > CONSTANT_TO * np.where(np.isfinite(size), size, 0.0)
        lost = varies & (self.error > LOST_SHARE * span)
        if not lost.any():
            return
        at = tuple(int(i) for i in np.argwhere(lost)[0])
        place = f", column {at[0] if len(at) == 1 else at}" if at else ""
        raise DataError(
            f"{source}: {name}{place} (counted from 0) lies between {self.smallest[at]:.17g} and "
            f"{self.largest[at]:.17g}, and single precision rounds it by up to "
            f"{self.error[at]:.2g}: subtract a constant from it first (its mean, a first date)."
        )


def _column_of(at: tuple[int, ...]) -> str:
    rest = at[1:]
    if not rest:
        return ""
    return f", column {rest[0] if len(rest) == 1 else rest}"
