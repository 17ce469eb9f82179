"""Calibrations are alone; chains go side by side and cannot keep a calibration waiting for ever."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mamba_cli import quiet


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@contextlib.contextmanager
def another_process(kind: str) -> Iterator[subprocess.Popen[str]]:
    """A process that says "in" when it is inside, and stays there until its input ends."""
    code = (
        "import sys; from mamba_cli import quiet\n"
        f"with quiet.{kind}(): print('in', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)
        assert process.stdout is not None
        process.stdout.close()


def entered(process: subprocess.Popen[str]) -> threading.Event:
    """Set once the process is inside."""
    inside, stdout = threading.Event(), process.stdout
    assert stdout is not None

    def read() -> None:
        if stdout.readline() == "in\n":
            inside.set()

    threading.Thread(target=read, daemon=True).start()
    return inside


def test_chains_go_side_by_side() -> None:
    with quiet.shared(), another_process("shared") as other:
        assert entered(other).wait(120)


@pytest.mark.parametrize(
    ("mine", "other"), [("shared", "alone"), ("alone", "shared"), ("alone", "alone")]
)
def test_a_calibration_is_alone(mine: str, other: str) -> None:
    with another_process("shared") as warm:  # how long a process takes to come so far
        assert entered(warm).wait(120)
    with contextlib.ExitStack() as stack:
        with getattr(quiet, mine)():
            inside = entered(stack.enter_context(another_process(other)))
            assert not inside.wait(1.5)
        assert inside.wait(120)


def test_without_a_place_for_locks_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    with quiet.alone(), quiet.shared(), quiet.alone():
        pass
