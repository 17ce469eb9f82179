from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_cli.models import rating_matrix
from mamba_cli.models.rating_matrix import squared_error

NUM_USERS, NUM_ITEMS, LATENT_DIM = 37, 50, 4


def ratings(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs that crowd on the first items; some users and items have none."""
    rng = np.random.default_rng(seed)
    chance = 0.9 / (1 + np.arange(NUM_ITEMS)) ** 0.7
    rated = rng.random((NUM_USERS, NUM_ITEMS)) < chance
    rated[5] = rated[:, 49] = False
    rated = rated[:, rng.permutation(NUM_ITEMS)]
    users, items = np.nonzero(rated)
    shuffled = rng.permutation(len(users))
    return users[shuffled], items[shuffled], rng.normal(size=len(users)).astype(np.float32)


def float64_reference(
    users: np.ndarray, items: np.ndarray, values: np.ndarray, u: np.ndarray, v: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    of_users, of_items = np.zeros_like(u), np.zeros_like(v)
    total = 0.0
    for i, j, rating in zip(users, items, values.astype(np.float64), strict=True):
        error = rating - u[i] @ v[j]
        total += error**2
        of_users[i] -= 2 * error * v[j]
        of_items[j] -= 2 * error * u[i]
    return total, of_users, of_items


@pytest.mark.parametrize("dense_share", [0.01, 0.3, 1.0])
def test_error_and_gradient_are_those_of_a_loop_over_ratings(
    dense_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all ratings in lists, the default, and all of them dense."""
    monkeypatch.setattr(rating_matrix, "DENSE_SHARE", dense_share)
    for seed in range(3):
        pairs = ratings(seed)
        rng = np.random.default_rng(seed + 10)
        u, v = rng.normal(size=(NUM_USERS, LATENT_DIM)), rng.normal(size=(NUM_ITEMS, LATENT_DIM))
        value, of_users, of_items = float64_reference(*pairs, u, v)
        matrix = rating_matrix.rating_matrix(*pairs, NUM_USERS, NUM_ITEMS)
        arguments = jnp.asarray(u, jnp.float32), jnp.asarray(v, jnp.float32)
        found = jax.jit(jax.value_and_grad(squared_error, (0, 1)))(*arguments, matrix)
        assert float(found[0]) == pytest.approx(value, rel=1e-5)
        np.testing.assert_allclose(found[1][0], of_users, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found[1][1], of_items, rtol=1e-4, atol=1e-4)


def test_products_with_the_hessian_are_differences_of_gradients() -> None:
    pairs = ratings(0)
    matrix = rating_matrix.rating_matrix(*pairs, NUM_USERS, NUM_ITEMS)
    rng = np.random.default_rng(1)
    u, du = rng.normal(size=(2, NUM_USERS, LATENT_DIM))
    v, dv = rng.normal(size=(2, NUM_ITEMS, LATENT_DIM))
    to32 = [jnp.asarray(a, jnp.float32) for a in (u, v, du, dv)]

    @jax.jit
    def product(u: jax.Array, v: jax.Array, du: jax.Array, dv: jax.Array) -> tuple:  # type: ignore[type-arg]
        gradient = jax.grad(lambda u, v: squared_error(u, v, matrix), (0, 1))
        return jax.jvp(gradient, (u, v), (du, dv))[1]

    step = 1e-5
    ahead = float64_reference(*pairs, u + step * du, v + step * dv)
    behind = float64_reference(*pairs, u - step * du, v - step * dv)
    for found, plus, minus in zip(product(*to32), ahead[1:], behind[1:], strict=True):
        np.testing.assert_allclose(found, (plus - minus) / (2 * step), rtol=1e-3, atol=1e-3)


def test_every_rating_has_one_place_on_each_side() -> None:
    users, items, values = ratings(2)
    matrix = rating_matrix.rating_matrix(users, items, values, NUM_USERS, NUM_ITEMS)
    num_dense = int(np.sum(np.asarray(matrix.dense) > 0.5 * rating_matrix.UNRATED))
    for side, num_others in ((matrix.by_user, NUM_ITEMS), (matrix.by_item, NUM_USERS)):
        listed = sum(int(np.sum(np.asarray(part.others) < num_others)) for part in side.lists)
        assert num_dense + listed == len(values)
        lengths = [part.others.shape[1] for part in side.lists]
        assert lengths == sorted(set(lengths), reverse=True)
