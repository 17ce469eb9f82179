"""The state of the chains on disk, from which a run that was stopped goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mamba_cli import artifacts
from mamba_cli.ground_truth.coordinates import Coordinates
from mamba_cli.ground_truth.programs import is_key
from mamba_cli.ground_truth.progress import Kept, Progress
from mamba_cli.types import PyTree

CHECKPOINT_VERSION = 2
"""Raised when the numbers of a checkpoint change their meaning but not their names and shapes."""

logger = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    layout: str  # of the state that the leaves are of
    coordinates: Coordinates
    progress: Progress
    leaves: list[np.ndarray]
    kept: list[Kept]


def save_checkpoint(
    folder: Path,
    question: str,
    coordinates: Coordinates,
    state: PyTree,
    progress: Progress,
    kept: Sequence[Kept],
) -> None:
    """Save the last block's draws, then the state that counts them.

    A run killed between the two leaves draws that the state does not know of; they are written
    again, the same. Earlier draws are never rewritten.
    """
    if kept:
        artifacts.write_arrays(_draws_path(folder, len(kept) - 1), kept[-1]._asdict(), {})
    arrays = {
        "centre": coordinates.centre,
        **progress.arrays(),
        **{f"leaf_{i:03d}": leaf for i, leaf in enumerate(_pack(state))},
    }
    if coordinates.matrix is not None:
        arrays["matrix"] = coordinates.matrix
    if coordinates.scale is not None:
        arrays["scale"] = coordinates.scale
    meta = {
        "version": CHECKPOINT_VERSION,
        "layout": layout_of(state),
        "question": question,
        "num_kept": len(kept),
        "num_moments": progress.positions.count,
        "counters": progress.counters(),
    }
    artifacts.write_arrays(_state_path(folder), arrays, meta)


def load_checkpoint(folder: Path, question: str) -> Checkpoint | None:
    """The last state saved in ``folder``; ``None`` where there is none, or it cannot be used.

    Whether its leaves fit the sampler of this version is known when that is compiled.
    """
    found = artifacts.read_arrays(_state_path(folder))
    if found is None:
        return None
    arrays, meta = found
    if meta.get("question") != question:
        return None
    if meta.get("version") != CHECKPOINT_VERSION:
        logger.warning("%s is of another version and not used: the chains start again", folder)
        return None
    kept = []
    for index in range(meta["num_kept"]):
        block = artifacts.read_arrays(_draws_path(folder, index))
        if block is None:
            return None
        kept.append(Kept(**block[0]))
    progress = Progress.restored(arrays, meta)
    leaves = [arrays[name] for name in sorted(arrays) if name.startswith("leaf_")]
    coordinates = Coordinates(arrays["centre"], arrays.get("matrix"), arrays.get("scale"))
    return Checkpoint(meta["layout"], coordinates, progress, leaves, kept)


def layout_of(state: PyTree) -> str:
    """Name, type and shape of every leaf of a state of the chains."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return "\n".join(
        f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves
    )


def unpack(state_like: PyTree, leaves: Sequence[np.ndarray]) -> PyTree:
    """The inverse of ``_pack``, for a state of the shapes and types of ``state_like``."""
    like, structure = jax.tree.flatten(state_like)
    restored = [
        jax.random.wrap_key_data(jnp.asarray(leaf)) if is_key(shape) else jnp.asarray(leaf)
        for shape, leaf in zip(like, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


def _pack(state: PyTree) -> list[np.ndarray]:
    """The state's leaves as arrays of numbers; random keys as their raw data."""
    return [
        np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for leaf in jax.tree.leaves(state)
    ]


def _state_path(folder: Path) -> Path:
    return folder / "state.npz"


def _draws_path(folder: Path, index: int) -> Path:
    return folder / f"draws-{index:05d}.npz"
