"""The study's figures against what was to be reached: ``summary.md``, from the tables.

    python -m experiments.reward_study.report [--out results/reward_study] [--readme README.md]

Writes also the table of the rewards in README.md, between its markers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path

import pandas as pd

from experiments.readme import write_between
from experiments.reward_study import options
from experiments.reward_study.bandit import REWARD
from experiments.reward_study.comparisons import NUM_SEEDS as NUM_SEEDS_COMPARED
from experiments.reward_study.comparisons import TARGETS
from experiments.reward_study.coverage import LONGEST_ARMS, PROBLEMS
from experiments.reward_study.seeds import KEYS, LONGEST_ARMS_S, NUM_SEEDS, SAMPLERS
from experiments.reward_study.study import BUDGETS_S
from experiments.reward_study.study import SAMPLERS as STUDIED
from experiments.reward_study.targets import NAMES, cells

RHO, REGRET_MEDIAN, REGRET_WORST = 0.92, 1.05, 1.5
COVERED, AGREE = 0.93, 0.9
NUM_GRIDS, NUM_REPETITIONS = 1_000, 500

BEGIN = "<!-- The reward study: written by make reward-study PARTS=report -->"
END = "<!-- End of the reward study -->"
NOT_MADE = "(not made yet)"

Lines = list[str]


def short(value: object) -> str:
    """Three digits, or a word."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        return str(value)
    if value != value:
        return "-"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def markdown(frame: pd.DataFrame) -> Lines:
    """A table, its columns as they are named."""
    rows = [[short(value) for value in row] for row in frame.itertuples(index=False)]
    header = [str(name).replace("_", " ") for name in frame.columns]
    return [
        f"| {' | '.join(header)} |",
        f"|{' --- |' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def target(what: str, value: float, limit: float, *, least: bool) -> str:
    """One line: met, or not and by how much."""
    met = value >= limit if least else value <= limit
    sign = "at least" if least else "at most"
    line = f"* {what}: {short(value)}, target {sign} {short(limit)}: "
    # What is neither, NaN, is not met.
    return line + ("met." if met else f"**not met**, by {short(abs(value - limit))}.")


def not_run(
    table: pd.DataFrame, wanted: Iterable[tuple[object, ...]], names: Sequence[str]
) -> Lines:
    """A line that tells which of ``wanted`` have no row; a row is known by these columns."""
    there = set(table[list(names)].itertuples(index=False, name=None))
    missing = [cell for cell in wanted if cell not in there]
    said = [" ".join(short(value) for value in cell) for cell in missing]
    return [f"* Not run: {', '.join(said)}."] if said else []


def study(table: pd.DataFrame) -> Lines:
    """The rewards against the truth."""
    own = table[(table.reward == REWARD) & table.guards.astype(bool)].iloc[0]
    rows = table.sort_values(
        ["guards", "regret_median", "regret_max"], ascending=[False, True, True]
    )
    return [
        target("Median rank correlation with the true error", own.rho_median, RHO, least=True),
        target("Least rank correlation", own.rho_min, RHO, least=True),
        target("Median regret", own.regret_median, REGRET_MEDIAN, least=False),
        target("Worst regret", own.regret_max, REGRET_WORST, least=False),
        "",
        *markdown(rows),
    ]


def by_posterior(table: pd.DataFrame) -> Lines:
    """The recommended reward, posterior by posterior."""
    own = table[(table.reward == REWARD) & table.guards.astype(bool)]
    rows = own.groupby(["target", "budget_s"], sort=False).agg(
        samplers=("sampler", "nunique"),
        rho_median=("rho", "median"),
        rho_min=("rho", "min"),
        regret_median=("regret", "median"),
        regret_max=("regret", "max"),
    )
    wanted = cells(NAMES, STUDIED, BUDGETS_S)
    lacking = not_run(own, wanted, ("target", "sampler", "budget_s"))
    return [*lacking, *([""] if lacking else []), *markdown(rows.reset_index())]


def adversarial(table: pd.DataFrame) -> Lines:
    """The grids in which most arms are broken."""
    own = table[(table.reward == REWARD) & table.guards.astype(bool)].iloc[0]
    rows = table.sort_values(["guards", "broken", "worst_regret"], ascending=[False, True, True])
    return [
        target("Grids", own.grids, NUM_GRIDS, least=True),
        target("Broken winners", own.broken, 0, least=False),
        "",
        *markdown(rows),
    ]


def coverage(table: pd.DataFrame) -> Lines:
    """The sets of arms that may be the best."""
    return [
        target("Repetitions", table.repetitions.min(), NUM_REPETITIONS, least=True),
        target("Least share of sets with the best arm", table.covered.min(), COVERED, least=True),
        *not_run(table, product(PROBLEMS, LONGEST_ARMS), ("posterior", "longest_arm")),
        "",
        *markdown(table),
    ]


def seeds(table: pd.DataFrame) -> Lines:
    """Tunings that differ in their seed."""
    share = table.agree / table.seeds
    met = (share >= AGREE).groupby(table.longest_arm_s).agg(["sum", "size"])
    told = [
        f"{row['sum']} of {row['size']} at {short(seconds)} s" for seconds, row in met.iterrows()
    ]
    return [
        target("Seeds of each", table.seeds.min(), NUM_SEEDS, least=True),
        target("Least share of seeds that agree", share.min(), AGREE, least=True),
        f"* Posteriors and samplers for which it is met: {', '.join(told)}.",
        *not_run(table, cells(NAMES, SAMPLERS, LONGEST_ARMS_S), KEYS),
        "",
        *markdown(table),
    ]


def comparisons(table: pd.DataFrame) -> Lines:
    """Halving against what a user would otherwise do; no figure was set."""
    wanted = len(TARGETS) * NUM_SEEDS_COMPARED
    return [
        target("Choices of each method", table.choices.min(), wanted, least=True),
        "",
        *markdown(table),
    ]


PARTS: Sequence[tuple[str, str, Callable[[pd.DataFrame], Lines]]] = (
    ("summary.csv", f"The study: `{REWARD}` with the guards against the truth", study),
    ("problems.csv", f"`{REWARD}` with the guards, by posterior", by_posterior),
    ("adversarial.csv", "Adversarial grids", adversarial),
    ("coverage.csv", "The set that contains the best arm with 95 %", coverage),
    ("seeds.csv", "The same choice from other seeds", seeds),
    ("comparisons.csv", "At equal time, what a user would otherwise do", comparisons),
)


def document(folder: Path, *, quick: bool) -> str:
    """``summary.md`` from the tables of a folder."""
    lines = ["# Which reward can be trusted: the figures", ""]
    if quick:
        lines += ["Toy sizes (QUICK=1). These numbers mean nothing.", ""]
    lines += ["Columns are explained in `experiments/reward_study`, in the file of each part.", ""]
    for name, title, part in PARTS:
        path = folder / name
        body = part(pd.read_csv(path)) if path.exists() else [NOT_MADE]
        lines += [f"## {title}", "", *body, ""]
    return "\n".join(lines)


def readme_table(folder: Path) -> str:
    """The rewards of the study with the guards, best first, for README.md."""
    path = folder / "summary.csv"
    if not path.exists():
        return NOT_MADE
    table = pd.read_csv(path)
    rows = table[table.guards.astype(bool)].sort_values(["regret_median", "regret_max"])
    unguarded = table[~table.guards.astype(bool)].set_index("reward")
    shown = pd.DataFrame(
        {
            "`reward`": [f"`{name}`" for name in rows.reward],
            "rank correlation": [f"{value:.2f}" for value in rows.rho_median],
            "median regret": [f"{value:.2f}" for value in rows.regret_median],
            "worst regret": [f"{value:.3g}" for value in rows.regret_max],
            "broken winners without guards": [
                f"{unguarded.broken[name]} of {unguarded.problems[name]}" for name in rows.reward
            ],
        }
    )
    return "\n".join(markdown(shown))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="whose table is set")
    arguments = options.parse(parser, argv, {"readme": None})
    path = arguments.out / "summary.md"
    path.write_text(document(arguments.out, quick=arguments.quick), encoding="utf-8")
    if arguments.readme is not None:
        write_between(arguments.readme, BEGIN, END, readme_table(arguments.out))
    print(path)


if __name__ == "__main__":
    main()
