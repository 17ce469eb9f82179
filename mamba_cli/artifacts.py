"""The only module that reads or writes result files.

Every file appears whole or not at all: it is written beside its destination, forced to disk and
renamed over it. Whoever reads a run's folder while the run goes on, or after it was killed, sees
the last complete version of each file.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import enum
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import secrets
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, get_type_hints

import jax
import numpy as np
from omegaconf import OmegaConf

from mamba_cli.compilation import cpu_threads
from mamba_cli.errors import ConfigError, DataError, StorageError
from mamba_cli.types import ArmRecord

logger = logging.getLogger(__name__)

TUNING_COLUMNS = ArmRecord._fields

METRICS_COLUMNS = (
    "model",
    "sampler",
    "tuner",
    "seed",
    "repeat",
    "step_size",
    "log10_step_size",
    "batch_size",
    "batch_percent",
    "num_integration_steps",
    "ksd",
    "relative_std_error",
    "accuracy",
    "rmse",
    "mse_of_draws",
    "ece",
    "mce",
    "num_samples",
    "elapsed_s",
    "status",
    "reason",
)

CURVE_COLUMNS = (
    "repeat",
    "elapsed_s",
    "num_samples",
    "num_scored",
    "metric",
    "value",
    "status",
    "reason",
)

# The stages whose seconds provenance.json always lists; a stage that did not run is null.
TIMED_STAGES = (
    "compile",
    "sampling",
    "gradients",
    "reward",
    "ground_truth",
    "evaluation",
    "total",
)

# Keys of the configuration that say where things are or what is done now, and change no result.
KEYS_WITHOUT_EFFECT = (
    "data_dir",
    "model.posterior.data_dir",
    "results_dir",
    "run_dir",
    "stages",
    "dry_run",
    "budget.allow_parallel_wall_clock",
    "ground_truth.recompute",
    "hydra",
)

# Keys that came after runs which are kept, with the values that do what was done without them.
KEYS_ADDED = {
    "budget.clock": "wall",
    "evaluation.curve_metric": "ksd",
    "evaluation.curve_points": 0,
    "ground_truth.converged_share": 1.0,
    "ground_truth.max_s": None,
    "model.ground_truth.converged_share": 1.0,
    "noise._partial_": True,
    "noise._target_": "mamba_cli.noise.threefry",
    "replay": None,
    "tuner.check_s": None,
    "tuner.guards": False,
    "tuner.keep_ties": False,
    "tuner.reward.thin": 1,
}

LOCK_POLL_S = 0.1
"""How often a folder that another process uses is tried again."""

_TEXT_COLUMNS = frozenset({"model", "sampler", "tuner", "status", "reason"})
_INTEGER_COLUMNS = frozenset({"seed", "repeat", "batch_size", "num_integration_steps"})
_META = "__meta__"
_TEMPORARY_SUFFIX = ".part"

_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space, or point results_dir= at another disk",
    errno.EDQUOT: "your disk quota is used up: free some space, or point results_dir= elsewhere",
    errno.EACCES: "no permission to write there: change it, or point results_dir= elsewhere",
    errno.EPERM: "no permission to write there: change it, or point results_dir= elsewhere",
    errno.EROFS: "the file system is read-only: point results_dir= elsewhere",
    errno.EEXIST: "a file is in the way: move it, or point results_dir= elsewhere",
    errno.ENOTDIR: "a file is in the way: move it, or point results_dir= elsewhere",
    errno.EISDIR: "a folder is in the way: move it, or point results_dir= elsewhere",
    errno.EFBIG: "the file is over the size limit of this session: raise it (ulimit -f)",
}


# What may pass without another command: elsewhere the same one would fail again.
_PASSING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE}
)


def _storage_error(path: Path, error: OSError) -> StorageError:
    what = error.strerror or str(error)
    advice = _ADVICE.get(
        error.errno or 0, "check that the path can be written, or point results_dir= elsewhere"
    )
    resume = "; the same command goes on from them" if error.errno in _PASSING else ""
    return StorageError(
        f"cannot write {path}: {what}; {advice}. Files written earlier are intact{resume}."
    )


def _sync_folder(folder: Path) -> None:
    """Force a rename in ``folder`` to disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _storage_error(folder, error) from error


