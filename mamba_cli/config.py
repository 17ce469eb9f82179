"""The configuration as plain values: read once, checked once, frozen.

:func:`settings_from` turns the composed configuration into a :class:`RunSettings`, and below
``run.py`` nothing sees a ``cfg`` object. Whatever a person can get wrong in a value raises
:class:`~mamba_cli.errors.ConfigError`, which names the key, the value and what is allowed.
Nothing here imports JAX, so that a wrong key is reported at once.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mamba_cli.errors import ConfigError

T = TypeVar("T")

CLOCKS = ("wall", "calibrated")
STAGES = ("tune", "ground_truth", "evaluate")
TOP_LEVEL_KEYS = (
    "seed",
    "stages",
    "data_dir",
    "results_dir",
    "run_dir",
    "replay",
    "dry_run",
    "model",
    "sampler",
    "tuner",
    "minibatch",
    "noise",
    "budget",
    "evaluation",
    "ground_truth",
)

# The parts of a model's file; every other key of it is an argument of the posterior.
MODEL_PARTS = (
    "name",
    "posterior",
    "tuning",
    "budgets",
    "burn_in_fraction",
    "map",
    "ground_truth",
    "in_paper",
)

# What makes the size of a run, and where a model's budget has it. The number of repeats is not
# here: more of them are not another experiment.
SIZE_KEYS = {
    "tuner.longest_arm_s": "longest_arm_s",
    "tuner.num_iterations": "search_iterations",
    "tuner.max_draws": "max_draws",
    "evaluation.budget_s": "evaluation_s",
    "evaluation.max_draws": "evaluation_max_draws",
    "ground_truth.num_draws": "ground_truth_draws",
    "ground_truth.num_warmup": "ground_truth_warmup",
    "model.map.phases": "map_phases",
}

# The paper's heuristic (appendix on tuning methods); also where `fixed` is left open.
DEFAULT_BATCH_PERCENT = 10.0
DEFAULT_INTEGRATION_STEPS = 10

# A JAX key wraps silently above 32 bits: seeds 0 and 2^32 would be the same run.
LARGEST_SEED = 2**32 - 1

# Chains run in single precision: beyond these a step size would become 0 or infinite there.
SMALLEST_STEP_SIZE = 1e-37
LARGEST_STEP_SIZE = 3e38


# Step size, batch size, L.
Point = tuple[float, int, int]


@dataclass(frozen=True)
class Grid:
    """The lists whose product is the set of arms. The rows are known once the data are.

    A list that is ``None`` is laid around the model, once its MAP is known.
    """

    step_sizes: tuple[float, ...] | None
    batch_percents: tuple[float, ...] | None
    num_integration_steps: tuple[int, ...]

    @property
    def is_open(self) -> bool:
        """Whether a list is still to be laid around the model."""
        return self.step_sizes is None or self.batch_percents is None

    def points(self, num_train: int) -> tuple[Point, ...]:
        """Every arm for ``num_train`` rows, each once, the step size varying fastest.

        Arms that share a compiled program are therefore neighbours.

        Raises
        ------
        ConfigError
            A percentage is less than one row.
        """
        assert self.step_sizes is not None
        assert self.batch_percents is not None
        batch_sizes = dict.fromkeys(
            batch_size_of(percent, num_train, "tuner.grid.batch_percent")
            for percent in self.batch_percents
        )
        return tuple(
            (step_size, batch_size, num_steps)
            for batch_size, num_steps, step_size in product(
                batch_sizes, self.num_integration_steps, self.step_sizes
            )
        )


@dataclass(frozen=True)
class MambaSettings:
    """Successive halving. ``longest_arm_s`` is the paper's R, ``reduction_factor`` its eta.

    ``check_s`` is the length of the winner's check run, 0 without guards.
    """

    name: str
    reduction_factor: int
    longest_arm_s: float
    max_draws: int
    score_on: str  # chain | rung
    grid: Grid
    guards: bool = False
    check_s: float = 0.0
    keep_ties: bool = False

    def points(self, num_train: int) -> tuple[Point, ...]:
        """The arms, as :meth:`Grid.points`."""
        return self.grid.points(num_train)


@dataclass(frozen=True)
class GridSettings:
    """The paper's grid search: ``num_iterations`` a point, the best ``metric`` wins."""

    name: str
    num_iterations: int
    noise_scale: float
    metric: str
    max_draws: int
    check_from_map: bool
    grid: Grid

    def points(self, num_train: int) -> tuple[Point, ...]:
        """The points tried, as :meth:`Grid.points`."""
        return self.grid.points(num_train)


