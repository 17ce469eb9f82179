"""Two runs at once that ask the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nuts_runs import SETTINGS, CountedSampler, Recorder, ask
from small_posteriors import LINEAR

from mamba_cli import artifacts
from mamba_cli.errors import ConfigError, NothingUsableError
from mamba_cli.ground_truth import lock
from mamba_cli.ground_truth.cache import cache_path, save
from mamba_cli.ground_truth.lock import _is_file, clear, sole_owner


@pytest.fixture
def partial_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lock, "SECONDS_BETWEEN_LOOKS", 0.01)
    path = cache_path(LINEAR, SETTINGS, tmp_path).with_suffix(".partial")
    path.mkdir()
    return path


class _WhenToldToWait(Recorder):
    """The other process goes on when it hears that someone waits for it."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then

    def message(self, text: str) -> None:
        super().message(text)
        if "waiting" in text:
            self.then()


@pytest.mark.parametrize("recompute", [False, True])
def test_who_finds_another_at_work_takes_its_result(
    tmp_path: Path, sampler: CountedSampler, partial_dir: Path, recompute: bool
) -> None:
    truth = ask(tmp_path / "elsewhere")
    held = artifacts.take_lock(partial_dir)
    (partial_dir / "state.npz").write_bytes(b"of the other")

    def finish() -> None:
        assert (partial_dir / "state.npz").exists()
        save(truth, tmp_path / f"test-{truth.digest}.npz")
        clear(partial_dir)
        os.close(held)

    reporter = _WhenToldToWait(finish)
    found = ask(tmp_path, reporter=reporter, recompute=recompute)
    np.testing.assert_array_equal(found.mean, truth.mean)
    assert sampler.calls == 1
    assert f"waiting for process {os.getpid()} on " in reporter.messages[0]
    assert "are taken from" in reporter.messages[1]
    assert not partial_dir.exists()


def test_who_waited_for_one_that_gave_up_goes_on_itself(
    tmp_path: Path, sampler: CountedSampler, partial_dir: Path
) -> None:
    held = artifacts.take_lock(partial_dir)
    reporter = _WhenToldToWait(lambda: os.close(held))
    ask(tmp_path, reporter=reporter)
    assert sampler.calls == 1
    assert len(reporter.messages) == 1
    assert not partial_dir.exists()


def test_a_lock_on_a_file_that_is_gone_is_no_lock(
    tmp_path: Path, partial_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one before removes the file after we have opened it and before we have locked it.
    take_lock, taken = artifacts.take_lock, []

    def late(folder: Path) -> int:
        taken.append(take_lock(folder))
        if len(taken) == 1:
            (folder / ".lock").unlink()
        return taken[-1]

    monkeypatch.setattr(artifacts, "take_lock", late)
    with sole_owner(partial_dir, Recorder()):
        assert len(taken) == 2
        with pytest.raises(ConfigError, match="in use"):
            take_lock(partial_dir)


def test_a_wait_can_be_interrupted(
    tmp_path: Path, partial_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    held = artifacts.take_lock(partial_dir)
    monkeypatch.setattr(lock.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path)
    assert _is_file(held, partial_dir / ".lock")
    os.close(held)


def test_chains_that_did_not_converge_stay_and_the_lock_is_free(
    tmp_path: Path, sampler: CountedSampler, partial_dir: Path
) -> None:
    (partial_dir / "draws-00000.npz").write_bytes(b"")
    with pytest.raises(NothingUsableError):
        ask(tmp_path, replace(SETTINGS, min_ess=5000))
    assert (partial_dir / "draws-00000.npz").exists()
    os.close(artifacts.take_lock(partial_dir))
