"""The configuration: every option composes and is sound, every bad value is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from mamba_cli import config
from mamba_cli.config import (
    AdamPhaseSettings,
    FixedSettings,
    GridSettings,
    MambaSettings,
    MapSearchSettings,
    batch_size_of,
    did_you_mean,
    group_options,
    settings_from,
)
from mamba_cli.errors import ConfigError, DataError

Compose = Callable[..., DictConfig]

CONF = Path(__file__).parents[1] / "conf"
FIXED = ("tuner=fixed", "tuner.step_size=1e-5")
# Options that only make sense inside another group are tried there.
PACKAGES = {"reward": "reward@tuner.reward"}


def options_on_disk() -> list[tuple[str, str]]:
    return sorted(
        (path.parent.relative_to(CONF).as_posix(), path.stem)
        for path in CONF.glob("*/**/*.yaml")
        if not path.name.startswith("_") and path.relative_to(CONF).parts[0] != "hydra"
    )


@pytest.mark.parametrize(("group", "option"), options_on_disk())
def test_every_option_of_every_group_gives_sound_settings(
    compose: Compose, group: str, option: str
) -> None:
    required = ["tuner.step_size=1e-5"] if (group, option) == ("tuner", "fixed") else []
    cfg = compose(f"{PACKAGES.get(group, group)}={option}", *required)
    settings = settings_from(cfg)
    if group in ("model", "sampler", "tuner", "budget"):
        assert cfg[group].name == option
    assert settings.run_dir == Path(
        f"results/runs/{settings.model}/{settings.sampler.name}/{settings.tuner.name}/seed-0"
    )


def of_group(group: str) -> list[str]:
    return [option for name, option in options_on_disk() if name == group]


@pytest.mark.parametrize("sampler", of_group("sampler"))
def test_every_sampler_goes_with_every_tuner(compose: Compose, sampler: str) -> None:
    cfg = compose(f"sampler={sampler}")
    uses_integration_steps = sampler.startswith("sghmc")
    for tuner in of_group("tuner"):
        cfg.tuner = compose(f"tuner={tuner}").tuner
        if tuner == "fixed":
            cfg.tuner.step_size = 1e-5
        settings = settings_from(cfg)
        assert settings.sampler.control_variates == sampler.endswith("_cv")
        assert settings.sampler.uses_integration_steps == uses_integration_steps
        num_steps = {num_steps for _, _, num_steps in settings.tuner.points(1_000)}
        if isinstance(settings.tuner, FixedSettings):
            assert num_steps == ({10} if uses_integration_steps else {1})
        else:
            assert num_steps == ({5, 10} if uses_integration_steps else {1})


def test_the_default_is_the_papers_size(compose: Compose) -> None:
    settings = settings_from(compose())
    tuner = settings.tuner
    assert isinstance(tuner, MambaSettings)
    assert (tuner.reduction_factor, tuner.longest_arm_s) == (3, 1.0)
    expected = [10.0 ** (-1 - i / 2) for i in range(14)]
    assert tuner.grid.step_sizes == pytest.approx(expected, rel=1e-15)
    points = tuner.points(1_000_000)
    assert len(points) == 56
    assert {batch_size for _, batch_size, _ in points} == {1_000_000, 100_000, 10_000, 1_000}
    assert settings.evaluation.budget_s == 10.0
    assert settings.ground_truth is not None
    assert settings.ground_truth.num_draws == 20_000
    assert settings.ground_truth.num_warmup == 1_000
    assert settings.ground_truth.max_r_hat == 1.01
    assert settings.stages == ("tune", "ground_truth", "evaluate")
    assert settings.is_paper_size


def test_the_quick_budget_is_smaller_and_says_so(compose: Compose) -> None:
    paper, quick = settings_from(compose()), settings_from(compose("budget=quick"))
    assert not quick.is_paper_size
    assert compose("budget=quick").model.num_train < compose().model.num_train == 1_000_000
    assert quick.evaluation.budget_s < paper.evaluation.budget_s
    assert isinstance(paper.tuner, MambaSettings)
    assert isinstance(quick.tuner, MambaSettings)
    assert quick.tuner.longest_arm_s < paper.tuner.longest_arm_s
    assert paper.ground_truth is not None
    assert quick.ground_truth is not None
    assert quick.ground_truth.num_draws == 1_200
    # A few hundred draws a chain miss 1.01 by chance in one data set of ten.
    assert (paper.ground_truth.max_r_hat, quick.ground_truth.max_r_hat) == (1.01, 1.05)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.num_train=1000"],
        ["model.num_test=1000"],
        ["model.dim=2"],
        ["model=pmf", "model.latent_dim=2"],
        ["model=bnn", "model.num_hidden=2"],
        ["tuner.longest_arm_s=0.01"],
        ["tuner.longest_arm_s=2"],
        ["tuner.max_draws=10"],
        ["tuner=grid", "tuner.num_iterations=10"],
        ["evaluation.budget_s=1"],
        ["evaluation.max_draws=10"],
        ["ground_truth.num_draws=2000"],
        ["ground_truth.num_warmup=100"],
        [
            "model=pmf",
            "model.map.phases=[{num_steps: 1, batch_size: null, learning_rate: 1.0, "
            "final_learning_rate: 0}]",
        ],
        ["budget=quick"],
    ],
)
def test_a_run_of_another_size_is_not_the_papers(compose: Compose, overrides: list[str]) -> None:
    assert not settings_from(compose(*overrides)).is_paper_size


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=pmf"],
        ["model=bnn"],
        ["tuner=grid", "ground_truth=none"],
        ["tuner=heuristic"],
        ["model.num_train=1000000", "tuner.longest_arm_s=1"],
        ["evaluation.num_repeats=5", "model.data_seed=1", "sampler=sghmc_cv"],
    ],
)
def test_what_leaves_the_papers_size_as_it_is(compose: Compose, overrides: list[str]) -> None:
    assert settings_from(compose(*overrides)).is_paper_size


@pytest.mark.parametrize("model", ["logreg", "pmf", "bnn"])
def test_the_metrics_of_a_grid_search_are_those_the_model_has(compose: Compose, model: str) -> None:
    from mamba_cli.models.bnn import BayesianNeuralNetwork
    from mamba_cli.models.logreg import LogisticRegression
    from mamba_cli.models.pmf import ProbabilisticMatrixFactorization

    class_of: dict[str, Any] = {
        "logreg": LogisticRegression,
        "pmf": ProbabilisticMatrixFactorization,
        "bnn": BayesianNeuralNetwork,
    }
    targets = SimpleNamespace(
        test_labels=np.array([0, 1]), test_ratings=np.array([1.0, 2.0], np.float32)
    )
    prediction = np.full((2, 2) if model == "bnn" else 2, 0.5, np.float32)
    listed = list(compose(f"model={model}").model.tuning.metrics)
    assert sorted(listed) == sorted(class_of[model].predictive_metrics(targets, prediction))
    for metric in listed:
        tuner = settings_from(compose(f"model={model}", "tuner=grid", f"tuner.metric={metric}"))
        assert isinstance(tuner.tuner, GridSettings)
        assert tuner.tuner.metric == metric


def test_burn_in_and_the_search_for_the_map_are_the_models(compose: Compose) -> None:
    logreg = settings_from(compose())
    assert logreg.evaluation.burn_in_fraction == 0.0
    assert logreg.map_search == MapSearchSettings()
    network = settings_from(compose("model=bnn"))
    assert network.evaluation.burn_in_fraction == 0.2
    assert network.map_search.phases is not None
    epochs = [
        phase.num_steps * (phase.batch_size or 0) / 60_000 for phase in network.map_search.phases
    ]
    assert epochs == [20, 40]
    factorisation = settings_from(compose("model=pmf")).map_search
    assert factorisation.phases == (AdamPhaseSettings(3_000, None, 0.03, 0.0),)


def test_the_papers_grid_search_and_heuristic(compose: Compose) -> None:
    grid = settings_from(compose("tuner=grid")).tuner
    assert isinstance(grid, GridSettings)
    assert (grid.num_iterations, grid.noise_scale, grid.metric) == (5_000, 0.2, "log_loss")
    assert {batch_size for _, batch_size, _ in grid.points(1_000_000)} == {100_000}
    heuristic = settings_from(compose("tuner=heuristic", "sampler=sghmc")).tuner
    assert heuristic.points(1_000_000) == ((1e-6, 100_000, 10),)


def test_fixed_takes_rows_or_per_cent_or_neither(compose: Compose) -> None:
    def batch_size(*overrides: str) -> int:
        ((_, rows, _),) = settings_from(compose(*FIXED, *overrides)).tuner.points(1_000_000)
        return rows

    assert batch_size("tuner.batch_size=123") == 123
    assert batch_size("tuner.batch_percent=0.5") == 5_000
    assert batch_size() == 100_000


def test_arms_that_share_a_program_are_neighbours(compose: Compose) -> None:
    points = settings_from(compose("sampler=sghmc")).tuner.points(1_000_000)
    assert len(points) == len(set(points)) == 14 * 4 * 2
    programs = [(batch_size, num_steps) for _, batch_size, num_steps in points]
    changes = sum(before != after for before, after in itertools.pairwise(programs))
    assert changes == 4 * 2 - 1


def test_batches_that_come_out_equal_are_tried_once(compose: Compose) -> None:
    tuner = settings_from(compose("tuner.grid.batch_percent=[100,10,9,5]")).tuner
    for num_train, expected in ((2_000, {2_000, 200, 180, 100}), (20, {20, 2, 1})):
        points = tuner.points(num_train)
        assert {batch_size for _, batch_size, _ in points} == expected
        assert len(points) == 14 * len(expected)


def test_rows_are_checked_again_where_only_the_data_know_them(compose: Compose) -> None:
    tuner = settings_from(compose(*FIXED, "tuner.batch_size=50")).tuner
    assert tuner.points(50) == ((1e-5, 50, 1),)
    with pytest.raises(ConfigError, match=r"tuner\.batch_size=50 .* at most 49"):
        tuner.points(49)


def test_numbers_written_without_a_dot_or_as_text_arrive_as_floats(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP", "1e-5")
    for text in ("1e-5", "'1e-5'", "${oc.env:STEP}"):
        tuner = settings_from(compose("tuner=fixed", f"tuner.step_size={text}")).tuner
        assert isinstance(tuner, FixedSettings)
        assert tuner.step_size == 1e-5


def test_step_sizes_survive_being_saved_and_read_again(compose: Compose, tmp_path: Path) -> None:
    cfg = compose("tuner.grid.step_size=[1e-5,3.16e-8,1]")
    OmegaConf.save(cfg, tmp_path / "config.yaml", resolve=True)
    again = OmegaConf.load(tmp_path / "config.yaml")
    assert OmegaConf.is_dict(again)
    assert settings_from(again) == settings_from(cfg)


def test_folders_come_from_the_environment_or_the_command(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAMBA_RESULTS_DIR", "/from/env")
    monkeypatch.setenv("MAMBA_DATA_DIR", "/data")
    assert compose("model=pmf").model.posterior.data_dir == "/data"
    settings = settings_from(compose("seed=3"))
    assert settings.results_dir == Path("/from/env")
    assert settings.run_dir == Path("/from/env/runs/logreg/sgld/mamba_ksd/seed-3")
    assert settings_from(compose("results_dir=/given")).results_dir == Path("/given")


def test_stages_are_done_in_their_own_order(compose: Compose) -> None:
    assert settings_from(compose("stages=[evaluate,tune]")).stages == ("tune", "evaluate")
    assert settings_from(compose("stages=tune")).stages == ("tune",)


def test_ground_truth_is_a_group_and_has_keys(compose: Compose) -> None:
    assert settings_from(compose("ground_truth=none")).ground_truth is None
    again = settings_from(compose("ground_truth.recompute=true")).ground_truth
    assert again is not None
    assert again.recompute


BAD_VALUES = [
    ("tuner.step_size", ["tuner=fixed", "tuner.step_size=-1"]),
    ("tuner.step_size", ["tuner=fixed", "tuner.step_size=0"]),
    ("tuner.step_size", ["tuner=fixed", "tuner.step_size=nan"]),
    ("tuner.step_size", ["tuner=fixed", "tuner.step_size=inf"]),
    ("tuner.step_size", ["tuner=fixed", "tuner.step_size=small"]),
    ("tuner.step_size", ["tuner=fixed", "tuner.step_size=true"]),
    ("tuner.step_size", ["tuner=fixed", "tuner.step_size=[1e-5]"]),
    ("tuner.step_size", ["tuner=fixed"]),
    ("tuner.step_size", ["tuner=heuristic", "tuner.step_size=0"]),
    ("tuner.batch_size", [*FIXED, "tuner.batch_size=0"]),
    ("tuner.batch_size", [*FIXED, "tuner.batch_size=1000001"]),
    ("tuner.batch_size", [*FIXED, "tuner.batch_size=0.5"]),
    ("tuner.batch_size", [*FIXED, "tuner.batch_size=10", "tuner.batch_percent=10"]),
    ("tuner.batch_percent", [*FIXED, "tuner.batch_percent=0"]),
    ("tuner.batch_percent", [*FIXED, "tuner.batch_percent=101"]),
    ("tuner.batch_percent", ["tuner=heuristic", "tuner.batch_percent=null"]),
    ("tuner.num_integration_steps", [*FIXED, "sampler=sghmc", "tuner.num_integration_steps=0"]),
    ("tuner.num_integration_steps", [*FIXED, "tuner.num_integration_steps=0"]),
    ("tuner.num_integration_steps", [*FIXED, "tuner.num_integration_steps=5"]),
    ("tuner.num_integration_steps", ["tuner=heuristic", "tuner.num_integration_steps=5"]),
    ("tuner.reduction_factor", ["tuner.reduction_factor=1"]),
    ("tuner.reduction_factor", ["tuner.reduction_factor=2.5"]),
    ("tuner.reduction_factor", ["tuner.reduction_factor=3.0"]),
    ("tuner.reduction_factor", ["tuner.reduction_factor=true"]),
    ("tuner.longest_arm_s", ["tuner.longest_arm_s=0"]),
    ("tuner.longest_arm_s", ["tuner.longest_arm_s=-1"]),
    ("tuner.longest_arm_s", ["tuner.longest_arm_s=null"]),
    ("tuner.longest_arm_s", ["tuner.longest_arm_s=false"]),
    ("tuner.max_draws", ["tuner.max_draws=1"]),
    ("tuner.max_draws", ["tuner=grid", "tuner.max_draws=1"]),
    ("tuner.score_on", ["tuner.score_on=rungs"]),
    ("tuner.score_on", ["tuner.score_on=3"]),
    ("tuner.guards", ["tuner.guards=1"]),
    ("tuner.check_s", ["tuner.check_s=1"]),
    ("tuner.check_s", ["tuner=mamba", "tuner.guards=false", "tuner.check_s=1"]),
    ("tuner.check_s", ["tuner=mamba", "tuner.check_s=-1"]),
    ("tuner.keep_ties", ["tuner.keep_ties=maybe"]),
    ("tuner.method", ["tuner.method=random"]),
    ("tuner.grid", ["tuner.grid=3"]),
    ("tuner.grid.step_size", ["tuner.grid.step_size=[]"]),
    ("tuner.grid.step_size", ["tuner.grid.step_size=1e-5"]),
    ("tuner.grid.step_size[1]", ["tuner.grid.step_size=[1e-5,-1]"]),
    ("tuner.grid.batch_percent", ["tuner.grid.batch_percent=[]"]),
    ("tuner.grid.batch_percent[0]", ["tuner.grid.batch_percent=[0]"]),
    ("tuner.grid.batch_percent[1]", ["tuner.grid.batch_percent=[100,100.1]"]),
    ("tuner.grid.batch_percent[0]", ["tuner=grid", "tuner.grid.batch_percent=[-1]"]),
    (
        "tuner.grid.num_integration_steps",
        ["sampler=sghmc", "tuner.grid.num_integration_steps=[]"],
    ),
    (
        "tuner.grid.num_integration_steps[0]",
        ["sampler=sghmc", "tuner.grid.num_integration_steps=[0]"],
    ),
    ("tuner.grid.num_integration_steps", ["tuner.grid.num_integration_steps=[5,10]"]),
    ("tuner.num_iterations", ["tuner=grid", "tuner.num_iterations=0"]),
    ("tuner.noise_scale", ["tuner=grid", "tuner.noise_scale=-0.1"]),
    ("tuner.metric", ["tuner=grid", "tuner.metric=logloss"]),
    ("tuner.metric", ["tuner=grid", "tuner.metric=rmse"]),
    ("tuner.metric", ["model=pmf", "tuner=grid", "tuner.metric=accuracy"]),
    ("model.tuning.metrics", ["tuner=grid", "model.tuning.metrics=[]"]),
    ("tuner.stepsize", ["+tuner.stepsize=1"]),
    ("model.num_train", ["model.num_train=0"]),
    ("model.num_train", ["model.num_train=1e6"]),
    ("model.num_test", ["model.num_test=-5"]),
    ("model.dim", ["model.dim=0"]),
    ("model.data_seed", ["model.data_seed=-1"]),
    ("model.correlation", ["model.correlation=1.5"]),
    ("model.correlation", ["model.correlation=1"]),
    ("model.correlation", ["model.correlation=-1"]),
    ("model.correlation", ["model.correlation=nan"]),
    ("model.correlation", ["model.correlation='0.4'"]),
    ("model.prior_variance", ["model.prior_variance=0"]),
    ("model.prior_variance", ["model.prior_variance=-1"]),
    ("model.prior_variance", ["model.prior_variance=inf"]),
    ("model.foo", ["+model.foo=1"]),
    ("model.data_dir", ["+model.data_dir=here"]),
    ("model.foo", ["model=pmf", "+model.foo=1"]),
    ("model.posterior.num_train", ["model.posterior.num_train=5"]),
    ("model.tuning.foo", ["+model.tuning.foo=1"]),
    ("budget.foo", ["+budget.foo=1"]),
    ("sampler.foo", ["+sampler.foo=1"]),
    ("sampler.friction", ["sampler=sghmc", "+sampler.friction=0.1"]),
    ("ground_truth.num_draws", ["budget.name=slow"]),
    ("sampler.gradient", ["sampler.gradient=full"]),
    ("sampler.uses_integration_steps", ["sampler.uses_integration_steps=1"]),
    ("evaluation.budget_s", ["evaluation.budget_s=0"]),
    ("evaluation.budget_s", ["evaluation.budget_s=ten"]),
    ("evaluation.num_repeats", ["evaluation.num_repeats=0"]),
    ("evaluation.max_draws", ["evaluation.max_draws=1"]),
    ("evaluation.curve_points", ["evaluation.curve_points=-1"]),
    ("evaluation.curve_metric", ["evaluation.curve_metric=rmse"]),
    ("evaluation.burn_in_fraction", ["evaluation.burn_in_fraction=1"]),
    ("evaluation.burn_in_fraction", ["evaluation.burn_in_fraction=-0.1"]),
    ("model.map.phases", ["model=pmf", "model.map.phases=[]"]),
    ("model.map.phases[0]", ["model=pmf", "model.map.phases=[3]"]),
    (
        "model.map.phases[0].batch_size",
        [
            "model=pmf",
            "model.map.phases=[{num_steps: 1, batch_size: 0, learning_rate: 1.0, "
            "final_learning_rate: 0}]",
        ],
    ),
    ("model.map.max_lbfgs_iterations", ["model=bnn", "model.map.max_lbfgs_iterations=-1"]),
    ("evaluation.repeats", ["+evaluation.repeats=1"]),
    ("evaluation", ["evaluation=3"]),
    ("ground_truth.num_chains", ["ground_truth.num_chains=1"]),
    ("ground_truth.num_draws", ["ground_truth.num_draws=4"]),
    ("ground_truth.num_draws", ["ground_truth.num_draws=20001"]),
    ("ground_truth.num_warmup", ["ground_truth.num_warmup=0"]),
    ("ground_truth.max_r_hat", ["ground_truth.max_r_hat=1"]),
    ("ground_truth.min_ess", ["ground_truth.min_ess=0"]),
    ("ground_truth.recompute", ["ground_truth.recompute=1"]),
    ("ground_truth.method", ["ground_truth.method=hmc"]),
    ("ground_truth.num_draws", ["ground_truth=none", "+ground_truth.num_draws=10"]),
    ("stages", ["stages=[]"]),
    ("stages", ["stages=[tune,plot]"]),
    ("stages", ["stages=3"]),
    ("stages", ["stages=[[tune]]"]),
    ("seed", ["seed=-1"]),
    ("seed", ["seed=4294967296"]),
    ("seed", ["seed=0.5"]),
    ("seed", ["seed=true"]),
    ("results_dir", ["results_dir=null"]),
    ("run_dir", ["run_dir=''"]),
    ("data_dir", ["data_dir=3"]),
    ("seeds", ["+seeds=1"]),
    ("sampler", ["~sampler", "run_dir=here"]),
    ("run_dir", ["run_dir=${nowhere}"]),
]


@pytest.mark.parametrize(("key", "overrides"), BAD_VALUES)
def test_a_bad_value_is_refused_by_name(compose: Compose, key: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        settings_from(compose(*overrides))
    message = str(refusal.value)
    assert message.startswith((f"{key}=", f"{key} ", f"{key}:"))
    assert "\n" not in message
    _, _, given_value = overrides[-1].partition("=")
    if message.startswith(f"{key}=") and given_value:
        assert "must" in message or "not allowed" in message or "both" in message


def test_a_refusal_says_how_to_write_it(compose: Compose) -> None:
    with pytest.raises(ConfigError, match=r"model\.num_train=1000000\.$"):
        settings_from(compose("model.num_train=1e6"))
    with pytest.raises(ConfigError, match=r"tuner\.grid\.step_size=\[1e-05\]\.$"):
        settings_from(compose("tuner.grid.step_size=1e-5"))
    with pytest.raises(ConfigError, match=r"one of log_loss, accuracy, ece, mce\.$"):
        settings_from(compose("tuner=grid", "tuner.metric=rmse"))
    with pytest.raises(ConfigError, match=r"Did you mean model\.num_train\?"):
        settings_from(compose("+model.numtrain=5"))
    with pytest.raises(ConfigError, match="Did you mean log_loss"):
        settings_from(compose("tuner=grid", "tuner.metric=logloss"))


@given(
    st.decimals(min_value="0.0001", max_value="100", places=4),
    st.integers(min_value=1, max_value=10**9),
)
def test_batch_size_is_the_floor_of_the_decimal_as_written(percent: object, rows: int) -> None:
    exact = Fraction(str(percent)) * rows / 100
    if exact < 1:
        with pytest.raises(ConfigError, match=f"of a row where there are {rows} training rows"):
            batch_size_of(float(str(percent)), rows)
        return
    size = batch_size_of(float(str(percent)), rows)
    assert size == exact.numerator // exact.denominator
    assert 1 <= size <= rows


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("tuner.grid.step_size=[1e-5,1e-5]",), r"tuner\.grid\.step_size=.*1e-05 more than once"),
        (("tuner.grid.batch_percent=[10,10.0]",), r"tuner\.grid\.batch_percent=.*more than once"),
        (
            ("model.num_train=1000", "tuner.grid.batch_percent=[10,0.05]"),
            r"tuner\.grid\.batch_percent=0\.05 .* 0\.5 of a row",
        ),
        (
            (*FIXED, "model.num_train=1000", "tuner.batch_percent=0.02"),
            r"tuner\.batch_percent=0\.02 .* 0\.2 of a row",
        ),
        (("tuner.grid.step_size=[1e-5,1e-46]",), r"step_size\[1\]=1e-46 .* from 1e-37 to 3e\+38"),
        (("tuner=fixed", "tuner.step_size=1e39"), r"tuner\.step_size=1e\+39 .* from 1e-37"),
        (("tuner=heuristic", "tuner.step_size=1e-38"), r"tuner\.step_size=1e-38 .* from 1e-37"),
    ],
)
def test_arms_that_would_not_be_what_was_asked_for(
    compose: Compose, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_from(compose(*overrides))


def test_batch_size_where_floating_point_is_one_row_short() -> None:
    assert 0.57 * 10_000 / 100 < 57  # what makes this test worth having
    assert batch_size_of(0.57, 10_000) == 57


def test_group_options_are_the_files_on_disk() -> None:
    listed = [(group, option) for group, names in group_options().items() for option in names]
    assert sorted(listed) == options_on_disk()
    assert not any(option.startswith("_") for _, option in listed)


@pytest.mark.parametrize(
    ("name", "candidates", "suggestion"),
    [
        ("sgdl", ["sgld", "sghmc", "sgnht"], " Did you mean sgld?"),
        (
            "tuner.longest_arm",
            ["tuner", "tuner.longest_arm_s"],
            " Did you mean tuner.longest_arm_s?",
        ),
        ("longest_arm_s", ["tuner", "tuner.longest_arm_s"], " Did you mean tuner.longest_arm_s?"),
        ("xyz", ["sgld"], ""),
        ("xyz", [], ""),
    ],
)
def test_did_you_mean(name: str, candidates: list[str], suggestion: str) -> None:
    assert did_you_mean(name, candidates) == suggestion


class Friction:
    def __init__(self, alpha: float, beta: float = 0.0) -> None:
        if alpha < 0:
            raise DataError("alpha is negative")
        self.alpha = alpha
        self.beta = beta


def test_build_makes_what_the_node_describes() -> None:
    target = f"{__name__}.Friction"
    built = config.build(OmegaConf.create({"_target_": target, "alpha": 0.5}), "kernel")
    assert (built.alpha, built.beta) == (0.5, 0.0)
    partial = OmegaConf.create({"_target_": target, "_partial_": True, "beta": 2.0})
    assert config.build(partial, "kernel")(alpha=1.0).beta == 2.0


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": f"{__name__}.Friction", "alhpa": 1.0}, r"kernel\.alhpa .* mean alpha\?"),
        ({"_target_": f"{__name__}.Nothing"}, r"kernel\._target_: .*Nothing"),
        ({"_target_": "no_such_package.thing"}, r"kernel\._target_: .*no_such_package"),
    ],
)
def test_build_refuses_what_cannot_be_built(node: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.build(OmegaConf.create(node), "kernel")


def test_build_passes_on_what_the_target_raises() -> None:
    node = OmegaConf.create({"_target_": f"{__name__}.Friction", "alpha": -1.0})
    with pytest.raises(DataError, match="alpha is negative"):
        config.build(node, "kernel")


@pytest.mark.parametrize("model", ["python", "numpyro"])
def test_models_of_ones_own_have_the_recommended_tuner_unless_one_is_named(
    compose: Callable[..., DictConfig], model: str
) -> None:
    cfg = compose(f"model={model}")
    assert (cfg.tuner.name, cfg.tuner.reward.name) == ("mamba", "stein_moments")
    assert cfg.run_dir == f"results/runs/{model}/sgld/mamba/seed-0"
    assert compose(f"model={model}", "tuner.longest_arm_s=3").tuner.guards is True
    assert compose(f"model={model}", "tuner=mamba_ksd").tuner.name == "mamba_ksd"
    assert compose("tuner=grid", f"model={model}").tuner.name == "grid"
    assert compose("model=logreg").tuner.name == "mamba_ksd"
