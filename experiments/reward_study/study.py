"""Which reward follows the true error: arms x posteriors x samplers x budgets.

    python -m experiments.reward_study.study [--targets ...] [--samplers ...] [--budgets ...]

Every arm of a grid (14 step sizes a half decade apart from 10 times the largest stable one of SGLD
downwards, times the batch sizes of the posterior) runs from the MAP for the steps that the budget's
seconds buy (those of PMF are ten times as many, ``targets.SLOW``). What a step costs is measured
once, before the first piece of a posterior and sampler, and kept in ``costs.csv``: with it, a study
repeats itself whatever else the machine does. The true error and every reward of conf/reward are
computed on the same chain. Each posterior, sampler, budget and seed is a piece,
``pieces/<...>.csv``, one row an arm; a piece that is there and has every reward is not made again,
so that a study can be stopped and taken up.

From the pieces: ``problems.csv``, one row a piece and reward; ``summary.csv``, one row a reward;
``reward_study.png``. ``rho``: Spearman's rank correlation of loss and true error over the arms that
are ranked: those that stayed finite, with guards those that passed. ``regret``: true error of the
chosen arm over that of the best of all arms. ``broken``: pieces whose chosen arm the guards refuse.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from hydra.core.global_hydra import GlobalHydra

from experiments.reward_study import options, targets
from experiments.reward_study.candidates import (
    Candidate,
    candidates,
    finite_or_worst,
    loss_of,
    whitening_method,
)
from experiments.reward_study.errors import PredictionMoments
from experiments.reward_study.tables import read, write
from mamba_cli import gradients, minibatch
from mamba_cli.chain import Budget, Chain, advance
from mamba_cli.config import batch_size_of, build
from mamba_cli.console import Console
from mamba_cli.curvature import whitening_at
from mamba_cli.map_estimate import AdamPhase, MapSettings, find_map
from mamba_cli.pacing import Calibrated
from mamba_cli.tuners.guards import Guards, principal_axes
from mamba_cli.tuners.scoring import failure, is_constant
from mamba_cli.types import (
    AccumulatedReward,
    Array,
    BlockSums,
    Hyperparameters,
    PyTree,
    ScoredDraws,
)
from mamba_cli.whitening import Whitening
from mamba_cli.workbench import Workbench

NUM_STEP_SIZES = 14
LARGEST_STEP = 40.0
"""h lambda_max of the largest step size, ten times what SGLD is stable to."""

INTEGRATION_STEPS = 5
MAX_OUTER_DIM = 64
"""Up to here the covariance of all draws is summed."""

SAMPLERS = ("sgld", "sgld_cv", "sghmc", "sgnht", "badodab")
BUDGETS_S = (0.05, 0.2, 1.0)
MAX_DRAWS = 200

QUICK = {
    "targets": ["skewed", "two_modes"],
    "samplers": ["sgld"],
    "budgets": [0.02],
    "rewards": ["ksd", "stein_moments", "psd"],
}

logger = logging.getLogger(__name__)


class Features:
    """Block features of the true moments and of every accumulated reward, side by side."""

    def __init__(self, dim: int, rewards: dict[str, Candidate]) -> None:
        self._outer = dim <= MAX_OUTER_DIM
        self._parts = {
            name: reward.features(dim)
            for name, reward in rewards.items()
            if isinstance(reward, AccumulatedReward)
        }

    def __call__(self, delta: Array, gradient: Array) -> PyTree:
        second = delta[:, None] * delta if self._outer else delta**2
        moments = {"first": delta, "second": second}
        return {"moments": moments} | {n: f(delta, gradient) for n, f in self._parts.items()}


def moments_of(sums: BlockSums) -> tuple[np.ndarray, np.ndarray]:
    """Mean ``[dim]`` and covariance (or its diagonal) of all draws of a chain."""
    count = float(np.sum(sums.num_draws))
    first, second = (sums.features["moments"][k].sum(axis=0) / count for k in ("first", "second"))
    square = np.outer(first, first) if second.ndim == 2 else first**2
    return sums.origin + first, second - square


class Problem:
    """One posterior, ready to run arms of one sampler."""

    def __init__(
        self, name: str, target: targets.Target, sampler: str, rewards: dict[str, Candidate]
    ) -> None:
        self.name, self.target, self.sampler, self.rewards = name, target, sampler, rewards
        model = target.model
        settings = MapSettings()
        if model.dim > settings.max_newton_dim:
            phase = AdamPhase(3000, None, 0.03, 0.0)
            settings = MapSettings(phases=(phase,), max_lbfgs_iterations=0)
        start = np.asarray(find_map(model, rng_key=jax.random.key(0), settings=settings).position)
        self.whitenings = whitenings_of(model, start, rewards)
        self.axes = principal_axes(self.whitenings["hessian"])
        cfg = composed(f"sampler={sampler}")
        controlled = cfg.sampler.gradient == "control_variates"
        self.refreshes = bool(cfg.sampler.uses_integration_steps)
        self.bench = Workbench(
            model=model,
            start=start,
            estimator=gradients.control_variates(model, jnp.asarray(start))
            if controlled
            else gradients.standard(model),
            sampler=build(cfg.sampler.kernel, "sampler.kernel"),
            scheme=minibatch.without_replacement,
            capacity=2 * MAX_DRAWS,
            block_features=Features(model.dim, rewards),
        )
        self.guards = Guards(start, self.axes, self.bench.log_densities)

    def arms(self) -> list[Hyperparameters]:
        """The grid; the step sizes hang on the posterior's largest curvature."""
        factor = self.axes.factor
        largest = float(np.max(factor**2 if self.axes.is_diagonal else np.sum(factor**2, axis=0)))
        steps = LARGEST_STEP / largest * 10.0 ** (-0.5 * np.arange(NUM_STEP_SIZES))
        length = INTEGRATION_STEPS if self.refreshes else 1
        sizes = dict.fromkeys(
            batch_size_of(percent, self.target.model.num_data)
            for percent in self.target.batch_percents
        )
        return [Hyperparameters(float(h), n, length) for n in sizes for h in steps]

    def run(
        self, budget_s: float, seed: int, costs_s: dict[int, float], seconds: dict[str, float]
    ) -> pd.DataFrame:
        """Every arm, with its true error and every reward; adds to ``seconds`` of each reward.

        ``costs_s`` has the seconds of a gradient step by batch size.
        """
        arms = self.arms()
        self.bench.compile(arm.batch_size for arm in arms)
        key = jax.random.key(seed)
        rows = []
        for number, arm in enumerate(arms):
            program, _ = self.bench.program(arm.batch_size)
            arm_key = jax.random.fold_in(key, number)
            chain = program.start(arm_key, self.bench.start, arm)
            length = arm.num_integration_steps
            draws = max(1, round(budget_s / costs_s[arm.batch_size] / length))
            began = time.perf_counter()
            chain = advance(program, chain, Budget(steps=draws * length))
            seconds["chains"] = seconds.get("chains", 0.0) + time.perf_counter() - began
            rows.append({"arm": number, **arm._asdict()} | self.score(chain, arm_key, seconds))
        return pd.DataFrame(rows)

    def score(self, chain: Chain, rng_key: Array, seconds: dict[str, float]) -> dict[str, Any]:
        """True error, verdict of the guards, and rewards with their standard errors."""
        row: dict[str, Any] = {"num_steps": chain.num_steps, "num_draws": chain.num_draws}
        failed = failure(chain)
        if failed is None and is_constant(chain.thinned(MAX_DRAWS)[0]):
            failed = ("frozen", "all draws are equal")
        if failed is not None:
            return row | {"status": failed[0], "reason": failed[1], "error": math.inf}
        positions, _ = chain.thinned(MAX_DRAWS)
        sums = chain.block_sums()
        error = self.target.error(*moments_of(sums), partial(self.predicted, positions))
        verdict = self.guards.verdict(positions, num_steps=chain.num_steps)
        row |= {"status": "ok", "reason": "", "error": error}
        if verdict is not None:
            row |= {"status": verdict.status, "reason": verdict.reason}
        began = time.perf_counter()
        scores = self.bench.scores(positions)
        seconds["full_gradients"] = seconds.get("full_gradients", 0.0) + time.perf_counter() - began
        draws = ScoredDraws(jnp.asarray(positions), jnp.asarray(scores), rng_key)
        for name, reward in self.rewards.items():
            began = time.perf_counter()
            own = sums
            if isinstance(reward, AccumulatedReward):
                own = sums._replace(features=sums.features[name])
            value, std_error = loss_of(reward, draws, own, self.whitenings)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
            row |= {name: value, f"{name}_std_error": std_error}
        return row

    def predicted(self, positions: np.ndarray) -> PredictionMoments:
        """The moments over draws ``[m, dim]`` of the predictions for the test rows."""
        mean = np.asarray(self.bench.posterior_predictive(positions), np.float64)
        return PredictionMoments(np.ravel(mean), self.bench.predictive_std(positions))


