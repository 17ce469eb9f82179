"""The wheel, installed the ordinary way and used from another directory."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside the checkout; its stdout. A failure shows what it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that no build folder is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("mamba_cli", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "dist"]
    run(sys.executable, "-m", "pip", *build, ".", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment that holds the wheel and borrows all else from this one."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    site = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=ROOT).strip()
    )
    install = ["install", "--no-deps", "--no-index", "--quiet", wheel]
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=environment)
    # A .pth file read from here adds the folder alone: the editable install of the package
    # itself, which is a .pth file over there, is not followed.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def test_every_module_and_every_configuration_file_is_in_the_wheel(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "mamba_cli").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in packed
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"mamba_cli/{path.relative_to(ROOT).as_posix()}" in packed
    assert "mamba_cli/py.typed" in packed


def test_the_wheel_carries_nothing_else(wheel: Path) -> None:
    for name in zipfile.ZipFile(wheel).namelist():
        assert name.startswith(("mamba_cli/", "mamba_cli-"))


def test_the_installed_command_works_from_any_directory(scripts: Path, tmp_path: Path) -> None:
    where = "import mamba_cli, mamba_cli.conf; print(mamba_cli.__file__, *mamba_cli.conf.__path__)"
    for folder in run(scripts / "python", "-c", where, cwd=tmp_path).split():
        assert str(ROOT) not in folder
        assert str(scripts.parent) in folder
    printed = run(scripts / "mamba-run", "--cfg", "job", "model=logreg", cwd=tmp_path)
    assert "_target_: mamba_cli.models.logreg.logistic_regression" in printed
    assert "sghmc_cv" in run(scripts / "mamba-run", "--help", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_installed_command_does_a_whole_run(scripts: Path, tmp_path: Path) -> None:
    small = ["model.num_train=400", "model.num_test=100", "evaluation.budget_s=0.1"]
    fixed = ["tuner=fixed", "tuner.step_size=1e-3", "ground_truth=none"]
    printed = run(scripts / "mamba-run", *small, *fixed, cwd=tmp_path)
    folder = tmp_path / "results/runs/logreg/sgld/fixed/seed-0"
    assert str(folder.relative_to(tmp_path)) in printed
    with (folder / "metrics.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["status"] == "ok"
    assert float(row["batch_size"]) == 40
    assert float(row["num_samples"]) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
