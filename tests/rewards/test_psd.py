"""The polynomial Stein discrepancy against its operator, applied to monomials by autodiff."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whitened_draws import gaussian_draws, narrow_posterior, scored

from mamba_cli.errors import ConfigError
from mamba_cli.rewards import PolynomialSteinDiscrepancy, psd
from mamba_cli.whitening import MAX_DENSE_DIM


def by_autodiff(positions, scores, *, mixed: bool = True) -> float:
    """sqrt of the sum over monomials of the squared mean of Laplacian + gradient . score."""
    dim = positions.shape[1]
    degree_two = combinations_with_replacement(range(dim), 2)
    monomials = [(j,) for j in range(dim)] + [m for m in degree_two if mixed or m[0] == m[1]]
    total = 0.0
    with jax.enable_x64(True):
        for monomial in monomials:

            def value(x, monomial=monomial):
                return jnp.prod(x[jnp.array(monomial)])

            def feature(x, s, value=value):
                return jnp.trace(jax.hessian(value)(x)) + jax.grad(value)(x) @ s

            features = jax.vmap(feature)(jnp.asarray(positions), jnp.asarray(scores))
            total += float(jnp.mean(features)) ** 2
    return math.sqrt(total)


def test_it_is_the_operator_on_every_monomial() -> None:
    rng = np.random.default_rng(6)
    positions, scores = rng.standard_normal((2, 5, 3))
    assert psd(positions, scores) == pytest.approx(by_autodiff(positions, scores), rel=1e-12)


def test_closed_form_of_a_gaussian() -> None:
    """N(0, I) and draws of mean m, second moment Q: |m|^2 + 4 sum (1 - Q_jj)^2 + 4 sum Q_jl^2."""
    draws, scores = gaussian_draws(7, 50, 4, width=1.3)
    second = draws.T @ draws / 50
    expected = np.sum(draws.mean(axis=0) ** 2) + 4 * np.sum((1 - np.diag(second)) ** 2)
    expected += 4 * np.sum(np.triu(second, 1) ** 2)
    assert psd(draws, scores) == pytest.approx(math.sqrt(expected), rel=1e-12)


def test_high_dimension_leaves_the_mixed_monomials_out() -> None:
    dim = MAX_DENSE_DIM + 1
    draws, scores = gaussian_draws(8, 3, dim)
    second = np.mean(draws**2, axis=0)
    expected = np.sum(draws.mean(axis=0) ** 2) + 4 * np.sum((1 - second) ** 2)
    assert psd(draws, scores) == pytest.approx(math.sqrt(expected), rel=1e-12)


def test_reward_is_that_of_whitened_draws() -> None:
    whitening, posterior = narrow_posterior()
    w, _ = gaussian_draws(9, 40, 3, width=0.6)
    value = PolynomialSteinDiscrepancy()(scored(*posterior(w), whitening))
    assert value == pytest.approx(psd(w, -w), rel=2e-3)
    assert math.isnan(psd(w, np.full_like(w, np.nan)))


@pytest.mark.parametrize(("key", "value"), [("whitening", "pca"), ("gradients", "none")])
def test_bad_parameters_are_named(key, value) -> None:
    with pytest.raises(ConfigError, match=rf"tuner\.reward\.{key}={value}: must be "):
        PolynomialSteinDiscrepancy(**{key: value})