def whitenings_of(
    model: Any, start: np.ndarray, rewards: dict[str, Candidate]
) -> dict[str, Whitening]:
    """The coordinates that the rewards and the guards ask for."""
    methods = {whitening_method(reward) for reward in rewards.values()} - {None} | {"hessian"}
    return {str(method): whitening_at(model, start, str(method)) for method in methods}


def composed(*overrides: str) -> Any:
    """A configuration of the product."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("mamba_cli.conf", version_base="1.3"):
        return hydra.compose("config", list(overrides))


def problems(arms: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """One row a piece, reward and setting: rho, regret, and whether the choice was refused."""
    rows = []
    keys = ["target", "sampler", "budget_s", "seed"]
    for key, piece in arms.groupby(keys, sort=False):
        errors = piece.error.to_numpy(float)
        finite = np.isfinite(errors)
        refused = (piece.status != "ok").to_numpy()
        if finite.sum() < 3:
            continue
        for name in names:
            if name not in piece:
                continue
            for guarded in (False, True):
                losses = finite_or_worst(piece[name].to_numpy(float))
                losses = np.where(refused & guarded, np.inf, losses)
                row = dict(zip(keys, key, strict=True)) | {"reward": name, "guards": guarded}
                ranked = finite & ~(refused & guarded)
                row |= {"arms": int(ranked.sum()), "rho": spearman(losses[ranked], errors[ranked])}
                choice = int(np.argmin(losses))
                known = bool(np.isfinite(losses[choice]))
                best = float(np.min(errors))
                row["regret"] = errors[choice] / best if known else math.inf
                row["choice"] = int(piece.arm.iloc[choice]) if known else -1
                row["choice_refused"] = bool(refused[choice])
                rows.append(row)
    return pd.DataFrame(rows)


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Rank correlation, ties at their mean rank; NaN where one does not vary."""
    ranks = [pd.Series(values).rank().to_numpy() for values in (first, second)]
    if len(first) < 2 or min(np.ptp(rank) for rank in ranks) == 0:
        return math.nan
    return float(np.corrcoef(*ranks)[0, 1])


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row a reward and setting over all problems."""
    rows = []
    for (name, guarded), group in table.groupby(["reward", "guards"], sort=False):
        rows.append(
            {
                "reward": name,
                "guards": guarded,
                "problems": len(group),
                "rho_median": group.rho.median(),
                "rho_min": group.rho.min(),
                "regret_median": group.regret.median(),
                "regret_max": group.regret.max(),
                "broken": int(group.choice_refused.sum()),
            }
        )
    return pd.DataFrame(rows).sort_values(["guards", "regret_median", "regret_max"])


def picture(table: pd.DataFrame, path: Path) -> None:
    """Regret of every problem, one column a reward, one colour a posterior."""
    from matplotlib.figure import Figure

    names = list(summary(table[table.guards]).reward)
    figure = Figure(figsize=(1.6 + 1.1 * len(names), 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    colours = {name: f"C{i}" for i, name in enumerate(table.target.unique())}
    rng = np.random.default_rng(0)
    for axes, guarded in zip(panels, (False, True), strict=True):
        for place, name in enumerate(names):
            own = table[(table.reward == name) & (table.guards == guarded)]
            shift = rng.uniform(-0.25, 0.25, len(own))
            # What has no arm left, or one that diverged, is drawn at the top.
            heights = np.minimum(own.regret.to_numpy(float), 1e3)
            axes.scatter(place + shift, heights, s=14, c=[colours[t] for t in own.target])
            axes.hlines(own.regret.median(), place - 0.3, place + 0.3, color="black")
        axes.set(yscale="log", title="with guards" if guarded else "without guards")
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right")
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("error of the chosen arm / of the best")
    for name, colour in colours.items():
        panels[1].scatter([], [], c=colour, label=name)
    panels[1].legend(title="posterior", fontsize=8)
    figure.savefig(path, dpi=130)


def piece_is_done(path: Path, names: Iterable[str]) -> bool:
    """Whether a piece is there, with every reward."""
    return path.exists() and set(names) <= set(pd.read_csv(path, nrows=0).columns)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(targets.NAMES), choices=targets.NAMES)
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS))
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=float,
        default=list(BUDGETS_S),
        help="seconds an arm (pmf has ten times as many)",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rewards", nargs="+", help="names in conf/reward; all by default")
    parser.add_argument("--ground-truth", type=Path, default=Path("results/ground_truth"))
    arguments = options.parse(parser, argv, QUICK)
    rewards = candidates(arguments.rewards)
    pieces = arguments.out / "pieces"
    pieces.mkdir(parents=True, exist_ok=True)
    with Console() as console:
        for name in arguments.targets:
            made = make_pieces(name, arguments, rewards, pieces, console)
            console.message(f"{name}: {made} pieces made")
    report(pieces, arguments.out, list(rewards))


def make_pieces(
    name: str,
    arguments: argparse.Namespace,
    rewards: dict[str, Candidate],
    pieces: Path,
    console: Console,
) -> int:
    """The pieces of one posterior that are missing; how many were made."""
    made, target = 0, None
    for sampler in arguments.samplers:
        missing = {}
        for _, _, budget_s in targets.cells([name], [sampler], arguments.budgets):
            for seed in arguments.seeds:
                path = pieces / f"{name}-{sampler}-{budget_s:g}s-{seed}.csv"
                if not piece_is_done(path, rewards):
                    missing[path] = (budget_s, seed)
        if not missing:
            continue
        target = target or targets.available(name, arguments.out, arguments.ground_truth, console)
        if target is None:
            return made
        problem = Problem(name, target, sampler, rewards)
        costs_s = costs_of(problem, arguments.out / "costs.csv")
        for path, (budget_s, seed) in missing.items():
            began, seconds = time.perf_counter(), dict[str, float]()
            frame = problem.run(budget_s, seed, costs_s, seconds)
            for column, value in (("target", name), ("sampler", sampler), ("seed", seed)):
                frame[column] = value
            frame["budget_s"] = budget_s
            write(frame, path)
            made += 1
            spent = ", ".join(f"{n} {s:.1f}" for n, s in sorted(seconds.items()))
            console.message(f"{path.name}: {time.perf_counter() - began:.0f} s (rewards: {spent})")
    return made


def costs_of(problem: Problem, path: Path) -> dict[int, float]:
    """Seconds of a gradient step by batch size; what is not in the file is measured and added."""
    columns = ["target", "sampler", "batch_size", "cost_s"]
    known = read(path, columns)
    own = known[(known.target == problem.name) & (known.sampler == problem.sampler)]
    costs = {int(n): float(s) for n, s in zip(own.batch_size, own.cost_s, strict=True)}
    missing = {arm.batch_size: arm for arm in problem.arms() if arm.batch_size not in costs}
    if missing:
        bench, pace = problem.bench, Calibrated()
        bench.compile(missing)
        for n, arm in missing.items():
            costs[n] = pace.cost_s(bench.program(n)[0], arm, bench.start, bench.clock)
        added = [(problem.name, problem.sampler, n, costs[n]) for n in missing]
        write(pd.DataFrame([*known.itertuples(index=False), *added], columns=columns), path)
    return costs


def report(pieces: Path, out: Path, names: list[str]) -> None:
    """The tables and the picture from all pieces that are there."""
    frames = [pd.read_csv(path) for path in sorted(pieces.glob("*.csv"))]
    if not frames:
        return
    table = problems(pd.concat(frames, ignore_index=True), names)
    write(table, out / "problems.csv")
    short = summary(table)
    write(short, out / "summary.csv")
    picture(table, out / "reward_study.png")
    print(short.to_string(index=False, float_format=lambda value: f"{value:.3g}"))


if __name__ == "__main__":
    main()