def atomic_write(path: str | Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Write a file so that it is seen whole or not at all.

    The content goes to a temporary file in the same folder (made if missing), which is flushed,
    forced to disk and renamed over ``path``; then the folder is forced to disk. On any failure the
    temporary file is removed and what ``path`` held stays.

    Parameters
    ----------
    path
        The file to write.
    content
        The bytes, or a function that writes them to a binary file.

    Raises
    ------
    StorageError
        The file could not be written: disk full, quota, no permission, read-only.
    """
    path = Path(path)
    _make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}")
    try:
        _write_and_sync(temporary, content)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        _remove_quietly(temporary)
        raise _storage_error(path, error) from error
    except BaseException:
        _remove_quietly(temporary)
        raise


def _write_and_sync(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        if callable(content):
            content(file)
        else:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove_quietly(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove the temporary file %s: %s", path, error)


def remove_leftovers(folder: str | Path, *, older_than_s: float = 0.0) -> None:
    """Remove the temporary files that a killed writer left in ``folder``, not in those below.

    In a folder that several processes write to, ``older_than_s`` spares the file that another
    one is writing now: it is the age in seconds from which a file counts as left over.
    """
    newest = time.time() - older_than_s
    for leftover in Path(folder).glob(f".*{_TEMPORARY_SUFFIX}"):
        try:
            if older_than_s and leftover.stat().st_mtime > newest:
                continue
        except FileNotFoundError:
            continue
        _remove_quietly(leftover)


def sha256_of(path: str | Path) -> str:
    """Sha256 of a file's content, in hex. Raises ``DataError``."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


# --- JSON ---------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Turn ``value`` into what JSON knows: dict, list, str, int, float, bool, None.

    Arrays become lists, paths and enumerations their names, numbers that are not finite ``None``.
    """
    match value:
        case None | bool() | str():
            return value
        case enum.Enum():
            return value.name
        case int() | np.integer():
            return int(value)
        case float() | np.floating():
            return float(value) if math.isfinite(value) else None
        case np.bool_():
            return bool(value)
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case datetime.datetime():
            return utc(value)
        case np.ndarray() | jax.Array():
            return plain(np.asarray(value).tolist())
        case tuple() if hasattr(value, "_asdict"):
            return plain(value._asdict())
        case set() | frozenset():
            return [plain(item) for item in sorted(value, key=str)]
        case list() | tuple():
            return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return str(value)


def utc(moment: datetime.datetime) -> str:
    """``moment`` (with a time zone) in ISO 8601, UTC, to the second."""
    assert moment.tzinfo is not None, "a moment without a time zone is ambiguous"
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _scalar(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if isinstance(value, float) and "e" in text and "." not in text:
        # JSON allows 1e-05; YAML 1.1 reads it as a string. 1.0e-05 is a number to both.
        text = text.replace("e", ".0e", 1)
    return text


def _layout(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value:
        items = [f"{inner}{_scalar(key)}: {_layout(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and value:
        if not any(isinstance(item, dict | list) for item in value):
            line = "[" + ", ".join(_scalar(item) for item in value) + "]"
            if len(line) <= 1000:
                return line
        items = [inner + _layout(item, inner) for item in value]
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    return _scalar(value)


def to_json(value: Any) -> str:
    """Strict JSON laid out for a reader: one key a line, lists of numbers on one line.

    What is not finite becomes ``null``; floats keep all their digits and are numbers to a YAML 1.1
    reader too (``1.0e-05``). Keys keep the order they were given in.
    """
    return _layout(plain(value), "") + "\n"


def write_json(path: str | Path, value: Any) -> None:
    """Write ``to_json(value)`` atomically. Raises ``StorageError``."""
    atomic_write(path, to_json(value).encode("utf-8", "backslashreplace"))


def read_json(path: str | Path) -> dict[str, Any] | None:
    """Read a JSON object, or ``None`` where there is no such file. Raises ``DataError``."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: expected a JSON object, found: {error}; delete the file, "
            f"or restore it"
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"cannot read {path}: expected a JSON object, found {type(value).__name__}; delete the "
            f"file, or restore it"
        )
    return value


# --- CSV ----------------------------------------------------------------------------------------


