"""The study's tables: read where they are, added to, written whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd


def read(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """A table, or an empty one with these columns where there is none yet."""
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=list(columns))


def joined(table: pd.DataFrame, more: pd.DataFrame) -> pd.DataFrame:
    """The rows of both."""
    return pd.concat([table, more]) if len(table) else more


def write(table: pd.DataFrame, path: Path) -> None:
    """A CSV that is whole or not there."""
    partial_path = path.with_suffix(".partial")
    table.to_csv(partial_path, index=False)
    partial_path.replace(path)
