"""The runs behind the paper's tables and figures.

A cell is an ordinary ``mamba-run`` with a folder of its own; :attr:`Cell.command` is what a person
types to repeat it. Which cells a table or a figure has is said here, how they are run in
``schedule``.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from mamba_cli.artifacts import (
    config_differences,
    read_json,
    read_metrics,
    read_table,
    read_tuning,
)
from mamba_cli.errors import DataError, first_line

SAMPLERS = ("sgld", "sgld_cv", "sghmc", "sghmc_cv", "sgnht", "sgnht_cv")
"""Columns of the paper's tables, in its order."""


class Study(NamedTuple):
    """One of the paper's three models, and how it is compared."""

    model: str
    tuners: tuple[str, ...]
    tables: tuple[str, str, str]  # results, hyperparameters, results in full
    curves: str


STUDIES = {
    "LR": Study(
        "logreg",
        ("mamba_ksd", "mamba_fssd", "grid", "heuristic"),
        ("LR_std_estimates", "LR_hyperparameters", "LR_std_estimates_full"),
        "LR_ksd_curves",
    ),
    "PMF": Study(
        "pmf",
        ("mamba_ksd", "grid", "heuristic"),
        ("PMF_uncertainty_tests", "PMF_hyperparameters", "PMF_uncertainty_tests_full"),
        "PMF_ksd_curves",
    ),
    "NN": Study(
        "bnn",
        ("mamba_ksd", "grid", "heuristic"),
        ("NN_uncertainty_tests", "NN_hyperparameters", "NN_uncertainty_tests_full"),
        "NN_ksd_curves",
    ),
}

TABLES = {label: key for key, study in STUDIES.items() for label in study.tables}
"""The study of every table."""

AS_PUBLISHED = "LR_std_estimates_as_published"
"""The first table again, as the published code made it where it departed from the text."""

ALL_TABLES = {**TABLES, AS_PUBLISHED: "LR"}

CURVES = {study.curves: key for key, study in STUDIES.items()}
"""The study of every figure over time."""

KSD_TESTS = ("KSD_test_step_size", "KSD_test_batch_size")
"""Figures of the KSD by stochastic and full gradients, of all draws and of thinned ones."""

FIGURES = (*CURVES, *KSD_TESTS)

SMALLER_GRID = "smaller_grid"
"""Runs of SGNHT for the network on the paper's second grid; they are those of its tables."""

THINNING = 5
"""The paper's, in its figures of the KSD."""

MAX_DRAWS = {
    "KSD_test_step_size": {"logreg": 8_000, "pmf": 2_500, "bnn": 800},
    "KSD_test_batch_size": {"logreg": 30_000, "pmf": 2_500, "bnn": 2_000},
}
"""More draws than a chain of the figures of the KSD makes in its second: all of them are scored."""

LINES = ("stochastic-thinned", "stochastic-all", "full-thinned", "full-all")
"""Of every panel of the figures of the KSD. The first is timed, since it is the quickest to score;
the others make its chains again and score the same draws."""


class Scale(NamedTuple):
    """How large the runs are, and where they and what is made of them lie."""

    root: Path  # of tables and figures
    runs: Path
    seeds: Mapping[str, int]
    ksd_test_draws: Mapping[str, Mapping[str, int]] = MAX_DRAWS  # by figure and model
    sizes: Mapping[str, tuple[str, ...]] = {}  # overrides by model
    curve_sizes: tuple[str, ...] = ()
    ksd_test_sizes: tuple[str, ...] = ()
    batch_test_sizes: tuple[str, ...] = ()
    note: str = ""


def paper_scale(root: Path = Path("results"), seeds: Mapping[str, int] | None = None) -> Scale:
    """The paper's own sizes: three runs of every cell, one of the network's."""
    return Scale(root, root / "paper", {"logreg": 3, "pmf": 3, "bnn": 1, **(seeds or {})})


def _toy(**sizes: Any) -> tuple[str, ...]:
    values = {"map_phases": None, **sizes}
    phases = values.pop("map_phases")
    keys = [f"model.budgets.quick.{key}={value}" for key, value in values.items()]
    steps = "num_steps: {}, batch_size: 500, learning_rate: 0.02, final_learning_rate: 0.001"
    if phases is not None:
        keys.append(f"model.budgets.quick.map_phases=[{{{steps.format(phases)}}}]")
    return ("budget=quick", "model.tuning.num_integration_steps=[5]", *keys)


