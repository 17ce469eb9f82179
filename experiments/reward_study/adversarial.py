"""How often does a reward choose a broken arm, with and without the guards?

    python experiments/reward_study/adversarial.py [--grids 1000] [--out results/reward_study]

Random grids of SGLD arms, most of them broken by construction: *frozen*, so small a step that by
its law the chain covers 4 % of the posterior's scale at most, in the stiffest direction, or
*unstable*, a step beyond 4 / lambda_max, from barely (with the Gaussian) to thousands of times. The
others are sound. Half of the posteriors are Gaussian; half have log-cosh tails, where the gradient
is bounded and an unstable chain never overflows. All are rotated, with condition numbers up to 10^4
and scales from 0.01 to 1 in raw coordinates. Minibatches are Gaussian noise of the variance
(N - n) / n per whitened coordinate.

All chains run side by side. Every reward of conf/reward picks its best arm, once among all arms
that are finite and move at all (what a tuning without guards has), and once among those that pass
the guards, where the pick has to pass a check run as long as its chain and the next best takes its
place otherwise. One row a reward and setting in ``adversarial.csv``:

``broken``, ``frozen``, ``unstable``: grids in which such an arm was chosen; ``none``: no arm was
left; ``median_regret``, ``worst_regret``: error of the chosen arm over that of the best arm, by the
Wasserstein-2 distance of mean and covariance in whitened coordinates; ``sound_refused``: the share
of sound arms that the guards refused (steps near the limit with much noise are), ``best_refused``
the grids whose best arm they refused.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from experiments.reward_study import options
from experiments.reward_study.candidates import (
    Candidate,
    candidates,
    finite_or_worst,
    loss_of,
)
from experiments.reward_study.errors import gaussian_w2
from mamba_cli.tuners.guards import Guards, principal_axes
from mamba_cli.types import BlockSums, ScoredDraws
from mamba_cli.whitening import Whitening

DIM = 4
NUM_ARMS = 16
NUM_KEPT = 64
NUM_BLOCKS = 16
TAIL = 3.0
"""kappa of the log-cosh density, in standard deviations: beyond, its tails are exponential."""

CHUNK = 100
"""Grids that are simulated side by side."""

QUICK = {"grids": 20, "rewards": ["ksd", "stein_moments", "psd"]}


@dataclass(frozen=True)
class Grids:
    """Chains of all arms of some grids, in principal whitened coordinates u about the mode.

    Shapes: G grids, A arms, m kept draws, B blocks, D dimensions.
    """

    kind: np.ndarray  # [G, A], sound | frozen | unstable
    roots: np.ndarray  # [G, D], sqrt(lambda_j): u_j = roots_j (V^T theta)_j
    vectors: np.ndarray  # [G, D, D], V
    gaussian: np.ndarray  # [G], or log-cosh
    num_steps: np.ndarray  # [G, A]
    kept: np.ndarray  # [G, A, m, D], draws of the tuning
    checked: np.ndarray  # [G, A, m, D], draws of a check run after it
    gradients: np.ndarray  # [G, A, B, D], sums over blocks of the noisy gradient in u
    products: np.ndarray  # [G, A, B, D, D], of gradient times u^T
    mean: np.ndarray  # [G, A, D], of all draws of the tuning
    covariance: np.ndarray  # [G, A, D, D]


def log_density(u: np.ndarray, gaussian: bool) -> np.ndarray:
    """log p(u) for draws ``[..., D]``."""
    if gaussian:
        return np.asarray(-0.5 * np.sum(u**2, axis=-1))
    scaled = np.abs(u) / TAIL
    # log cosh x = x + log(1 + exp(-2 x)) - log 2, which does not overflow.
    return np.asarray(-(TAIL**2) * np.sum(scaled + np.log1p(np.exp(-2 * scaled)), axis=-1))


def score(u: np.ndarray, gaussian: np.ndarray) -> np.ndarray:
    """grad log p at u; ``gaussian`` is broadcast against it."""
    return np.asarray(np.where(gaussian, -u, -TAIL * np.tanh(u / TAIL)))


def log_cosh_variance() -> float:
    """Variance of a coordinate with the log-cosh density, by quadrature."""
    grid = np.linspace(-60, 60, 200_001)[:, None]
    weights = np.exp(log_density(grid, gaussian=False) - log_density(np.zeros((1, 1)), False))
    return float(np.sum(weights * grid[:, 0] ** 2) / np.sum(weights))


def simulate(num_grids: int, rng: np.random.Generator) -> Grids:
    """Draw grids and run their arms: SGLD, u <- u + (h lambda / 2) (s + noise) + sqrt(h lambda) xi.

    Every arm of a grid makes its own number of steps between 200 and 800, as batches of different
    sizes would; draws are kept and summed at even places of its own chain.
    """
    shape = (num_grids, NUM_ARMS)
    condition = 10 ** rng.uniform(0, 4, num_grids)
    scale = 10 ** rng.uniform(-2, 0, num_grids)
    exponents = np.sort(rng.uniform(0, 1, (num_grids, DIM)), axis=1)
    exponents[:, 0], exponents[:, -1] = 0.0, 1.0
    curvature = condition[:, None] ** exponents  # relative to the softest direction
    roots = np.sqrt(curvature) / (scale[:, None] * np.sqrt(condition[:, None]) ** 0.5)
    vectors = np.linalg.qr(rng.standard_normal((num_grids, DIM, DIM)))[0]
    gaussian = rng.random(num_grids) < 0.5
    num_steps = rng.choice([208, 400, 800], shape)
    kind, stiff_step = draw_arms(gaussian, num_steps, rng)
    # h lambda_j of every arm and direction.
    step = stiff_step[:, :, None] * (curvature / curvature[:, -1:])[:, None, :]
    noise = np.sqrt(rng.choice([0.0, 9.0, 99.0], shape))[:, :, None]
    block, stride = num_steps // NUM_BLOCKS, np.maximum(num_steps // NUM_KEPT, 1)
    u = np.zeros((*shape, DIM))
    kept, checked = (np.zeros((*shape, NUM_KEPT, DIM)) for _ in range(2))
    gradients = np.zeros((*shape, NUM_BLOCKS, DIM))
    products = np.zeros((*shape, NUM_BLOCKS, DIM, DIM))
    first, second = np.zeros((*shape, DIM)), np.zeros((*shape, DIM, DIM))
    gradient = score(u, gaussian[:, None, None]) + noise * rng.standard_normal(u.shape)
    rows, columns = np.indices(shape)
    for t in range(2 * int(num_steps.max())):
        with np.errstate(over="ignore", invalid="ignore"):
            u = u + 0.5 * step * gradient + np.sqrt(step) * rng.standard_normal(u.shape)
            u = np.clip(u, -1e30, 1e30)
            gradient = score(u, gaussian[:, None, None]) + noise * rng.standard_normal(u.shape)
            tuning, done = t < num_steps, t < 2 * num_steps
            place = (t % num_steps) // stride
            keep = ((t % num_steps) % stride == stride - 1) & done & (place < NUM_KEPT)
            target = np.where(tuning[..., None], 0, 1)
            for which, store in ((0, kept), (1, checked)):
                chosen = keep & (target[..., 0] == which)
                store[rows[chosen], columns[chosen], place[chosen]] = u[chosen]
            inside = tuning & (t // block < NUM_BLOCKS)
            index = (rows[inside], columns[inside], (t // block)[inside])
            gradients[index] += gradient[inside]
            products[index] += gradient[inside][:, :, None] * u[inside][:, None, :]
            first[tuning] += u[tuning]
            second[tuning] += u[tuning][:, :, None] * u[tuning][:, None, :]
    with np.errstate(over="ignore", invalid="ignore"):
        mean = first / num_steps[..., None]
        covariance = second / num_steps[..., None, None] - mean[..., :, None] * mean[..., None, :]
    return Grids(
        kind=kind,
        roots=roots,
        vectors=vectors,
        gaussian=gaussian,
        num_steps=num_steps,
        kept=kept,
        checked=checked,
        gradients=gradients,
        products=products,
        mean=mean,
        covariance=covariance,
    )


def draw_arms(
    gaussian: np.ndarray, num_steps: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Kinds and h lambda_max of the arms: 2 to 5 sound ones in a grid, the others broken.

    With log-cosh tails a step a little beyond 4 / lambda_max makes a chain swing by less than the
    posterior's width: unstable starts at 10, where it swings between 7 standard deviations.
    """
    num_grids, shape = len(gaussian), num_steps.shape
    order = np.argsort(rng.random(shape), axis=1)
    num_sound = rng.integers(2, 6, (num_grids, 1))
    share_frozen = rng.uniform(0.2, 0.8, (num_grids, 1))
    frozen = rng.random(shape) < share_frozen
    kind = np.where(order < num_sound, "sound", np.where(frozen, "frozen", "unstable"))
    # The mean spread of a slow chain is h lambda T / 2, at most 0.0016 here.
    small = 10 ** rng.uniform(-7, -2.5, shape) / num_steps
    barely = rng.random(shape) < 0.3
    near, far = rng.uniform(4.02, 4.5, shape), 10 ** rng.uniform(1, 4, shape)
    large = np.where(barely & gaussian[:, None], near, far)
    good = 10 ** rng.uniform(-1.7, 0.1, shape)
    return kind, np.select([kind == "sound", kind == "frozen"], [good, small], large)