@dataclass(frozen=True)
class FixedSettings:
    """Hyperparameters that need no search: the user's (``fixed``) or the heuristic's.

    ``step_size`` is ``None`` for 1/N; of ``batch_size`` and ``batch_percent`` one is ``None``.
    """

    name: str
    step_size: float | None
    batch_size: int | None
    batch_percent: float | None
    num_integration_steps: int

    def points(self, num_train: int) -> tuple[Point, ...]:
        """The one point, for ``num_train`` rows.

        Raises
        ------
        ConfigError
            ``batch_size`` is above ``num_train``, or ``batch_percent`` is less than one row.
        """
        if self.batch_size is not None and self.batch_size > num_train:
            raise _refusal(
                "tuner.batch_size",
                self.batch_size,
                f"a whole number, at least 1 and at most {num_train} (the training rows)",
            )
        step_size = 1.0 / num_train if self.step_size is None else self.step_size
        if self.batch_percent is not None:
            return (
                (
                    step_size,
                    batch_size_of(self.batch_percent, num_train, "tuner.batch_percent"),
                    self.num_integration_steps,
                ),
            )
        assert self.batch_size is not None
        return ((step_size, self.batch_size, self.num_integration_steps),)


TunerSettings = MambaSettings | GridSettings | FixedSettings


@dataclass(frozen=True)
class SamplerSettings:
    """What the run has to know of a sampler; its kernel is built from ``sampler.kernel``."""

    name: str
    control_variates: bool
    uses_integration_steps: bool


@dataclass(frozen=True)
class AdamPhaseSettings:
    """One phase of the search for the MAP; ``batch_size`` is ``None`` for all rows."""

    num_steps: int
    batch_size: int | None
    learning_rate: float
    final_learning_rate: float


@dataclass(frozen=True)
class MapSearchSettings:
    """The search for the MAP; ``None`` leaves a setting at its default."""

    seed: int = 0
    phases: tuple[AdamPhaseSettings, ...] | None = None
    max_lbfgs_iterations: int | None = None


@dataclass(frozen=True)
class EvaluationSettings:
    """The chains of the chosen hyperparameters: seconds each, how many, draws scored.

    The draws of the first ``burn_in_fraction`` of the seconds are dropped.
    """

    budget_s: float
    num_repeats: int
    max_draws: int
    burn_in_fraction: float
    curve_points: int = 0  # 0: no curve
    curve_metric: str = "ksd"


@dataclass(frozen=True)
class GroundTruthSettings:
    """NUTS: ``num_draws`` over all chains, ``num_warmup`` for each."""

    num_draws: int
    num_warmup: int
    num_chains: int
    whiten: bool
    criterion: str  # positions | predictions
    converged_share: float
    max_r_hat: float
    min_ess: float
    recompute: bool
    max_s: float | None = None  # the most it may be expected to take; None: whatever it takes


