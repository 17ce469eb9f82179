"""Runs the cells that are missing, one at a time, and says how long it will take.

Every cell goes through the same code as ``mamba-run`` with its words, in this one process: what is
imported stays, and compiled programs come from the cache. A finished cell is left alone, one that
was stopped goes on, one whose configuration has changed is made again. A cell that fails leaves its
reason, and the next one begins.
"""

from __future__ import annotations

import fcntl
import gc
import io
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from experiments.paper.cells import (
    CURVES,
    KSD_TESTS,
    THINNING,
    TO_BE_REMOVED,
    Cell,
    Scale,
    State,
)
from mamba_cli.artifacts import read_json, write_json
from mamba_cli.config import FixedSettings, GridSettings, MambaSettings, RunSettings, settings_from
from mamba_cli.console import Console, duration
from mamba_cli.errors import (
    ConfigError,
    MambaError,
    NothingUsableError,
    StorageError,
    first_line,
)
from mamba_cli.run import opened
from mamba_cli.tuners import halving

FAILED = "failed.json"
"""In the folder of a cell that could not be finished: its reason and exit code."""

MACHINE_LOCK = Path("/tmp") / f"mamba-cli-{os.getuid()}-paper.lock"
"""Held while timed runs are made: of the user, and not of TMPDIR, which shells may set apart."""

NUM_TRAIN = {"logreg": 1_000_000, "pmf": 80_000, "bnn": 60_000}
"""Training rows, where the configuration does not have them."""

STEP_S = {"logreg": 1.8e-3, "pmf": 1.4e-3, "bnn": 1.7e-2}
"""Seconds of a gradient step on a tenth of the rows, two cores: what a grid search is made of."""

BANDIT_OVERHEAD = {"logreg": 1.35, "pmf": 1.1, "bnn": 2.2}
"""Seconds of a bandit over its seconds of sampling: gradients, rewards and compilation on top."""

GRID_OVERHEAD = 1.35
EVALUATION_OVERHEAD = 1.05
"""The same of a grid search and of an evaluation."""

START_S = {"logreg": 5.0, "pmf": 7.0, "bnn": 20.0}
"""Seconds of a run before and after it samples: data, MAP, compilation."""

TOY_START_S = {"logreg": 1.4, "pmf": 3.5, "bnn": 3.5}
TOY_BANDIT_S = {"logreg": 1.0, "pmf": 3.0, "bnn": 3.0}
"""The same at toy sizes, and what a bandit compiles besides."""

GRADIENT_S = {"logreg": 1.5e-3, "pmf": 3e-3, "bnn": 0.14}
"""Seconds to score a draw of a figure of the KSD by its gradient over all rows."""

TEST_DRAWS = {"logreg": 5000, "pmf": 2000, "bnn": 400}
PAIR_S = {"logreg": 3e-8, "pmf": 2.5e-6, "bnn": 7e-6}
"""Draws of an arm there, and seconds for a pair of them."""

CURVE_S = {"logreg": 4e-4, "pmf": 1e-3, "bnn": 0.02}
"""The same of a curve: draws share the passes over the rows; the network's predict test images."""


class Plan(NamedTuple):
    """A cell that has to be run."""

    cell: Cell
    cfg: DictConfig
    settings: RunSettings
    state: State
    why: str


class Failure(NamedTuple):
    """A cell that could not be finished."""

    cell: Cell
    reason: str
    exit_code: int


def evaluation_s(plan: Plan) -> float:
    """Seconds of a cell's evaluation."""
    settings = plan.settings
    if "evaluate" not in settings.stages:
        return 0.0
    sampling_s = settings.evaluation.num_repeats * settings.evaluation.budget_s
    return EVALUATION_OVERHEAD * sampling_s


def tuning_s(plan: Plan) -> float:
    """Seconds of a cell's tuning; of a grid search, what its steps should take."""
    settings, model = plan.settings, plan.cell.model
    tuner = settings.tuner
    if "tune" not in settings.stages or isinstance(tuner, FixedSettings):
        return 0.0
    num_train = int(plan.cfg.model.get("num_train") or NUM_TRAIN[model])
    arms = tuner.points(num_train)
    if isinstance(tuner, GridSettings):
        share = num_train / NUM_TRAIN[model]
        steps = sum(length * tuner.num_iterations for _, _, length in arms)
        return GRID_OVERHEAD * steps * STEP_S[model] * share
    rungs = halving.schedule(len(arms), tuner.reduction_factor, tuner.longest_arm_s)
    return BANDIT_OVERHEAD[model] * halving.total_s(rungs)