def choose(
    grids: Grids, rewards: dict[str, Candidate], rng_key: jax.Array
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Which arm each reward takes, with and without guards; and the verdicts on all arms."""
    chosen, verdicts = [], []
    variance = {True: 1.0, False: log_cosh_variance()}
    for grid in range(len(grids.kind)):
        gaussian = bool(grids.gaussian[grid])
        factor = grids.vectors[grid] * grids.roots[grid]
        whitening = Whitening(np.zeros(DIM), np.linalg.cholesky(factor @ factor.T))
        to_raw = np.linalg.inv(factor)  # theta = u F^-1 for rows

        def log_densities(theta: np.ndarray, f=factor, g=gaussian) -> np.ndarray:  # type: ignore[no-untyped-def]
            return log_density(theta @ f, g)

        guards = Guards(np.zeros(DIM), principal_axes(whitening), log_densities)
        kind, errors = grids.kind[grid], np.full(NUM_ARMS, np.inf)
        usable, passed = np.zeros(NUM_ARMS, bool), np.zeros(NUM_ARMS, bool)
        losses = {name: np.full(NUM_ARMS, np.nan) for name in rewards}
        for arm in range(NUM_ARMS):
            u = grids.kept[grid, arm]
            if np.abs(u).max() > 1e15:  # float32 squares would overflow: not finite
                continue
            theta = (u @ to_raw).astype(np.float32)
            usable[arm] = True
            errors[arm] = gaussian_w2(
                grids.mean[grid, arm], grids.covariance[grid, arm], variance[gaussian] * np.eye(DIM)
            )
            num_steps = int(grids.num_steps[grid, arm])
            passed[arm] = guards.verdict(theta, num_steps=num_steps) is None
            draws = ScoredDraws(
                jnp.asarray(theta),
                jnp.asarray(score(u, np.asarray(gaussian)) @ factor.T, jnp.float32),
                jax.random.fold_in(jax.random.fold_in(rng_key, grid), arm),
            )
            sums = BlockSums(
                {
                    "gradient": grids.gradients[grid, arm] @ factor.T,
                    "product": factor @ grids.products[grid, arm] @ to_raw,
                },
                np.full(NUM_BLOCKS, num_steps // NUM_BLOCKS),
                np.zeros(DIM),
            )
            for name, reward in rewards.items():
                losses[name][arm] = loss_of(reward, draws, sums, {"hessian": whitening}).value
        verdicts += [
            {"kind": k, "passed": bool(p), "best": bool(b)}
            for k, p, u, b in zip(kind, passed, usable, errors == errors.min(), strict=True)
            if u
        ]
        for name, values in losses.items():
            for guarded in (False, True):
                allowed = passed if guarded else usable
                pick = take(
                    finite_or_worst(np.where(allowed, values, np.nan)),
                    grids,
                    grid,
                    to_raw,
                    guards if guarded else None,
                )
                row = {"reward": name, "guards": guarded, "chosen": "none", "regret": np.nan}
                if pick is not None:
                    row |= {"chosen": kind[pick], "regret": errors[pick] / errors.min()}
                chosen.append(row)
    return pd.DataFrame(chosen), pd.DataFrame(verdicts)


def take(
    losses: np.ndarray, grids: Grids, grid: int, to_raw: np.ndarray, guards: Guards | None
) -> int | None:
    """The best arm; with guards the best that stays stable in its check run."""
    for arm in np.argsort(losses, kind="stable"):
        if not np.isfinite(losses[arm]):
            return None
        if guards is None or guards.drift(grids.checked[grid, arm] @ to_raw) is None:
            return int(arm)
    return None


def summary(chosen: pd.DataFrame, verdicts: pd.DataFrame) -> pd.DataFrame:
    """One row a reward and setting; see the module's docstring."""
    rows = []
    sound = verdicts[verdicts.kind == "sound"]
    for (name, guarded), group in chosen.groupby(["reward", "guards"], sort=False):
        counts = group.chosen.value_counts()
        frozen, unstable = int(counts.get("frozen", 0)), int(counts.get("unstable", 0))
        rows.append(
            {
                "reward": name,
                "guards": guarded,
                "grids": len(group),
                "broken": frozen + unstable,
                "frozen": frozen,
                "unstable": unstable,
                "none": int(counts.get("none", 0)),
                "median_regret": group.regret.median(),
                "worst_regret": group.regret.max(),
                "sound_refused": 1 - sound.passed.mean() if guarded else 0.0,
                "best_refused": int((verdicts.best & ~verdicts.passed).sum()) if guarded else 0,
            }
        )
    return pd.DataFrame(rows)


def run(
    num_grids: int, seed: int, rewards: dict[str, Candidate], *, quiet: bool = True
) -> pd.DataFrame:
    """Simulate, choose and count, ``CHUNK`` grids at a time."""
    chosen, verdicts = [], []
    began = time.perf_counter()
    for first in range(0, num_grids, CHUNK):
        rng = np.random.default_rng([seed, first])
        grids = simulate(min(CHUNK, num_grids - first), rng)
        for frames, frame in zip(
            (chosen, verdicts), choose(grids, rewards, jax.random.key(seed + first)), strict=True
        ):
            frames.append(frame)
        if not quiet:
            done = min(first + CHUNK, num_grids)
            print(f"{done} of {num_grids} grids, {time.perf_counter() - began:.0f} s", flush=True)
    return summary(pd.concat(chosen), pd.concat(verdicts))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grids", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rewards", nargs="*", help="names in conf/reward; all by default")
    arguments = options.parse(parser, argv, QUICK)
    table = run(arguments.grids, arguments.seed, candidates(arguments.rewards), quiet=False)
    table.to_csv(arguments.out / "adversarial.csv", index=False)
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
