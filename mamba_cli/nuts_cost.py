"""What NUTS on all rows would cost, before it is run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli import map_estimate
from mamba_cli.errors import NothingUsableError
from mamba_cli.ground_truth import (
    MAX_DENSE_DIM,
    Coordinates,
    NutsSettings,
    chain_groups,
    in_threads,
    laplace_matrix,
    make_target,
    potentials_and_gradients,
)
from mamba_cli.types import Array, HasFullLikelihood, Model

LEAPFROGS_WHITENED = 10
"""A draw of a near-Gaussian posterior in whitened coordinates takes 7 leapfrog steps; chains that
move together wait for the longest."""

LEAPFROGS_UNWHITENED = 63
"""Nothing is known of the scales then: trees of depth 6."""

WARMUP_FACTOR = 2.0
"""A step of the warm-up costs about two later ones, while the step size is still being found."""

NUM_TIMINGS = 3


class NutsCost(NamedTuple):
    """An estimate: ``seconds`` of sampling = time of a leapfrog step x their expected number."""

    seconds: float
    leapfrog_s: float
    num_leapfrogs: int
    whiten: bool

    def describe(self) -> str:
        """The estimate in words."""
        return (
            f"NUTS would take about {self.seconds:.3g} s ({self.num_leapfrogs:,} leapfrog steps of "
            f"{1e3 * self.leapfrog_s:.3g} ms)"
        )


def estimate(
    model: Model,
    map_position: Array,
    settings: NutsSettings,
    clock: Callable[[], float] = time.perf_counter,
) -> NutsCost:
    """Time one gradient of all chains on all rows, and multiply.

    Whitening is left out where the Hessian at the MAP is not positive definite. Where the dimension
    is too large for a Hessian, coordinates are scaled one by one, which needs none, and trees are
    taken to be as deep as without.
    """
    is_dense = model.dim <= MAX_DENSE_DIM
    whiten = settings.whiten and (not is_dense or _has_laplace(model, map_position))
    blocks = None
    if not isinstance(model, HasFullLikelihood):
        blocks = map_estimate.row_blocks(model.data, model.num_data)
    coordinates = Coordinates(np.asarray(map_position, np.float32), None)
    target = make_target(model, coordinates, blocks)
    evaluate = jax.jit(partial(potentials_and_gradients, model))
    groups = chain_groups(model, settings.num_chains)
    # Compiled before threads ask for it at once.
    for size in {len(group) for group in groups}:
        jax.block_until_ready(evaluate(target, jnp.zeros((size, model.dim))))

    def leapfrog(group: range) -> None:
        jax.block_until_ready(evaluate(target, jnp.zeros((len(group), model.dim))))

    times = []
    for _ in range(NUM_TIMINGS):
        began = clock()
        in_threads(leapfrog, groups)
        times.append(clock() - began)
    leapfrog_s = min(times)
    each = LEAPFROGS_WHITENED if whiten and is_dense else LEAPFROGS_UNWHITENED
    num_leapfrogs = int(each * (settings.draws_per_chain + WARMUP_FACTOR * settings.num_warmup))
    return NutsCost(leapfrog_s * num_leapfrogs, leapfrog_s, num_leapfrogs, whiten)


def settings_for(cost: NutsCost, settings: NutsSettings) -> NutsSettings:
    """``settings``, without whitening where there is nothing to whiten by."""
    return replace(settings, whiten=cost.whiten)


def _has_laplace(model: Model, map_position: Array) -> bool:
    try:
        laplace_matrix(map_estimate.hessian(model, map_position))
    except NothingUsableError:
        return False
    return True
