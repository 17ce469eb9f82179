"""The jackknife over blocks against the textbook's error of a mean."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mamba_cli.rewards.batch_means import batch_means_error

RNG = np.random.default_rng(5)


def norm_of(mean):
    return np.linalg.norm(mean, axis=-1)


def test_the_error_of_a_mean_is_that_of_the_textbook() -> None:
    blocks = RNG.standard_normal((6, 1)) + 10
    expected = blocks.std(ddof=1) / math.sqrt(6)
    merged = blocks.reshape(3, 2).mean(axis=1)  # three: too few for an error of their own
    assert len(merged) == 3
    assert batch_means_error(norm_of, blocks) == pytest.approx(expected, rel=1e-10)


def test_blocks_that_agree_with_their_neighbours_have_a_larger_error() -> None:
    pairs = np.repeat(RNG.standard_normal((8, 1)), 2, axis=0) + 10
    expected = pairs[::2].std(ddof=1) / math.sqrt(8)
    assert batch_means_error(norm_of, pairs) == pytest.approx(expected, rel=1e-10)


def test_too_few_blocks_have_no_error() -> None:
    assert math.isnan(batch_means_error(norm_of, np.ones((3, 1))))


def test_a_function_of_several_means() -> None:
    """A difference of means has the error of the mean of differences."""
    one, other = RNG.standard_normal((2, 7, 1)) + 3

    def difference(first, second):
        return (first - second)[:, 0]

    expected = (one - other).std(ddof=1) / math.sqrt(7)
    assert batch_means_error(difference, one, other) == pytest.approx(expected, rel=1e-10)
