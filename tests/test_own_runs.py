"""Models of a user's own from the command line: files, resumption, refusals, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mamba_cli.artifacts import read_table
from mamba_cli.errors import ConfigError, DataError
from mamba_cli.run import digests_of_files, run

Compose = Callable[..., DictConfig]

MODEL = """
import jax.numpy as jnp
import numpy as np

data = np.random.default_rng(0).normal(2.0, 1.0, size=200)


def init(key):
    return {"mean": 0.0}


def log_prior(params):
    return -0.5 * params["mean"] ** 2


def log_likelihood(params, datum):
    return -0.5 * (datum - params["mean"]) ** 2
"""

# Steps at a measured cost: a machine that is busy for a moment takes none of them away.
SHORT = [
    "budget=quick",
    "budget.clock=calibrated",
    "tuner.longest_arm_s=0.05",
    "evaluation.budget_s=0.5",
]


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def asked(compose: Compose, tmp_path: Path, *overrides: str) -> DictConfig:
    assert not HydraConfig.initialized()
    return compose(f"results_dir={tmp_path / 'results'}", *overrides)


def test_a_model_file_is_tuned_compared_with_nuts_and_summarised(
    compose: Compose, tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["model=python", f"model.file={model_file}", *SHORT]
    # What NUTS would take is estimated on a machine that may be busy.
    limit = "ground_truth.max_s=1e6"
    cfg = asked(compose, tmp_path, *overrides, "ground_truth.num_draws=800", limit)
    run(cfg)
    said = capsys.readouterr()
    # Posterior precision 200 + 1, so 4 / 201 = 10^-1.7: steps from 10^-2 down.
    assert "largest curvature at the MAP 201; step sizes 10^-2 to 10^-6.5 (10)" in said.err
    assert "batches of 100, 10 % of the rows" in said.err
    assert "NUTS would take about" in said.err
    assert "NOT the paper's size" not in said.out + said.err
    folder = tmp_path / "results" / "runs" / "python" / "sgld" / "mamba" / "seed-0"
    _, rows = read_table(folder / "parameters.csv")
    assert [row["parameter"] for row in rows] == ["mean"]
    data = np.random.default_rng(0).normal(2.0, 1.0, size=200)
    exact_sd = 201**-0.5
    # A tenth of a second or more of a chain that moves: hundreds of effective draws.
    assert float(rows[0]["mean"]) == pytest.approx(data.sum() / 201, abs=exact_sd)
    assert float(rows[0]["sd"]) == pytest.approx(exact_sd, rel=0.5)
    assert json.loads((folder / "provenance.json").read_text())["paper_size"] is False
    _, metrics = read_table(folder / "metrics.csv")
    assert float(metrics[0]["relative_std_error"]) < 0.5

    model_file.write_text(MODEL.replace("-0.5 * (datum", "-0.6 * (datum"))
    with pytest.raises(ConfigError, match=r"file_sha256\.model\.file"):
        run(cfg)


def test_a_ground_truth_that_costs_too_much_is_left_out_once_and_for_all(
    compose: Compose,
    tmp_path: Path,
    model_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cfg = asked(
        compose,
        tmp_path,
        "model=python",
        f"model.file={model_file}",
        "tuner=fixed",
        "tuner.step_size=1e-3",
        "budget=quick",
        "evaluation.budget_s=0.1",
        "ground_truth.max_s=1e-6",
    )
    run(cfg)
    folder = tmp_path / "results" / "runs" / "python" / "sgld" / "fixed" / "seed-0"
    skipped = json.loads((folder / "ground_truth_skipped.json").read_text())
    assert "and ground_truth.max_s is 1e-06" in skipped["reason"]
    capsys.readouterr()
    run(cfg)
    assert "nothing left to do" in capsys.readouterr().out

    # A repetition does what was done, whatever a gradient costs by then.
    cfg.replay, cfg.run_dir, cfg.ground_truth.max_s = str(folder), str(tmp_path / "again"), 1e6
    run(cfg)
    assert "identical, seconds apart" in capsys.readouterr().out
    again = json.loads((tmp_path / "again" / "ground_truth_skipped.json").read_text())
    assert again == skipped


def test_a_run_remembers_the_files_that_its_model_is_read_from(model_file: Path) -> None:
    def digests(**keys: str) -> dict[str, str]:
        found: dict[str, str] = digests_of_files({"model": keys}).get("file_sha256", {})
        return found

    before = digests(target=f"{model_file}:model", data=str(model_file))
    assert list(before) == ["model.data", "model.target"]
    model_file.write_text(MODEL + "# changed")
    after = digests(target=f"{model_file}:model", data=str(model_file))
    assert after["model.target"] != before["model.target"]
    assert not digests(target="package.module:model")


def test_a_run_remembers_the_modules_that_its_target_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "own_pkg/__init__.py": "raise RuntimeError('a digest executes nothing')",
        "own_pkg/models/__init__.py": "",
        "own_pkg/models/first.py": "import os\nfrom ..parts import prior\nfrom . import second",
        "own_pkg/models/second.py": "import own_pkg.third as t, numpy",
        "own_pkg/models/apart.py": "",
        "own_pkg/parts/__init__.py": "",
        "own_pkg/parts/prior.py": "from ..models.first import model",
        "own_pkg/third.py": "def late():\n    import own_lone",
        "own_lone.py": "import own_beside, json",
        "own_beside.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def digests(target: str) -> dict[str, str]:
        found: dict[str, str] = digests_of_files({"model": {"target": target}})["file_sha256"]
        return found

    package = digests("own_pkg.models.first:model")
    names = ("models", "models.second", "parts", "parts.prior", "third")
    assert set(package) == {"model.target", "model.target.own_pkg"} | {
        f"model.target.own_pkg.{name}" for name in names
    }
    # A module of no package: the modules in its folder. A file is like it.
    assert set(digests("own_lone:model")) == {"model.target", "model.target.own_beside"}
    assert digests("own_lone.py:model") == digests("own_lone:model")
    (tmp_path / "own_pkg" / "parts" / "prior.py").write_text("changed = True")
    changed = digests("own_pkg.models.first:model")
    assert {key for key in package if package[key] != changed.get(key)} == {
        "model.target.own_pkg.parts.prior"
    }


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["model=python"], ConfigError, r"model\.file and model\.target: neither is given"),
        (["model=python", "model.file=none.py"], ConfigError, r"model\.file='none\.py'"),
        (["model=numpyro"], ConfigError, r"model\.target has no value"),
        (
            ["model=python", "model.file={model}", "model.data={folder}/none.npz"],
            DataError,
            r"none\.npz: no such file",
        ),
        (
            ["model=python", "model.file={model}", "tuner=grid"],
            ConfigError,
            r"tuner\.metric='log_loss': .* it has none: it has no test_data",
        ),
    ],
)
def test_what_is_missing_is_said_by_key(
    compose: Compose,
    tmp_path: Path,
    model_file: Path,
    overrides: list[str],
    kind: type[Exception],
    message: str,
) -> None:
    filled = [text.format(model=model_file, folder=tmp_path) for text in overrides]
    with pytest.raises(kind, match=message):
        run(asked(compose, tmp_path, *filled, "budget=quick"))
