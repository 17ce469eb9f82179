"""Which chains move together, and in which thread.

Groups move in threads of their own, one to a core, since a pass over the data keeps one core busy.
Where a model has its likelihood of all rows in one piece, every chain is a group: none waits for
another's longer trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import jax

from mamba_cli.compilation import cpu_threads
from mamba_cli.types import HasFullLikelihood, Model, PyTree

T = TypeVar("T")


def chain_groups(model: Model, num_chains: int) -> tuple[range, ...]:
    """Which chains move together, reading the rows once for all of them; one thread a group.

    As many groups as the process has threads, of sizes that differ by one at most. Chains of a
    likelihood of all rows in one piece share no pass: each is a group. An accelerator takes all
    chains at once.
    """
    if isinstance(model, HasFullLikelihood):
        num_groups = num_chains
    elif jax.default_backend() == "cpu":
        num_groups = min(num_chains, cpu_threads())
    else:
        num_groups = 1
    ends = [number * num_chains // num_groups for number in range(num_groups + 1)]
    return tuple(range(*pair) for pair in pairwise(ends))


def in_threads(function: Callable[[range], T], groups: Sequence[range]) -> list[T]:
    """``function`` of every group, as many at a time as the process has threads."""
    with ThreadPoolExecutor(min(len(groups), cpu_threads())) as pool:
        return list(pool.map(function, groups))


def state_of_group(state: PyTree, group: range) -> PyTree:
    """The state of the chains of a group; that of one chain has no leading axis."""
    which = group.start if len(group) == 1 else slice(group.start, group.stop)
    return jax.tree.map(lambda leaf: leaf[which], state)
