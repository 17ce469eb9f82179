"""A run repeated by its ledger of steps, and compared with what it was.

``steps.json`` has the length of every dispatch of every chain (:mod:`mamba_cli.pacing`). With the
same configuration, data, versions and machine, the same steps are the same draws, rewards,
decisions and metrics, bit for bit, whatever else the machine is doing and whatever clock paced
the run. Seconds are not compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from mamba_cli import artifacts
from mamba_cli.artifacts import RunFolder
from mamba_cli.config import TOP_LEVEL_KEYS
from mamba_cli.errors import ConfigError, DataError
from mamba_cli.pacing import Calibrated, Pace, Replayed, StepLedger, WallClock
from mamba_cli.types import ArmRecord

SECONDS = ("elapsed_s", "compile_s", "reward_s", "burn_in_s")
"""Columns that are not repeated."""

IN_SECONDS = "theorem_1"
"""The entry of ``best.json`` that is not repeated: the theorem's terms are times of the clock."""

ALLOWED_OVERRIDES = ("replay", "run_dir", "results_dir")
"""What may be given with ``replay=``: where things are written."""

SCORING = "tuner.reward."
"""How keys begin that may be given besides: by them the tuning's chains are scored otherwise."""

_MADE_BY = (
    "versions",
    "platform",
    "cpu",
    "device",
    "num_cores",
    "num_threads",
    "xla_flags",
    "prng_implementation",
    "threefry_partitionable",
    "threefry_partitionable_in_chains",
    "x64",
    "git",
    "data_digests",
)
"""Entries of ``provenance.json`` on which the bits of a result may depend."""

_SHOWN = 5


def read_steps(folder: Path) -> StepLedger | None:
    """The ledger of the run in ``folder``; ``None`` where there is none. Raises ``DataError``."""
    path = folder / "steps.json"
    values = artifacts.read_json(path)
    if values is None:
        return None
    try:
        return StepLedger.from_dict(values)
    except ValueError as error:
        raise DataError(f"cannot read {path}: {error}; delete the run's folder") from error


def pace_of(
    clock: str, folder: Path, replayed: Path | None, config: Mapping[str, Any] | None = None
) -> Pace:
    """What paces a run in ``folder``: its clock, or the ledger of the run it repeats.

    A run that goes on in another process keeps what its ledger has. One whose ``config`` scores
    the draws otherwise than the run that it repeats follows its arms from rung to rung.

    Raises
    ------
    DataError
        There is no ledger to repeat, or it is damaged.
    """
    own = read_steps(folder)
    if replayed is None:
        return Calibrated(own) if clock == "calibrated" else WallClock(own)
    earlier = read_steps(replayed)
    if earlier is None:
        raise DataError(
            f"{replayed} cannot be repeated: it has no steps.json, where a run of this version "
            f"keeps the steps of its chains"
        )
    pace = Replayed(
        earlier, follows=config is not None and scores_otherwise(_config_of(replayed), config)
    )
    if own is not None:
        pace.ledger = own
    return pace


@dataclass(frozen=True)
class SteppedStore:
    """A run's folder as a tuner's ``Checkpoints``, with the ledger written before the records."""

    folder: RunFolder
    pace: Pace

    def write_steps(self) -> None:
        self.folder.write_steps(self.pace.ledger.to_dict(self.pace.name))

    def write_tuning(self, records: list[ArmRecord]) -> None:
        self.write_steps()
        self.folder.write_tuning(records)

    def read_tuning(self) -> list[ArmRecord]:
        return self.folder.read_tuning()

    def save_checkpoint(
        self, name: str, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
    ) -> None:
        self.folder.save_checkpoint(name, arrays, meta)

    def load_checkpoint(self, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        return self.folder.load_checkpoint(name)

    def drop_checkpoint(self, name: str) -> None:
        self.folder.drop_checkpoint(name)


def configuration_of(folder: str | Path, overrides: Sequence[str], given: DictConfig) -> DictConfig:
    """The configuration that repeats the run in ``folder``.

    Parameters
    ----------
    folder
        A run's folder, with its ``provenance.json`` and ``steps.json``.
    overrides
        What was typed, as ``key=value``: with ``replay=`` only folders may be named, and keys of
        the reward, by which the draws of the tuning are then scored: the arms that went on from
        rung to rung go on again, whatever they are worth now. It ends there, without a check run,
        since what another winner would have done afterwards is on no record.
    given
        The configuration composed of them.

    Raises
    ------
    ConfigError
        Another key was given, or the folder holds no run.
    DataError
        ``provenance.json`` is damaged.
    """
    folder = Path(folder).expanduser()
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]
    scoring = [key for key in keys if key.startswith(SCORING)]
    others = [
        key
        for key in keys
        if key not in (*ALLOWED_OVERRIDES, *scoring) and not key.startswith("hydra")
    ]
    if others:
        raise ConfigError(
            f"{others[0]} cannot be given with replay={folder}, which repeats a run as it was: "
            f"only {', '.join(ALLOWED_OVERRIDES[1:])} and {SCORING}* can."
        )
    stored = artifacts.read_json(folder / "provenance.json")
    if stored is None or not isinstance(stored.get("config"), dict):
        raise ConfigError(
            f"replay={folder} is not allowed: it must be the folder of a run, with its "
            f"provenance.json and steps.json."
        )
    if "num_threads" in stored:
        # Sums over rows are cut by the number of threads, before JAX makes them.
        os.environ["NPROC"] = str(stored["num_threads"])
    # What a run adds to its configuration is found anew.
    kept = {key: value for key, value in stored["config"].items() if key in TOP_LEVEL_KEYS}
    config = OmegaConf.create(kept)
    assert isinstance(config, DictConfig)
    config.replay = str(folder)
    config.dry_run = False
    config.run_dir = str(folder) + "-replay"
    for key in ("run_dir", "results_dir"):
        if key in keys:
            config[key] = given[key]
    for key in scoring:
        OmegaConf.update(config, key, OmegaConf.select(given, key))
    if scoring:
        config.stages = ["tune"]
        if "check_s" in config.tuner and config.tuner.guards:
            config.tuner.check_s = 0
    if Path(config.run_dir).resolve() == folder.resolve():
        raise ConfigError(f"run_dir={config.run_dir} is the run that is repeated: give another.")
    return config