TOY = {
    "logreg": (
        *_toy(
            num_test=1000,
            longest_arm_s=0.02,
            max_draws=20,
            search_iterations=20,
            evaluation_s=0.1,
            evaluation_max_draws=50,
            ground_truth_draws=400,
            ground_truth_warmup=100,
            ground_truth_max_r_hat=1.5,
            ground_truth_min_ess=20,
        ),
        "model.num_train=4000",
        "model.tuning.step_size=[1e-3,1e-4,1e-5]",
        "model.tuning.batch_percent=[10,1]",
    ),
    "pmf": (
        *_toy(
            longest_arm_s=0.05,
            max_draws=4,
            search_iterations=4,
            evaluation_s=0.2,
            evaluation_max_draws=8,
        ),
        "model.tuning.step_size=[1e-5,1e-6]",
        "model.tuning.batch_percent=[10]",  # each size is programs to compile
    ),
    "bnn": (
        *_toy(
            num_hidden=5,
            map_phases=50,
            longest_arm_s=0.1,
            max_draws=2,
            search_iterations=2,
            evaluation_s=0.2,
            evaluation_max_draws=4,
        ),
        "model.tuning.step_size=[1e-5,1e-6]",
        "model.tuning.batch_percent=[10]",  # each size is programs to compile
    ),
}
"""Overrides by model that make every cell take a few seconds."""


def toy_scale(root: Path = Path("results/quick")) -> Scale:
    """Every cell once and tiny: whether it all works, and no result."""
    return Scale(
        root,
        root,
        dict.fromkeys(TOY, 1),
        {figure: {"logreg": 500, "pmf": 50, "bnn": 50} for figure in KSD_TESTS},
        TOY,
        ("evaluation.num_repeats=2", "evaluation.curve_points=3", "evaluation.max_draws=4"),
        ("tuner.longest_arm_s=0.05",),
        ("tuner.grid.batch_percent=[100,10]",),
        "QUICK=1: toy sizes, NOT the paper's. These numbers mean nothing.",
    )


class State(Enum):
    """What the folder of a cell holds."""

    DONE = "done"
    MISSING = "missing"
    UNFINISHED = "unfinished"
    CHANGED = "changed"
    DAMAGED = "damaged"
    OUT_OF_MEMORY = "out of memory"


TO_BE_REMOVED = (State.CHANGED, State.DAMAGED, State.OUT_OF_MEMORY)
"""A run of these is made anew and not gone on with."""