@dataclass(frozen=True)
class RunSettings:
    """One run. ``stages`` is in the order they are done; no ``ground_truth`` is ``None``.

    ``is_paper_size`` is false where the budget is not the paper's, and where a key that makes
    the size of a run was given another value than the paper's.
    """

    seed: int
    stages: tuple[str, ...]
    results_dir: Path
    run_dir: Path
    budget: str
    clock: str  # wall | calibrated
    replay: Path | None
    dry_run: bool
    is_paper_size: bool
    model: str
    sampler: SamplerSettings
    tuner: TunerSettings
    map_search: MapSearchSettings
    evaluation: EvaluationSettings
    ground_truth: GroundTruthSettings | None
    in_paper: bool = True

    @property
    def needs_no_size_note(self) -> bool:
        """Whether the size is the paper's, or the model is none of the paper's."""
        return self.is_paper_size or not self.in_paper


def settings_from(cfg: DictConfig) -> RunSettings:
    """Read and check a composed configuration.

    Parameters
    ----------
    cfg
        What Hydra composed from ``conf/``, without the ``hydra`` node.

    Raises
    ------
    ConfigError
        A value is missing, of the wrong type or outside its range, a key is unknown, or an
        interpolation leads nowhere.
    """
    root = _Section("", _plain(cfg))
    root.refuse_unknown(TOP_LEVEL_KEYS)
    model = _model(root.section("model"))
    sampler = _sampler(root.section("sampler"))
    tuner = _tuner(root.section("tuner"), sampler, model)
    if "num_train" in model.values:
        tuner.points(model.values["num_train"])
    budget = root.section("budget")
    budget.refuse_unknown(("name", "clock", "allow_parallel_wall_clock"))
    budget.flag("allow_parallel_wall_clock")
    if root.get("data_dir") is not None:
        root.folder("data_dir")
    return RunSettings(
        seed=root.integer("seed", at_least=0, at_most=LARGEST_SEED),
        stages=_stages(root),
        results_dir=root.folder("results_dir"),
        run_dir=root.folder("run_dir"),
        budget=budget.text("name"),
        clock=budget.choice("clock", CLOCKS),
        dry_run=root.flag("dry_run"),
        replay=None if root.get("replay") is None else root.folder("replay"),
        is_paper_size=_in_paper(model)
        and budget.text("name") == "paper"
        and _has_paper_sizes(root),
        model=model.text("name"),
        sampler=sampler,
        tuner=tuner,
        map_search=_map_search(model),
        evaluation=_evaluation(root.section("evaluation"), model),
        ground_truth=_ground_truth(root.section("ground_truth")),
        in_paper=_in_paper(model),
    )


def batch_size_of(percent: float, num_train: int, key: str = "batch_percent") -> int:
    """Rows in ``percent`` per cent of ``num_train``: floor(percent N / 100).

    In exact arithmetic on the decimal as written: 0.57 per cent of 10,000 is 57 rows, where
    floating point makes it 56.

    Raises
    ------
    ConfigError
        It is less than one row; ``key`` is named.
    """
    rows = Fraction(repr(percent)) * num_train / 100
    if rows < 1:
        raise ConfigError(
            f"{key}={percent} is not allowed: it is {float(rows):.3g} of a row where there are "
            f"{num_train} training rows, and a minibatch has at least one."
        )
    return math.floor(rows)


def build(node: DictConfig, key: str) -> Any:
    """The object a configuration node with a ``_target_`` describes.

    Parameters
    ----------
    node
        A leaf: ``_target_``, maybe ``_partial_``, and keyword arguments as plain values.
    key
        Where it stands in the configuration, for messages.

    Raises
    ------
    ConfigError
        The target does not exist or does not take one of the arguments. What the target
        itself raises is passed on as it is.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import get_object, instantiate

    try:
        target = get_object(str(node["_target_"]))
    except (ImportError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}._target_: {_one_line(error)}") from error
    arguments = [str(name) for name in node if not str(name).startswith("_")]
    _refuse_unknown_arguments(target, arguments, key)
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        if error.__cause__ is None:
            raise ConfigError(f"{key}: {_one_line(error)}") from error
        raise error.__cause__ from None


def group_options() -> dict[str, list[str]]:
    """The options of every configuration group, as the folders and files of ``conf/`` have them.

    A file whose name begins with an underscore is a base for others, not an option.
    """
    found: dict[str, list[str]] = {}
    _collect_options(resources.files("mamba_cli.conf"), "", found)
    return dict(sorted(found.items()))


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The nearest known name as a sentence to append, or nothing.

    Dotted keys are compared whole first, then by their last part, so that a key given
    without its section is found too.
    """
    known = list(candidates)
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if not matches:
        by_last_part: dict[str, str] = {}
        for candidate in known:
            by_last_part.setdefault(candidate.rpartition(".")[2], candidate)
        last_parts = difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1)
        matches = [by_last_part[part] for part in last_parts]
    return f" Did you mean {matches[0]}?" if matches else ""


