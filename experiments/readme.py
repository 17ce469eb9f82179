"""Figures in README.md: written by the programs that make them, between two markers each."""

from __future__ import annotations

from pathlib import Path


def between(readme: Path, begin: str, end: str) -> str:
    """What stands between the lines ``begin`` and ``end``."""
    return readme.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip()


def write_between(readme: Path, begin: str, end: str, text: str) -> None:
    """Put ``text`` there."""
    old = readme.read_text(encoding="utf-8")
    before, found, rest = old.partition(begin)
    assert found, f"{readme} has no line {begin}"
    _, found, after = rest.partition(end)
    assert found, f"{readme} has no line {end}"
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
