"""Provenance: how many jobs ran side by side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hydra.types import RunMode

from mamba_cli import ledger

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"


@pytest.mark.parametrize(
    ("mode", "launcher", "jobs"),
    [
        (RunMode.RUN, {"_target_": JOBLIB, "n_jobs": 4}, 1),
        (RunMode.MULTIRUN, {"_target_": BASIC}, 1),
        (RunMode.MULTIRUN, {"_target_": JOBLIB, "n_jobs": 4}, 4),
        (RunMode.MULTIRUN, {"_target_": JOBLIB, "n_jobs": -1}, 8),
        (RunMode.MULTIRUN, {"_target_": JOBLIB, "n_jobs": -3}, 6),
        (RunMode.MULTIRUN, {"_target_": JOBLIB, "n_jobs": -20}, 1),
        (RunMode.MULTIRUN, {"_target_": "some.SlurmLauncher"}, None),
    ],
)
def test_jobs_side_by_side(
    monkeypatch: pytest.MonkeyPatch, mode: RunMode, launcher: dict[str, Any], jobs: int | None
) -> None:
    node = SimpleNamespace(mode=mode, launcher=launcher)
    stub = SimpleNamespace(initialized=lambda: True, get=lambda: node)
    monkeypatch.setattr(ledger, "HydraConfig", stub)
    monkeypatch.setattr(ledger.os, "cpu_count", lambda: 8)
    assert ledger.concurrent_jobs() == jobs


def test_a_configuration_composed_by_hand_is_one_job() -> None:
    assert ledger.concurrent_jobs() == 1
