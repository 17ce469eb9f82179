"""Chains that are stopped and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from nuts_runs import PROGRAMS, SETTINGS, Recorder, sample_linear, whole_run

from mamba_cli import artifacts, ground_truth
from mamba_cli.errors import StorageError
from mamba_cli.ground_truth import checkpoint
from mamba_cli.ground_truth.checkpoint import load_checkpoint, save_checkpoint
from mamba_cli.ground_truth.coordinates import Coordinates
from mamba_cli.ground_truth.progress import Progress


@pytest.mark.usefixtures("compiled_once")
def test_a_resumed_run_gives_the_same_draws(tmp_path: Path) -> None:
    """Stopped in warm-up, stopped while sampling: bit for bit the draws of one run."""
    whole = whole_run()
    for fail_at in (2, 6):
        with pytest.raises(KeyboardInterrupt):
            sample_linear(checkpoint_dir=tmp_path, question="q", reporter=Recorder(fail_at))
    recorder = Recorder()
    resumed = sample_linear(checkpoint_dir=tmp_path, question="q", reporter=recorder)
    np.testing.assert_array_equal(resumed.draws, whole.draws)
    np.testing.assert_array_equal(resumed.mean, whole.mean)
    np.testing.assert_array_equal(resumed.std, whole.std)
    assert resumed.num_leapfrogs == whole.num_leapfrogs
    assert resumed.mean_accept == whole.mean_accept
    # 2 blocks, then 1 taken up + 5 more: 7 of the 18 were done before.
    assert recorder.amounts[0] == 7 * 2 * 100
    assert sum(recorder.amounts) == recorder.total


@pytest.mark.usefixtures("compiled_once")
def test_a_new_process_resumes(tmp_path: Path) -> None:
    """The warm-up's length lives in NumPyro's closures, not in the state: compile afresh."""
    whole = whole_run()
    with pytest.raises(KeyboardInterrupt):
        sample_linear(checkpoint_dir=tmp_path, question="q", reporter=Recorder(2))
    PROGRAMS.clear()
    resumed = sample_linear(checkpoint_dir=tmp_path, question="q")
    np.testing.assert_array_equal(resumed.draws, whole.draws)


@pytest.mark.usefixtures("compiled_once")
def test_killed_between_the_two_files_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = whole_run()
    write, count = artifacts.write_arrays, iter(range(1000))

    def failing(path: Any, *arguments: Any) -> None:
        if Path(path).name == "state.npz" and next(count) == 5:
            raise StorageError("disk full")
        write(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "write_arrays", failing)
        with pytest.raises(StorageError, match="disk full"):
            sample_linear(checkpoint_dir=tmp_path, question="q")
    assert len(list(tmp_path.glob("draws-*.npz"))) == 3
    resumed = sample_linear(checkpoint_dir=tmp_path, question="q")
    np.testing.assert_array_equal(resumed.draws, whole.draws)


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("damage", ["state.npz", "draws-00001.npz", "question"])
def test_a_checkpoint_that_cannot_be_used_is_not(tmp_path: Path, damage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        sample_linear(checkpoint_dir=tmp_path, question="q", reporter=Recorder(6))
    if damage != "question":
        content = (tmp_path / damage).read_bytes()
        (tmp_path / damage).write_bytes(content[: len(content) // 2])
    asked = "another" if damage == "question" else "q"
    assert load_checkpoint(tmp_path, asked) is None


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("changed", ["CHECKPOINT_VERSION", "layout"])
def test_a_checkpoint_of_another_version_starts_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: str,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        sample_linear(checkpoint_dir=tmp_path, question="q", reporter=Recorder(6))
    if changed == "layout":
        path = tmp_path / "state.npz"
        arrays, meta = artifacts.read_arrays(path) or ({}, {})
        assert ".z float32[2, 2]" in meta["layout"].splitlines()
        meta["layout"] = meta["layout"].replace(".z float32", ".z float64")
        artifacts.write_arrays(path, arrays, meta)
    else:
        monkeypatch.setattr(checkpoint, changed, checkpoint.CHECKPOINT_VERSION + 1)
    recorder = Recorder()
    samples = sample_linear(checkpoint_dir=tmp_path, question="q", reporter=recorder)
    np.testing.assert_array_equal(samples.draws, whole_run().draws)
    assert not recorder.messages
    assert "of another version" in caplog.messages[0]
    assert len(caplog.messages) == 1


@pytest.mark.usefixtures("compiled_once")
def test_a_checkpoint_for_another_criterion_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        sample_linear(checkpoint_dir=tmp_path, question="q", reporter=Recorder(6))
    path = tmp_path / "state.npz"
    arrays, meta = artifacts.read_arrays(path) or ({}, {})
    arrays |= {"prediction_mean": np.zeros(3), "prediction_squares": np.zeros(3)}
    artifacts.write_arrays(path, arrays, meta)
    samples = sample_linear(checkpoint_dir=tmp_path, question="q")
    np.testing.assert_array_equal(samples.draws, whole_run().draws)
    assert "of another ground_truth.criterion: it starts again" in caplog.messages[0]


def test_recompute_goes_on_after_an_interruption_but_not_after_a_failure(tmp_path: Path) -> None:
    folder = tmp_path / "partial"
    progress = Progress.start(2, 0)
    progress.num_steps = 100
    coordinates = Coordinates(np.zeros(2, np.float32), None)
    save_checkpoint(folder, "q", coordinates, {"z": jnp.zeros(2)}, progress, [])
    ground_truth._drop_finished(folder, "q", SETTINGS)
    assert folder.exists()
    progress.num_steps = SETTINGS.num_warmup + SETTINGS.draws_per_chain
    save_checkpoint(folder, "q", coordinates, {"z": jnp.zeros(2)}, progress, [])
    ground_truth._drop_finished(folder, "q", SETTINGS)
    assert not list(folder.iterdir())