def _cell(value: Any) -> str:
    """A cell that reads back to the same number: floats by ``repr``, nothing for ``None``."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, np.ndarray | jax.Array):
        return _cell(np.asarray(value).item())
    return repr(float(value))


def write_table(
    path: str | Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Write a CSV table atomically; a missing value is an empty cell. Raises ``StorageError``."""
    lines = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    text = "".join(",".join(_quoted(cell) for cell in line) + "\n" for line in lines)
    atomic_write(path, text.encode("utf-8", "backslashreplace"))


def _quoted(cell: str) -> str:
    # csv.writer leaves a lone carriage return bare, which csv.reader then takes for a row's end.
    if any(character in cell for character in ',"\r\n'):
        return '"' + cell.replace('"', '""') + '"'
    return cell


def read_table(path: str | Path) -> tuple[list[str], list[dict[str, str]]]:
    """Read a CSV table as text: its columns and its rows (none where there is no such file).

    Raises
    ------
    DataError
        The file cannot be read, or a row has not as many cells as there are columns.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}; delete the file, or restore it") from error
    if not lines:
        raise DataError(f"cannot read {path}: it is empty; delete the file, or restore it")
    columns, *cells = lines
    for number, row in enumerate(cells, start=1):
        if len(row) != len(columns):
            raise DataError(
                f"cannot read {path}: row {number} has {len(row)} cells, expected {len(columns)}; "
                f"delete the file, or restore it"
            )
    return columns, [dict(zip(columns, row, strict=True)) for row in cells]


def _boolean(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"expected True or False, found {text!r}")
    return text == "True"


def _arm_record(path: Path, row: Mapping[str, str]) -> ArmRecord:
    values: dict[str, Any] = {}
    for column, kind in get_type_hints(ArmRecord).items():
        if column not in row:
            continue
        parse = _boolean if kind is bool else kind
        try:
            values[column] = parse(row[column])
        except ValueError as error:
            raise DataError(
                f"cannot read {path}: column {column}: {error}; delete the file, or restore it"
            ) from error
    return ArmRecord(**values)


def _untyped(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return text


def _metric(column: str, text: str) -> Any:
    if column in _TEXT_COLUMNS:
        return text
    if column in _INTEGER_COLUMNS:
        return int(text)
    if column in METRICS_COLUMNS and column != "num_samples":
        return float(text)
    return _untyped(text)


# --- arrays -------------------------------------------------------------------------------------


def write_arrays(
    path: str | Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> None:
    """Write named arrays and a JSON description into one ``.npz``, atomically.

    Parameters
    ----------
    path
        The file.
    arrays
        Arrays of numbers. PRNG keys are passed as their raw uint32 data.
    meta
        What JSON can hold; numbers that are not finite come back as ``None``.

    Raises
    ------
    StorageError
        The file could not be written.
    """
    assert _META not in arrays, f"{_META} is the name of the description"
    contents = {name: np.asarray(array) for name, array in arrays.items()}
    objects = [name for name, array in contents.items() if array.dtype.hasobject]
    assert not objects, f"not arrays of numbers: {objects}"
    description = np.frombuffer(to_json(meta).encode("utf-8", "backslashreplace"), np.uint8)

    def write(file: BinaryIO) -> None:
        # Entries are written one by one because np.savez keeps the names "file" and
        # "allow_pickle" to itself.
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in {**contents, _META: description}.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)

    atomic_write(path, write)


def read_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Read what ``write_arrays`` wrote; ``None`` where there is no such file, or it is damaged.

    A damaged file is logged as a warning: whoever asks does the work again, and overwrites it.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _read_archive(file)
    except FileNotFoundError:
        return None
    except Exception as error:
        # A damaged archive fails in as many ways as zipfile, struct, json and numpy know, and
        # each of them means the same.
        logger.warning("%s is damaged and not used (%s: %s)", path, type(error).__name__, error)
        return None


def _read_archive(file: BinaryIO) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    with zipfile.ZipFile(file) as archive:
        # Checksums first: a flipped bit in a header could otherwise read as other numbers.
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"wrong checksum of {damaged}")
    file.seek(0)
    with np.load(file, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    meta = json.loads(arrays.pop(_META).tobytes().decode("utf-8"))
    return arrays, meta


# --- the run's folder ---------------------------------------------------------------------------


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat.update(_flatten(item, f"{prefix}.{key}" if prefix else str(key)))
    return flat


_ABSENT = "(absent)"


def config_differences(
    there: Mapping[str, Any], asked: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Keys that change results and differ between two configurations: (key, there, asked).

    Keys are dotted; a key that one side lacks has the value ``(absent)`` there. The keys of
    ``KEYS_WITHOUT_EFFECT`` are left out; those of ``KEYS_ADDED`` have their values there where a
    configuration is older than they are.
    """
    first, second = _flatten(plain(there)), _flatten(plain(asked))
    differences = []
    for key in sorted(first.keys() | second.keys()):
        if any(key == name or key.startswith(f"{name}.") for name in KEYS_WITHOUT_EFFECT):
            continue
        old, new = first.get(key, KEYS_ADDED.get(key, _ABSENT)), second.get(key, _ABSENT)
        if old != new or isinstance(old, bool) != isinstance(new, bool):
            differences.append((key, old, new))
    return differences


