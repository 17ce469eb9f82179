"""What may be asked, and the digest of a question."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nuts_runs import SETTINGS
from small_posteriors import LINEAR

from mamba_cli.errors import ConfigError
from mamba_cli.ground_truth import NutsSettings
from mamba_cli.ground_truth.settings import digest


def test_the_digest_changes_with_what_changes_the_draws() -> None:
    settings = [
        SETTINGS,
        replace(SETTINGS, num_draws=4000),
        replace(SETTINGS, num_warmup=301),
        replace(SETTINGS, num_chains=3),
        replace(SETTINGS, seed=1),
        replace(SETTINGS, whiten=False),
        replace(SETTINGS, target_accept=0.9),
        replace(SETTINGS, max_tree_depth=9),
        replace(SETTINGS, start_scale=1.0),
    ]
    digests = [digest(LINEAR, chosen) for chosen in settings]
    digests.append(digest(replace(LINEAR, digest="1"), SETTINGS))
    digests.append(digest(replace(LINEAR, name="other"), SETTINGS))
    assert len(set(digests)) == len(digests)
    for unchanged in (
        replace(SETTINGS, min_ess=1.0),
        replace(SETTINGS, max_r_hat=1.1),
        replace(SETTINGS, block_draws=7),
        replace(SETTINGS, max_stored_bytes=1000),
    ):
        assert digest(LINEAR, unchanged) == digests[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_chains", 1),
        ("num_draws", 7),
        ("num_warmup", 0),
        ("max_r_hat", 1.0),
        ("min_ess", 0),
        ("target_accept", 1.0),
        ("max_tree_depth", 0),
        ("start_scale", -1.0),
        ("block_draws", 0),
    ],
)
def test_settings_name_the_key_and_the_value(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"ground_truth\.{key}={value}: must be"):
        NutsSettings(**{key: value})
