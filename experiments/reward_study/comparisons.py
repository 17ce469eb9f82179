"""What a user would otherwise do, at equal time: does halving choose better?

    python -m experiments.reward_study.comparisons [--targets ...] [--seeds 0 1 2 3 4] [--out ...]

Each method has the same seconds, in steps at the costs in ``costs.csv``, and the same range of step
sizes, batch sizes, reward (``stein_moments``) and guards:

* ``halving``: ``tuner=mamba``, with its check run;
* ``grid``: every arm of the same grid for an equal share of the seconds, the best reward wins;
* ``random``: Optuna's RandomSampler, step sizes log-uniform over the grid's range; every arm runs
  as long as one of halving that reaches the end, the best reward wins;
* ``asha``: the same with Optuna's SuccessiveHalvingPruner: rewards after 1/9, 1/3 and all of it;
* ``formula`` and ``formula_limit``: the step size by the predicted covariance, of the chain and of
  its limit; see ``formula.py``. They take no time to tune, and are for SGLD alone.

What a method chose is judged by its mean true error over independent chains as long as that of an
arm of halving that reaches the end.

``comparisons_runs.csv``: one row a posterior, seed and method. ``comparisons.csv``: one row a
method: ``ratio``, the true error of its choice over the least that any method and seed chose there,
and ``against_halving``, over that of halving with the same seed, with the number of choices that
are better or worse than it by more than 10 %. ``comparisons.png`` shows the first. What is in
``comparisons_runs.csv`` is not run again. Optuna comes with ``pip install 'mamba-cli[study]'``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optuna
import pandas as pd

from experiments.reward_study import formula, options, targets
from experiments.reward_study.bandit import REDUCTION_FACTOR, Costs, Estimate, Stage
from experiments.reward_study.study import costs_of
from experiments.reward_study.tables import joined, read, write
from mamba_cli.chain import Chain
from mamba_cli.console import Console
from mamba_cli.tuners.halving import schedule, total_s
from mamba_cli.types import Hyperparameters

TARGETS = ("gaussian", "logreg", "skewed", "two_modes", "network")
SAMPLER = "sgld"
NUM_SEEDS = 5
LONGEST_ARM_S = 0.2
NUM_TRUTH_CHAINS = 8
ASHA_RUNGS = 3
WITHIN = 0.10
"""Differences below are those of the true errors' own estimates."""

METHODS = ("halving", "grid", "random", "asha", "formula", "formula_limit")

QUICK = {"targets": ["skewed"], "seeds": [0, 1], "longest_arm_s": 0.02, "truth_chains": 4}


class Choice(NamedTuple):
    """What a method chose (None: nothing was usable) and the seconds it took."""

    arm: Hyperparameters | None
    spent_s: float


class Purse:
    """The seconds of a method, and the arms that it spends them on."""

    def __init__(self, stage: Stage, seconds: float, seed: int) -> None:
        self.stage, self.seconds = stage, seconds
        self.spent_s = 0.0
        self._key = jax.random.key(seed)

    def affords(self, seconds: float) -> bool:
        """Whether so many seconds are left, but for rounding."""
        return self.spent_s + seconds <= self.seconds * (1 + 1e-6)

    def run(
        self, number: int, arm: Hyperparameters, seconds: float, chain: Chain | None = None
    ) -> Chain:
        """Arm ``number`` continued; what it took is spent."""
        before = 0 if chain is None else chain.num_steps
        key = jax.random.fold_in(self._key, number)
        chain = self.stage.run(arm, seconds, key, chain)
        self.spent_s += (chain.num_steps - before) * self.stage.costs.seconds[arm.batch_size]
        return chain

    def loss(self, number: int, chain: Chain, lifetimes: float = 1.0) -> float:
        """Of arm ``number``; NaN where the guards refuse it."""
        return self.stage.loss(chain, jax.random.fold_in(self._key, number), lifetimes)


def by_halving(
    stage: Stage, arms: Sequence[Hyperparameters], longest_arm_s: float, seed: int
) -> Choice:
    """The product's own."""
    tuning = stage.tune(arms, longest_arm_s, seed)
    last = {record.arm: record for record in tuning.records}
    spent_s = sum(r.num_steps * stage.costs.seconds[r.batch_size] for r in last.values())
    # With one check run: further ones, after an arm that fails it, are not in the others' seconds.
    return Choice(tuning.hyperparameters if tuning.winner else None, spent_s + longest_arm_s)


