"""One run at a time in the folder where chains are saved."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mamba_cli import artifacts
from mamba_cli.errors import ConfigError, StorageError
from mamba_cli.types import Reporter

SECONDS_BETWEEN_LOOKS = 2.0
"""How often a run that waits for another one's chains looks whether they are done."""

_LOCK = ".lock"


@contextmanager
def sole_owner(folder: Path, reporter: Reporter) -> Iterator[bool]:
    """Hold ``folder``, made where it is not; the value is whether another process held it first.

    Waits as long as that takes, which the reporter is told once.
    """
    waited = False
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder} cannot be made: {error.strerror or error}") from error
        try:
            lock = artifacts.take_lock(folder)
        except ConfigError:
            if not waited:
                reporter.message(f"ground truth: waiting for {_owner(folder)}, which computes it")
            waited = True
            time.sleep(SECONDS_BETWEEN_LOOKS)
            continue
        # The one before may have removed the file between our opening and our locking it.
        if _is_file(lock, folder / _LOCK):
            break
        os.close(lock)
    try:
        yield waited
    finally:
        with suppress(OSError):
            if [entry.name for entry in folder.iterdir()] == [_LOCK]:
                (folder / _LOCK).unlink()
                folder.rmdir()
        os.close(lock)


def clear(folder: Path) -> None:
    """Remove what is in ``folder``, but not the lock that holds it."""
    for entry in folder.iterdir():
        if entry.name != _LOCK:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _owner(folder: Path) -> str:
    try:
        owner = (folder / _LOCK).read_text(errors="replace").strip()
    except OSError:
        owner = ""
    return f"process {owner}" if owner else "another process"


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