@dataclass(frozen=True)
class Cell:
    """One run. ``keys`` are overrides of its own; ``variant`` tells it from the plain one.

    One that ``rescores`` another makes the chains of that again and scores them by its own keys.
    """

    experiment: str
    model: str
    sampler: str
    tuner: str
    seed: int = 0
    variant: str = ""
    keys: tuple[str, ...] = ()
    rescores: Cell | None = None

    @property
    def name(self) -> str:
        """What a person reads."""
        parts = (self.experiment, self.model, self.sampler, self.tuner, self.variant)
        return f"{' '.join(part for part in parts if part)} seed {self.seed}"

    def folder(self, scale: Scale) -> Path:
        """The run's folder."""
        is_figure = self.experiment in FIGURES
        first = Path(self.experiment) / self.model if is_figure else Path(self.model)
        tuner = f"{self.tuner}-{self.variant}" if self.variant else self.tuner
        return scale.runs / "runs" / first / self.sampler / tuner / f"seed-{self.seed}"

    def overrides(self, scale: Scale) -> list[str]:
        """What follows ``mamba-run``."""
        if self.rescores is not None:
            places = (f"results_dir={scale.runs}", f"run_dir={self.folder(scale)}")
            return [f"replay={self.rescores.folder(scale)}", *self.keys, *places]
        is_test = self.experiment in KSD_TESTS
        is_given = any(key.startswith("tuner=") for key in self.keys)
        return [
            f"experiment={self.experiment}",
            *([f"model={self.model}"] if is_test else []),
            f"sampler={self.sampler}",
            *([] if is_given else [f"tuner={self.tuner}"]),
            f"seed={self.seed}",
            *self.keys,
            *scale.sizes.get(self.model, ()),
            *(scale.curve_sizes if self.experiment in CURVES else ()),
            *(scale.ksd_test_sizes if is_test else ()),
            *(scale.batch_test_sizes if self.experiment == "KSD_test_batch_size" else ()),
            f"results_dir={scale.runs}",
            f"run_dir={self.folder(scale)}",
        ]

    def command(self, scale: Scale) -> str:
        """What a person types to repeat the cell."""
        return shlex.join(["mamba-run", *self.overrides(scale)])

    def config(self, scale: Scale) -> DictConfig:
        """The configuration that ``mamba-run`` composes of the same words."""
        if self.rescores is not None:
            cfg = self.rescores.config(scale)
            cfg.replay = str(self.rescores.folder(scale))
            cfg.merge_with_dotlist([*self.keys])
            cfg.run_dir = str(self.folder(scale))
            return cfg
        own = ("seed=", "run_dir=")
        shared = tuple(word for word in self.overrides(scale) if not word.startswith(own))
        cfg = copy.deepcopy(_composed(shared))
        cfg.seed, cfg.run_dir = self.seed, str(self.folder(scale))
        return cfg

    def state(self, scale: Scale, cfg: DictConfig | None = None) -> tuple[State, str]:
        """What is there of the run, and for one that has to be made again why.

        Parameters
        ----------
        scale
            Sizes and places.
        cfg
            Its :meth:`config`, where that is at hand.
        """
        folder = self.folder(scale)
        try:
            stored = read_json(folder / "provenance.json")
            best, rows = read_json(folder / "best.json"), metrics_of(folder)
            is_test = self.experiment in KSD_TESTS
            arms = read_tuning(folder / "tuning.csv") if is_test or best is None else []
            curve = read_table(folder / "curve.csv")[1] if self.experiment in CURVES else []
            steps = _steps(folder) if is_test else None
        except DataError as error:
            return State.DAMAGED, first_line(error).partition(";")[0]
        if stored is None:
            return State.MISSING, ""
        there = stored.get("config") or {}
        asked: Any = OmegaConf.to_container(
            self.config(scale) if cfg is None else cfg, resolve=True
        )
        changes = config_differences(there, asked)
        if self.rescores is not None:
            # What tells whose chains it scores are their steps: the folder may have moved.
            changes = [change for change in changes if change[0] != "replay"]
        if changes:
            key, old, new = changes[0]
            more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
            return State.CHANGED, f"{key}: there {old!r}, asked for {new!r}{more}"
        # A run that was asked to tune alone came to its end, and its cell did not.
        missing = set(asked["stages"]) - set(there.get("stages") or ())
        if missing or not stored.get("end"):
            return State.UNFINISHED, ""
        if is_test and (steps is None or not arms):
            return State.DAMAGED, f"{'tuning.csv' if steps else 'steps.json'} has gone"
        if self.experiment in CURVES and not curve:
            return State.DAMAGED, "curve.csv has gone"
        if self.rescores is not None:
            chains, _ = self.rescores.state(scale)
            if chains is not State.DONE or steps != _steps(self.rescores.folder(scale)):
                return State.CHANGED, "the chains that it scores are others by now"
        short = [str(row["reason"]) for row in rows if row["status"] == "out_of_memory"]
        if best is None:
            if not arms or any(arm.promoted and arm.rung == arms[-1].rung for arm in arms):
                return State.UNFINISHED, "best.json has gone"
            short = [arm.reason for arm in arms if arm.status == "out_of_memory"]
        elif "evaluate" in asked["stages"] and len(rows) < asked["evaluation"]["num_repeats"]:
            return State.UNFINISHED, "rows of metrics.csv have gone"
        # It says more of the machine than of the chains.
        return (State.OUT_OF_MEMORY, short[0]) if short else (State.DONE, "")


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's ``metrics.csv``, each with its status. Raises ``DataError``."""
    rows = read_metrics(folder / "metrics.csv")
    if any("status" not in row for row in rows):
        raise DataError(f"cannot read {folder / 'metrics.csv'}: it has no column status")
    return rows


