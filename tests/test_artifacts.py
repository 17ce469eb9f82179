"""Result files: whole or absent, exact, and told apart."""

from __future__ import annotations

import datetime
import errno
import json
import logging
import math
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import jax
import numpy as np
import pandas as pd
import pytest
import yaml
from hydra import compose, initialize_config_module
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mamba_cli import artifacts
from mamba_cli.artifacts import RunFolder, RunLog, atomic_write
from mamba_cli.errors import ConfigError, DataError, StorageError
from mamba_cli.rewards import KernelSteinDiscrepancy
from mamba_cli.types import ArmRecord

CONFIG = {
    "seed": 0,
    "data_dir": "data",
    "results_dir": "results",
    "run_dir": "results/runs/logreg",
    "ground_truth": {"recompute": False, "num_draws": 20_000},
    "model": {"name": "logreg", "num_train": 1_000_000},
    "tuner": {"grid": {"step_size": [1e-1, 1e-5, 10**-7.5]}, "longest_arm_s": 1.0},
}


def record(**changes: object) -> ArmRecord:
    plain = ArmRecord(
        rung=0,
        arm=3,
        step_size=10**-5.5,
        batch_size=1_000,
        num_integration_steps=1,
        budget_s=0.0768,
        elapsed_s=0.07701,
        compile_s=0.41,
        reward_s=0.002,
        num_steps=7_000,
        num_draws=7_000,
        num_scored=500,
        reward=1.25,
        status="ok",
        reason="",
        promoted=True,
        reward_std_error=0.125,
        in_best_set=True,
    )
    return plain._replace(**changes)  # type: ignore[arg-type]


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow beyond ``num_bytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- atomic_write -------------------------------------------------------------------------------


def test_atomic_write_makes_the_folder_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    atomic_write(path, b"first")
    atomic_write(path, lambda file: _write(file, b"second"))
    assert path.read_bytes() == b"second"
    assert files_in(path.parent) == {"file.txt"}


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(content)


