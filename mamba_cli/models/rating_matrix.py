"""The squared error of a factorised rating matrix over all ratings, and its gradient, in one pass.

    E(U, V) = sum over the observed pairs (i, j) of (R_ij - U_i . V_j)^2

Ratings crowd on popular items: of MovieLens 100K, three tenths of the items have four fifths of the
ratings. So the columns of the most popular items are one dense masked block, whose gradient is
three matrix products, and the ratings of the others are lists, once by item and once by user. A
list is padded to the next power of two with a rating of 0 of a vector of zeros, which adds nothing;
a gradient is then a sum along each list, without the scatter-add that is the slow part of a sparse
one. That is about a third of the work of a dense product over all columns.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mamba_cli.types import Array

DENSE_SHARE = 0.3
"""Share of the items, the most popular, whose columns are dense."""

UNRATED = -1e30
"""In the dense block where there is no rating; no centred rating is near it."""


class Lists(NamedTuple):
    """Ratings of the rows of one side, padded lists of one length; shortest lists last."""

    others: Array  # [num_rows, length] int32, row of the other side; its number of rows is padding
    ratings: Array  # [num_rows, length] float32, 0 in the padding


class Side(NamedTuple):
    """The listed ratings of all rows of one side."""

    order: Array  # [num_rows] int32, rows by the number of their listed ratings, most first
    place: Array  # [num_rows] int32, its inverse
    lists: tuple[Lists, ...]  # of order[:k], then of the rows after them, ...


class RatingMatrix(NamedTuple):
    """All ratings, laid out for :func:`squared_error`."""

    dense_items: Array  # [num_dense] int32
    dense: Array  # [num_users, num_dense] float32, UNRATED where there is none
    by_user: Side
    by_item: Side


def rating_matrix(
    users: ArrayLike, items: ArrayLike, ratings: ArrayLike, num_users: int, num_items: int
) -> RatingMatrix:
    """Lay out ratings ``[n]`` of pairs of ids from 0; no pair twice."""
    users, items = np.asarray(users), np.asarray(items)
    ratings = np.asarray(ratings, np.float32)
    by_popularity = np.argsort(-np.bincount(items, minlength=num_items), kind="stable")
    dense_items = by_popularity[: max(1, round(DENSE_SHARE * num_items))]
    column = np.full(num_items, -1)
    column[dense_items] = np.arange(len(dense_items))
    is_dense = column[items] >= 0
    dense = np.full((num_users, len(dense_items)), UNRATED, np.float32)
    dense[users[is_dense], column[items[is_dense]]] = ratings[is_dense]
    rest = users[~is_dense], items[~is_dense], ratings[~is_dense]
    return RatingMatrix(
        jnp.asarray(dense_items, jnp.int32),
        jnp.asarray(dense),
        _side(rest[0], rest[1], rest[2], num_users, num_items),
        _side(rest[1], rest[0], rest[2], num_items, num_users),
    )


def _side(
    own: NDArray[np.integer],
    others: NDArray[np.integer],
    ratings: NDArray[np.float32],
    num_own: int,
    num_others: int,
) -> Side:
    counts = np.bincount(own, minlength=num_own)
    order = np.argsort(-counts, kind="stable")
    place = np.empty(num_own, np.int64)
    place[order] = np.arange(num_own)
    # Ratings in the order of their rows, and the number of each within its row.
    by_row = np.argsort(place[own], kind="stable")
    row = place[own][by_row]
    within = np.arange(len(row)) - np.searchsorted(row, row)
    lengths = np.where(counts > 0, 2 ** np.ceil(np.log2(np.maximum(counts, 1))), 0)[order]
    lists = []
    for length in sorted({int(each) for each in lengths if each > 0}, reverse=True):
        first, last = np.flatnonzero(lengths == length)[[0, -1]]
        mine = (row >= first) & (row <= last)
        at = row[mine] - first, within[mine]
        ids = np.full((last - first + 1, length), num_others, np.int32)
        values = np.zeros(ids.shape, np.float32)
        ids[at], values[at] = others[by_row][mine], ratings[by_row][mine]
        lists.append(Lists(jnp.asarray(ids), jnp.asarray(values)))
    return Side(jnp.asarray(order, jnp.int32), jnp.asarray(place, jnp.int32), tuple(lists))


@jax.custom_vjp
def squared_error(users: Array, items: Array, matrix: RatingMatrix) -> Array:
    """E at U ``[num_users, D]`` and V ``[num_items, D]``, a scalar.

    Its derivative is that of :func:`squared_error_and_gradients`: nothing is stored for a backward
    pass. There is no second derivative in reverse mode, and none in forward mode.
    """
    return squared_error_and_gradients(users, items, matrix)[0]


def squared_error_and_gradients(
    users: Array, items: Array, matrix: RatingMatrix
) -> tuple[Array, Array, Array]:
    """E, dE/dU ``[num_users, D]`` and dE/dV ``[num_items, D]``, with e_ij = R_ij - U_i . V_j:

    dE/dU_i = -2 sum_j e_ij V_j and dE/dV_j = -2 sum_i e_ij U_i.
    """
    popular = items[matrix.dense_items]
    errors = jnp.where(matrix.dense > 0.5 * UNRATED, matrix.dense - users @ popular.T, 0.0)
    _, of_users = _listed(users, items, matrix.by_user)
    listed, of_items = _listed(items, users, matrix.by_item)
    of_items = of_items.at[matrix.dense_items].add(errors.T @ users)
    value = jnp.sum(errors**2) + listed
    return value, -2 * (of_users + errors @ popular), -2 * of_items


def _listed(own: Array, others: Array, side: Side) -> tuple[Array, Array]:
    """Squared error of the listed ratings, and sum_j e_ij V_j for every row of ``own``."""
    with_padding = jnp.concatenate([others, jnp.zeros((1, others.shape[1]), others.dtype)])
    ordered = own[side.order]
    value, sums, first = jnp.zeros(()), [], 0
    for ids, ratings in side.lists:
        mine = ordered[first : first + len(ids)]
        vectors = with_padding[ids]  # [num_rows, length, D]
        errors = ratings - jnp.sum(vectors * mine[:, None], axis=-1)
        sums.append(jnp.sum(errors[..., None] * vectors, axis=1))
        value = value + jnp.sum(errors**2)
        first += len(ids)
    sums.append(jnp.zeros((len(own) - first, own.shape[1]), own.dtype))
    return value, jnp.concatenate(sums)[side.place]


def _forward(users: Array, items: Array, matrix: RatingMatrix) -> tuple[Array, tuple[Array, Array]]:
    value, of_users, of_items = squared_error_and_gradients(users, items, matrix)
    return value, (of_users, of_items)


def _backward(gradients: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    of_users, of_items = gradients
    return cotangent * of_users, cotangent * of_items, None


squared_error.defvjp(_forward, _backward)