def is_scored_otherwise(there: Path, here: Path) -> bool:
    """Whether the run in ``here`` scores the chains of that in ``there`` by another reward."""
    return scores_otherwise(_config_of(there), _config_of(here))


def scores_otherwise(there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether two configurations score the draws of a tuning in two ways."""
    differ = artifacts.config_differences(there, here)
    return any(key.startswith((SCORING, "tuner.check_s")) for key, _, _ in differ)


def _config_of(folder: Path) -> dict[str, Any]:
    return (artifacts.read_json(folder / "provenance.json") or {}).get("config") or {}


def made_otherwise(there: Path, here: Path) -> list[str]:
    """What the two runs were made with that is not the same, a line each."""
    first = artifacts.read_json(there / "provenance.json") or {}
    second = artifacts.read_json(here / "provenance.json") or {}
    return [
        f"{key}: there {old}, here {new}"
        for key, old, new in artifacts.config_differences(
            {key: first.get(key) for key in _MADE_BY}, {key: second.get(key) for key in _MADE_BY}
        )
    ]


def differences(there: Path, here: Path) -> list[str]:
    """What two runs came to that is not the same, a line each; seconds apart.

    Compared are ``tuning.csv``, ``best.json``, ``metrics.csv``, ``parameters.csv`` and
    ``moments.npz``, numbers by their bits; of a run in ``here`` that ended with its tuning, what
    came before.

    Raises
    ------
    DataError
        A file of one of the runs is damaged.
    """
    found: list[str] = []
    stages = _config_of(here).get("stages") or ["evaluate"]
    evaluated = ("metrics.csv", "parameters.csv") if "evaluate" in stages else ()
    for name in ("tuning.csv", *evaluated):
        tables = [artifacts.read_table(folder / name)[1] for folder in (there, here)]
        found += _table_differences(name, *tables)
    best = [artifacts.read_json(folder / "best.json") or {} for folder in (there, here)]
    for key in sorted((best[0].keys() | best[1].keys()) - {IN_SECONDS}):
        found += _value_differences(f"best.json, {key}", best[0].get(key), best[1].get(key))
    if not evaluated:
        return found
    moments = [(artifacts.read_arrays(f / "moments.npz") or ({}, {}))[0] for f in (there, here)]
    for key in sorted(moments[0].keys() | moments[1].keys()):
        old, new = moments[0].get(key), moments[1].get(key)
        if old is None or new is None or not np.array_equal(old, new, equal_nan=True):
            found.append(f"moments.npz, {key}: {_largest_difference(old, new)}")
    return found


def _table_differences(
    name: str, there: Sequence[Mapping[str, str]], here: Sequence[Mapping[str, str]]
) -> list[str]:
    found = []
    if len(there) != len(here):
        found.append(f"{name}: there {len(there)} rows, here {len(here)}")
    for number, (old, new) in enumerate(zip(there, here, strict=False), start=1):
        for column in dict.fromkeys([*old, *new]):
            if column not in SECONDS:
                place = f"{name}, row {number}, {column}"
                found += _value_differences(place, old.get(column), new.get(column))
    return found


def _value_differences(place: str, old: Any, new: Any) -> list[str]:
    return [] if old == new else [f"{place}: there {old}, here {new}"]


def _largest_difference(old: np.ndarray | None, new: np.ndarray | None) -> str:
    if old is None or new is None:
        return f"{'not ' if old is None else ''}there, {'not ' if new is None else ''}here"
    if old.shape != new.shape:
        return f"there of shape {list(old.shape)}, here {list(new.shape)}"
    largest = float(np.nanmax(np.abs(old - new), initial=0.0))
    return f"as far as {largest:.3g} apart" if math.isfinite(largest) else "not finite alike"


def verdict(there: Path, here: Path) -> tuple[bool, list[str]]:
    """Whether the run in ``here`` repeats that in ``there``, and lines that say so.

    Where it scores the chains of that run otherwise there is nothing to be repeated.
    """
    if is_scored_otherwise(there, here):
        return True, [f"the chains of {there}, scored otherwise"]
    found = differences(there, here)
    others = made_otherwise(there, here)
    made = [f"made otherwise: {line}" for line in others]
    if not found:
        return True, [f"identical, seconds apart, to {there}", *made]
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    blame = [] if others else ["the versions and the machine are the same"]
    return False, [f"not identical to {there}:", *found[:_SHOWN], *more, *made, *blame]
