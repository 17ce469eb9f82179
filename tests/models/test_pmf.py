from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.typing import NDArray
from scipy import stats

from mamba_cli.data import movielens
from mamba_cli.errors import ConfigError
from mamba_cli.models import pmf
from mamba_cli.models.pmf import Pairs, ProbabilisticMatrixFactorization, Ratings

REAL = Path(os.environ.get("MAMBA_DATA_DIR", Path(__file__).parents[3] / "shared" / "data"))
needs_movielens = pytest.mark.skipif(
    not (REAL / "ml-100k" / "u.data").is_file(),
    reason=f"the MovieLens files are not in {REAL / 'ml-100k'} (set MAMBA_DATA_DIR)",
)

NUM_USERS, NUM_ITEMS, LATENT_DIM = 9, 11, 3
ALPHA, MU0, A0, B0 = 2.5, 0.3, 4.0, 5.0


def small_fold(seed: int = 0) -> movielens.Fold:
    """60 training and 12 test ratings; user 4 and items 2 and 7 are in the test part alone."""
    rng = np.random.default_rng(seed)
    users, items = np.divmod(rng.permutation(NUM_USERS * NUM_ITEMS), NUM_ITEMS)
    seen = (users != 4) & ~np.isin(items, [2, 7])
    rows = np.stack([users, items, rng.integers(1, 6, users.size)])

    def ratings(columns: NDArray[np.int64]) -> movielens.Ratings:
        return movielens.Ratings(
            columns[0].astype(np.int32), columns[1].astype(np.int32), columns[2].astype(np.int8)
        )

    train, spare, unseen = rows[:, seen][:, :60], rows[:, seen][:, 60:66], rows[:, ~seen][:, :6]
    test = np.concatenate([spare, unseen], axis=1)
    return movielens.Fold(ratings(train), ratings(test), NUM_USERS, NUM_ITEMS)


@pytest.fixture(scope="module")
def model() -> ProbabilisticMatrixFactorization:
    return pmf.from_fold(small_fold(), latent_dim=LATENT_DIM, alpha=ALPHA, mu0=MU0, a0=A0, b0=B0)