@dataclass(frozen=True)
class _Section:
    """A node of the configuration that knows where it stands."""

    path: str
    values: Mapping[str, Any]

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        if name not in self.values:
            raise ConfigError(f"{self.key(name)} is missing from the configuration.")
        return self.values[name]

    def section(self, name: str) -> _Section:
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise _refusal(self.key(name), value, "a group of keys")
        return _Section(self.key(name), value)

    def integer(self, name: str, *, at_least: int, at_most: int | None = None) -> int:
        return _integer(self.key(name), self.get(name), at_least, at_most)

    def step_size(self, name: str) -> float:
        return _step_size(self.key(name), self.get(name))

    def above_zero(self, name: str) -> float:
        return _above_zero(self.key(name), self.get(name))

    def text(self, name: str) -> str:
        return _word(self.key(name), self.get(name))

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise _refusal(self.key(name), value, "true or false")
        return value

    def folder(self, name: str) -> Path:
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise _refusal(self.key(name), value, "the path of a folder")
        return Path(value).expanduser()

    def choice(self, name: str, allowed: Collection[str]) -> str:
        value = self.get(name)
        if value not in allowed:
            hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
            raise _refusal(self.key(name), value, "one of " + ", ".join(allowed), hint)
        return str(value)

    def each(self, name: str, read: Callable[[str, Any], T]) -> tuple[T, ...]:
        """A list that is not empty, every entry read by ``read`` and given once."""
        value = self.get(name)
        if not isinstance(value, list):
            hint = f" Write {self.key(name)}=[{value}]."
            raise _refusal(self.key(name), value, "a list", hint)
        if not value:
            raise ConfigError(
                f"{self.key(name)}=[] is not allowed: it must hold at least one value, "
                "or there is no arm to try."
            )
        entries = tuple(read(f"{self.key(name)}[{i}]", entry) for i, entry in enumerate(value))
        for i, entry in enumerate(entries):
            if entry in entries[:i]:
                raise ConfigError(
                    f"{self.key(name)}={value} is not allowed: it holds {entry} more than once."
                )
        return entries

    def refuse_unknown(self, known: Collection[str]) -> None:
        for name in self.values:
            if name not in known:
                keys = [self.key(candidate) for candidate in known]
                raise ConfigError(
                    f"{self.key(name)} is not a key of this configuration."
                    f"{did_you_mean(self.key(name), keys)} Known: {', '.join(keys)}."
                )


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as dicts and lists, every interpolation resolved, nothing missing."""
    try:
        values = OmegaConf.to_container(cfg, resolve=True)
        missing = sorted(OmegaConf.missing_keys(cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_one_line(error)}.") from error
    if missing:
        raise ConfigError(
            f"{missing[0]} has no value and there is no default: give it, as {missing[0]}=VALUE."
        )
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _stages(root: _Section) -> tuple[str, ...]:
    value = root.get("stages")
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed:
        raise _refusal("stages", value, f"a list of any of {', '.join(STAGES)}")
    for stage in listed:
        if stage not in STAGES:
            hint = did_you_mean(stage, STAGES) if isinstance(stage, str) else ""
            raise _refusal("stages", value, f"a list of any of {', '.join(STAGES)}", hint)
    return tuple(stage for stage in STAGES if stage in listed)


def _model(section: _Section) -> _Section:
    """The model's section, checked: its keys are what the posterior is built from."""
    posterior = section.section("posterior")
    known = [*MODEL_PARTS, *(name for name in posterior.values if not name.startswith("_"))]
    section.refuse_unknown(known)
    for name in section.values:
        if name in posterior.values and repr(section.get(name)) != repr(posterior.get(name)):
            raise ConfigError(
                f"{posterior.key(name)}={posterior.get(name)!r} is not allowed: it must be "
                f"{section.key(name)}={section.get(name)!r}. Leave it as the model's file has it."
            )
    for name, smallest in (("num_train", 1), ("num_test", 1), ("dim", 1), ("data_seed", 0)):
        if name in section.values:
            section.integer(name, at_least=smallest)
    if "correlation" in section.values:
        _unconverted(section, "correlation", "above -1 and below 1", lambda rho: abs(rho) < 1.0)
    if "prior_variance" in section.values:
        _unconverted(section, "prior_variance", "above 0", lambda variance: variance > 0.0)
    section.section("tuning").refuse_unknown(
        (
            "step_size",
            "batch_percent",
            "num_integration_steps",
            "search_noise",
            "search_metric",
            "metrics",
        )
    )
    return section


