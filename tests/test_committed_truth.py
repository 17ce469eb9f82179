"""The committed posterior of the matrix factorisation against an independent sampler.

Given everything else, each block of the parameters has a conjugate law: Gibbs sampling
(Salakhutdinov and Mnih, 2008, with diagonal precisions) needs neither gradients nor a step size,
and is written here from the formulas of the paper's appendix in float64 NumPy.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import sparse

from mamba_cli import artifacts
from mamba_cli.data import movielens
from mamba_cli.models import pmf

ROOT = Path(__file__).parents[1]
REAL = Path(os.environ.get("MAMBA_DATA_DIR") or ROOT.parent / "shared" / "data")
COMMITTED = sorted((ROOT / "results" / "ground_truth").glob("pmf-*.npz"))
pytestmark = [
    pytest.mark.skipif(
        not (REAL / "ml-100k").is_dir() and not (REAL / "ml-100k.zip").exists(),
        reason="needs MovieLens 100K (MAMBA_DATA_DIR)",
    ),
]
LATENT_DIM, ALPHA, A0, B0 = 20, 3.0, 4.0, 5.0
NUM_SWEEPS, NUM_BURN_IN = 220, 140


@cache
def fold() -> movielens.Fold:
    return movielens.load_movielens(1, REAL)


class Gibbs:
    """One chain; ``predict`` is the expectation of the test ratings given all else."""

    def __init__(self, seed: int) -> None:
        data = fold()
        self.rng = np.random.default_rng(seed)
        self.mean = float(np.mean(data.train.ratings, dtype=np.float64))
        shape = (data.num_users, data.num_items)
        place = (data.train.users, data.train.items)
        # One pair in twenty is rated.
        self.rated = sparse.csr_array((np.ones(len(place[0])), place), shape)
        self.ratings = sparse.csr_array((data.train.ratings - self.mean, place), shape)
        self.users = 0.1 * self.rng.standard_normal((data.num_users, LATENT_DIM))
        self.items = 0.1 * self.rng.standard_normal((data.num_items, LATENT_DIM))

    def hyperparameters(self, latent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """lambda ~ Gamma(a0 + n/2, b0 + S/2) and mu ~ N(sum/(n+1), 1/((n+1) lambda)).

        mu is integrated out of the first; S = sum x^2 - (sum x)^2 / (n+1).
        """
        n, total = len(latent), latent.sum(axis=0)
        spread = (latent**2).sum(axis=0) - total**2 / (n + 1)
        precision = self.rng.gamma(A0 + n / 2, 1.0, LATENT_DIM) / (B0 + spread / 2)
        noise = self.rng.standard_normal(LATENT_DIM) / np.sqrt((n + 1) * precision)
        return total / (n + 1) + noise, precision

    def rows(
        self,
        others: np.ndarray,
        rated: sparse.csr_array,
        ratings: sparse.csr_array,
        mean: np.ndarray,
        precision: np.ndarray,
    ) -> np.ndarray:
        """Each row N(P^-1 b, P^-1): P = diag(lambda) + alpha sum x x^T, b = lambda mu + ..."""
        # The lower triangles: np.linalg.cholesky reads nothing else.
        row, column = np.tril_indices(LATENT_DIM)
        matrices = np.zeros((rated.shape[0], LATENT_DIM, LATENT_DIM))
        matrices[:, row, column] = ALPHA * (rated @ (others[:, row] * others[:, column]))
        matrices[:, np.arange(LATENT_DIM), np.arange(LATENT_DIM)] += precision
        vectors = ALPHA * (ratings @ others) + precision * mean
        factors = np.linalg.cholesky(matrices)
        half = np.linalg.solve(factors, vectors[..., None])
        half += self.rng.standard_normal(half.shape)
        return np.linalg.solve(np.swapaxes(factors, 1, 2), half)[..., 0]

    def sweep(self) -> np.ndarray:
        """One draw of everything; its clipped prediction of the test ratings."""
        users_mean, users_precision = self.hyperparameters(self.users)
        self.users = self.rows(self.items, self.rated, self.ratings, users_mean, users_precision)
        items_mean, items_precision = self.hyperparameters(self.items)
        self.items = self.rows(
            self.users, self.rated.T.tocsr(), self.ratings.T.tocsr(), items_mean, items_precision
        )
        test = fold().test
        users, items = self.users[test.users], self.items[test.items]
        users[self.rated.sum(axis=1)[test.users] == 0] = users_mean
        items[self.rated.sum(axis=0)[test.items] == 0] = items_mean
        return np.clip(self.mean + np.sum(users * items, axis=1), 1.0, 5.0)


@cache
def gibbs_moments(seed: int) -> tuple[np.ndarray, np.ndarray]:
    chain = Gibbs(seed)
    draws = np.stack([chain.sweep() for _ in range(NUM_SWEEPS)])[NUM_BURN_IN:]
    return draws.mean(axis=0), draws.std(axis=0, ddof=1)


def committed() -> dict[str, np.ndarray]:
    (path,) = COMMITTED
    found = artifacts.read_arrays(path)
    assert found is not None
    return found[0]


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def test_predictions_are_those_of_an_independent_sampler() -> None:
    """The two chains' own difference tells how far a mean of 80 draws is from the truth.

    The mean of two has half the difference's error; NUTS's own, of thousands of draws, is small
    beside it. The sds of these predictions are 0.5, the errors 0.1.
    """
    (mean_1, std_1), (mean_2, std_2) = gibbs_moments(1), gibbs_moments(2)
    truth = committed()
    error_of_mean = rms(mean_1 - mean_2) / 2
    assert rms((mean_1 + mean_2) / 2 - truth["prediction_mean"]) < 1.25 * error_of_mean
    # The variance within chains lacks that of their means, which the difference estimates: the sum
    # is free of bias however slowly they mix. That second term is a fifth of the variance and, from
    # some twenty slow directions, known to a third: a standard error of 3 % of the deviation.
    variance = (std_1**2 + std_2**2) / 2 + (mean_1 - mean_2) ** 2 / 2
    expected = rms(truth["prediction_std"])
    assert np.sqrt(np.mean(variance)) == pytest.approx(expected, rel=0.09)


def test_the_posterior_mean_predicts_better_than_the_map() -> None:
    """1.02 by a converged MAP on this fold, 0.94 by the mean over the posterior."""
    model = pmf.probabilistic_matrix_factorization(fold=1, data_dir=REAL)
    rmse = model.predictive_metrics(jax.numpy.asarray(committed()["prediction_mean"]))["rmse"]
    assert rmse < 0.96
