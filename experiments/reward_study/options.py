"""What the command lines of all parts of the study have in common."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path("results/reward_study")
QUICK_RESULTS = Path("results/quick/reward_study")


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, quick: Mapping[str, Any]
) -> argparse.Namespace:
    """The options, with ``--quick`` and ``--out`` besides; ``quick`` are the defaults of a toy run.

    What the command line says comes before them.
    """
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help=f"toy sizes, into {QUICK_RESULTS}")
    if parser.parse_args(argv).quick:
        parser.set_defaults(**{"out": QUICK_RESULTS, **quick})
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    return options