def _unconverted(
    section: _Section, name: str, allowed: str, is_allowed: Callable[[float], bool]
) -> None:
    """Check a number that reaches the model as it is written, so that text is not one."""
    key, value = section.key(name), section.get(name)
    if isinstance(value, str) or not is_allowed(_real(key, value, allowed)):
        raise _refusal(key, value, f"a finite number, {allowed}")


def _in_paper(model: _Section) -> bool:
    return model.flag("in_paper") if "in_paper" in model.values else True


def _has_paper_sizes(root: _Section) -> bool:
    """Whether every key that makes the size of a run has the value of the paper's budget."""
    paper = root.section("model").section("budgets").values.get("paper")
    if not isinstance(paper, Mapping):
        return False
    sizes = SIZE_KEYS | {f"model.{name}": name for name in root.section("model").values}
    for key, size in sizes.items():
        given: Any = root.values
        for part in key.split("."):
            given = given.get(part) if isinstance(given, Mapping) else None
        if size in paper and given is not None and given != paper[size]:
            return False
    return True


def _sampler(section: _Section) -> SamplerSettings:
    section.refuse_unknown(("name", "gradient", "kernel", "uses_integration_steps"))
    return SamplerSettings(
        name=section.text("name"),
        control_variates=section.choice("gradient", ("standard", "control_variates"))
        == "control_variates",
        uses_integration_steps=section.flag("uses_integration_steps"),
    )


def _tuner(section: _Section, sampler: SamplerSettings, model: _Section) -> TunerSettings:
    method = section.choice("method", ("mamba", "grid", "heuristic", "fixed"))
    if method == "mamba":
        return _mamba(section, sampler, model)
    if method == "grid":
        return _grid_search(section, sampler, model)
    if method == "heuristic":
        return _heuristic(section, sampler)
    return _fixed(section, sampler)


def _mamba(section: _Section, sampler: SamplerSettings, model: _Section) -> MambaSettings:
    section.refuse_unknown(
        (
            "name",
            "method",
            "reduction_factor",
            "longest_arm_s",
            "max_draws",
            "score_on",
            "grid",
            "reward",
            "guards",
            "check_s",
            "keep_ties",
        )
    )
    guards = section.flag("guards")
    return MambaSettings(
        name=section.text("name"),
        reduction_factor=section.integer("reduction_factor", at_least=2),
        longest_arm_s=section.above_zero("longest_arm_s"),
        max_draws=section.integer("max_draws", at_least=2),
        score_on=section.choice("score_on", ("chain", "rung")),
        grid=_grid(section.section("grid"), sampler, model),
        guards=guards,
        check_s=_check_s(section, guards),
        keep_ties=section.flag("keep_ties"),
    )


