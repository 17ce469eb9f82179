"""The ground truth against closed forms and float64 quadrature; faults, cache and resumption."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from numpyro.diagnostics import effective_sample_size

from mamba_cli import artifacts, ground_truth, map_estimate
from mamba_cli.errors import ConfigError, NothingUsableError, StorageError
from mamba_cli.ground_truth import GroundTruth, NutsSettings, Samples, nuts_ground_truth
from mamba_cli.types import SilentReporter


@dataclass(frozen=True, eq=False)
class _Model:
    """What NUTS needs of a model; the rest of the protocol is absent."""

    data: jax.Array
    dim: int
    name: str = "test"
    digest: str = "0"

    @property
    def num_data(self) -> int:
        return int(self.data.shape[0])


@dataclass(frozen=True, eq=False)
class _Logistic(_Model):
    prior_variance: float = 10.0

    def log_prior(self, position: jax.Array) -> jax.Array:
        return -0.5 * jnp.sum(position**2) / self.prior_variance

    def log_likelihood(self, position: jax.Array, minibatch: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.log_sigmoid(minibatch @ position))


@dataclass(frozen=True, eq=False)
class _Linear(_Model):
    """y ~ N(x.theta, 1), theta ~ N(0, I): rows hold x, then y."""

    def log_prior(self, position: jax.Array) -> jax.Array:
        return -0.5 * jnp.sum(position**2)

    def log_likelihood(self, position: jax.Array, minibatch: jax.Array) -> jax.Array:
        return -0.5 * jnp.sum((minibatch[:, -1] - minibatch[:, :-1] @ position) ** 2)


@dataclass(frozen=True, eq=False)
class _TwoModes(_Model):
    """Two unit Gaussians at -8 and 8; the data say nothing."""

    def log_prior(self, position: jax.Array) -> jax.Array:
        return jnp.logaddexp(-0.5 * (position[0] - 8) ** 2, -0.5 * (position[0] + 8) ** 2)

    def log_likelihood(self, position: jax.Array, minibatch: jax.Array) -> jax.Array:
        return jnp.sum(0.0 * minibatch * position[0])


def _logistic(num_data: int, dim: int, scale: float, seed: int) -> _Logistic:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_data, dim)).astype(np.float32)
    labels = rng.random(num_data) < scipy.special.expit(rows @ (scale * rng.normal(size=dim)))
    return _Logistic(jnp.asarray(rows * np.where(labels, 1, -1)[:, None], jnp.float32), dim)


def _linear() -> _Linear:
    """5,001 rows, so two blocks with padding; the two coefficients are correlated by -0.95."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5001, 2)) @ np.linalg.cholesky([[1, 0.95], [0.95, 1]]).T
    x = x.astype(np.float32)
    y = x @ np.asarray([3.0, -2.0]) + rng.normal(size=5001)
    return _Linear(jnp.asarray(np.column_stack([x, y]), jnp.float32), 2)


def _linear_posterior() -> tuple[np.ndarray, np.ndarray]:
    rows = np.asarray(LINEAR.data, np.float64)
    x, y = rows[:, :2], rows[:, 2]
    covariance = np.linalg.inv(x.T @ x + np.eye(2))
    return covariance @ x.T @ y, covariance


LINEAR = _linear()
SETTINGS = NutsSettings(num_draws=3000, num_warmup=300, num_chains=2, block_draws=100)


class _Recorder(SilentReporter):
    """Counts what is reported; raises ``error`` at the ``fail_at``-th update."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = KeyboardInterrupt):
        self.messages: list[str] = []
        self.notes: list[str] = []
        self.amounts: list[float] = []
        self.total = 0.0
        self.finished = False
        self.fail_at, self.error = fail_at, error

    def message(self, text: str) -> None:
        self.messages.append(text)

    def start(self, description: str, total: float, unit: str) -> None:
        self.total = total

    def update(self, amount: float, note: str = "") -> None:
        self.amounts.append(amount)
        self.notes.append(note)
        if len(self.amounts) == self.fail_at:
            raise self.error

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse the programs of one set of shapes: compiling NUTS takes seconds."""
    real = ground_truth._compile

    def cached(model: Any, keys: Any, starts: Any, target: Any, settings: NutsSettings) -> Any:
        key = (id(model), replace(settings, seed=0, num_draws=99, max_stored_bytes=1))
        if key not in _PROGRAMS:
            _PROGRAMS[key] = real(model, keys, starts, target, settings)
        return _PROGRAMS[key]

    monkeypatch.setattr(ground_truth, "_compile", cached)


_PROGRAMS: dict[Any, Any] = {}
_WHOLE: list[Samples] = []


def _sample(settings: NutsSettings = SETTINGS, **options: Any) -> Samples:
    return ground_truth.sample(
        LINEAR, jnp.asarray(_linear_posterior()[0], jnp.float32), settings, **options
    )


def _whole() -> Samples:
    """The run that others are compared with: not interrupted, all draws kept."""
    if not _WHOLE:
        _WHOLE.append(_sample())
    return _WHOLE[0]