def scoring_s(plan: Plan) -> float:
    """Seconds for what a figure scores; what a table does is in the overheads."""
    cell, evaluation, tuner = plan.cell, plan.settings.evaluation, plan.settings.tuner
    if cell.experiment in KSD_TESTS and isinstance(tuner, MambaSettings):
        num_draws: float = min(TEST_DRAWS[cell.model], tuner.max_draws)
        if cell.variant.endswith("thinned"):
            num_draws /= THINNING
        own_s = num_draws**2 * PAIR_S[cell.model]
        if cell.variant.startswith("full"):
            own_s += num_draws * GRADIENT_S[cell.model]
        return len(tuner.points(NUM_TRAIN[cell.model])) * own_s
    if cell.experiment not in CURVES:
        return 0.0
    scored = evaluation.num_repeats * evaluation.curve_points * evaluation.max_draws
    return scored * CURVE_S[cell.model]


def expected_s(plan: Plan) -> float:
    """Seconds that a cell is expected to take."""
    model, settings = plan.cell.model, plan.settings
    start_s = START_S[model]
    if not settings.is_paper_size:
        is_bandit = isinstance(settings.tuner, MambaSettings)
        start_s = TOY_START_S[model] + (TOY_BANDIT_S[model] if is_bandit else 0.0)
    return start_s + tuning_s(plan) + evaluation_s(plan) + scoring_s(plan)


def planned(cells: Sequence[Cell], scale: Scale) -> list[Plan]:
    """Those of ``cells`` that are not done, with their configurations."""
    plans = []
    for cell in cells:
        cfg = cell.config(scale)
        state, why = cell.state(scale, cfg)
        if state is not State.DONE:
            plans.append(Plan(cell, cfg, settings_from(cfg), state, why))
    return plans


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


class Batch(NamedTuple):
    """What is missing of some cells: the runs, and the seconds that each should take."""

    title: str
    num_cells: int
    plans: list[Plan]
    seconds: list[float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds)


def missing(title: str, cells: Sequence[Cell], scale: Scale) -> Batch:
    """What is missing of ``cells``, each of which is given once."""
    plans = planned(cells, scale)
    spent = _spent_s(set(cells) - {plan.cell for plan in plans}, scale)
    seconds = [spent.get(replace(plan.cell, seed=0), expected_s(plan)) for plan in plans]
    return Batch(title, len(cells), plans, seconds)


def announce(batches: Sequence[Batch]) -> None:
    """Say what is missing of all that was asked for, and how long it should take."""
    for batch in batches:
        left = len(batch.plans)
        say(
            f"{batch.title}: {batch.num_cells} runs, {batch.num_cells - left} of them done before"
            + (f"; the other {left} take about {duration(batch.total_s)}" if left else "")
        )
    if sum(bool(batch.plans) for batch in batches) > 1:
        say(f"all of it takes about {duration(sum(batch.total_s for batch in batches))}")


def _spent_s(done: Iterable[Cell], scale: Scale) -> dict[Cell, float]:
    """Seconds that finished cells took; those of another seed should take as long."""
    spent: dict[Cell, float] = {}
    for cell in done:
        seconds = (read_json(cell.folder(scale) / "provenance.json") or {}).get("seconds") or {}
        if seconds.get("total"):
            spent[replace(cell, seed=0)] = float(seconds["total"])
    return spent