def _check_s(section: _Section, guards: bool) -> float:
    """The seconds of the check run: as given, R where they are not, none without guards."""
    key, value = section.key("check_s"), section.get("check_s")
    if value is None:
        return section.above_zero("longest_arm_s") if guards else 0.0
    if not guards:
        raise _refusal(key, value, f"null where {section.key('guards')}=false: nothing is checked")
    return _at_least_zero(key, value)


def _grid_search(section: _Section, sampler: SamplerSettings, model: _Section) -> GridSettings:
    section.refuse_unknown(
        (
            "name",
            "method",
            "num_iterations",
            "noise_scale",
            "metric",
            "max_draws",
            "check_from_map",
            "grid",
        )
    )
    noise_scale = _at_least_zero(section.key("noise_scale"), section.get("noise_scale"))
    return GridSettings(
        name=section.text("name"),
        num_iterations=section.integer("num_iterations", at_least=1),
        noise_scale=noise_scale,
        metric=section.choice("metric", model.section("tuning").each("metrics", _word)),
        max_draws=section.integer("max_draws", at_least=2),
        check_from_map=section.flag("check_from_map"),
        grid=_grid(section.section("grid"), sampler, model),
    )


def _heuristic(section: _Section, sampler: SamplerSettings) -> FixedSettings:
    """h = 1/N (Brosse et al., 2018) unless a step size is given."""
    section.refuse_unknown(
        ("name", "method", "step_size", "batch_percent", "num_integration_steps")
    )
    given = section.get("step_size")
    return FixedSettings(
        name=section.text("name"),
        step_size=None if given is None else section.step_size("step_size"),
        batch_size=None,
        batch_percent=_percent(section.key("batch_percent"), section.get("batch_percent")),
        num_integration_steps=_num_integration_steps(section, sampler),
    )


def _fixed(section: _Section, sampler: SamplerSettings) -> FixedSettings:
    section.refuse_unknown(
        ("name", "method", "step_size", "batch_size", "batch_percent", "num_integration_steps")
    )
    step_size = section.step_size("step_size")
    rows, percent = section.get("batch_size"), section.get("batch_percent")
    if rows is not None and percent is not None:
        raise ConfigError(
            f"{section.key('batch_size')}={rows} and {section.key('batch_percent')}={percent} "
            "are both given: give one of them."
        )
    if rows is None and percent is None:
        percent = DEFAULT_BATCH_PERCENT
    return FixedSettings(
        name=section.text("name"),
        step_size=step_size,
        batch_size=None if rows is None else section.integer("batch_size", at_least=1),
        batch_percent=None if percent is None else _percent(section.key("batch_percent"), percent),
        num_integration_steps=_num_integration_steps(section, sampler),
    )


def _num_integration_steps(section: _Section, sampler: SamplerSettings) -> int:
    if section.get("num_integration_steps") is None:
        return DEFAULT_INTEGRATION_STEPS if sampler.uses_integration_steps else 1
    num_steps = section.integer("num_integration_steps", at_least=1)
    _refuse_unused_integration_steps(section, (num_steps,), sampler)
    return num_steps


def _grid(section: _Section, sampler: SamplerSettings, model: _Section) -> Grid:
    section.refuse_unknown(("step_size", "batch_percent", "num_integration_steps"))
    return Grid(
        step_sizes=_each_or_open(section, "step_size", _step_size, model),
        batch_percents=_each_or_open(section, "batch_percent", _percent, model),
        num_integration_steps=_grid_integration_steps(section, sampler, model),
    )


def _each_or_open(
    section: _Section, name: str, read: Callable[[str, Any], float], model: _Section
) -> tuple[float, ...] | None:
    """A list of the grid; ``None`` is allowed where the model's own file leaves it open."""
    if section.get(name) is None and model.section("tuning").get(name) is None:
        return None
    return section.each(name, read)