def test_atomic_write_honours_the_umask(tmp_path: Path) -> None:
    outer = os.umask(0o027)
    try:
        atomic_write(tmp_path / "file", b"x")
    finally:
        os.umask(outer)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_atomic_write_forces_content_to_disk_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("folder" if is_folder else f"file of {os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def note_replace(source: Path, destination: Path) -> None:
        events.append("rename")
        replace(source, destination)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    atomic_write(tmp_path / "file", b"four")
    assert events == ["file of 4 bytes", "rename", "folder"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "permission"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "check that the path"),
    ],
)
def test_a_failed_write_says_what_to_do_and_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, code: int, advice: str
) -> None:
    path = tmp_path / "tuning.csv"
    atomic_write(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(StorageError) as caught:
        atomic_write(path, b"new")
    assert str(path) in str(caught.value)
    assert advice in str(caught.value)
    assert "intact" in str(caught.value)
    assert path.read_bytes() == b"old"
    assert files_in(tmp_path) == {"tuning.csv"}


def test_a_write_that_outgrows_the_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "tuning.csv"
    atomic_write(path, b"old")
    with file_size_limit(100_000), pytest.raises(StorageError, match="size limit"):
        atomic_write(path, b"x" * 1_000_000)
    assert path.read_bytes() == b"old"
    assert files_in(tmp_path) == {"tuning.csv"}


def test_arrays_that_outgrow_the_disk_keep_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "arm.npz"
    artifacts.write_arrays(path, {"position": np.arange(3.0)}, {})
    with file_size_limit(100_000), pytest.raises(StorageError):
        artifacts.write_arrays(path, {"position": np.zeros(100_000)}, {})
    loaded = artifacts.read_arrays(path)
    assert loaded is not None
    np.testing.assert_array_equal(loaded[0]["position"], np.arange(3.0))
    assert files_in(tmp_path) == {"arm.npz"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_writer_that_is_interrupted_leaves_no_temporary_file(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def interrupted(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(error):
        atomic_write(path, interrupted)
    assert path.read_bytes() == b"old"
    assert files_in(tmp_path) == {"file"}


def test_a_file_where_a_folder_should_be_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match="runs"):
        atomic_write(tmp_path / "runs" / "seed-0" / "tuning.csv", b"x")


# --- killed in the middle -----------------------------------------------------------------------

# Forks writers and kills each at a random moment; run in a process of its own, because a process
# that has started JAX's threads should not fork.
KILLER = """
import os, random, signal, sys, time
import numpy as np
from pathlib import Path
from mamba_cli.artifacts import TUNING_COLUMNS, read_arrays, read_tuning, write_arrays, write_table
from mamba_cli.types import ArmRecord

table, arrays = Path(sys.argv[1]) / "tuning.csv", Path(sys.argv[1]) / "arm.npz"

def write_for_ever():
    number = 0
    while True:
        number += 1
        rows = [
            ArmRecord(number, arm, 1e-5, 100, 1, 0.1, 0.1, 0.0, 0.0, 9, 9, 9, 0.5, "ok", "", True)
            for arm in range(number % 400 + 1)
        ]
        rows = [row._asdict() for row in rows]
        write_table(table, TUNING_COLUMNS, rows)
        write_arrays(arrays, {"draws": np.full((number % 50 + 1, 1000), number)}, {"n": number})

def stamp():
    return arrays.stat().st_mtime_ns if arrays.exists() else 0

generator = random.Random(0)
complete = 0
for _ in range(40):
    child = os.fork()
    if child == 0:
        write_for_ever()
    # From where it has written something: how long that takes depends on the machine.
    before, deadline = stamp(), time.monotonic() + 10
    while stamp() == before and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(generator.uniform(0.0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if table.exists():
        assert table.read_bytes().endswith(b"\\n")
        records = read_tuning(table)
        assert len(records) == records[0].rung % 400 + 1
        assert len({item.rung for item in records}) == 1
    if arrays.exists():
        loaded = read_arrays(arrays)
        assert loaded is not None, "a checkpoint is damaged"
        number = loaded[1]["n"]
        assert loaded[0]["draws"].shape == (number % 50 + 1, 1000)
        assert (loaded[0]["draws"] == number).all()
        complete += 1
print(complete)
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_files_are_complete_whenever_their_writer_is_killed(tmp_path: Path) -> None:
    done = run_python(KILLER, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_temporary_files_of_a_killed_writer_are_swept_on_the_next_run(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder:
        folder.save_checkpoint("arm", example_arrays(), {})
    leftovers = [
        tmp_path / ".tuning.csv.0123abcd.part",
        tmp_path / "checkpoint" / ".arm.npz.0123abcd.part",
        tmp_path / ".hydra" / ".config.yaml.0123abcd.part",
    ]
    for leftover in leftovers:
        leftover.write_text("half")
    with RunFolder.open(tmp_path, CONFIG) as folder:
        assert not list(tmp_path.rglob("*.part"))
        assert folder.load_checkpoint("arm") is not None


def test_leftovers_are_told_from_what_another_process_is_writing(tmp_path: Path) -> None:
    old, new, result = (tmp_path / name for name in (".a.npz.0.part", ".a.npz.1.part", "a.part"))
    for path in (old, new, result):
        path.write_text("half")
    os.utime(old, (time.time() - 100, time.time() - 100))
    artifacts.remove_leftovers(tmp_path, older_than_s=60)
    assert files_in(tmp_path) == {new.name, result.name}
    artifacts.remove_leftovers(tmp_path)
    assert files_in(tmp_path) == {result.name}
    artifacts.remove_leftovers(tmp_path / "absent", older_than_s=60)


# --- tables -------------------------------------------------------------------------------------

floats = st.floats(allow_nan=True, allow_infinity=True)
counts = st.integers(0, 2**62)
text = st.text(st.characters(blacklist_categories=["Cs"]))
records = st.builds(
    ArmRecord,
    rung=counts,
    arm=counts,
    step_size=floats,
    batch_size=counts,
    num_integration_steps=counts,
    budget_s=floats,
    elapsed_s=floats,
    compile_s=floats,
    reward_s=floats,
    num_steps=counts,
    num_draws=counts,
    num_scored=counts,
    reward=floats,
    status=st.sampled_from(["ok", "diverged", "frozen", "no_draws", "out_of_memory"]),
    reason=text | st.sampled_from(['a, b "c"\nd\r\ne', "\r", " ", "nan", "True", "1e5"]),
    promoted=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(records, max_size=4))
def test_tuning_round_trips_exactly(tmp_path_factory: pytest.TempPathFactory, rows: list) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip.csv"
    artifacts.write_table(path, artifacts.TUNING_COLUMNS, [row._asdict() for row in rows])
    back = artifacts.read_tuning(path)
    # repr tells NaN, -0.0, True and 1 apart, where == does not.
    assert repr(back) == repr(rows)


def test_tuning_columns_are_the_fixed_ones_in_order(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder:
        folder.write_tuning([record(reward=math.nan, status="diverged", reason="at step 12, x")])
        header = folder.tuning_path.read_text().splitlines()[0]
    assert header == (
        "rung,arm,step_size,batch_size,num_integration_steps,budget_s,elapsed_s,compile_s,"
        "reward_s,num_steps,num_draws,num_scored,reward,status,reason,promoted,"
        "reward_std_error,in_best_set"
    )


def test_tuning_takes_numpy_and_jax_scalars(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder:
        folder.write_tuning(
            [
                record(
                    step_size=np.float64(1e-5),
                    num_steps=np.int64(7),
                    reward=jax.numpy.float32(0.5),
                    promoted=np.bool_(False),
                )
            ]
        )
        (back,) = folder.read_tuning()
    assert repr(back) == repr(record(step_size=1e-5, num_steps=7, reward=0.5, promoted=False))


def test_tuning_is_read_by_pandas(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder:
        folder.write_tuning([record(), record(arm=4, reward=math.nan, promoted=False)])
        table = pd.read_csv(folder.tuning_path)
    assert table.promoted.dtype == bool
    assert table.step_size.tolist() == pytest.approx([10**-5.5] * 2, rel=1e-15)
    assert table.reward.isna().tolist() == [False, True]


def test_an_empty_tuning_is_told_from_none(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder:
        assert folder.read_tuning() == []
        assert not folder.tuning_path.exists()
        folder.write_tuning([])
        assert folder.read_tuning() == []
        assert folder.tuning_path.exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ok", "ok,extra", "row 1 has 19 cells, expected 18"),
        ("7000", "many", "column num_steps"),
        ("True", "yes", "column promoted"),
        ("reward_s", "score_s", "missing columns reward_s"),
    ],
)
def test_a_table_changed_by_hand_is_named_with_its_fault(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "tuning.csv"
    artifacts.write_table(path, artifacts.TUNING_COLUMNS, [record()._asdict()])
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=message) as caught:
        artifacts.read_tuning(path)
    assert str(path) in str(caught.value)


def test_metrics_round_trip_with_missing_cells_and_extra_columns(tmp_path: Path) -> None:
    rows = [
        {
            "model": "logreg",
            "sampler": "sgld",
            "tuner": "mamba_ksd",
            "seed": 0,
            "repeat": 0,
            "step_size": 1e-5,
            "log10_step_size": -5.0,
            "batch_size": 10_000,
            "batch_percent": 1.0,
            "num_integration_steps": 1,
            "ksd": 0.1 + 0.2,
            "relative_std_error": math.nan,
            "accuracy": 0.9431,
            "num_samples": 123_456,
            "elapsed_s": 10.0,
            "status": "ok",
            "reason": "",
            "log_loss": 0.25,
            "paper_size": True,
        },
        {
            "model": "logreg",
            "sampler": "sgld",
            "tuner": "grid",
            "status": "diverged",
            "reason": "x",
        },
    ]
    with RunFolder.open(tmp_path, CONFIG) as folder:
        folder.write_metrics([{**rows[0], "rmse": None}, rows[1]])
        back = folder.read_metrics()
        header, first, second = folder.metrics_path.read_text().splitlines()
    assert repr(back[0]) == repr({key: rows[0][key] for key in back[0]})
    assert back[0].keys() == rows[0].keys()
    assert back[1] == rows[1]
    assert header == (
        "model,sampler,tuner,seed,repeat,step_size,log10_step_size,batch_size,batch_percent,"
        "num_integration_steps,ksd,relative_std_error,accuracy,rmse,mse_of_draws,ece,mce,"
        "num_samples,elapsed_s,status,reason,log_loss,paper_size"
    )
    assert first.split(",")[13:17] == ["", "", "", ""]
    assert second == "logreg,sgld,grid,,,,,,,,,,,,,,,,,diverged,x,,"


# --- JSON and YAML ------------------------------------------------------------------------------


def test_json_is_strict_and_keeps_every_digit(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder:
        folder.write_best({"arm": np.int64(3), "step_size": 10**-5.5, "reward": math.nan})
        text = folder.best_path.read_text()
        best = folder.read_best()
    assert best == {"arm": 3, "step_size": 10**-5.5, "reward": None}
    json.loads(text, parse_constant=pytest.fail)


def test_absent_json_is_none(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder:
        assert folder.read_best() is None


@example(value=1e-05)
@example(value=-1e22)
@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_the_same_to_a_json_and_to_a_yaml_reader(value: float) -> None:
    written = artifacts.to_json({"step_size": value})
    assert json.loads(written)["step_size"] == value
    read = yaml.safe_load(written)["step_size"]
    assert isinstance(read, float)
    assert read == value


def test_json_is_laid_out_for_a_reader() -> None:
    value = {"grid": (0.1, 1e-05), "nested": {"b": 1, "a": []}, "path": Path("x"), "none": None}
    assert artifacts.to_json(value) == (
        '{\n  "grid": [0.1, 1.0e-05],\n  "nested": {\n    "b": 1,\n    "a": []\n  },\n'
        '  "path": "x",\n  "none": null\n}\n'
    )


def test_plain_turns_arrays_and_records_into_json() -> None:
    value = {
        "array": np.array([1.0, np.inf]),
        "jax": jax.numpy.arange(2),
        "flag": np.bool_(True),
        "record": record(arm=9),
        "set": {"b", "a"},
        1: float("-inf"),
    }
    converted = artifacts.plain(value)
    assert converted["array"] == [1.0, None]
    assert converted["jax"] == [0, 1]
    assert converted["flag"] is True
    assert converted["record"]["arm"] == 9
    assert converted["set"] == ["a", "b"]
    assert converted["1"] is None


def test_a_damaged_json_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"arm": 3')
    with pytest.raises(DataError, match=r"best\.json"):
        artifacts.read_json(tmp_path / "best.json")


@pytest.mark.parametrize("loader", [yaml.safe_load, OmegaConf.load])
def test_step_sizes_survive_in_hydra_config_as_floats(tmp_path: Path, loader: object) -> None:
    steps = [10.0**-exponent for exponent in range(1, 13)] + [10**-7.5, 1e5, 1e22]
    config = {**CONFIG, "tuner": {"grid": {"step_size": steps}, "name": "1e-5"}}
    with RunFolder.open(tmp_path, config, overrides=["seed=0", "a='x: y'"], hydra_config={"v": 1}):
        pass
    folder = tmp_path / ".hydra"
    with (folder / "config.yaml").open() as file:
        read = loader(file)  # type: ignore[operator]
    assert list(read["tuner"]["grid"]["step_size"]) == steps
    assert all(isinstance(step, float) for step in read["tuner"]["grid"]["step_size"])
    assert read["tuner"]["name"] == "1e-5"
    assert yaml.safe_load((folder / "overrides.yaml").read_text()) == ["seed=0", "a='x: y'"]
    assert yaml.safe_load((folder / "hydra.yaml").read_text()) == {"v": 1}


# --- checkpoints --------------------------------------------------------------------------------


def example_arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "position": generator.normal(size=(4, 10)).astype(np.float32),
        "key": np.array([1, 2**32 - 1], np.uint32),
        "count": np.array(7),
        "empty": np.zeros((0, 10)),
        "file": np.array([True, False]),
    }


def test_checkpoints_round_trip(tmp_path: Path) -> None:
    arrays = example_arrays()
    with RunFolder.open(tmp_path, CONFIG) as folder:
        assert folder.load_checkpoint("arms") is None
        folder.save_checkpoint("arms", arrays, {"rung": 2, "step_size": 1e-5, "names": ["θ"]})
        loaded = folder.load_checkpoint("arms")
        assert loaded is not None
        back, meta = loaded
        assert meta == {"rung": 2, "step_size": 1e-5, "names": ["θ"]}
        assert back.keys() == arrays.keys()
        for name, array in arrays.items():
            assert back[name].dtype == array.dtype
            np.testing.assert_array_equal(back[name], array)
        assert (tmp_path / "checkpoint" / "arms.npz").exists()
        folder.drop_checkpoint("arms")
        assert folder.load_checkpoint("arms") is None
        assert not (tmp_path / "checkpoint").exists()
        folder.drop_checkpoint("arms")


def test_checkpoints_are_ordinary_npz_files(tmp_path: Path) -> None:
    artifacts.write_arrays(tmp_path / "a.npz", {"x": np.arange(3)}, {})
    with np.load(tmp_path / "a.npz") as stored:
        np.testing.assert_array_equal(stored["x"], np.arange(3))


def test_a_truncated_checkpoint_counts_as_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "arm.npz"
    artifacts.write_arrays(path, example_arrays(), {"rung": 1})
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        caplog.clear()
        assert artifacts.read_arrays(path) is None
        assert [item.levelname for item in caplog.records] == ["WARNING"]
        assert str(path) in caplog.text


def test_a_flipped_byte_never_reads_as_other_numbers(tmp_path: Path) -> None:
    path = tmp_path / "arm.npz"
    arrays = example_arrays()
    artifacts.write_arrays(path, arrays, {"rung": 1})
    whole = path.read_bytes()
    absent = 0
    for place in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        loaded = artifacts.read_arrays(path)
        if loaded is None:
            absent += 1
            continue
        # A byte that nothing reads (a time stamp) may be flipped without harm.
        assert loaded[1] == {"rung": 1}
        assert loaded[0].keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(loaded[0][name], array)
    assert absent > len(whole) / 5 / 2


@pytest.mark.parametrize(
    ("old", "new"), [(b"'<f4'", b"'<f2'"), (b"(40, 1000)", b"(20, 1000)"), (b"False", b"True ")]
)
def test_a_header_that_became_another_valid_one_is_noticed(
    tmp_path: Path, old: bytes, new: bytes
) -> None:
    path = tmp_path / "arm.npz"
    # Large enough that a reader of half of it never comes to the checksum at its end.
    artifacts.write_arrays(path, {"draws": np.ones((40, 1000), np.float32)}, {})
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new, 1))
    assert artifacts.read_arrays(path) is None


def test_an_archive_of_something_else_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "arm.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")
    assert artifacts.read_arrays(path) is None
    np.savez(path, x=np.arange(3))
    assert artifacts.read_arrays(path) is None


def test_pickles_are_neither_written_nor_read(tmp_path: Path) -> None:
    path = tmp_path / "arm.npz"
    with pytest.raises(AssertionError, match="not arrays of numbers"):
        artifacts.write_arrays(path, {"x": np.array([object()])}, {})
    np.savez(path, x=np.array([{"a": 1}], dtype=object), __meta__=np.zeros(0, np.uint8))
    assert artifacts.read_arrays(path) is None


# --- the run's folder ---------------------------------------------------------------------------


def test_the_same_configuration_resumes(tmp_path: Path) -> None:
    moved = {
        **CONFIG,
        "data_dir": "elsewhere",
        "results_dir": "there",
        "run_dir": "x",
        "stages": ["evaluate"],
        "ground_truth": {"recompute": True, "num_draws": 20_000},
    }
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        folder.write_provenance({"start": "the first"})
        folder.write_tuning([record()])
    with RunFolder.open(tmp_path / "run", moved, overrides=["data_dir=elsewhere"]) as folder:
        assert (folder.read_provenance() or {})["start"] == "the first"
        assert folder.read_tuning() == [record()]


def test_another_configuration_is_refused_with_every_difference(tmp_path: Path) -> None:
    other = {
        **CONFIG,
        "data_dir": "elsewhere",
        "model": {"name": "logreg", "num_train": 1_000},
        "tuner": {"grid": {"step_size": [1e-1, 1e-4]}, "longest_arm_s": 1.0, "new": True},
    }
    with RunFolder.open(tmp_path, CONFIG) as folder:
        folder.write_best({"arm": 3})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        RunFolder.open(tmp_path, other)
    message = str(caught.value)
    assert "model.num_train: there 1000000, asked for 1000" in message
    assert f"tuner.grid.step_size: there [0.1, 1e-05, {10**-7.5!r}], asked for [0.1" in message
    assert "tuner.new: there (absent), asked for true" in message
    assert "data_dir" not in message
    assert "longest_arm_s" not in message
    for advice in ("seed=", "run_dir=", "delete"):
        assert advice in message
    changed = {name for name, content in before.items() if name.read_bytes() != content}
    assert changed <= {tmp_path / ".lock"}


@pytest.mark.parametrize(
    ("there", "asked", "differ"),
    [
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 1}, {"a": True}, True),
        ({"a": (1, 2)}, {"a": [1, 2]}, False),
        ({"a": {}}, {}, True),
        ({"a": None}, {}, True),
        ({"a": "1e-05"}, {"a": 1e-05}, True),
        ({"hydra": {"x": 1}}, {}, False),
        ({"ground_truth": {"recompute": 1}}, {"ground_truth": {"recompute": 2}}, False),
        ({"ground_truth": "nuts"}, {"ground_truth": "none"}, True),
    ],
)
def test_what_counts_as_a_difference(there: dict, asked: dict, differ: bool) -> None:
    assert bool(artifacts.config_differences(there, asked)) == differ


WRITERS: dict[str, Callable[[RunFolder], None]] = {
    "tuning.csv": lambda folder: folder.write_tuning([]),
    "best.json": lambda folder: folder.write_best({}),
    "metrics.csv": lambda folder: folder.write_metrics([]),
    "checkpoint": lambda folder: folder.save_checkpoint("map", example_arrays(), {}),
}


@pytest.mark.parametrize("made", WRITERS)
def test_a_run_killed_after_its_first_file_is_still_told_apart(tmp_path: Path, made: str) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder:
        WRITERS[made](folder)
    with pytest.raises(ConfigError, match="seed: there 0, asked for 1"):
        RunFolder.open(tmp_path, {**CONFIG, "seed": 1})


def test_a_folder_without_a_result_is_taken_over(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder, folder.log():
        folder.write_provenance({"start": "the first", "seconds": {"total": 3.0}})
        folder.save_checkpoint("map", example_arrays(), {})
        folder.drop_checkpoint("map")
    # A writer killed in its very first checkpoint leaves a folder with half a file.
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / ".map.npz.0123abcd.part").write_text("half")
    other = {**CONFIG, "seed": 1}
    with RunFolder.open(tmp_path, other) as folder:
        stored = folder.read_provenance()
        assert stored is not None
        # Nothing of the earlier run is counted to this one.
        assert stored["start"] != "the first"
        assert "seconds" not in stored
        assert stored["config"] == artifacts.plain(other)
        folder.write_best({})
    written = OmegaConf.load(tmp_path / ".hydra" / "config.yaml")
    assert OmegaConf.to_container(written) == artifacts.plain(other)
    with pytest.raises(ConfigError, match="seed: there 1, asked for 0"):
        RunFolder.open(tmp_path, CONFIG)


def test_the_corrected_command_follows_a_refused_one(tmp_path: Path) -> None:
    def config(c: float) -> dict[str, object]:
        return {**CONFIG, "tuner": {"reward": {"_target_": "KernelSteinDiscrepancy", "c": c}}}

    # A reward refuses its value when it is built, which is after the folder was opened.
    with (
        pytest.raises(ConfigError, match="above 0"),
        RunFolder.open(tmp_path, config(-1.0)) as folder,
        folder.log(),
    ):
        KernelSteinDiscrepancy(c=-1.0)
    with RunFolder.open(tmp_path, config(1.0)) as folder:
        stored = folder.read_provenance()
    assert stored is not None
    assert stored["config"]["tuner"]["reward"]["c"] == 1.0


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_provenance_is_corrupt_data(tmp_path: Path, content: str) -> None:
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(DataError, match="seed=") as caught:
        RunFolder.open(tmp_path, CONFIG)
    assert str(tmp_path / "provenance.json") in str(caught.value)


def test_a_place_that_can_never_be_written_promises_nothing(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    for folder in (tmp_path / "results", tmp_path / "results" / "runs"):
        with pytest.raises(StorageError, match="in the way") as caught:
            RunFolder.open(folder, CONFIG)
        assert "same command" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "{}", '{"config": 3}'])
def test_results_of_an_unknown_run_are_not_overwritten(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "tuning.csv").write_text("precious")
    if content is not None:
        (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(ConfigError, match="seed=") as caught:
        RunFolder.open(tmp_path, CONFIG)
    assert str(tmp_path) in str(caught.value)
    assert (tmp_path / "tuning.csv").read_text() == "precious"


def test_provenance_always_holds_the_configuration(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder:
        folder.write_provenance({"seed": 0})
        stored = folder.read_provenance()
    assert stored is not None
    assert stored["config"] == artifacts.plain(CONFIG)


def test_a_folder_in_use_names_the_process(tmp_path: Path) -> None:
    with (
        RunFolder.open(tmp_path, CONFIG),
        pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"),
    ):
        RunFolder.open(tmp_path, CONFIG)
    RunFolder.open(tmp_path, CONFIG).close()


def test_a_refused_folder_gives_its_lock_back(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder:
        folder.write_best({})
    with pytest.raises(ConfigError):
        RunFolder.open(tmp_path, {**CONFIG, "seed": 1})
    RunFolder.open(tmp_path, CONFIG).close()


def test_the_lock_of_a_killed_process_is_gone(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\n"
            "from mamba_cli.artifacts import RunFolder\n"
            "folder = RunFolder.open(sys.argv[1], {'seed': 0})\n"
            "print('held', flush=True)\n"
            "time.sleep(60)\n",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"):
            RunFolder.open(tmp_path, {"seed": 0})
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=10)
    RunFolder.open(tmp_path, {"seed": 0}).close()


@pytest.mark.parametrize("model", ["logreg", "pmf", "bnn"])
def test_a_run_made_before_a_key_came_is_still_that_run(model: str) -> None:
    name = f"runs/{model}/sgld_cv/mamba_ksd/seed-0/provenance.json"
    kept = artifacts.read_json(Path(__file__).parents[1] / "results" / "paper" / name)
    assert kept is not None
    with initialize_config_module("mamba_cli.conf", version_base="1.3"):
        asked = compose("config", [f"model={model}", "sampler=sgld_cv", "tuner=mamba_ksd"])
        guarded = compose("config", [f"model={model}", "sampler=sgld_cv", "tuner.guards=true"])
    assert (
        artifacts.config_differences(kept["config"], OmegaConf.to_container(asked, resolve=True))
        == []
    )
    (difference,) = artifacts.config_differences(
        kept["config"], OmegaConf.to_container(guarded, resolve=True)
    )
    assert difference == ("tuner.guards", False, True)


def test_whoever_waits_gets_the_folder_when_it_is_given_back(tmp_path: Path) -> None:
    held = RunFolder.open(tmp_path, {"seed": 0})
    with pytest.raises(ConfigError, match="in use by process"):
        RunFolder.open(tmp_path, {"seed": 0}, wait_s=0.2)
    timer = threading.Timer(0.3, held.close)
    timer.start()
    RunFolder.open(tmp_path, {"seed": 0}, wait_s=30.0).close()
    timer.join()


def test_a_full_disk_during_a_run_keeps_every_earlier_file(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as folder:
        folder.write_tuning([record()])
        folder.write_best({"arm": 3})
        folder.write_metrics([{"model": "logreg"}])
        with file_size_limit(1):
            for write in (
                lambda: folder.write_tuning([record()] * 2),
                lambda: folder.write_best({"arm": 4}),
                lambda: folder.write_metrics([]),
                lambda: folder.write_provenance({}),
                lambda: folder.save_checkpoint("arms", example_arrays(), {}),
            ):
                with pytest.raises(StorageError, match="the same command goes on"):
                    write()
        assert folder.read_tuning() == [record()]
        assert folder.read_best() == {"arm": 3}
        assert len(folder.read_metrics()) == 1
        assert folder.load_checkpoint("arms") is None


# --- the run's log ------------------------------------------------------------------------------


def test_the_log_is_appended_to_and_its_handler_removed(tmp_path: Path) -> None:
    package = logging.getLogger("mamba_cli")
    before, level = list(package.handlers), package.level
    log = logging.getLogger("mamba_cli.chain")
    for text in ("first", "second"):
        with RunLog(tmp_path / "run.log"):
            log.info("%s", text)
            logging.getLogger("elsewhere").warning("not ours")
    log.warning("after")
    assert package.handlers == before
    assert package.level == level
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "INFO    mamba_cli.chain: first",
        "INFO    mamba_cli.chain: second",
    ]
    for line in lines:
        moment = datetime.datetime.fromisoformat(line.split(" ")[0])
        assert moment.tzinfo == datetime.UTC
        assert abs(datetime.datetime.now(datetime.UTC) - moment).total_seconds() < 60


def test_a_line_that_a_killed_run_left_half_is_ended(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("half a li")
    with RunLog(tmp_path / "run.log"):
        logging.getLogger("mamba_cli").info("next")
    half, after = (tmp_path / "run.log").read_text().splitlines()
    assert half == "half a li"
    assert after.endswith("next")


def test_a_log_that_cannot_grow_does_not_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with file_size_limit(10), RunLog(tmp_path / "run.log"):
        for _ in range(3):
            logging.getLogger("mamba_cli").info("a line longer than ten bytes")
    assert "could not be written" in caplog.text
    assert "Traceback" not in capsys.readouterr().err
    assert (tmp_path / "run.log").stat().st_size <= 10


def test_a_log_that_cannot_be_opened_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "run.log").mkdir()
    with pytest.raises(StorageError, match=r"run\.log"), RunLog(tmp_path / "run.log"):
        pass
    assert not any(
        isinstance(handler, logging.FileHandler)
        for handler in logging.getLogger("mamba_cli").handlers
    )


# --- provenance ---------------------------------------------------------------------------------


def test_provenance_names_what_made_the_numbers() -> None:
    start = datetime.datetime(
        2024, 5, 1, 14, 0, tzinfo=datetime.timezone(datetime.timedelta(hours=2))
    )
    values = artifacts.provenance(
        CONFIG,
        start=start,
        end=start + datetime.timedelta(seconds=90),
        seconds={"sampling": 12.9, "total": 20.0, "optimisation": 1.0},
        data_digests={"logreg": "sha256:abc"},
        num_concurrent_jobs=2,
        budget="quick",
        paper_size=False,
        reward={"name": "ksd", "higher_is_better": False},
    )
    assert json.loads(artifacts.to_json(values)) == values
    assert values["config"] == artifacts.plain(CONFIG)
    assert values["seed"] == 0
    assert values["start"] == "2024-05-01T12:00:00Z"
    assert values["end"] == "2024-05-01T12:01:30Z"
    assert values["budget"] == "quick"
    assert values["paper_size"] is False
    assert values["num_concurrent_jobs"] == 2
    assert values["data_digests"] == {"logreg": "sha256:abc"}
    assert values["seconds"] == {
        "compile": None,
        "sampling": 12.9,
        "gradients": None,
        "reward": None,
        "ground_truth": None,
        "evaluation": None,
        "total": 20.0,
        "optimisation": 1.0,
    }
    assert values["versions"]["jax"] == jax.__version__
    assert values["versions"]["numpy"] == np.__version__
    assert values["versions"]["mamba-cli"] is not None
    assert values["versions"]["jaxlib"] is not None
    assert values["versions"]["numpyro"] is not None
    assert values["device"]["platform"] == jax.devices()[0].platform
    assert values["num_cores"] == os.cpu_count()
    assert values["prng_implementation"] == "threefry2x32"
    assert set(values["git"]) == {"revision", "dirty"}


def test_provenance_of_a_run_that_goes_on_has_no_end() -> None:
    now = datetime.datetime.now(datetime.UTC)
    values = artifacts.provenance({}, start=now, budget="paper", paper_size=True)
    assert values["end"] is None
    assert values["paper_size"] is True


def test_the_thread_count_follows_what_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert artifacts.machine()["num_threads"] == 3
    monkeypatch.setenv("NPROC", "7")
    assert artifacts.machine()["num_threads"] == 7


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which("git") is None:
        pytest.skip("no git")
    for name, value in {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    package = tmp_path / "repository" / "mamba_cli"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    _git(package.parent, "init", "--quiet")
    return package


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_revision_of_a_checkout_and_whether_its_sources_changed(checkout: Path) -> None:
    top = checkout.parent
    assert artifacts.git_revision(checkout) == {"revision": None, "dirty": None}
    _git(top, "add", "mamba_cli")
    _git(top, "commit", "--quiet", "-m", "first")
    revision = _git(top, "rev-parse", "HEAD")
    assert artifacts.git_revision(checkout) == {"revision": revision, "dirty": False}
    (top / "results.csv").write_text("a result is not a source")
    assert artifacts.git_revision(checkout) == {"revision": revision, "dirty": False}
    (checkout / "sampler.py").write_text("")
    assert artifacts.git_revision(checkout) == {"revision": revision, "dirty": True}


def test_a_package_installed_inside_another_checkout_is_not_a_part_of_it(checkout: Path) -> None:
    top = checkout.parent
    _git(top, "add", "mamba_cli")
    _git(top, "commit", "--quiet", "-m", "first")
    installed = top / ".venv" / "site-packages" / "mamba_cli"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert artifacts.git_revision(installed) == {"revision": None, "dirty": None}


def test_no_git_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(artifacts, "_running", {"revision": None, "dirty": None})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert artifacts.git_revision() == {"revision": None, "dirty": None}


def test_what_was_loaded_is_what_git_knew_first(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown, clean = {"revision": None, "dirty": None}, {"revision": "a1", "dirty": False}
    later = {"revision": "b2", "dirty": True}
    told = iter([unknown, clean, later])
    monkeypatch.setattr(artifacts, "_running", dict(unknown))
    monkeypatch.setattr(artifacts, "_revision_of", lambda _: next(told))
    assert artifacts.git_revision() == unknown  # git may have been too slow: it is asked again
    assert artifacts.git_revision() == clean
    artifacts.git_revision()["revision"] = "changed by who asked"
    assert artifacts.git_revision() == clean
