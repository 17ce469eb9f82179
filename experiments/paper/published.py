"""The numbers the paper prints, as ``experiments/paper_tables/*.csv`` has them.

One file a table, one row a number: sampler, tuner, metric, value, and whether it is bold there. The
step sizes are those of the library that the paper's experiments used; see :func:`log10_h`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from mamba_cli.artifacts import read_table

FOLDER = Path(__file__).resolve().parents[1] / "paper_tables"


class Key(NamedTuple):
    """Which number of a table."""

    sampler: str
    tuner: str
    metric: str


class Published(NamedTuple):
    """A printed number."""

    value: float
    is_bold: bool


def published(label: str) -> dict[Key, Published]:
    """The numbers of one table, in the order they are printed. Raises ``DataError``."""
    _, rows = read_table(FOLDER / f"{label}.csv")
    return {
        Key(row["sampler"], row["tuner"], row["metric"]): Published(
            float(row["value"]), row["is_bold"] == "true"
        )
        for row in rows
    }


def log10_h(sampler: str, printed: float) -> float:
    """The paper's h for a printed step size.

    SGMCMCJax writes SGLD as theta + dt g + sqrt(2 dt) xi, so that h = 2 dt; the tables print dt.
    Of the other samplers its step size is the h of the paper's equations.
    """
    return printed + math.log10(2) if sampler.startswith("sgld") else printed