def _grid_integration_steps(
    section: _Section, sampler: SamplerSettings, model: _Section
) -> tuple[int, ...]:
    def at_least_one(key: str, value: Any) -> int:
        return _integer(key, value, 1, None)

    if section.get("num_integration_steps") is not None:
        listed = section.each("num_integration_steps", at_least_one)
        _refuse_unused_integration_steps(section, listed, sampler)
        return listed
    if not sampler.uses_integration_steps:
        return (1,)
    return model.section("tuning").each("num_integration_steps", at_least_one)


def _refuse_unused_integration_steps(
    section: _Section, num_steps: Sequence[int], sampler: SamplerSettings
) -> None:
    if not sampler.uses_integration_steps and tuple(num_steps) != (1,):
        raise ConfigError(
            f"{section.key('num_integration_steps')}={section.get('num_integration_steps')} is "
            f"not allowed with sampler={sampler.name}, which does not redraw a momentum: leave "
            "it null."
        )


def _map_search(model: _Section) -> MapSearchSettings:
    if "map" not in model.values:
        return MapSearchSettings()
    section = model.section("map")
    section.refuse_unknown(("seed", "phases", "max_lbfgs_iterations"))
    return MapSearchSettings(
        seed=section.integer("seed", at_least=0, at_most=LARGEST_SEED),
        phases=section.each("phases", _adam_phase),
        max_lbfgs_iterations=section.integer("max_lbfgs_iterations", at_least=0),
    )


def _adam_phase(key: str, value: Any) -> AdamPhaseSettings:
    names = ("num_steps", "batch_size", "learning_rate", "final_learning_rate")
    if not isinstance(value, Mapping):
        raise _refusal(key, value, f"a group of {', '.join(names)}")
    section = _Section(key, value)
    section.refuse_unknown(names)
    rows, final = section.get("batch_size"), section.get("final_learning_rate")
    final_key = section.key("final_learning_rate")
    return AdamPhaseSettings(
        num_steps=section.integer("num_steps", at_least=1),
        batch_size=None if rows is None else section.integer("batch_size", at_least=1),
        learning_rate=section.above_zero("learning_rate"),
        final_learning_rate=_at_least_zero(final_key, final),
    )


def _evaluation(section: _Section, model: _Section) -> EvaluationSettings:
    section.refuse_unknown(
        (
            "budget_s",
            "num_repeats",
            "max_draws",
            "burn_in_fraction",
            "curve_points",
            "curve_metric",
        )
    )
    key, value = section.key("burn_in_fraction"), section.get("burn_in_fraction")
    burn_in_fraction = _real(key, value, "at least 0 and below 1")
    if not 0.0 <= burn_in_fraction < 1.0:
        raise _refusal(key, value, "a number, at least 0 and below 1")
    return EvaluationSettings(
        burn_in_fraction=burn_in_fraction,
        budget_s=section.above_zero("budget_s"),
        num_repeats=section.integer("num_repeats", at_least=1),
        max_draws=section.integer("max_draws", at_least=2),
        curve_points=section.integer("curve_points", at_least=0),
        curve_metric=section.choice(
            "curve_metric", ("ksd", *model.section("tuning").each("metrics", _word))
        ),
    )


