"""What a run spent and what it came from: ``provenance.json``, over all processes of the run.

A run that was interrupted goes on in another process. Seconds are those of the earlier processes,
as the file had them when this one began, plus this one's: writing twice counts nothing twice.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from mamba_cli import artifacts
from mamba_cli.artifacts import RunFolder
from mamba_cli.config import GridSettings, RunSettings
from mamba_cli.errors import StorageError
from mamba_cli.metrics import HIGHER_IS_BETTER
from mamba_cli.types import AnyReward
from mamba_cli.workbench import Seconds

logger = logging.getLogger(__name__)


class Ledger:
    """The provenance of one run.

    Parameters
    ----------
    folder
        Where it is kept, and where earlier processes left theirs.
    config
        The whole resolved configuration.
    settings
        The same, checked.
    reward
        What ranks the arms, if they are ranked by one.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Mapping[str, Any],
        settings: RunSettings,
        reward: AnyReward | None,
    ) -> None:
        earlier = folder.read_provenance() or {}
        now = datetime.datetime.now(datetime.UTC)
        self.finished = earlier.get("end") is not None
        self.seconds = Seconds()
        self.data_digests: dict[str, str] = dict(earlier.get("data_digests") or {})
        self.map: dict[str, Any] | None = earlier.get("map")
        self._folder, self._config, self._settings = folder, config, settings
        self._reward = reward
        self._start: Any = earlier.get("start") or now
        self._earlier_s = {k: v for k, v in (earlier.get("seconds") or {}).items() if v is not None}
        self._stages_s: dict[str, float] = {}
        self._running: tuple[str, float] | None = None
        self._began_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Seconds since this process took the run up."""
        return time.perf_counter() - self._began_s

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the seconds of the block as those of ``name``, and write them however it ends."""
        self._running = (name, time.perf_counter())
        try:
            yield
        except BaseException:
            try:
                self.write()
            except StorageError as error:
                logger.warning("the seconds spent are not in provenance.json: %s", error)
            raise
        self.write()
        self._running = None

    def write(self, *, finished: bool = False) -> None:
        """Write ``provenance.json``, the running stage included. Raises ``StorageError``."""
        if self._running is not None:
            name, began_s = self._running
            self._stages_s[name] = time.perf_counter() - began_s
        spent = {**vars(self.seconds), **self._stages_s, "total": self.elapsed_s}
        values = artifacts.provenance(
            self._config,
            start=self._start,
            end=datetime.datetime.now(datetime.UTC) if finished else None,
            seconds={
                name: self._earlier_s.get(name, 0.0) + spent.get(name, 0.0)
                for name in {**self._earlier_s, **spent}
            },
            data_digests=self.data_digests,
            budget=self._settings.budget,
            paper_size=self._settings.is_paper_size,
            reward=_reward_entry(self._settings, self._reward),
        )
        own = {"num_concurrent_jobs": concurrent_jobs(), "map": artifacts.plain(self.map)}
        self._folder.write_provenance({**values, **own})
        self.finished = finished


def concurrent_jobs() -> int | None:
    """How many jobs Hydra's launcher runs side by side; ``None`` where it does not say.

    1 without a launcher or for the basic one. joblib's ``n_jobs`` counts down from the number of
    cores where it is negative: -1 is all of them, -2 all but one.
    """
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return 1
    launcher = HydraConfig.get().launcher
    if str(launcher.get("_target_", "")).endswith(".BasicLauncher"):
        return 1
    wanted = launcher.get("n_jobs")
    if wanted is None:
        return None
    wanted = int(wanted)
    return wanted if wanted >= 0 else max(1, (os.cpu_count() or 1) + 1 + wanted)


def _reward_entry(settings: RunSettings, reward: AnyReward | None) -> dict[str, Any] | None:
    if reward is not None:
        return {"name": reward.name, "higher_is_better": reward.higher_is_better}
    if isinstance(settings.tuner, GridSettings):
        metric = settings.tuner.metric
        return {"name": metric, "higher_is_better": metric in HIGHER_IS_BETTER}
    return None