def random_position(model: ProbabilisticMatrixFactorization, seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(scale=0.5, size=model.dim)


def blocks_of(position: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """U, mu_U, l_U, V, mu_V, l_V by the layout that the class documents."""
    d = LATENT_DIM
    ends = np.cumsum([NUM_USERS * d, d, d, NUM_ITEMS * d, d])
    u, mu_u, l_u, v, mu_v, l_v = np.split(position, ends)
    return [u.reshape(NUM_USERS, d), mu_u, l_u, v.reshape(NUM_ITEMS, d), mu_v, l_v]


def reference_log_prior(position: NDArray[np.float64]) -> float:
    """The normalised densities of the paper's appendix, with scipy, in float64."""
    u, mu_u, l_u, v, mu_v, l_v = blocks_of(position)
    total = 0.0
    for latent, mean, log_precision in ((u, mu_u, l_u), (v, mu_v, l_v)):
        precision = np.exp(log_precision)
        sd = precision**-0.5
        total += stats.norm.logpdf(latent, mean, sd).sum()
        total += stats.norm.logpdf(mean, MU0, sd).sum()
        density = stats.gamma.logpdf(precision, a=A0, scale=1 / B0)
        total += (density + log_precision).sum()  # d lambda = lambda d log lambda
    return float(total)


def reference_log_likelihood(position: NDArray[np.float64]) -> float:
    u, _, _, v, _, _ = blocks_of(position)
    train = small_fold().train
    mean = train.ratings.astype(np.float64).mean()
    expected = mean + np.einsum("nk,nk->n", u[train.users], v[train.items])
    return float(stats.norm.logpdf(train.ratings, expected, ALPHA**-0.5).sum())


def reference_gradient(position: NDArray[np.float64]) -> NDArray[np.float64]:
    """The gradient of log prior + log likelihood, derived by hand, rating by rating."""
    u, mu_u, l_u, v, mu_v, l_v = blocks_of(position)
    train = small_fold().train
    mean = train.ratings.astype(np.float64).mean()
    du, dv = np.zeros_like(u), np.zeros_like(v)
    for i, j, rating in zip(*train, strict=True):
        residual = float(rating) - mean - u[i] @ v[j]
        du[i] += ALPHA * residual * v[j]
        dv[j] += ALPHA * residual * u[i]
    blocks = []
    for latent, mu, log_precision, d_latent in ((u, mu_u, l_u, du), (v, mu_v, l_v, dv)):
        precision = np.exp(log_precision)
        deviations = latent - mu
        d_mean = precision * (deviations.sum(0) - (mu - MU0))
        squares = (deviations**2).sum(0) + (mu - MU0) ** 2
        d_log_precision = 0.5 * (len(latent) + 1) - 0.5 * precision * squares + A0 - B0 * precision
        blocks += [d_latent - precision * deviations, d_mean, d_log_precision]
    return np.concatenate([block.ravel() for block in blocks])


def as_float32(position: NDArray[np.float64]) -> jax.Array:
    return jnp.asarray(position, jnp.float32)


def test_log_prior_and_likelihood_differ_from_the_densities_by_a_constant(
    model: ProbabilisticMatrixFactorization,
) -> None:
    positions = [random_position(model, seed) for seed in range(4)]
    for function, reference in (
        (model.log_prior, reference_log_prior),
        (lambda p: model.log_likelihood(p, model.data), reference_log_likelihood),
    ):
        offsets = [float(function(as_float32(p))) - reference(p) for p in positions]
        np.testing.assert_allclose(offsets, offsets[0], atol=2e-3)


def test_gradient_equals_the_one_derived_by_hand(model: ProbabilisticMatrixFactorization) -> None:
    @jax.jit
    def gradient(position: jax.Array) -> jax.Array:
        return jax.grad(lambda p: model.log_prior(p) + model.log_likelihood(p, model.data))(
            position
        )

    for seed in range(3):
        position = random_position(model, seed)
        np.testing.assert_allclose(
            gradient(as_float32(position)), reference_gradient(position), rtol=2e-4, atol=2e-4
        )


@pytest.mark.parametrize("batch", [slice(0, 1), slice(7, 30), slice(0, 60)])
def test_the_difference_of_two_gradients_on_the_same_rows(
    model: ProbabilisticMatrixFactorization, batch: slice
) -> None:
    position, centre = random_position(model, 1), random_position(model, 2)
    rows = jax.tree.map(lambda leaf: leaf[batch], model.data)
    statistics = jax.jit(model.centre_statistics)(as_float32(centre), rows)
    difference = jax.jit(model.gradient_difference)
    found = difference(as_float32(position), as_float32(centre), rows, statistics)
    train, mean = small_fold().train, small_fold().train.ratings.astype(np.float64).mean()
    expected = np.zeros(model.dim)
    for at, sign in ((position, 1.0), (centre, -1.0)):
        u, _, _, v, _, _ = blocks_of(at)
        du, dv = np.zeros_like(u), np.zeros_like(v)
        columns = (column[batch] for column in train)
        for i, j, rating in zip(*columns, strict=True):
            residual = float(rating) - mean - u[i] @ v[j]
            du[i] += ALPHA * residual * v[j]
            dv[j] += ALPHA * residual * u[i]
        first = NUM_USERS * LATENT_DIM
        start = first + 2 * LATENT_DIM
        expected[:first] += sign * du.ravel()
        expected[start : start + dv.size] += sign * dv.ravel()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max() + 1e-5)
    at_centre = difference(as_float32(centre), as_float32(centre), rows, statistics)
    np.testing.assert_allclose(at_centre, 0, atol=1e-5)


def test_the_gradient_derived_by_hand_agrees_with_differences(
    model: ProbabilisticMatrixFactorization,
) -> None:
    position = random_position(model, 5)
    gradient = reference_gradient(position)
    for direction in np.random.default_rng(6).normal(size=(4, model.dim)):
        step = 1e-5 * direction
        difference = sum(
            f(position + step) - f(position - step)
            for f in (reference_log_prior, reference_log_likelihood)
        )
        assert difference / 2e-5 == pytest.approx(gradient @ direction, rel=1e-6)


def test_sparse_and_dense_likelihood_are_equal(model: ProbabilisticMatrixFactorization) -> None:
    sparse = jax.jit(jax.value_and_grad(model.log_likelihood))
    dense = jax.jit(jax.value_and_grad(model.full_log_likelihood))
    for seed in range(3):
        position = as_float32(random_position(model, seed))
        value, gradient = sparse(position, model.data)
        dense_value, dense_gradient = dense(position, model.full_data)
        assert float(value) == pytest.approx(float(dense_value), rel=1e-5)
        np.testing.assert_allclose(gradient, dense_gradient, rtol=1e-4, atol=1e-4)


def test_the_mean_over_a_partition_into_minibatches_is_the_full_gradient(
    model: ProbabilisticMatrixFactorization,
) -> None:
    position = as_float32(random_position(model, 1))
    gradient = jax.jit(jax.grad(model.log_likelihood))
    order = np.random.default_rng(2).permutation(model.num_data).reshape(6, 10)
    estimates = [
        model.num_data / 10 * gradient(position, jax.tree.map(lambda a, r=rows: a[r], model.data))
        for rows in order
    ]
    np.testing.assert_allclose(
        np.mean(estimates, axis=0), gradient(position, model.data), rtol=1e-4, atol=1e-4
    )


def test_programs_take_the_data_as_arguments(model: ProbabilisticMatrixFactorization) -> None:
    position = as_float32(random_position(model, 0))
    for jaxpr in (
        jax.make_jaxpr(model.log_likelihood)(position, model.data),
        jax.make_jaxpr(model.full_log_likelihood)(position, model.full_data),
        jax.make_jaxpr(model.log_prior)(position),
    ):
        assert all(np.size(constant) < model.num_data for constant in jaxpr.consts)


def test_ravel_and_unravel_are_inverse(model: ProbabilisticMatrixFactorization) -> None:
    position = jnp.arange(model.dim, dtype=jnp.float32)
    assert model.dim == LATENT_DIM * (NUM_USERS + NUM_ITEMS + 4)
    np.testing.assert_array_equal(model.ravel(model.unravel(position)), position)
    for block, reference in zip(
        model.unravel(position), blocks_of(np.arange(model.dim)), strict=True
    ):
        np.testing.assert_array_equal(block, reference)


def test_predictions_follow_the_prior_mean_of_what_was_never_rated(
    model: ProbabilisticMatrixFactorization,
) -> None:
    position = random_position(model, 3)
    u, mu_u, _, v, mu_v, _ = blocks_of(position)
    users, items = np.array([4, 4, 0, 0]), np.array([2, 0, 7, 1])
    vectors = [(mu_u, mu_v), (mu_u, v[0]), (u[0], mu_v), (u[0], v[1])]
    expected = [model.rating_mean + a @ b for a, b in vectors]
    prediction = model.predict(as_float32(position), Pairs(jnp.asarray(users), jnp.asarray(items)))
    np.testing.assert_allclose(prediction, np.clip(expected, 1, 5), rtol=1e-5)
    assert np.ptp(expected) > 0.1


def test_unseen_pairs_are_counted(model: ProbabilisticMatrixFactorization) -> None:
    assert model.num_unseen_test_pairs == 6
    assert not model.seen_users[4]
    assert np.flatnonzero(~model.seen_items).tolist() == [2, 7]


def test_predictions_are_clipped_to_the_scale(model: ProbabilisticMatrixFactorization) -> None:
    parameters = model.unravel(jnp.ones(model.dim))
    for sign, limit in ((1.0, 5.0), (-1.0, 1.0)):
        far = model.ravel(parameters._replace(users=parameters.users * 9 * sign))
        assert model.predict(far, Pairs(jnp.array([0]), jnp.array([1]))).tolist() == [limit]


def test_data_rows_can_be_predicted_too(model: ProbabilisticMatrixFactorization) -> None:
    position = as_float32(random_position(model, 3))
    of_rows = model.predict(position, model.data)
    of_pairs = model.predict(position, Pairs(model.data.users, model.data.items))
    np.testing.assert_array_equal(of_rows, of_pairs)


def test_rmse_of_the_mean_prediction_and_mse_of_draws() -> None:
    one_rating = movielens.Ratings(
        np.array([0], np.int32), np.array([1], np.int32), np.array([3], np.int8)
    )
    fold = small_fold()._replace(test=one_rating)
    model = pmf.from_fold(fold, latent_dim=2)
    draws = jnp.array([[2.0], [4.0]])
    assert model.predictive_metrics(draws.mean(0)) == {"rmse": 0.0}
    assert jax.vmap(model.squared_error)(draws).mean() == 1.0


def test_hold_out_divides_the_training_ratings(model: ProbabilisticMatrixFactorization) -> None:
    def triples(
        users: jax.Array, items: jax.Array, ratings: NDArray[np.float64]
    ) -> set[tuple[int, int, int]]:
        rounded = np.rint(ratings).astype(int)
        return set(zip(users.tolist(), items.tolist(), rounded.tolist(), strict=True))

    def training(part: ProbabilisticMatrixFactorization) -> set[tuple[int, int, int]]:
        ratings = np.asarray(part.data.centred_ratings) + part.rating_mean
        return triples(part.data.users, part.data.items, ratings)

    part = model.hold_out(0.25, seed=1)
    held_out = triples(part.test_inputs.users, part.test_inputs.items, part.test_ratings)
    assert (part.num_data, len(held_out)) == (45, 15)
    assert training(part).isdisjoint(held_out)
    assert training(part) | held_out == training(model)
    assert part.dim == model.dim
    assert (part.alpha, part.mu0) == (ALPHA, MU0)
    # Centred by the mean of what is kept: nothing of the held-out ratings is used.
    assert abs(float(part.data.centred_ratings.mean())) < 1e-6
    assert training(model.hold_out(0.25, seed=2)) != training(part)
    with pytest.raises(ConfigError, match=r"held-out fraction 1\.0"):
        model.hold_out(1.0, seed=0)


def test_digest_tells_models_and_data_apart(model: ProbabilisticMatrixFactorization) -> None:
    def digest(fold: movielens.Fold, **changes: float) -> str:
        settings = {"alpha": ALPHA, "mu0": MU0, "a0": A0, "b0": B0, **changes}
        return pmf.from_fold(fold, latent_dim=LATENT_DIM, **settings).digest

    fold = small_fold()
    assert digest(fold) == model.digest
    assert len(model.digest) == 64
    ratings = fold.train.ratings.copy()
    ratings[[0, 1]] = np.array([5, 1]) if ratings[0] != 5 else np.array([1, 5])
    changed = fold._replace(train=fold.train._replace(ratings=ratings))
    others = [digest(changed)] + [
        digest(fold, **{key: 1.25}) for key in ("alpha", "mu0", "a0", "b0")
    ]
    assert len({model.digest, *others}) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_dim": 0}, r"model\.latent_dim=0: expected an integer of at least 1"),
        ({"alpha": 0.0}, r"model\.alpha=0\.0: expected a positive number"),
        ({"a0": -1.0}, r"model\.a0=-1\.0"),
        ({"b0": float("nan")}, r"model\.b0=nan"),
    ],
)
def test_a_hyperparameter_out_of_range_is_named(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pmf.from_fold(small_fold(), **changes)  # type: ignore[arg-type]


def test_the_start_is_small_random_and_not_a_saddle(
    model: ProbabilisticMatrixFactorization,
) -> None:
    first, second = (model.initial_position(jax.random.key(seed)) for seed in (0, 1))
    assert first.shape == (model.dim,)
    assert first.dtype == jnp.float32
    assert not np.array_equal(first, second)
    gradient = model.unravel(jax.jit(jax.grad(model.log_likelihood))(first, model.data))
    assert np.linalg.norm(gradient.users) > 0.1
    assert np.linalg.norm(gradient.items) > 0.1
    precision = np.exp(model.unravel(first).users_log_precision)
    np.testing.assert_allclose(precision, A0 / B0, rtol=1e-6)


@needs_movielens
def test_on_fold_1_a_short_optimisation_beats_the_mean_rating() -> None:
    model = pmf.probabilistic_matrix_factorization(fold=1, data_dir=REAL)
    assert (model.num_data, model.dim) == (80_000, 52_580)
    assert model.num_unseen_test_pairs == 32
    assert len(np.asarray(model.test_ratings)) == 20_000

    def potential(position: jax.Array, ratings: jax.Array) -> jax.Array:
        return -model.log_prior(position) - model.full_log_likelihood(position, ratings)

    optimiser = optax.adam(0.03)

    @jax.jit
    def optimise(position: jax.Array, ratings: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, optax.OptState], _: None) -> tuple[object, None]:
            position, state = carry
            updates, state = optimiser.update(jax.grad(potential)(position, ratings), state)
            return (optax.apply_updates(position, updates), state), None

        return jax.lax.scan(step, (position, optimiser.init(position)), None, length=100)[0][0]

    start = model.initial_position(jax.random.key(0))
    position = optimise(start, model.full_data)
    rmse = model.predictive_metrics(model.predict(position, model.test_inputs))["rmse"]
    of_mean_rating = float(np.std(model.test_ratings - model.rating_mean))
    assert rmse < 1.05 < of_mean_rating
    rows = Ratings(*(column[:1000] for column in model.data))
    assert np.isfinite(float(model.log_likelihood(position, rows)))