class RunFolder:
    """One run's folder: locked by one process, holding one configuration.

    Made by ``RunFolder.open`` and used as a context manager; leaving it gives the lock back.
    """

    def __init__(self, path: Path, config: dict[str, Any], lock: int) -> None:
        self.path = path
        self._config = config
        self._lock: int | None = lock

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        overrides: Sequence[str] = (),
        hydra_config: Mapping[str, Any] | None = None,
        wait_s: float = 0.0,
    ) -> RunFolder:
        """Make or re-enter the folder of a run.

        A folder that holds another configuration but nothing made with it (its run was refused
        or killed before its first checkpoint) is taken over.

        Parameters
        ----------
        path
            The folder; made if missing.
        config
            The whole resolved configuration, plain containers.
        overrides
            What the user typed, for ``.hydra/overrides.yaml``.
        hydra_config
            Hydra's own configuration, for ``.hydra/hydra.yaml``.
        wait_s
            How long to wait for another process that uses the folder.

        Raises
        ------
        ConfigError
            Another process uses the folder, or it holds results or checkpoints made with another
            configuration: the message lists each key with both values.
        DataError
            ``provenance.json`` is damaged.
        StorageError
            The folder cannot be made or written.
        """
        path = Path(path)
        _make_folder(path)
        lock = take_lock(path, wait_s)
        try:
            resolved = plain(config)
            for place in (path, path / "checkpoint", path / ".hydra"):
                remove_leftovers(place)
            resumed = _check_same_run(path, resolved)
            folder = cls(path, resolved, lock)
            folder._write_hydra(resolved, overrides, hydra_config)
            if not resumed:
                # Named at once, so that a run killed in its first second can still be told apart.
                folder.write_provenance({"start": utc(datetime.datetime.now(datetime.UTC))})
            return folder
        except BaseException:
            os.close(lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the lock back; the folder may be opened again."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write_hydra(
        self,
        config: dict[str, Any],
        overrides: Sequence[str],
        hydra_config: Mapping[str, Any] | None,
    ) -> None:
        contents: dict[str, Any] = {"config.yaml": config, "overrides.yaml": list(overrides)}
        if hydra_config is not None:
            contents["hydra.yaml"] = plain(hydra_config)
        for name, value in contents.items():
            # OmegaConf writes floats as 1.0e-05 and quotes strings that look like numbers.
            text = OmegaConf.to_yaml(OmegaConf.create(value))
            atomic_write(self.path / ".hydra" / name, text.encode("utf-8", "backslashreplace"))

    @property
    def tuning_path(self) -> Path:
        return self.path / "tuning.csv"

    @property
    def best_path(self) -> Path:
        return self.path / "best.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def curve_path(self) -> Path:
        """``curve.csv``: what repeats of the evaluation scored on their way."""
        return self.path / "curve.csv"

    @property
    def parameters_path(self) -> Path:
        return self.path / "parameters.csv"

    @property
    def provenance_path(self) -> Path:
        return self.path / "provenance.json"

    @property
    def steps_path(self) -> Path:
        return self.path / "steps.json"

    @property
    def log_path(self) -> Path:
        return self.path / "run.log"

    def write_tuning(self, records: Sequence[ArmRecord]) -> None:
        """Write ``tuning.csv``, one row an arm and rung. Raises ``StorageError``."""
        write_table(self.tuning_path, TUNING_COLUMNS, (record._asdict() for record in records))

    def read_tuning(self) -> list[ArmRecord]:
        """Read ``tuning.csv``; empty where there is none. Raises ``DataError``."""
        return read_tuning(self.tuning_path)

    def write_best(self, best: Mapping[str, Any]) -> None:
        """Write ``best.json``. Raises ``StorageError``."""
        write_json(self.best_path, best)

    def read_best(self) -> dict[str, Any] | None:
        """Read ``best.json``; ``None`` where there is none. Raises ``DataError``."""
        return read_json(self.best_path)

    def write_metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write ``metrics.csv``, one row a repeat.

        A metric that is missing or ``None`` is an empty cell. Columns beyond ``METRICS_COLUMNS``
        follow those, in the order they first appear. Raises ``StorageError``.
        """
        extra = dict.fromkeys(key for row in rows for key in row if key not in METRICS_COLUMNS)
        write_table(self.metrics_path, (*METRICS_COLUMNS, *extra), rows)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read ``metrics.csv``; empty where there is none. Raises ``DataError``."""
        return read_metrics(self.metrics_path)

    def write_curve(self, repeat: int, points: Sequence[Mapping[str, Any]]) -> None:
        """Write the points of one repeat to ``curve.csv``, after those of the repeats before it.

        Raises ``DataError`` or ``StorageError``.
        """
        kept: list[Mapping[str, Any]] = []
        if self.curve_path.exists():
            _, rows = read_table(self.curve_path)
            kept = [row for row in rows if int(row["repeat"]) < repeat]
        own = [{"repeat": repeat, **point} for point in points]
        write_table(self.curve_path, CURVE_COLUMNS, [*kept, *own])

    def write_steps(self, values: Mapping[str, Any]) -> None:
        """Write ``steps.json``, the ledger of steps. Raises ``StorageError``."""
        write_json(self.steps_path, values)

    def write_provenance(self, values: Mapping[str, Any]) -> None:
        """Write ``provenance.json``; the run's configuration is always in it."""
        write_json(self.provenance_path, {**values, "config": self._config})

    def read_provenance(self) -> dict[str, Any] | None:
        """Read ``provenance.json``; ``None`` where there is none. Raises ``DataError``."""
        return read_json(self.provenance_path)

    def _checkpoint_path(self, name: str) -> Path:
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name), f"not a file name: {name!r}"
        return self.path / "checkpoint" / f"{name}.npz"

    def save_checkpoint(
        self, name: str, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
    ) -> None:
        """Keep the state of an unfinished stage; see ``write_arrays``."""
        write_arrays(self._checkpoint_path(name), arrays, meta)

    def load_checkpoint(self, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """The arrays and the description kept under ``name``.

        ``None`` where there is none, or where it is damaged (which is logged as a warning).
        """
        return read_arrays(self._checkpoint_path(name))

    def drop_checkpoint(self, name: str) -> None:
        """Remove a checkpoint that is no longer needed, and the folder with the last one."""
        path = self._checkpoint_path(name)
        try:
            path.unlink(missing_ok=True)
            if path.parent.is_dir() and not any(path.parent.iterdir()):
                path.parent.rmdir()
        except OSError as error:
            raise _storage_error(path, error) from error

    def log(self) -> RunLog:
        """The run's log file, a context manager."""
        return RunLog(self.log_path)


def read_tuning(path: str | Path) -> list[ArmRecord]:
    """Read a ``tuning.csv``; empty where there is none.

    Raises
    ------
    DataError
        A column is missing, or a cell is not of the column's type.
    """
    path = Path(path)
    columns, rows = read_table(path)
    # Columns with a default came later than files that lack them.
    optional = ArmRecord._field_defaults
    missing = [name for name in TUNING_COLUMNS if rows and name not in {*columns, *optional}]
    if missing:
        raise DataError(
            f"cannot read {path}: missing columns {', '.join(missing)}; delete the file, "
            f"or restore it"
        )
    return [_arm_record(path, row) for row in rows]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a ``metrics.csv``; empty where there is none.

    Each row holds the cells that are not empty, as numbers where they are numbers.

    Raises
    ------
    DataError
        A cell is not of the column's type.
    """
    path = Path(path)
    rows = []
    for row in read_table(path)[1]:
        values = {}
        for column, text in row.items():
            if text == "" and column not in _TEXT_COLUMNS:
                continue
            try:
                values[column] = _metric(column, text)
            except ValueError as error:
                raise DataError(
                    f"cannot read {path}: column {column}: {error}; delete the file, or restore it"
                ) from error
        rows.append(values)
    return rows


def take_lock(folder: Path, wait_s: float = 0.0) -> int:
    """Lock ``folder`` for this process; the system drops the lock when the process ends.

    Where another process has it, that one gets ``wait_s`` seconds to end.
    """
    path = folder / ".lock"
    last_s = time.monotonic() + wait_s
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _storage_error(path, error) from error
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= last_s:
                    raise
                time.sleep(LOCK_POLL_S)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} on {platform.node()}\n".encode())
    except BlockingIOError as error:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "(unknown)"
        os.close(descriptor)
        raise ConfigError(
            f"run folder {folder} is in use by process {owner}; wait for it to end, "
            f"or choose another seed= or run_dir="
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            logger.warning("%s: this file system has no locks; start one run at a time", folder)
            return descriptor
        os.close(descriptor)
        raise _storage_error(path, error) from error
    return descriptor


def _check_same_run(folder: Path, config: dict[str, Any]) -> bool:
    """Whether ``folder`` already holds this run; refuses one that holds results of another."""
    provenance = folder / "provenance.json"
    try:
        stored = read_json(provenance)
    except DataError as error:
        raise DataError(
            f"run folder {folder} cannot be told from another run: {error}; "
            f"or choose another seed= or run_dir="
        ) from error
    found = _results_in(folder)
    if stored is None or not isinstance(stored.get("config"), dict):
        if found or stored is not None:
            raise ConfigError(
                f"run folder {folder} holds {', '.join(found) or 'provenance.json'} but no "
                f"configuration in provenance.json, so it cannot be told what made it; choose "
                f"another seed= or run_dir=, or delete the folder"
            )
        return False
    differences = config_differences(stored["config"], config)
    if differences and not found:
        logger.info("%s holds no result of its earlier configuration and is taken over", folder)
        return False
    if differences:
        lines = "".join(
            f"\n  {key}: there {_shown(old)}, asked for {_shown(new)}"
            for key, old, new in differences
        )
        raise ConfigError(
            f"run folder {folder} holds a run made with another configuration:{lines}\n"
            f"choose another seed= or run_dir=, or delete the folder"
        )
    return True


def _results_in(folder: Path) -> list[str]:
    """What a run with another configuration must neither overwrite nor continue from."""
    files = ("tuning.csv", "best.json", "metrics.csv")
    found = [name for name in files if (folder / name).exists()]
    # An empty folder is what a writer leaves that was killed in its first checkpoint.
    if any((folder / "checkpoint").glob("*")):
        found.append("checkpoint")
    return found


def _shown(value: Any) -> str:
    return value if value == _ABSENT else json.dumps(value, ensure_ascii=False)


# --- the run's log ------------------------------------------------------------------------------


class _LogHandler(logging.FileHandler):
    """Appends to the log; a log that cannot be written never stops a run."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            logger.warning("the end of %s could not be written: %s", self.baseFilename, error)


class RunLog:
    """Copies what the package logs into a file while the context lasts.

    The file is appended to, so that a resumed run keeps its history. Lines carry the time in UTC.
    """

    def __init__(self, path: str | Path, level: int = logging.INFO) -> None:
        self.path = Path(path)
        self.level = level
        self._handler: logging.Handler | None = None
        self._outer_level = logging.NOTSET

    def __enter__(self) -> Self:
        """Attach the file. Raises ``StorageError`` when it cannot be opened."""
        _make_folder(self.path.parent)
        try:
            _end_last_line(self.path)
            handler = _LogHandler(self.path, mode="a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise _storage_error(self.path, error) from error
        formatter = logging.Formatter(
            "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
        handler.setLevel(self.level)
        package = logging.getLogger("mamba_cli")
        self._outer_level = package.level
        package.setLevel(min(self.level, package.getEffectiveLevel()))
        package.addHandler(handler)
        self._handler = handler
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._handler is not None, "left before it was entered"
        package = logging.getLogger("mamba_cli")
        package.removeHandler(self._handler)
        package.setLevel(self._outer_level)
        self._handler.close()
        self._handler = None


def _end_last_line(path: Path) -> None:
    """End the line that a killed process left half written."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


# --- provenance ---------------------------------------------------------------------------------


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints in ``folder``, or ``None`` when there is no git or it fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_revision(package: Path | None = None) -> dict[str, Any]:
    """The revision of the checkout that the package runs from: ``{"revision", "dirty"}``.

    Both are ``None`` outside a checkout. A package installed into somebody else's checkout is
    not taken for a part of it: its files must be tracked there. ``dirty`` looks at the sources
    (the package and its configuration) alone, untracked ones included. Never raises.

    Of the package that runs, what git once knew holds for the process: what is committed or
    changed later is not what was loaded.
    """
    if package is not None:
        return _revision_of(package)
    if None in _running.values():
        _running.update(_revision_of(Path(__file__).parent))
    return dict(_running)


_running: dict[str, Any] = {"revision": None, "dirty": None}


def _revision_of(package: Path) -> dict[str, Any]:
    unknown: dict[str, Any] = {"revision": None, "dirty": None}
    if _git(package, "ls-files", "--error-unmatch", "--", "__init__.py") is None:
        return unknown
    revision = _git(package, "rev-parse", "HEAD")
    top = _git(package, "rev-parse", "--show-toplevel")
    if revision is None or top is None:
        return unknown
    sources = [str(package), str(package.parent / "conf"), str(package.parent / "pyproject.toml")]
    changes = _git(Path(top), "status", "--porcelain", "--", *sources)
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def _cpu_name() -> str | None:
    """The processor's model: wall-clock budgets mean nothing without it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or None


def _jax_setting(name: str) -> Any:
    # By name, because the type stubs of jax know no flag as an attribute.
    return getattr(jax.config, name)


def machine() -> dict[str, Any]:
    """What the run ran on: devices, cores, threads, random numbers, versions."""
    device = jax.devices()[0]
    return {
        "versions": {
            "mamba-cli": _version("mamba-cli"),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": _version("jaxlib"),
            "numpy": np.__version__,
            "numpyro": _version("numpyro"),
            "optax": _version("optax"),
            "hydra-core": _version("hydra-core"),
        },
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
        },
        "num_cores": os.cpu_count(),
        "num_threads": cpu_threads(),
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "prng_implementation": str(_jax_setting("jax_default_prng_impl")),
        "threefry_partitionable": bool(_jax_setting("jax_threefry_partitionable")),
        "threefry_partitionable_in_chains": True,  # see mamba_cli.threefry
        "x64": bool(_jax_setting("jax_enable_x64")),
    }


def provenance(
    config: Mapping[str, Any],
    *,
    start: datetime.datetime,
    end: datetime.datetime | None = None,
    seconds: Mapping[str, float] | None = None,
    data_digests: Mapping[str, str] | None = None,
    num_concurrent_jobs: int = 1,
    budget: str,
    paper_size: bool,
    reward: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What made a run's numbers, for ``provenance.json``.

    Parameters
    ----------
    config
        The whole resolved configuration; its ``seed`` is repeated at the top.
    start, end
        Moments with a time zone; ``end`` is ``None`` while the run goes on.
    seconds
        Seconds spent by stage; the stages of ``TIMED_STAGES`` are always listed, ``None`` for one
        that did not run, and others follow.
    data_digests
        Digest of each data set, by name.
    num_concurrent_jobs
        Jobs the launcher ran side by side: above 1, wall-clock budgets were shared.
    budget
        The name of the budget.
    paper_size
        Whether the run has the paper's size: a single key can take it away from ``paper``.
    reward
        The metric in the ``reward`` column of ``tuning.csv``: its name and direction.

    Returns
    -------
    dict
        Plain values, in the order they are read in.
    """
    spent = dict(seconds or {})
    stages = [*TIMED_STAGES, *(stage for stage in spent if stage not in TIMED_STAGES)]
    values = {
        "budget": budget,
        "paper_size": paper_size,
        "seed": config.get("seed"),
        "start": start,
        "end": end,
        "seconds": {stage: spent.get(stage) for stage in stages},
        "reward": reward,
        "num_concurrent_jobs": num_concurrent_jobs,
        **machine(),
        "git": git_revision(),
        "data_digests": data_digests or {},
        "config": config,
    }
    return {key: plain(value) for key, value in values.items()}