def _standard_errors(samples: Samples, std: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the mean and of the standard deviation, from the ESS of draws and of their squares."""
    squares = (samples.draws - samples.mean) ** 2
    ess = effective_sample_size(samples.draws)
    ess_of_squares = effective_sample_size(squares)
    return std / np.sqrt(ess), std / np.sqrt(2 * ess_of_squares)


# --- the law ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("whiten", [True, False])
def test_conjugate_posterior(whiten: bool) -> None:
    """Moments of a Gaussian posterior, whitened or not, within 4.5 standard errors."""
    samples = _whole() if whiten else _sample(replace(SETTINGS, whiten=False))
    mean, covariance = _linear_posterior()
    std = np.sqrt(np.diag(covariance))
    error_of_mean, error_of_std = _standard_errors(samples, std)
    assert np.all(np.abs(samples.mean - mean) < 4.5 * error_of_mean)
    assert np.all(np.abs(samples.std - std) < 4.5 * error_of_std)
    correlation = np.corrcoef(samples.draws.reshape(-1, 2).T)[0, 1]
    expected = covariance[0, 1] / (std[0] * std[1])
    ess = effective_sample_size(samples.draws).min()
    assert abs(correlation - expected) < 4.5 * (1 - expected**2) / np.sqrt(ess)
    assert samples.num_divergences == 0
    assert 0.7 < samples.mean_accept < 0.98
    assert np.all(error_of_mean < 0.08 * std), "too few effective draws to see anything"


@pytest.mark.usefixtures("compiled_once")
def test_whitened_coordinates_are_isotropic_at_unit_scale() -> None:
    """A step size near the one of N(0, I), few leapfrogs, and no adaptation left to do."""
    samples = _whole()
    assert all(0.5 < step_size < 1.6 for step_size in samples.step_sizes)
    assert samples.num_leapfrogs / SETTINGS.num_draws < 5


def test_skewed_posterior_against_quadrature(tmp_path: Path) -> None:
    """Logistic regression on 30 rows, far from Gaussian, through the whole function."""
    model = _logistic(num_data=30, dim=2, scale=2.0, seed=4)
    settings = NutsSettings(num_draws=6000, num_warmup=400, num_chains=2, block_draws=1000)
    centre = map_estimate.find_map(_with_start(model), rng_key=jax.random.key(0)).position
    recorder = _Recorder()
    truth = nuts_ground_truth(model, centre, settings, cache_dir=tmp_path, reporter=recorder)

    axis = np.linspace(-14, 18, 801)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    rows = np.asarray(model.data, np.float64)
    log_density = -(grid**2).sum(1) / 20 - np.logaddexp(0, -grid @ rows.T).sum(1)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ grid
    std = np.sqrt(weights @ (grid - mean) ** 2)
    skewness = weights @ ((grid - mean) / std) ** 3
    fourth = weights @ ((grid - mean) / std) ** 4
    assert np.abs(skewness).max() > 0.3, "the posterior is meant to be far from Gaussian"

    error_of_mean = std / np.sqrt(truth.ess_bulk)
    error_of_std = 0.5 * std * np.sqrt((fourth - 1) / truth.ess_tail)
    assert np.all(np.abs(truth.mean - mean) < 4.5 * error_of_mean)
    assert np.all(np.abs(truth.std - std) < 4.5 * error_of_std)
    assert np.all(truth.r_hat < 1.01)
    assert recorder.total == sum(recorder.amounts) == 2 * 400 + 6000
    assert recorder.finished
    assert "warm-up, step size" in recorder.notes[0]
    assert "leapfrogs a draw" in recorder.notes[-1]

    assert not list(tmp_path.glob("*.partial"))
    beside = json.loads(next(tmp_path.glob("test-*.json")).read_text())
    assert beside["provenance"]["settings"]["num_draws"] == 6000
    assert beside["num_leapfrogs"] == truth.num_leapfrogs > 6000
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000


def _with_start(model: _Model) -> Any:
    class Started(type(model)):  # type: ignore[misc]
        def initial_position(self, rng_key: jax.Array) -> jax.Array:
            return jnp.zeros(self.dim)

    return Started(model.data, model.dim)


# --- the potential ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> tuple[_Logistic, ground_truth.Target, np.ndarray, Callable[[np.ndarray], Any]]:
    """200,001 rows: the model, its target, points z, and U and dU/dz there in float64."""
    model = _logistic(num_data=200_001, dim=5, scale=2.0, seed=0)
    centre = np.asarray(
        map_estimate.find_map(_with_start(model), rng_key=jax.random.key(0)).position
    )
    blocks = map_estimate.row_blocks(model.data, model.num_data)
    matrix = ground_truth.laplace_matrix(
        map_estimate.hessian(model, jnp.asarray(centre), blocks=blocks)
    ).astype(np.float32)
    target = ground_truth.make_target(model, ground_truth.Coordinates(centre, matrix), blocks)
    z = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    rows = np.asarray(model.data, np.float64)
    centre64, matrix64 = centre.astype(np.float64), matrix.astype(np.float64)

    def log_density(theta: np.ndarray) -> float:
        return -np.logaddexp(0, -rows @ theta).sum() - theta @ theta / 20

    def exact(z: np.ndarray) -> tuple[float, np.ndarray]:
        theta = centre64 + matrix64 @ z.astype(np.float64)
        gradient = rows.T @ scipy.special.expit(-rows @ theta) - theta / 10
        return log_density(centre64) - log_density(theta), -gradient @ matrix64

    return model, target, z, exact


def test_energy_differences_have_float64_quality(large: Any) -> None:
    """Errors of U below 2e-4; a difference of float32 sums is off by ten times that."""
    model, target, z, exact = large
    values, gradients = jax.jit(
        lambda z, target: ground_truth.potentials_and_gradients(model, target, z)
    )(z, target)
    expected_values, expected_gradients = zip(*map(exact, z), strict=True)
    np.testing.assert_allclose(values, expected_values, atol=2e-4)
    np.testing.assert_allclose(gradients, np.stack(expected_gradients), atol=1e-3)

    theta = np.asarray(target.centre + z @ target.matrix.T)
    plain = [
        float(model.log_likelihood(target.centre, model.data))
        - float(model.log_likelihood(position, model.data))
        + float(model.log_prior(target.centre) - model.log_prior(position))
        for position in jnp.asarray(theta)
    ]
    assert np.max(np.abs(np.asarray(plain) - expected_values)) > 2e-3


def test_energy_is_conserved_to_second_order(large: Any) -> None:
    """Halving the step quarters the energy error of a trajectory: rounding is far below it."""
    model, target, z, _ = large
    both = jax.jit(lambda z, target: ground_truth.potentials_and_gradients(model, target, z))
    rng = np.random.default_rng(1)
    momentum = rng.normal(size=z.shape)

    def energy_error(num_steps: int) -> np.ndarray:
        step = 1.0 / num_steps
        position, velocity = z.astype(np.float64), momentum.copy()
        value, gradient = both(jnp.asarray(position, jnp.float32), target)
        start = np.asarray(value, np.float64) + 0.5 * (velocity**2).sum(-1)
        for _ in range(num_steps):
            velocity -= 0.5 * step * np.asarray(gradient, np.float64)
            position += step * velocity
            value, gradient = both(jnp.asarray(position, jnp.float32), target)
            velocity -= 0.5 * step * np.asarray(gradient, np.float64)
        return np.asarray(value, np.float64) + 0.5 * (velocity**2).sum(-1) - start

    coarse, fine = energy_error(4), energy_error(8)
    np.testing.assert_allclose(coarse / fine, 4.0, rtol=0.15)


def test_many_chains_are_each_chain_alone(large: Any) -> None:
    model, target, z, _ = large
    potential = jax.value_and_grad(ground_truth.potential_fn(model, target))
    together = jax.jit(jax.vmap(potential))(z)
    alone = [jax.jit(potential)(point) for point in z]
    np.testing.assert_allclose(together[0], [value for value, _ in alone], atol=1e-4)
    np.testing.assert_allclose(together[1], [gradient for _, gradient in alone], atol=1e-4)


def test_data_are_arguments_of_the_programs(large: Any) -> None:
    model, target, z, _ = large
    program = jax.make_jaxpr(
        lambda z, target: jax.vmap(jax.value_and_grad(ground_truth.potential_fn(model, target)))(z)
    )(z, target)
    assert sum(np.size(constant) for constant in program.consts) < 100


def test_an_indefinite_hessian_cannot_whiten() -> None:
    with pytest.raises(NothingUsableError, match=r"smallest eigenvalue -1\b.*whiten=false"):
        ground_truth.laplace_matrix(np.diag([2.0, -1.0]))


# --- interruption -------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiled_once")
def test_a_resumed_run_gives_the_same_draws(tmp_path: Path) -> None:
    """Stopped in warm-up, stopped while sampling: bit for bit the draws of one run."""
    whole = _whole()
    for fail_at in (2, 6):
        with pytest.raises(KeyboardInterrupt):
            _sample(checkpoint_dir=tmp_path, question="q", reporter=_Recorder(fail_at))
    recorder = _Recorder()
    resumed = _sample(checkpoint_dir=tmp_path, question="q", reporter=recorder)
    np.testing.assert_array_equal(resumed.draws, whole.draws)
    np.testing.assert_array_equal(resumed.mean, whole.mean)
    np.testing.assert_array_equal(resumed.std, whole.std)
    assert resumed.num_leapfrogs == whole.num_leapfrogs
    assert resumed.mean_accept == whole.mean_accept
    # 2 blocks, then 1 taken up + 5 more: 7 of the 18 were done before.
    assert recorder.amounts[0] == 7 * 2 * 100
    assert sum(recorder.amounts) == recorder.total


@pytest.mark.usefixtures("compiled_once")
def test_a_new_process_resumes(tmp_path: Path) -> None:
    """The warm-up's length lives in NumPyro's closures, not in the state: compile afresh."""
    whole = _whole()
    with pytest.raises(KeyboardInterrupt):
        _sample(checkpoint_dir=tmp_path, question="q", reporter=_Recorder(2))
    _PROGRAMS.clear()
    resumed = _sample(checkpoint_dir=tmp_path, question="q")
    np.testing.assert_array_equal(resumed.draws, whole.draws)


@pytest.mark.usefixtures("compiled_once")
def test_killed_between_the_two_files_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _whole()
    write, count = artifacts.write_arrays, iter(range(1000))

    def failing(path: Any, *arguments: Any) -> None:
        if Path(path).name == "state.npz" and next(count) == 5:
            raise StorageError("disk full")
        write(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "write_arrays", failing)
        with pytest.raises(StorageError, match="disk full"):
            _sample(checkpoint_dir=tmp_path, question="q")
    assert len(list(tmp_path.glob("draws-*.npz"))) == 3
    resumed = _sample(checkpoint_dir=tmp_path, question="q")
    np.testing.assert_array_equal(resumed.draws, whole.draws)


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("damage", ["state.npz", "draws-00001.npz", "question"])
def test_a_checkpoint_that_cannot_be_used_is_not(tmp_path: Path, damage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        _sample(checkpoint_dir=tmp_path, question="q", reporter=_Recorder(6))
    if damage != "question":
        content = (tmp_path / damage).read_bytes()
        (tmp_path / damage).write_bytes(content[: len(content) // 2])
    asked = "another" if damage == "question" else "q"
    assert ground_truth._load_checkpoint(tmp_path, asked) is None


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("changed", ["CHECKPOINT_VERSION", "layout"])
def test_a_checkpoint_of_another_version_starts_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: str,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        _sample(checkpoint_dir=tmp_path, question="q", reporter=_Recorder(6))
    if changed == "layout":
        path = tmp_path / "state.npz"
        arrays, meta = artifacts.read_arrays(path) or ({}, {})
        assert ".z float32[2, 2]" in meta["layout"].splitlines()
        meta["layout"] = meta["layout"].replace(".z float32", ".z float64")
        artifacts.write_arrays(path, arrays, meta)
    else:
        monkeypatch.setattr(ground_truth, changed, ground_truth.CHECKPOINT_VERSION + 1)
    recorder = _Recorder()
    samples = _sample(checkpoint_dir=tmp_path, question="q", reporter=recorder)
    np.testing.assert_array_equal(samples.draws, _whole().draws)
    assert not recorder.messages
    assert "of another version" in caplog.messages[0]
    assert len(caplog.messages) == 1


@pytest.mark.usefixtures("compiled_once")
def test_a_checkpoint_for_another_criterion_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        _sample(checkpoint_dir=tmp_path, question="q", reporter=_Recorder(6))
    path = tmp_path / "state.npz"
    arrays, meta = artifacts.read_arrays(path) or ({}, {})
    arrays |= {"prediction_mean": np.zeros(3), "prediction_squares": np.zeros(3)}
    artifacts.write_arrays(path, arrays, meta)
    samples = _sample(checkpoint_dir=tmp_path, question="q")
    np.testing.assert_array_equal(samples.draws, _whole().draws)
    assert "of another ground_truth.criterion: it starts again" in caplog.messages[0]


@pytest.mark.usefixtures("compiled_once")
def test_thinned_draws_and_moments_of_all() -> None:
    """A third of the memory: every third draw, across blocks; the moments do not change."""
    whole = _whole()
    thinned = _sample(replace(SETTINGS, max_stored_bytes=4 * 3000 * 2 // 3))
    assert thinned.thinning == 3
    np.testing.assert_array_equal(thinned.draws, whole.draws[:, ::3])
    np.testing.assert_array_equal(thinned.mean, whole.mean)
    np.testing.assert_allclose(whole.mean, whole.draws.mean(axis=(0, 1)), rtol=1e-12)
    np.testing.assert_allclose(whole.std, whole.draws.reshape(-1, 2).std(axis=0, ddof=1), rtol=1e-9)


# --- convergence --------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiled_once")
def test_two_modes_are_no_ground_truth(tmp_path: Path) -> None:
    """Chains that stay in different modes: R-hat tells, and nothing is written."""
    model = _TwoModes(jnp.zeros((5, 1)), dim=1)
    settings = NutsSettings(num_draws=400, num_warmup=100, num_chains=2, seed=1, start_scale=20.0)
    with pytest.raises(NothingUsableError, match="at the worst") as caught:
        nuts_ground_truth(model, jnp.asarray([8.0]), settings, cache_dir=tmp_path)
    assert caught.value.exit_code == 4
    assert not list(tmp_path.glob("*.npz"))
    assert not list(tmp_path.glob("*.json"))
    # Asked again, the finished chains are judged again, not run again.
    recorder = _Recorder()
    with pytest.raises(NothingUsableError, match="at the worst"):
        nuts_ground_truth(
            model, jnp.asarray([8.0]), settings, cache_dir=tmp_path, reporter=recorder
        )
    assert len(recorder.amounts) == 1


def _independent_samples(**changes: Any) -> Samples:
    draws = np.random.default_rng(0).normal(size=(4, 500, 2))
    flat = draws.reshape(-1, 2)
    samples = Samples(
        draws=draws,
        thinning=1,
        log_densities=np.random.default_rng(1).normal(size=(4, 500)),
        mean=flat.mean(axis=0),
        std=flat.std(axis=0, ddof=1),
        prediction_mean=np.zeros(0),
        prediction_std=np.zeros(0),
        num_divergences=0,
        num_leapfrogs=6000,
        mean_accept=0.9,
        step_sizes=(0.5, 0.5, 0.5, 0.5),
        elapsed_s=3.0,
        warmup_s=1.0,
        compile_s=2.0,
    )
    return samples._replace(**changes)


class _CountedSampler:
    def __init__(self, samples: Samples) -> None:
        self.samples, self.calls = samples, 0

    def __call__(self, *arguments: Any, **options: Any) -> Samples:
        self.calls += 1
        return self.samples


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> _CountedSampler:
    """Stands in for NUTS: 2,000 independent draws at once."""
    counted = _CountedSampler(_independent_samples())
    monkeypatch.setattr(ground_truth, "sample", counted)
    return counted


def _ask(folder: Path, settings: NutsSettings = SETTINGS, **options: Any) -> GroundTruth:
    return nuts_ground_truth(LINEAR, jnp.zeros(2), settings, cache_dir=folder, **options)


def test_too_few_effective_draws_are_no_ground_truth(
    tmp_path: Path, sampler: _CountedSampler
) -> None:
    with pytest.raises(NothingUsableError, match=r"ESS .* \(needed 5000\)"):
        _ask(tmp_path, replace(SETTINGS, min_ess=5000))


@pytest.mark.parametrize("frozen", [np.zeros((4, 500, 2)), np.full((4, 500, 2), np.nan)])
def test_frozen_or_lost_chains_are_no_ground_truth(
    tmp_path: Path, sampler: _CountedSampler, frozen: np.ndarray
) -> None:
    sampler.samples = _independent_samples(draws=frozen)
    with pytest.raises(NothingUsableError, match="did not converge"):
        _ask(tmp_path)


@pytest.mark.parametrize("lost", ["r_hat", "ess_bulk", "ess_tail"])
def test_one_diagnostic_that_is_not_a_number_is_enough(
    tmp_path: Path, sampler: _CountedSampler, lost: str
) -> None:
    truth = _ask(tmp_path)
    ground_truth.check_converged(truth, SETTINGS)
    with pytest.raises(NothingUsableError, match="did not converge"):
        ground_truth.check_converged(
            truth._replace(**{lost: np.asarray([1000.0, np.nan])}),
            replace(SETTINGS, max_r_hat=2000.0),
        )


def test_divergences_are_told_and_recorded(tmp_path: Path, sampler: _CountedSampler) -> None:
    sampler.samples = _independent_samples(num_divergences=3)
    recorder = _Recorder()
    assert _ask(tmp_path, reporter=recorder).num_divergences == 3
    assert "3 of 3000 draws ended in a divergence" in recorder.messages[0]
    assert _ask(tmp_path).num_divergences == 3


def test_ess_of_independent_and_of_correlated_draws() -> None:
    """AR(1) with coefficient 0.8: n (1 - 0.8) / (1 + 0.8) in the bulk. Within 15 %."""
    rng = np.random.default_rng(2)
    noise = rng.normal(size=(4, 20_000, 2))
    draws = noise.copy()
    for t in range(1, draws.shape[1]):
        draws[:, t, 1] = 0.8 * draws[:, t - 1, 1] + 0.6 * noise[:, t, 1]
    bulk, tail = ground_truth.bulk_and_tail_ess(draws)
    np.testing.assert_allclose(bulk, [80_000, 80_000 / 9], rtol=0.15)
    assert tail[0] == pytest.approx(80_000, rel=0.15)
    assert 1.05 * bulk[1] < tail[1] < 0.5 * 80_000, "tails forget sooner than the middle"


# --- cache --------------------------------------------------------------------------------------


def test_a_second_run_reads_the_first(tmp_path: Path, sampler: _CountedSampler) -> None:
    first, second = _ask(tmp_path), _ask(tmp_path)
    assert sampler.calls == 1
    for name in GroundTruth._fields:
        np.testing.assert_equal(getattr(second, name), getattr(first, name))
    np.testing.assert_array_equal(first.mean, sampler.samples.mean)
    assert first.ess_per_s == pytest.approx(first.ess_bulk.min() / 2.0)
    path = tmp_path / f"test-{first.digest}.npz"
    assert path.exists()
    assert len(first.digest) == 16


def test_recompute_samples_again(tmp_path: Path, sampler: _CountedSampler) -> None:
    _ask(tmp_path)
    sampler.samples = _independent_samples(mean=np.asarray([7.0, 7.0]))
    assert _ask(tmp_path, recompute=True).mean[0] == 7
    assert _ask(tmp_path).mean[0] == 7
    assert sampler.calls == 2


def test_a_result_elsewhere_is_read_and_not_touched(
    tmp_path: Path, sampler: _CountedSampler
) -> None:
    shipped, cache = tmp_path / "shipped", tmp_path / "cache"
    truth = _ask(shipped)
    before = {file.name: file.read_bytes() for file in shipped.iterdir()}
    found = _ask(cache, search_dirs=[tmp_path / "absent", shipped])
    assert sampler.calls == 1
    assert found.digest == truth.digest
    assert not cache.exists()
    _ask(cache, search_dirs=[shipped], recompute=True)
    assert sampler.calls == 2
    assert {file.name: file.read_bytes() for file in shipped.iterdir()} == before


def test_a_damaged_result_is_done_again(tmp_path: Path, sampler: _CountedSampler) -> None:
    truth = _ask(tmp_path)
    (tmp_path / f"test-{truth.digest}.npz").write_bytes(b"PK")
    assert _ask(tmp_path).digest == truth.digest
    assert sampler.calls == 2


def test_a_cached_result_is_held_to_the_limits_of_the_day(
    tmp_path: Path, sampler: _CountedSampler
) -> None:
    _ask(tmp_path)
    with pytest.raises(NothingUsableError, match="needed 9000"):
        _ask(tmp_path, replace(SETTINGS, min_ess=9000))
    assert sampler.calls == 1


def test_recompute_goes_on_after_an_interruption_but_not_after_a_failure(tmp_path: Path) -> None:
    folder = tmp_path / "partial"
    progress = ground_truth._Progress.start(2, 0)
    progress.num_steps = 100
    coordinates = ground_truth.Coordinates(np.zeros(2, np.float32), None)
    ground_truth._save_checkpoint(folder, "q", coordinates, {"z": jnp.zeros(2)}, progress, [])
    ground_truth._drop_finished(folder, "q", SETTINGS)
    assert folder.exists()
    progress.num_steps = SETTINGS.num_warmup + SETTINGS.draws_per_chain
    ground_truth._save_checkpoint(folder, "q", coordinates, {"z": jnp.zeros(2)}, progress, [])
    ground_truth._drop_finished(folder, "q", SETTINGS)
    assert not list(folder.iterdir())


# --- two runs at once ---------------------------------------------------------------------------


@pytest.fixture
def partial_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ground_truth, "SECONDS_BETWEEN_LOOKS", 0.01)
    path = ground_truth.cache_path(LINEAR, SETTINGS, tmp_path).with_suffix(".partial")
    path.mkdir()
    return path


class _WhenToldToWait(_Recorder):
    """The other process goes on when it hears that someone waits for it."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then

    def message(self, text: str) -> None:
        super().message(text)
        if "waiting" in text:
            self.then()


@pytest.mark.parametrize("recompute", [False, True])
def test_who_finds_another_at_work_takes_its_result(
    tmp_path: Path, sampler: _CountedSampler, partial_dir: Path, recompute: bool
) -> None:
    truth = _ask(tmp_path / "elsewhere")
    lock = artifacts._take_lock(partial_dir)
    (partial_dir / "state.npz").write_bytes(b"of the other")

    def finish() -> None:
        assert (partial_dir / "state.npz").exists()
        ground_truth.save(truth, tmp_path / f"test-{truth.digest}.npz")
        ground_truth._clear(partial_dir)
        os.close(lock)

    reporter = _WhenToldToWait(finish)
    found = _ask(tmp_path, reporter=reporter, recompute=recompute)
    np.testing.assert_array_equal(found.mean, truth.mean)
    assert sampler.calls == 1
    assert f"waiting for process {os.getpid()} on " in reporter.messages[0]
    assert "are taken from" in reporter.messages[1]
    assert not partial_dir.exists()


def test_who_waited_for_one_that_gave_up_goes_on_itself(
    tmp_path: Path, sampler: _CountedSampler, partial_dir: Path
) -> None:
    lock = artifacts._take_lock(partial_dir)
    reporter = _WhenToldToWait(lambda: os.close(lock))
    _ask(tmp_path, reporter=reporter)
    assert sampler.calls == 1
    assert len(reporter.messages) == 1
    assert not partial_dir.exists()


def test_a_lock_on_a_file_that_is_gone_is_no_lock(
    tmp_path: Path, partial_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one before removes the file after we have opened it and before we have locked it.
    take_lock, taken = artifacts._take_lock, []

    def late(folder: Path) -> int:
        taken.append(take_lock(folder))
        if len(taken) == 1:
            (folder / ".lock").unlink()
        return taken[-1]

    monkeypatch.setattr(artifacts, "_take_lock", late)
    with ground_truth._sole_owner(partial_dir, _Recorder()):
        assert len(taken) == 2
        with pytest.raises(ConfigError, match="in use"):
            take_lock(partial_dir)


def test_a_wait_can_be_interrupted(
    tmp_path: Path, partial_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    lock = artifacts._take_lock(partial_dir)
    monkeypatch.setattr(ground_truth.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _ask(tmp_path)
    assert ground_truth._is_file(lock, partial_dir / ".lock")
    os.close(lock)


def test_chains_that_did_not_converge_stay_and_the_lock_is_free(
    tmp_path: Path, sampler: _CountedSampler, partial_dir: Path
) -> None:
    (partial_dir / "draws-00000.npz").write_bytes(b"")
    with pytest.raises(NothingUsableError):
        _ask(tmp_path, replace(SETTINGS, min_ess=5000))
    assert (partial_dir / "draws-00000.npz").exists()
    os.close(artifacts._take_lock(partial_dir))


def test_the_digest_changes_with_what_changes_the_draws() -> None:
    settings = [
        SETTINGS,
        replace(SETTINGS, num_draws=4000),
        replace(SETTINGS, num_warmup=301),
        replace(SETTINGS, num_chains=3),
        replace(SETTINGS, seed=1),
        replace(SETTINGS, whiten=False),
        replace(SETTINGS, target_accept=0.9),
        replace(SETTINGS, max_tree_depth=9),
        replace(SETTINGS, start_scale=1.0),
    ]
    digests = [ground_truth.digest(LINEAR, chosen) for chosen in settings]
    digests.append(ground_truth.digest(replace(LINEAR, digest="1"), SETTINGS))
    digests.append(ground_truth.digest(replace(LINEAR, name="other"), SETTINGS))
    assert len(set(digests)) == len(digests)
    for unchanged in (
        replace(SETTINGS, min_ess=1.0),
        replace(SETTINGS, max_r_hat=1.1),
        replace(SETTINGS, block_draws=7),
        replace(SETTINGS, max_stored_bytes=1000),
    ):
        assert ground_truth.digest(LINEAR, unchanged) == digests[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_chains", 1),
        ("num_draws", 7),
        ("num_warmup", 0),
        ("max_r_hat", 1.0),
        ("min_ess", 0),
        ("target_accept", 1.0),
        ("max_tree_depth", 0),
        ("start_scale", -1.0),
        ("block_draws", 0),
    ],
)
def test_settings_name_the_key_and_the_value(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"ground_truth\.{key}={value}: must be"):
        NutsSettings(**{key: value})


def test_a_start_off_the_support_is_an_error() -> None:
    with pytest.raises(NothingUsableError, match="the potential at the starts"):
        ground_truth._check_starts(LINEAR, np.asarray([1.0, np.inf]))


# --- likelihoods in one piece, and coordinates that are not identified --------------------------


@dataclass(frozen=True, eq=False)
class _InOnePiece(_Linear):
    """The likelihood of all rows from sums; predicts y at x = (1, 0) and at (0, 1)."""

    @property
    def full_data(self) -> dict[str, jax.Array]:
        x, y = self.data[:, :-1], self.data[:, -1]
        return {"xx": x.T @ x, "xy": x.T @ y}

    @property
    def test_inputs(self) -> jax.Array:
        return jnp.eye(2)

    def full_log_likelihood(
        self, position: jax.Array, full_data: dict[str, jax.Array]
    ) -> jax.Array:
        return position @ full_data["xy"] - 0.5 * position @ full_data["xx"] @ position

    def predict(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return inputs @ position


def test_a_likelihood_in_one_piece_is_sampled_chain_by_chain() -> None:
    """Forty rows: few enough for float32 sums to resolve differences of energy."""
    rows = np.asarray(LINEAR.data[:40], np.float64)
    x, y = rows[:, :2], rows[:, 2]
    covariance = np.linalg.inv(x.T @ x + np.eye(2))
    mean = covariance @ x.T @ y
    model = _InOnePiece(LINEAR.data[:40], 2)
    settings = replace(SETTINGS, whiten=False)
    samples = ground_truth.sample(model, jnp.asarray(mean, jnp.float32), settings)
    std = np.sqrt(np.diag(covariance))
    error_of_mean, error_of_std = _standard_errors(samples, std)
    assert np.all(np.abs(samples.mean - mean) < 4.5 * error_of_mean)
    assert np.all(np.abs(samples.std - std) < 4.5 * error_of_std)
    assert np.all(error_of_mean < 0.1 * std), "too few effective draws to see anything"


def test_groups_of_any_size_come_back_in_their_places() -> None:
    """Steps that add 1 to each chain's place: of one chain without an axis for chains."""

    class State(NamedTuple):
        z: jax.Array

    def advance(state: State, target: Any, num_steps: Any) -> tuple[State, ground_truth._Block]:
        steps = jnp.arange(num_steps, dtype=jnp.float32)
        z = steps.reshape(-1, *[1] * state.z.ndim) + state.z
        one = jnp.ones((), jnp.int32) * (1 if state.z.ndim == 1 else len(state.z))
        block = ground_truth._Block(z, 10 * z[..., 0], jnp.ones(2), one, 1.0 * one, 2 * one)
        return State(z[-1] + 1), block

    places = jnp.asarray([[100.0, 101], [200, 201], [300, 301], [400, 401]])
    groups = (range(1), range(1, 3), range(3, 4))
    state, block = ground_truth._in_groups(
        {1: advance, 2: advance}, groups, State(places), None, jnp.int32(3)
    )
    np.testing.assert_array_equal(state.z, places + 3)
    np.testing.assert_array_equal(block.z, np.stack([places, places + 1, places + 2]))
    np.testing.assert_array_equal(block.potentials, 10 * block.z[..., 0])
    np.testing.assert_array_equal(block.squared_gradients, [3, 3])
    assert (int(block.num_leapfrogs), float(block.sum_accept)) == (4, 4.0)
    assert int(block.num_divergences) == 8


def test_groups_share_the_chains_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ground_truth, "cpu_threads", lambda: 3)
    groups = ground_truth.chain_groups(LINEAR, 8)
    assert groups == (range(2), range(2, 5), range(5, 8))
    assert ground_truth.chain_groups(LINEAR, 2) == (range(1), range(1, 2))
    one_piece = _InOnePiece(LINEAR.data[:40], 2)
    assert [len(group) for group in ground_truth.chain_groups(one_piece, 8)] == [1] * 8


SCALES = np.asarray([0.01, 100.0])


@dataclass(frozen=True, eq=False)
class _Scales(_InOnePiece):
    """N(1, 0.01^2) x N(1, 100^2); the squares are predicted."""

    def log_prior(self, position: jax.Array) -> jax.Array:
        return jnp.zeros(())

    def full_log_likelihood(
        self, position: jax.Array, full_data: dict[str, jax.Array]
    ) -> jax.Array:
        return -0.5 * jnp.sum(((position - 1.0) / jnp.asarray(SCALES, jnp.float32)) ** 2)

    def predict(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return (inputs @ position) ** 2


def _scaled(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Samples:
    monkeypatch.setattr(ground_truth, "MAX_DENSE_DIM", 1)
    settings = replace(SETTINGS, num_warmup=100, criterion="predictions")
    return ground_truth.sample(_Scales(LINEAR.data[:4], 2), jnp.ones(2), settings, **options)


def test_many_dimensions_are_scaled_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Scales 10^4 apart cost what a round Gaussian costs: a handful of leapfrogs a draw."""
    samples = _scaled(monkeypatch)
    assert samples.num_leapfrogs < 8 * 3000
    error_of_mean, error_of_std = _standard_errors(samples, SCALES)
    assert np.all(np.abs(samples.mean - 1.0) < 4.5 * error_of_mean)
    assert np.all(np.abs(samples.std - SCALES) < 4.5 * error_of_std)
    assert np.all(error_of_mean < 0.1 * SCALES)
    squares = samples.draws.reshape(-1, 2) ** 2
    np.testing.assert_allclose(samples.prediction_mean, squares.mean(axis=0), rtol=1e-3)
    np.testing.assert_allclose(samples.prediction_std, squares.std(axis=0, ddof=1), rtol=1e-3)
    potentials = 0.5 * (((samples.draws - 1.0) / SCALES) ** 2).sum(axis=-1)
    np.testing.assert_allclose(-samples.log_densities, potentials, rtol=1e-3, atol=1e-3)
    # Stopped in the second window of the warm-up and while sampling: the same bit for bit.
    for fail_at in (2, 8):
        with pytest.raises(KeyboardInterrupt):
            _scaled(monkeypatch, checkpoint_dir=tmp_path, question="q", reporter=_Recorder(fail_at))
    resumed = _scaled(monkeypatch, checkpoint_dir=tmp_path, question="q")
    np.testing.assert_array_equal(resumed.draws, samples.draws)
    np.testing.assert_array_equal(resumed.log_densities, samples.log_densities)
    np.testing.assert_array_equal(resumed.prediction_std, samples.prediction_std)


def test_memory_is_told_before_it_is_taken() -> None:
    recorder = _Recorder()
    ground_truth._tell_memory(replace(LINEAR, dim=50_000), SETTINGS, recorder)
    ground_truth._tell_memory(LINEAR, SETTINGS, recorder)
    (told,) = recorder.messages
    # 3,000 draws of 200 kB are above 256 MiB: every third is kept, in float32 and in float64.
    # A block is 200 draws, and a chain has 40 vectors: (3 x 1,000 + 5 x 200 + 2 x 40) x 200 kB.
    assert "dimension 50,000, 2 chains; about 778 MiB of memory and 191 MiB on disk" in told


@dataclass(frozen=True, eq=False)
class _Symmetric(_InOnePiece):
    """Sign-symmetric: predictions are the squares of the coordinates."""

    def predict(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return jnp.append((inputs @ position) ** 2, 5.0)  # and one that no draw moves

    def full_log_likelihood(
        self, position: jax.Array, full_data: dict[str, jax.Array]
    ) -> jax.Array:
        return -0.5 * jnp.sum((position**2 - 9.0) ** 2)


@dataclass(frozen=True, eq=False)
class _Untested(_InOnePiece):
    """Has nothing to predict."""

    def predict(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return jnp.zeros(0)


def test_predictions_decide_where_coordinates_are_not_identified(
    tmp_path: Path, sampler: _CountedSampler
) -> None:
    """Two chains at +3, two at -3: they disagree on the sign alone."""
    signs = np.asarray([1.0, 1.0, -1.0, -1.0])[:, None, None]
    noise = np.random.default_rng(3).normal(size=(4, 500, 2))
    squares = (3.0 + 0.1 * noise.reshape(-1, 2)) ** 2
    sampler.samples = _independent_samples(
        draws=signs * (3.0 + 0.1 * noise),
        prediction_mean=squares.mean(axis=0),
        prediction_std=squares.std(axis=0, ddof=1),
    )
    model = _Symmetric(LINEAR.data[:40], 2)

    def ask(criterion: str) -> GroundTruth:
        settings = replace(SETTINGS, criterion=criterion)
        return nuts_ground_truth(model, jnp.zeros(2), settings, cache_dir=tmp_path)

    with pytest.raises(NothingUsableError, match="0 % of the coordinates have converged"):
        ask("positions")
    truth = ask("predictions")
    assert np.all(truth.r_hat > 2)  # reported all the same
    np.testing.assert_array_equal(truth.prediction_mean, squares.mean(axis=0))
    assert np.all(truth.prediction_r_hat < 1.01)
    assert truth.log_density_r_hat is not None
    assert truth.log_density_r_hat < 1.01
    assert truth.prediction_ess_bulk[2] == 2000
    again = ask("predictions")
    assert sampler.calls == 2  # the second answer is that of the file
    np.testing.assert_array_equal(again.prediction_std, truth.prediction_std)


def test_a_result_without_predictions_is_no_answer_where_they_have_to_converge(
    tmp_path: Path, sampler: _CountedSampler
) -> None:
    model = _Symmetric(LINEAR.data[:40], 2)
    noise = np.random.default_rng(3).normal(size=(4, 500, 2))
    sampler.samples = _independent_samples(draws=3.0 + 0.1 * noise)
    nuts_ground_truth(model, jnp.zeros(2), SETTINGS, cache_dir=tmp_path)
    asked = replace(SETTINGS, criterion="predictions")
    squares = (3.0 + 0.1 * noise.reshape(-1, 2)) ** 2
    sampler.samples = sampler.samples._replace(
        prediction_mean=squares.mean(axis=0), prediction_std=squares.std(axis=0, ddof=1)
    )
    truth = nuts_ground_truth(model, jnp.zeros(2), asked, cache_dir=tmp_path)
    assert sampler.calls == 2
    assert truth.prediction_std.size == 2
    # It answers both questions from now on.
    nuts_ground_truth(model, jnp.zeros(2), SETTINGS, cache_dir=tmp_path)
    assert sampler.calls == 2


def test_predictions_cannot_be_asked_of_a_model_without_test_data() -> None:
    settings = replace(SETTINGS, criterion="predictions")
    model = _Untested(LINEAR.data[:40], 2)
    with pytest.raises(ConfigError, match=r"criterion=predictions.*has no test data"):
        ground_truth._Predictions(model, settings)


@dataclass(frozen=True, eq=False)
class _CutOff(_Symmetric):
    """Predicts nothing but its bound, and is diagnosed by what it is before that."""

    def predict(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return jnp.clip(self.identified(position, inputs), 0.0, 1.0)

    def identified(self, position: jax.Array, inputs: jax.Array) -> jax.Array:
        return inputs @ position


def test_predictions_that_are_cut_off_are_diagnosed_before_that(sampler: _CountedSampler) -> None:
    signs = np.asarray([1.0, 1.0, 1.0, -1.0])[:, None, None]
    draws = signs * (3.0 + 0.1 * np.random.default_rng(3).normal(size=(4, 500, 2)))
    samples = _independent_samples(draws=draws)
    settings = replace(SETTINGS, criterion="predictions")
    found = ground_truth._identified(_CutOff(LINEAR.data[:4], 2), settings, samples)
    assert np.all(found["prediction_r_hat"] > 2)
    np.testing.assert_allclose(found["prediction_r_hat"], ground_truth.convergence(draws)[0])


def test_a_stated_share_has_to_converge_and_the_log_posterior_always() -> None:
    values = np.ones(200)
    truth = _asked_share(values, r_hat=np.where(np.arange(200) < 2, 1.5, 1.0))
    with pytest.raises(NothingUsableError, match=r"99 % of the predictions.*needed 99\.5 %"):
        ground_truth.check_converged(truth, _share(0.995))
    ground_truth.check_converged(truth, _share(0.99))
    for change in ({"log_density_r_hat": 1.5}, {"log_density_ess": 5.0}, {"log_density_ess": None}):
        with pytest.raises(NothingUsableError, match="the log posterior has an R-hat"):
            ground_truth.check_converged(truth._replace(**change), _share(0.99))


def _share(share: float) -> NutsSettings:
    return replace(SETTINGS, criterion="predictions", converged_share=share)


def _asked_share(values: np.ndarray, r_hat: np.ndarray) -> GroundTruth:
    samples = _independent_samples()
    truth = ground_truth.diagnose(LINEAR, SETTINGS, samples, datetime.datetime.now(datetime.UTC))
    return truth._replace(
        prediction_r_hat=r_hat,
        prediction_ess_bulk=1000 * values,
        prediction_ess_tail=1000 * values,
        log_density_r_hat=1.0,
        log_density_ess=1000.0,
    )


def test_many_coordinates_are_diagnosed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(0).normal(size=(4, 100, 5))
    whole = ground_truth.convergence(draws)
    monkeypatch.setattr(ground_truth, "DIAGNOSED_TOGETHER", 2)
    for found, expected in zip(ground_truth.convergence(draws), whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(whole[1:], ground_truth.bulk_and_tail_ess(draws))


def test_long_arrays_are_summarised_for_a_reader(
    tmp_path: Path, sampler: _CountedSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ground_truth, "MAX_LISTED", 1)
    truth = _ask(tmp_path)
    (path,) = tmp_path.glob("*.json")
    shown = artifacts.read_json(path)
    assert shown is not None
    assert shown["std"]["largest"] == pytest.approx(truth.std.max())
    assert _ask(tmp_path).std.dtype == np.float32
