"""Generators of noise: normal moments, no correlation within or between steps, exact laws."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_model import gaussian_mean
from scipy import stats

from mamba_cli import gradients, minibatch
from mamba_cli.chain import Budget, ChainProgram, advance
from mamba_cli.noise import counter_hash, hashed_bits, threefry
from mamba_cli.samplers.sghmc import sghmc
from mamba_cli.samplers.sgld import sgld
from mamba_cli.samplers.sgnht import sgnht
from mamba_cli.types import Array, Hyperparameters, Sampler

DIM, NUM_STEPS = 50_000, 2_000
NUM_VARIATES = DIM * NUM_STEPS  # 10^8


def step_key(number: int | Array) -> Array:
    """The key of a step, as a chain makes it."""
    return counter_hash(jax.random.fold_in(jax.random.key(0), number))


@cache
def moments() -> dict[str, float]:
    """Sums over 10^8 variates in steps of 50,000, as standard scores."""

    @jax.jit
    def of_step(number: Array, before: Array) -> tuple[Array, dict[str, Array]]:
        x = jax.random.normal(step_key(number), (DIM,))
        terms = {f"power {k}": x**k for k in (1, 2, 3, 4)}
        terms |= {f"lag {lag}": x[lag:] * x[:-lag] for lag in (1, 2, 3, 16, 1024)}
        terms |= {"next step": x * before, "squares, lag 1": (x[1:] ** 2 - 1) * (x[:-1] ** 2 - 1)}
        terms |= {"squares, next step": (x**2 - 1) * (before**2 - 1)}
        terms |= {"beyond 4": (jnp.abs(x) > 4).astype(jnp.float32)}
        return x, {name: jnp.sum(term) for name, term in terms.items()}

    x, totals = jax.random.normal(step_key(0), (DIM,)), dict[str, float]()
    for number in range(1, NUM_STEPS + 1):
        x, sums = of_step(jnp.int32(number), x)
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    beyond = 2 * stats.norm.sf(4)
    laws = {  # mean and variance of one term
        "power 1": (0, 1), "power 2": (1, 2), "power 3": (0, 15), "power 4": (3, 96),
        "squares, lag 1": (0, 4), "squares, next step": (0, 4),
        "beyond 4": (beyond, beyond * (1 - beyond)),
    }  # fmt: skip
    scores = {}
    for name, total in totals.items():
        mean, variance = laws.get(name, (0, 1))
        count = NUM_VARIATES
        if name.startswith("lag"):
            count -= NUM_STEPS * int(name.removeprefix("lag "))
        scores[name] = (total - mean * count) / np.sqrt(variance * count)
    return scores


def test_moments_and_correlations_of_a_hundred_million_variates() -> None:
    # 13 standard scores: beyond 4.5 by chance once in 10,000 runs. Sums of 50,000 float32 terms
    # are off by less than 0.2 of a standard score.
    assert len(moments()) == 13
    assert all(abs(score) < 4.5 for score in moments().values()), moments()


def test_words_are_uniform_bit_by_bit_and_from_step_to_step() -> None:
    size = 1 << 16
    draw = jax.jit(lambda key: hashed_bits(key, size))
    keys = [jax.random.key_data(step_key(number)) for number in range(6)]
    words = {number: np.asarray(draw(key)) for number, key in enumerate(keys)}
    bits = {key: (w[:, None] >> np.arange(32)) & 1 for key, w in words.items()}
    for one in bits.values():
        # Each bit, and each pair of bits, agrees half the time: standard error 1/512.
        signs = 2.0 * one - 1.0
        products = signs.T @ signs / size - np.eye(32)
        assert np.abs(signs.mean(axis=0)).max() < 5 / np.sqrt(size)
        assert np.abs(products).max() < 5 / np.sqrt(size)
    base = 2.0 * bits[0] - 1.0
    for key, other in bits.items():
        if key != 0:
            assert np.abs(base.T @ (2.0 * other - 1.0) / size).max() < 5 / np.sqrt(size), key
    assert len(np.unique(words[0])) == size  # a bijection


def test_variates_are_normal() -> None:
    x = np.concatenate([jax.random.normal(step_key(k), (DIM,)) for k in range(20)])
    assert stats.kstest(x, "norm").pvalue > 1e-3


@pytest.mark.parametrize("noise", [threefry, counter_hash])
@pytest.mark.parametrize("name", ["sgld", "sghmc", "sgnht"])
def test_stationary_laws_of_chains(name: str, noise: object) -> None:
    # Exact gradients, curvature 1000. SGLD: 2 / (lambda (2 - h lambda / 2)). SGNHT: E|v|^2/D = h,
    # and with L = 1 the momentum is a fresh N(0, h) after every step of SGHMC.
    model = gaussian_mean(num_data=1000, dim=2000)
    samplers: dict[str, tuple[Sampler, float]] = {
        "sgld": (sgld, 1e-3), "sghmc": (sghmc, 1e-6), "sgnht": (sgnht, 1e-6),
    }  # fmt: skip
    sampler, step_size = samplers[name]
    program = ChainProgram(
        gradients.standard(model), sampler, minibatch.without_replacement, 1000,
        capacity=10, noise=noise,  # type: ignore[arg-type]
    )  # fmt: skip
    start = model.posterior_mean.astype(np.float32)
    chain = program.start(jax.random.key(2), start, Hyperparameters(step_size, 1000))
    first = np.asarray(getattr(chain.carry.sampler, "momentum", np.nan))
    chain = advance(program, chain, Budget(steps=2_000))
    if name == "sgld":
        rho = 1 - step_size * model.precision / 2
        expected = 2 / (model.precision * (2 - step_size * model.precision / 2))
        # From its mean; the start takes 1 / (1 - rho^2) steps off.
        effective = 2000 * 2_000 * (1 - rho**2) / (1 + rho**2)
        assert np.mean(chain.std**2) / expected == pytest.approx(
            1, abs=4.5 * np.sqrt(2 / effective) + 2e-3
        )
    else:
        assert np.mean(first**2) / step_size == pytest.approx(1, abs=4.5 * np.sqrt(2 / 2000))
    if name == "sgnht":
        momentum = np.asarray(chain.carry.sampler.momentum)
        assert np.mean(momentum**2) / step_size == pytest.approx(1, abs=0.2)


def test_the_key_decides() -> None:
    first, second = (jax.random.normal(step_key(k), (100,)) for k in (3, 4))
    np.testing.assert_array_equal(first, jax.random.normal(step_key(3), (100,)))
    assert not np.any(first == second)


def test_words_of_another_width_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="not of 16"):
        jax.random.bits(step_key(0), (3,), jnp.uint16)
