"""One calibration at a time on a machine, and no calibrated chain beside it.

The jobs of a sweep run side by side. What a gradient step costs is measured while the chains of
the other jobs stand still: a chain holds the machine shared, a calibration holds it alone.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shared() -> Iterator[None]:
    """While the context lasts, no process of this user on this machine is ``alone``."""
    with _locked(_path("gate"), fcntl.LOCK_EX):
        # Behind the gate: whoever waits to be alone holds it, so that chains cannot starve it.
        machine = _opened(_path("machine"), fcntl.LOCK_SH)
    try:
        yield
    finally:
        _close(machine)


@contextmanager
def alone() -> Iterator[None]:
    """While the context lasts, no other process of this user is ``alone`` or ``shared``."""
    with _locked(_path("gate"), fcntl.LOCK_EX), _locked(_path("machine"), fcntl.LOCK_EX):
        yield


def _path(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"mamba-cli-{os.getuid()}-{name}.lock"


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    descriptor = _opened(path, kind)
    try:
        yield
    finally:
        _close(descriptor)


def _opened(path: Path, kind: int) -> int | None:
    """A descriptor that holds the lock; ``None`` where files cannot be locked or made."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
