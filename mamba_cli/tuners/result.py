"""What every tuner returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mamba_cli.types import ArmRecord, Hyperparameters


@dataclass(frozen=True)
class Tuning:
    """Records of every arm in every rung, and the winner (None: no arm was usable)."""

    records: list[ArmRecord]
    winner: ArmRecord | None

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The winner's."""
        assert self.winner is not None
        return Hyperparameters(
            self.winner.step_size, self.winner.batch_size, self.winner.num_integration_steps
        )


class Checkpoints(Protocol):
    """Where a tuner keeps what it has finished; ``artifacts.RunFolder`` is one."""

    def write_tuning(self, records: list[ArmRecord]) -> None: ...

    def read_tuning(self) -> list[ArmRecord]: ...

    def save_checkpoint(
        self, name: str, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
    ) -> None: ...

    def load_checkpoint(self, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None: ...

    def drop_checkpoint(self, name: str) -> None: ...