def by_grid(purse: Purse, arms: Sequence[Hyperparameters]) -> Choice:
    """Every arm for the same time."""
    share_s = purse.seconds / len(arms)
    losses = [
        purse.loss(number, purse.run(number, arm, share_s)) for number, arm in enumerate(arms)
    ]
    usable = [number for number, loss in enumerate(losses) if math.isfinite(loss)]
    best = min(usable, key=losses.__getitem__, default=None)
    return Choice(None if best is None else arms[best], purse.spent_s)


def by_optuna(
    purse: Purse, arms: Sequence[Hyperparameters], longest_arm_s: float, seed: int, *, prune: bool
) -> Choice:
    """Random search, or asynchronous successive halving of random arms, until no arm is affordable.

    The best of the arms that ran longest is chosen.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    resources = [REDUCTION_FACTOR**k for k in range(ASHA_RUNGS)] if prune else [1]
    study = optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=seed),
        pruner=optuna.pruners.SuccessiveHalvingPruner(
            min_resource=1, reduction_factor=REDUCTION_FACTOR
        )
        if prune
        else optuna.pruners.NopPruner(),
    )
    sizes = list(dict.fromkeys(arm.batch_size for arm in arms))
    steps = [arm.step_size for arm in arms]
    unit_s = longest_arm_s / resources[-1]
    reached: list[tuple[int, float, Hyperparameters]] = []
    while purse.affords(unit_s * resources[0]):
        trial = study.ask()
        arm = Hyperparameters(
            trial.suggest_float("step_size", min(steps), max(steps), log=True),
            trial.suggest_categorical("batch_size", sizes),
            arms[0].num_integration_steps,
        )
        chain, done, loss, pruned = None, 0, math.nan, False
        for resource in resources:
            if not purse.affords(unit_s * (resource - done)):
                pruned = True
                break
            chain = purse.run(trial.number, arm, unit_s * (resource - done), chain)
            done = resource
            loss = purse.loss(trial.number, chain, lifetimes=resources[-1] / resource)
            if not math.isfinite(loss):
                break
            reached.append((resource, loss, arm))
            trial.report(loss, resource)
            if resource < resources[-1] and trial.should_prune():
                pruned = True
                break
        if pruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif math.isfinite(loss):
            study.tell(trial, loss)
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
    longest = max((resource for resource, _, _ in reached), default=0)
    last = [(loss, arm) for resource, loss, arm in reached if resource == longest]
    best = min(last, key=lambda pair: pair[0], default=None)
    return Choice(None if best is None else best[1], purse.spent_s)


def by_formula(stage: Stage, *, limit: bool) -> Choice:
    """By the predicted covariance at the MAP."""
    factor = stage.problem.whitenings["hessian"].factor
    at = formula.local(stage.bench.model, stage.bench.start, factor @ factor.T)
    return Choice(formula.choose(at, stage.costs.seconds, limit=limit), 0.0)


def methods_of(
    stage: Stage, arms: Sequence[Hyperparameters], longest_arm_s: float
) -> dict[str, Callable[[int], Choice]]:
    """A choice for a seed, by every method; all with the seconds of halving and its check run."""
    seconds = total_s(schedule(len(arms), REDUCTION_FACTOR, longest_arm_s)) + longest_arm_s

    def purse(seed: int) -> Purse:
        return Purse(stage, seconds, seed)

    return {
        "halving": lambda seed: by_halving(stage, arms, longest_arm_s, seed),
        "grid": lambda seed: by_grid(purse(seed), arms),
        "random": lambda seed: by_optuna(purse(seed), arms, longest_arm_s, seed, prune=False),
        "asha": lambda seed: by_optuna(purse(seed), arms, longest_arm_s, seed, prune=True),
        "formula": lambda seed: by_formula(stage, limit=False),
        "formula_limit": lambda seed: by_formula(stage, limit=True),
    }


def compare(
    stage: Stage, longest_arm_s: float, seeds: Sequence[int], num_truth_chains: int
) -> pd.DataFrame:
    """One row a method and seed, with the true error of what was chosen."""
    arms = stage.problem.arms()
    stage.bench.compile(arm.batch_size for arm in arms)
    rows = []
    known: dict[Hyperparameters | None, Estimate] = {None: Estimate(math.inf, math.nan)}
    key = jax.random.key(2**31 - 1)
    for name, choose in methods_of(stage, arms, longest_arm_s).items():
        for seed in seeds:
            arm, spent_s = choose(seed)
            if arm not in known:
                assert arm is not None
                known[arm] = stage.true_error(arm, longest_arm_s, num_truth_chains, key)
            row = {"method": name, "seed": seed, "spent_s": spent_s}
            row |= {"step_size": math.nan, "batch_size": -1} if arm is None else arm._asdict()
            rows.append(row | {"error": known[arm].value, "error_std_error": known[arm].std_error})
    return pd.DataFrame(rows)


def with_ratios(table: pd.DataFrame) -> pd.DataFrame:
    """The runs with ``ratio`` and ``against_halving``."""
    halving = table[table.method == "halving"].set_index(["target", "seed"]).error
    keys = pd.MultiIndex.from_frame(table[["target", "seed"]])
    return table.assign(
        ratio=table.error / table.groupby("target").error.transform("min"),
        against_halving=table.error.to_numpy() / halving.reindex(keys).to_numpy(),
    )


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row a method; see the module's docstring."""
    rows = []
    full = with_ratios(table)
    for method in [name for name in METHODS if name in set(full.method)]:
        own = full[full.method == method]
        rows.append(
            {
                "method": method,
                "choices": len(own),
                "spent_s": own.spent_s.mean(),
                "ratio_median": own.ratio.median(),
                "ratio_max": own.ratio.max(),
                "against_halving_median": own.against_halving.median(),
                "better_by_10_percent": int((own.against_halving < 1 - WITHIN).sum()),
                "worse_by_10_percent": int((own.against_halving > 1 + WITHIN).sum()),
            }
        )
    return pd.DataFrame(rows)