def _ground_truth(section: _Section) -> GroundTruthSettings | None:
    method = section.choice("method", ("nuts", "auto", "none"))
    if method == "none":
        section.refuse_unknown(("method",))
        return None
    section.refuse_unknown(
        (
            *(("max_s",) if method == "auto" else ()),
            "method",
            "num_draws",
            "num_warmup",
            "num_chains",
            "whiten",
            "criterion",
            "converged_share",
            "max_r_hat",
            "min_ess",
            "recompute",
        )
    )
    num_chains = section.integer("num_chains", at_least=2)
    num_draws = section.integer("num_draws", at_least=4 * num_chains)
    if num_draws % num_chains:
        raise _refusal(
            section.key("num_draws"),
            num_draws,
            f"a multiple of {section.key('num_chains')}={num_chains}",
        )
    max_r_hat = _real(section.key("max_r_hat"), section.get("max_r_hat"), "above 1")
    if max_r_hat <= 1.0:
        raise _refusal(section.key("max_r_hat"), max_r_hat, "a finite number above 1")
    share = _real(section.key("converged_share"), section.get("converged_share"), "at most 1")
    if not 0 < share <= 1:
        raise _refusal(section.key("converged_share"), share, "above 0 and at most 1")
    return GroundTruthSettings(
        num_draws=num_draws,
        num_warmup=section.integer("num_warmup", at_least=1),
        num_chains=num_chains,
        whiten=section.flag("whiten"),
        criterion=section.choice("criterion", ("positions", "predictions")),
        converged_share=share,
        max_r_hat=max_r_hat,
        min_ess=section.above_zero("min_ess"),
        recompute=section.flag("recompute"),
        max_s=section.above_zero("max_s") if method == "auto" else None,
    )


def _refusal(key: str, value: Any, allowed: str, hint: str = "") -> ConfigError:
    return ConfigError(f"{key}={value!r} is not allowed: it must be {allowed}.{hint}")


def _word(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _refusal(key, value, "a word")
    return value


def _real(key: str, value: Any, allowed: str) -> float:
    """A finite number. Text that reads as one is taken as one; true and false are not."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _refusal(key, value, f"a finite number, {allowed}")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise _refusal(key, value, f"a finite number, {allowed}")
    return number


def _above_zero(key: str, value: Any) -> float:
    number = _real(key, value, "above 0")
    if number <= 0.0:
        raise _refusal(key, value, "a finite number, above 0")
    return number


def _step_size(key: str, value: Any) -> float:
    number = _above_zero(key, value)
    if not SMALLEST_STEP_SIZE <= number <= LARGEST_STEP_SIZE:
        allowed = f"from {SMALLEST_STEP_SIZE:g} to {LARGEST_STEP_SIZE:g} (single precision)"
        raise _refusal(key, value, allowed)
    return number


def _at_least_zero(key: str, value: Any) -> float:
    number = _real(key, value, "at least 0")
    if number < 0.0:
        raise _refusal(key, value, "a finite number, at least 0")
    return number


def _integer(key: str, value: Any, at_least: int, at_most: int | None) -> int:
    """A whole number written as one: what reaches a model by interpolation is not converted."""
    allowed = f"a whole number, at least {at_least}"
    if at_most is not None:
        allowed += f" and at most {at_most}"
    if isinstance(value, bool) or not isinstance(value, int):
        hint = ""
        if isinstance(value, float) and value.is_integer():
            hint = f" Write it without a dot or an exponent: {key}={int(value)}."
        raise _refusal(key, value, allowed, hint)
    if value < at_least or (at_most is not None and value > at_most):
        raise _refusal(key, value, allowed)
    return value


def _percent(key: str, value: Any) -> float:
    allowed = "above 0 and at most 100 (per cent of the training rows)"
    number = _real(key, value, allowed)
    if not 0.0 < number <= 100.0:
        raise _refusal(key, value, f"a finite number, {allowed}")
    return number


def _refuse_unknown_arguments(target: Any, arguments: Sequence[str], key: str) -> None:
    parameters = inspect.signature(target).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            raise ConfigError(
                f"{key}.{name} is not a parameter of {target.__qualname__}."
                f"{did_you_mean(name, parameters)} Known: {', '.join(parameters)}."
            )


def _collect_options(folder: Traversable, group: str, found: dict[str, list[str]]) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name != "hydra" and not entry.name.startswith("_"):
                _collect_options(entry, f"{group}/{entry.name}" if group else entry.name, found)
        elif group and entry.name.endswith(".yaml") and not entry.name.startswith("_"):
            found.setdefault(group, []).append(entry.name.removesuffix(".yaml"))
    if group in found:
        found[group].sort()


def _one_line(error: BaseException) -> str:
    """The first line of a library's message: what follows repeats keys or links to manuals."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