def _steps(folder: Path) -> object:
    """The steps of a run's chains; ``None`` where there are none."""
    return (read_json(folder / "steps.json") or {}).get("dispatches")


@cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    """One composition for all seeds: it takes a quarter of a second."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("mamba_cli.conf", version_base="1.3"):
        return hydra.compose("config", overrides=list(overrides))


def study_of(label: str) -> Study:
    """The study that a table is of."""
    return STUDIES[ALL_TABLES[label]]


def table_cells(label: str, scale: Scale) -> list[Cell]:
    """The runs of a table. Tables of one study share theirs, under the name of its first."""
    study = study_of(label)
    if label == AS_PUBLISHED:
        return [
            Cell(label, study.model, s, t, 0, "as_published", _published_keys(s, t, scale))
            for s in SAMPLERS
            for t in study.tuners
        ]
    cells = [
        Cell(study.tables[0], study.model, sampler, tuner, seed)
        for seed in range(scale.seeds[study.model])
        for sampler in SAMPLERS
        for tuner in study.tuners
    ]
    if study.model == "bnn":
        cells += [
            Cell(f"NN_sgnht_{SMALLER_GRID}", "bnn", "sgnht", tuner, seed, SMALLER_GRID)
            for seed in range(scale.seeds["bnn"])
            for tuner in ("mamba_ksd", "grid")
        ]
    return cells


def _published_keys(sampler: str, tuner: str, scale: Scale) -> tuple[str, ...]:
    """What the published code did besides, by sampler and tuner: see the experiment's file."""
    keys = []
    if tuner.startswith("mamba"):
        keys.append("tuner.score_on=rung")
    if tuner == "mamba_fssd":
        keys.append("tuner.reward.statistic=u")
    if sampler.startswith("sgld") and not scale.note:
        if tuner == "heuristic":
            keys.append("tuner.step_size=2.5e-6")  # 2 / N
        else:
            steps = ",".join(f"{2 * 10 ** (-1 - i / 2):.10e}" for i in range(14))
            keys.append(f"tuner.grid.step_size=[{steps}]")
    return tuple(keys)


def shown(label: str, scale: Scale) -> list[Cell]:
    """Of a table's runs, those it shows: of SGNHT for the network, those of the second grid."""
    cells = table_cells(label, scale)
    replaced = {(c.sampler, c.tuner, c.seed) for c in cells if c.variant}
    return [c for c in cells if c.variant or (c.sampler, c.tuner, c.seed) not in replaced]


def curve_cells(figure: str, scale: Scale) -> list[tuple[Cell, Cell]]:
    """For each line of a figure over time, the run whose hyperparameters it has, and itself.

    The second lacks the hyperparameters while the first is not finished: see :func:`with_best`.
    """
    study = STUDIES[CURVES[figure]]
    first = [cell for cell in shown(study.tables[0], scale) if cell.seed == 0]
    return [(cell, Cell(figure, study.model, cell.sampler, cell.tuner)) for cell in first]


def with_best(line: Cell, best: Mapping[str, Any], uses_integration_steps: bool) -> Cell:
    """``line`` with the hyperparameters of a finished run's ``best.json``."""
    keys = [
        "tuner=fixed",
        f"tuner.step_size={best['step_size']!r}",
        f"tuner.batch_size={best['batch_size']}",
    ]
    if uses_integration_steps:
        keys.append(f"tuner.num_integration_steps={best['num_integration_steps']}")
    return replace(line, keys=tuple(keys))


def ksd_test_cells(figure: str, scale: Scale) -> list[Cell]:
    """The four lines of every panel, the timed one first; ``variant`` is the line's name."""
    cells = []
    for study in STUDIES.values():
        draws = scale.ksd_test_draws[figure][study.model]
        first: Cell | None = None
        for line in LINES:
            gradients, _, which = line.partition("-")
            thin = THINNING if which == "thinned" else 1
            keys = (f"tuner.reward.gradients={gradients}", f"tuner.reward.thin={thin}")
            if first is None:
                keys = (*keys, f"tuner.max_draws={draws}")
            cell = Cell(figure, study.model, "sgld", "mamba_ksd", 0, line, keys, first)
            first = first or cell
            cells.append(cell)
    return cells