def picture(table: pd.DataFrame, path: Path) -> None:
    """The ratio of every choice, one column a method, one colour a posterior."""
    from matplotlib.figure import Figure

    full = with_ratios(table)
    names = list(summary(table).method)
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    rng = np.random.default_rng(0)
    for index, (target, group) in enumerate(full.groupby("target", sort=False)):
        for place, name in enumerate(names):
            own = group[group.method == name]
            shift = rng.uniform(-0.25, 0.25, len(own))
            label = str(target) if place == 0 else None
            # What diverged is drawn at the top.
            heights = np.minimum(own.ratio.to_numpy(float), 1e3)
            axes.scatter(place + shift, heights, s=16, c=f"C{index}", label=label)
    for place, name in enumerate(names):
        middle = min(full[full.method == name].ratio.median(), 1e3)
        axes.hlines(middle, place - 0.3, place + 0.3, color="black")
    axes.set(yscale="log", ylabel="true error of the choice / of the best choice")
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(title="posterior", fontsize=8)
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(NUM_SEEDS)))
    parser.add_argument("--longest-arm-s", type=float, default=LONGEST_ARM_S)
    parser.add_argument("--truth-chains", type=int, default=NUM_TRUTH_CHAINS)
    parser.add_argument("--ground-truth", type=Path, default=Path("results/ground_truth"))
    arguments = options.parse(parser, argv, QUICK)
    path = arguments.out / "comparisons_runs.csv"
    table = read(path, ["target"])
    with Console() as console:
        for name in [name for name in arguments.targets if name not in set(table.target)]:
            target = targets.available(name, arguments.out, arguments.ground_truth, console)
            if target is None:
                continue
            stage = Stage(name, target, SAMPLER)
            stage.pace(Costs(costs_of(stage.problem, arguments.out / "costs.csv")), [1])
            made = compare(stage, arguments.longest_arm_s, arguments.seeds, arguments.truth_chains)
            made = made.assign(target=name, longest_arm_s=arguments.longest_arm_s)
            table = joined(table, made)
            write(table, path)
            print(name, made.groupby("method", sort=False).error.mean().to_dict(), flush=True)
    if len(table):
        write(summary(table), arguments.out / "comparisons.csv")
        picture(table, arguments.out / "comparisons.png")


if __name__ == "__main__":
    main()