def run_cells(
    title: str, cells: Sequence[Cell], scale: Scale, later_s: float = 0.0
) -> list[Failure]:
    """Run what is missing of ``cells``; those that could not be finished.

    Parameters
    ----------
    title
        The table or figure, for the messages.
    cells
        Each once.
    scale
        Sizes and places.
    later_s
        Seconds that what comes after them should take, for the time that is left.
    """
    batch = missing(title, cells, scale)
    failures, spent_s, expected = [], 0.0, 0.0
    for number, plan in enumerate(batch.plans, start=1):
        own_s = batch.seconds[number - 1]
        note = f", {plan.state.value}" if plan.state is not State.MISSING else ""
        note += f": {plan.why}" if plan.why else ""
        say(
            f"[{title}, {number}/{len(batch.plans)}] {plan.cell.name} "
            f"(about {duration(own_s)}{note})"
        )
        before = time.monotonic()
        failure = _guarded(plan, scale)
        took_s = time.monotonic() - before
        if failure:
            failures.append(failure)
        else:  # how far the estimates are off; a failure says nothing of it
            spent_s, expected = spent_s + took_s, expected + own_s
        pace = spent_s / expected if expected else 1.0
        left_s = pace * (sum(batch.seconds[number:]) + later_s)
        outcome = f"failed: {failure.reason}" if failure else "done"
        say(
            f"    {outcome} in {duration(took_s)}"
            + (f", about {duration(left_s)} left in all" if left_s else "")
        )
    return failures


def _guarded(plan: Plan, scale: Scale) -> Failure | None:
    """Run one cell, whatever happens; a chain without a usable draw is a result, and no failure."""
    folder = plan.cell.folder(scale)
    failure = None
    try:
        if plan.state in TO_BE_REMOVED:
            _remove(folder)
        run_one(plan)
        failure = _short_of_memory(plan, scale)  # in some of its chains
    except Exception as error:
        failure = _failure_of(plan, scale, error)
    gc.collect()
    if failure is None:
        (folder / FAILED).unlink(missing_ok=True)
    else:
        write_json(folder / FAILED, {"reason": failure.reason, "exit_code": failure.exit_code})
    return failure


def _failure_of(plan: Plan, scale: Scale, error: Exception) -> Failure | None:
    """What an error makes of a cell; ``None`` where the run came to its end without a number.

    A run that ran out of memory says more of the machine than of its chains, and is a failure.
    """
    if isinstance(error, NothingUsableError):
        if plan.cell.state(scale, plan.cfg)[0] is State.DONE:
            return None
        if short := _short_of_memory(plan, scale):
            return short
    if isinstance(error, MambaError):
        return Failure(plan.cell, first_line(error), error.exit_code)
    return Failure(plan.cell, f"{type(error).__name__}: {first_line(error)}", 1)


def _short_of_memory(plan: Plan, scale: Scale) -> Failure | None:
    state, why = plan.cell.state(scale, plan.cfg)
    if state is not State.OUT_OF_MEMORY:
        return None
    return Failure(plan.cell, f"out of memory: {why}", NothingUsableError.exit_code)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise StorageError(f"cannot remove {folder}: {error.strerror}; remove it") from error


def reason_of(folder: Path) -> str:
    """Why a cell could not be finished, as its last try had it; empty where it was not tried."""
    failed: Mapping[str, Any] = read_json(folder / FAILED) or {}
    return str(failed.get("reason", ""))


class _Bars(Console):
    """Of what a run says, its bars alone, and those on a terminal: a run can take an hour."""

    def __init__(self) -> None:
        super().__init__(out=io.StringIO())

    def show(self, text: str) -> None:
        pass


def run_one(plan: Plan) -> None:
    """What ``mamba-run`` does with the words of the cell. Raises as it does."""
    with opened(plan.cfg, _Bars(), pictures=plan.settings.budget == "paper") as one:
        one.go()


@contextmanager
def alone(scale: Scale) -> Iterator[None]:
    """While the context lasts, no other command makes tables or figures.

    Runs are timed, so that those of the paper's size have the machine to themselves. Toy ones have
    their folder, and say whose seconds they take.

    Raises
    ------
    ConfigError
        Another one is at it.
    StorageError
        The results' folder cannot be written to.
    """
    is_toy = bool(scale.note)
    path = scale.root / ".lock" if is_toy else MACHINE_LOCK
    if is_toy and (owner := _owner(MACHINE_LOCK)):
        say(f"*** process {owner} makes timed runs meanwhile: this takes its seconds ***")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened_file = path.open("a+")
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}; make {path.parent} a folder that can be "
            "written to, or name another one (ARGS=--root=...)"
        ) from error
    with opened_file as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "(unknown)"
            raise ConfigError(
                f"tables or figures are being made by process {owner} ({path}): their runs are "
                "timed, so that two at once would take each other's seconds. Wait for it to end."
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _owner(lock: Path) -> str:
    """The process that holds a lock; empty where none does."""
    try:
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "(unknown)"
    except OSError:
        pass
    return ""
