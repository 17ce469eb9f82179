"""A small version of the adversarial grids: what raw KSD falls for and the guards refuse."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.reward_study import adversarial
from experiments.reward_study.candidates import candidates


def test_with_guards_no_broken_arm_is_chosen() -> None:
    rewards = candidates(["ksd", "stein_moments"])
    table = adversarial.run(25, 3, rewards).set_index(["reward", "guards"])
    assert table.broken["ksd", False] > 12  # frozen arms score well in raw coordinates
    for name in rewards:
        assert table.broken[name, True] == 0
        assert table.none[name, True] == 0
        assert table.best_refused[name, True] == 0
    assert table.median_regret["stein_moments", True] < 1.05


def test_the_arms_are_what_they_are_called() -> None:
    # By the laws of SGLD on a Gaussian: u <- (1 - h lambda / 2) u + ..., unstable beyond 4.
    rng = np.random.default_rng(0)
    gaussian = np.repeat([True, False], 50)
    num_steps = np.full((100, adversarial.NUM_ARMS), 400)
    kind, step = adversarial.draw_arms(gaussian, num_steps, rng)
    assert np.all(step[kind == "unstable"] > 4)
    assert np.all(step[~gaussian][kind[~gaussian] == "unstable"] >= 10)
    assert np.all(step[kind == "frozen"] * 400 / 2 < 0.002)
    assert np.all((step[kind == "sound"] > 0.01) & (step[kind == "sound"] < 2))
    assert 2 <= (kind == "sound").sum(axis=1).min() <= (kind == "sound").sum(axis=1).max() <= 5


def test_the_variance_of_the_log_cosh_density() -> None:
    # Close to a Gaussian within kappa = 3, wider beyond: against a sum on another grid.
    x = np.linspace(-40, 40, 4001)
    density = np.cosh(x / 3) ** -9.0
    expected = np.sum(density * x**2) / np.sum(density)
    assert adversarial.log_cosh_variance() == pytest.approx(expected, rel=1e-6)
