"""A run repeated from its folder: the same bits, or what differs and exit code 4."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from test_run import NO_TRUTH, folder_of, kill_when

from mamba_cli import artifacts, replay
from mamba_cli.errors import ConfigError, DataError, NothingUsableError
from mamba_cli.run import run

Composed = Callable[..., DictConfig]
TWO = [*NO_TRUTH, "evaluation.num_repeats=2", "evaluation.burn_in_fraction=0.2"]


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    with initialize_config_module("mamba_cli.conf", version_base="1.3"):
        yield lambda *overrides: compose(
            "config", overrides=[f"results_dir={tmp_path}", *overrides]
        )


def repeat(composed: Composed, folder: Path, *overrides: str) -> Path:
    given = [f"replay={folder}", *overrides]
    cfg = replay.configuration_of(folder, given, composed(*given))
    run(cfg)
    return Path(cfg.run_dir)


def without_seconds(path: Path) -> list[dict[str, str]]:
    _, rows = artifacts.read_table(path)
    return [{k: v for k, v in row.items() if k not in replay.SECONDS} for row in rows]


@pytest.fixture(params=["wall", "calibrated"])
def finished(request: pytest.FixtureRequest, composed: Composed, tmp_path: Path) -> Path:
    """A run's folder; by the wall clock, of one that was killed in its tuning and taken up."""
    overrides = [*TWO, f"budget.clock={request.param}"]
    folder = folder_of(tmp_path)
    if request.param == "wall":
        overrides.append("tuner.longest_arm_s=0.4")
        kill_when(tmp_path, overrides, lambda: (folder / "tuning.csv").exists())
        assert not (folder / "best.json").exists()
    run(composed(*overrides))
    return folder


