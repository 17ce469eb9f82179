"""Which chains move together."""

from __future__ import annotations

import pytest
from small_posteriors import LINEAR, InOnePiece

from mamba_cli.ground_truth import groups


def test_groups_share_the_chains_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "cpu_threads", lambda: 3)
    assert groups.chain_groups(LINEAR, 8) == (range(2), range(2, 5), range(5, 8))
    assert groups.chain_groups(LINEAR, 2) == (range(1), range(1, 2))
    one_piece = InOnePiece(LINEAR.data[:40], 2)
    assert [len(group) for group in groups.chain_groups(one_piece, 8)] == [1] * 8