def test_a_run_is_repeated_bit_for_bit_and_what_differs_is_named(
    composed: Composed, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, here = finished, repeat(composed, finished)
    assert here == there.with_name("seed-0-replay")
    assert "identical, seconds apart" in capsys.readouterr().out
    for name in ("tuning.csv", "metrics.csv"):
        assert without_seconds(there / name) == without_seconds(here / name)
        assert len(without_seconds(here / name)) > 1
    best = [json.loads((f / "best.json").read_text()) for f in (there, here)]
    for values in best:
        values.pop(replay.IN_SECONDS, None)
    assert best[0] == best[1]
    moments = [artifacts.read_arrays(f / "moments.npz") for f in (there, here)]
    assert moments[0] is not None
    assert moments[1] is not None
    assert moments[0][0]["std"].shape == (2, 3)
    for name, array in moments[0][0].items():
        assert array.tobytes() == moments[1][0][name].tobytes()
    # The ledger of the repetition is the ledger of the run.
    ledgers = [json.loads((f / "steps.json").read_text()) for f in (there, here)]
    assert ledgers[0]["dispatches"] == ledgers[1]["dispatches"]
    assert ledgers[1]["clock"] == "replay"
    if ledgers[0]["clock"] == "calibrated":
        check_equal_steps(there, ledgers[0]["costs_s"])
    else:
        check_that_what_differs_is_named(composed, there)


def test_a_tuning_with_guards_and_ties_is_repeated_with_its_decisions(
    composed: Composed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = "tuner.grid.step_size=[1e9,1e-3,1e-4,1e-5,1e-9]"
    run(composed(*TWO, "tuner=mamba", "tuner.longest_arm_s=0.2", grid, "stages=[tune]"))
    there = folder_of(tmp_path, "mamba")
    best = json.loads((there / "best.json").read_text())
    assert best["theorem_1"]["sigma"] > 0
    repeat(composed, there)
    assert "identical, seconds apart" in capsys.readouterr().out


def test_the_chains_of_a_tuning_are_scored_otherwise(
    composed: Composed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = "tuner.grid.step_size=[1e9,1e-3,1e-4,1e-5]"
    run(composed(*TWO, "tuner.longest_arm_s=0.2", "tuner.reduction_factor=2", grid))
    there = folder_of(tmp_path)

    def scored(name: str, *keys: str) -> list[dict[str, str]]:
        folder = repeat(composed, there, f"run_dir={tmp_path / name}", *keys)
        assert not (folder / "metrics.csv").exists()  # what another winner would do is not known
        return without_seconds(folder / "tuning.csv")

    original = without_seconds(there / "tuning.csv")
    assert len({row["rung"] for row in original}) > 1
    assert scored("same", "tuner.reward.thin=1") == original
    assert "identical, seconds apart" in capsys.readouterr().out
    thinned = scored("thinned", "tuner.reward.thin=3")
    own = scored("own", "tuner.reward.gradients=stochastic")
    assert f"the chains of {there}, scored otherwise" in capsys.readouterr().out
    for key, share, rows in (("thin", 3, thinned), ("gradients", 1, own)):
        # The arms of a rung are those that went on there; the new scores have them in their order.
        assert [(r["rung"], r["arm"]) for r in rows if r["rung"] == "0"] == [
            (r["rung"], r["arm"]) for r in original if r["rung"] == "0"
        ]
        found = {(row["rung"], row["arm"]): row for row in rows}
        assert found.keys() == {(row["rung"], row["arm"]) for row in original}
        pairs = [(row, found[row["rung"], row["arm"]]) for row in original]
        usable = [(first, other) for first, other in pairs if other["status"] == "ok"]
        assert len(usable) > 1, key
        for first, other in usable:
            assert int(other["num_scored"]) == int(first["num_scored"]) // share
            assert other["num_steps"] == first["num_steps"]
            assert other["reward"] != first["reward"]


def test_keys_of_another_reward_are_given_with_a_plus(composed: Composed, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    config = OmegaConf.to_container(composed("tuner=mamba_fssd"), resolve=True)
    artifacts.write_json(folder / "provenance.json", {"config": config})
    given = [f"replay={folder}", "+tuner.reward.statistic=u"]
    cfg = replay.configuration_of(folder, given, composed(*given))
    assert (cfg.tuner.reward.name, cfg.tuner.reward.statistic) == ("fssd", "u")
    assert cfg.stages == ["tune"]


def check_equal_steps(folder: Path, costs: dict[str, float]) -> None:
    """Arms of one shape and rung have the steps that their seconds buy, whatever they took."""
    first = [row for row in without_seconds(folder / "tuning.csv") if row["rung"] == "0"]
    usable = [row for row in first if row["status"] == "ok"]
    assert list(costs) == ["n=40 of 400, L=1"]
    bought = round(float(first[0]["budget_s"]) / costs["n=40 of 400, L=1"])
    assert {int(row["num_steps"]) for row in usable} == {bought}


def check_that_what_differs_is_named(composed: Composed, there: Path) -> None:
    table = (there / "tuning.csv").read_text()
    reward = artifacts.read_table(there / "tuning.csv")[1][3]["reward"]
    (there / "tuning.csv").write_text(table.replace(reward, "0.125"))
    with pytest.raises(NothingUsableError) as failed:
        repeat(composed, there)
    said = str(failed.value)
    assert failed.value.exit_code == 4
    assert f"tuning.csv, row 4, reward: there 0.125, here {reward}" in said
    assert "the versions and the machine are the same" in said


def test_moments_that_differ_are_named(tmp_path: Path) -> None:
    for name, shift in (("there", 0.0), ("here", 0.5)):
        arrays = {"mean": np.array([[1.0 + shift, np.nan]]), "std": np.ones((1, 2))}
        artifacts.write_arrays(tmp_path / name / "moments.npz", arrays, {})
    found = replay.differences(tmp_path / "there", tmp_path / "here")
    assert found == ["moments.npz, mean: as far as 0.5 apart"]


def test_another_version_is_said_whether_or_not_the_bits_are_the_same(tmp_path: Path) -> None:
    for name, version in (("there", "0.1"), ("here", "0.2")):
        artifacts.write_json(tmp_path / name / "provenance.json", {"versions": {"jax": version}})
    same, lines = replay.verdict(tmp_path / "there", tmp_path / "here")
    assert same
    assert lines[1:] == ["made otherwise: versions.jax: there 0.1, here 0.2"]


def test_another_way_to_draw_bits_is_said(tmp_path: Path) -> None:
    for name, used in (("there", False), ("here", True)):
        artifacts.write_json(
            tmp_path / name / "provenance.json", {"threefry_partitionable_in_chains": used}
        )
    _, lines = replay.verdict(tmp_path / "there", tmp_path / "here")
    assert lines[1:] == ["made otherwise: threefry_partitionable_in_chains: there False, here True"]


def test_only_folders_may_be_given_with_replay(composed: Composed, tmp_path: Path) -> None:
    given = [f"replay={tmp_path}", "seed=3"]
    with pytest.raises(ConfigError, match=r"seed cannot be given with replay=.*run_dir, results"):
        replay.configuration_of(tmp_path, given, composed(*given))


def test_a_folder_without_a_run_is_refused(composed: Composed, tmp_path: Path) -> None:
    given = [f"replay={tmp_path / 'nothing'}"]
    with pytest.raises(ConfigError, match="must be the folder of a run"):
        replay.configuration_of(tmp_path / "nothing", given, composed(*given))


def test_a_run_is_not_repeated_over_itself(composed: Composed, tmp_path: Path) -> None:
    artifacts.write_json(tmp_path / "provenance.json", {"config": {"seed": 0}})
    given = [f"replay={tmp_path}", f"run_dir={tmp_path}/."]
    with pytest.raises(ConfigError, match="is the run that is repeated"):
        replay.configuration_of(tmp_path, given, composed(*given))


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_run_without_a_sound_ledger_cannot_be_repeated(tmp_path: Path, content: Any) -> None:
    if content is not None:
        (tmp_path / "steps.json").write_text(content)
    with pytest.raises(DataError, match=re.escape("steps.json")):
        replay.pace_of("wall", tmp_path / "new", tmp_path)
