"""NumPyro models: densities against NumPyro's own potential, and what is refused by site."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.infer.util import potential_energy

from mamba_cli.errors import ConfigError, DataError
from mamba_cli.models.numpyro import from_numpyro, from_target

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(12, 2)), "y": RNG.normal(size=12)}


def regression(x, y=None, scale=5.0):
    slopes = numpyro.sample("slopes", dist.Normal(0, scale).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    numpyro.deterministic("precision", sigma**-2)
    mean = numpyro.deterministic("mean", x @ slopes)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


def constrained(y=None):
    """Every kind of support, one of which depends on another parameter."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    upper = numpyro.sample("upper", dist.LogNormal(0, 1))
    between = numpyro.sample("between", dist.Uniform(-upper, upper))
    share = numpyro.sample("share", dist.Beta(2, 3))
    factor = numpyro.sample("factor", dist.LKJCholesky(2, 1.5))
    with numpyro.plate("groups", 4):
        level = numpyro.sample("level", dist.Gamma(2, 2))
    with numpyro.handlers.scale(scale=0.5):
        extra = numpyro.sample("extra", dist.Exponential(1.0))
    mean = weights @ jnp.array([-1.0, 0, 1]) + between + share + factor[1, 0] + level.sum() + extra
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def with_matrix_rows(y=None):
    """Observations of several numbers a row: a second plate and an event dimension."""
    centre = numpyro.sample("centre", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("columns", 2, dim=-1), numpyro.plate("data", y.shape[0], dim=-2):
        numpyro.sample("y", dist.Normal(centre, 1), obs=y)


def weighted(y=None, weight=None):
    centre = numpyro.sample("centre", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0]), numpyro.handlers.scale(scale=weight):
        numpyro.sample("y", dist.Normal(centre, 1), obs=y)


def of_fixed_size(y=None):
    centre = numpyro.sample("centre", dist.Normal(0, 1))
    with numpyro.plate("data", 12):
        numpyro.sample("y", dist.Normal(centre, 1), obs=y)


CASES = {
    "regression": (regression, DATA),
    "constrained": (constrained, {"y": DATA["y"]}),
    "matrix": (with_matrix_rows, {"y": DATA["x"]}),
    "weighted": (weighted, {"y": DATA["y"], "weight": np.linspace(0.5, 2, 12)}),
    "fixed_size": (of_fixed_size, {"y": DATA["y"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_posterior_is_numpyros_on_the_whole_real_line(case: str) -> None:
    fn, data = CASES[case]
    model = from_numpyro(fn, data)
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in data.items()}

    def start() -> dict[str, Any]:
        trace = numpyro.handlers.trace(numpyro.handlers.seed(fn, 0)).get_trace(**arrays)
        sampled = [s for s in trace.values() if s["type"] == "sample" and not s["is_observed"]]
        return {s["name"]: dist.biject_to(s["fn"].support).inv(s["value"]) for s in sampled}

    zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape), jax.eval_shape(start))
    flat, unravel = ravel_pytree(zeros)
    assert model.dim == len(flat)

    @jax.jit
    def both(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        theirs = -potential_energy(fn, (), arrays, unravel(at))
        return model.log_prior(at) + model.log_likelihood(at, model.data), theirs

    for seed in (1, 2):
        ours, theirs = both(jax.random.normal(jax.random.key(seed), (len(flat),)))
        assert float(ours) == pytest.approx(float(theirs), rel=2e-5)


@pytest.mark.parametrize("case", ["regression", "matrix", "weighted", "fixed_size"])
def test_parts_of_the_rows_add_up_to_all_of_them(case: str) -> None:
    model = from_numpyro(*CASES[case])
    at = model.initial_position(jax.random.key(0))
    parts = [jax.tree.map(lambda a, s=s: a[s], model.data) for s in (slice(0, 5), slice(5, 12))]
    by_row = jax.jit(model.row_likelihoods)
    rows = np.asarray(by_row(at, model.data))
    assert rows.shape == (12,)
    in_parts = np.concatenate([by_row(at, part) for part in parts])
    np.testing.assert_allclose(in_parts, rows, rtol=1e-5)


def test_parameters_come_back_constrained_and_named() -> None:
    model = from_numpyro(constrained, {"y": DATA["y"]})
    values = jax.jit(model.constrain)(jax.random.normal(jax.random.key(1), (model.dim,)))
    assert float(jnp.sum(values["weights"])) == pytest.approx(1, rel=1e-5)
    assert abs(float(values["between"])) < float(values["upper"])
    assert 0 < float(values["share"]) < 1
    assert values["level"].shape == (4,)
    np.testing.assert_allclose(jnp.sum(values["factor"] ** 2, 1), 1, rtol=1e-5)


def test_deterministic_sites_of_the_parameters_are_reported_and_those_of_rows_are_not() -> None:
    model = from_numpyro(regression, DATA)
    values = model.constrain(jnp.array([0.5, 1.0, 2.0]))
    assert sorted(values) == ["precision", "sigma", "slopes"]
    assert float(values["precision"]) == pytest.approx(float(values["sigma"]) ** -2, rel=1e-5)


def test_constants_of_the_model_are_part_of_the_digest() -> None:
    first = from_numpyro(regression, DATA)
    again = from_numpyro(regression, DATA, kwargs={"scale": 5.0})
    other = from_numpyro(regression, DATA, kwargs={"scale": 6.0})
    assert first.digest == again.digest != other.digest


def test_programs_of_one_model_can_be_traced_side_by_side() -> None:
    model = from_numpyro(regression, DATA)
    at = model.initial_position(jax.random.key(0))

    def value(count: int) -> float:
        part = jax.tree.map(lambda a: a[:count], model.data)
        return float(jax.jit(model.log_likelihood)(at, part) + jax.jit(model.log_prior)(at))

    expected = [value(count) for count in range(1, 5)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(value, range(1, 5))) == expected


def test_rows_set_aside_are_measured_by_their_density() -> None:
    test_rows = {"x": np.ones((3, 2)), "y": np.zeros(3)}
    model = from_numpyro(regression, DATA, test_data=test_rows)
    at = jnp.array([0.0, 1.0, -1.0])  # sigma = 1
    density = jax.jit(model.predict)(at, model.test_inputs)
    np.testing.assert_allclose(density, np.full(3, (2 * np.pi) ** -0.5), rtol=1e-5)


def model_of(body: Callable[..., Any]) -> Callable[..., Any]:
    """A model whose body gets y and a centre."""

    def model(y=None):
        body(y, numpyro.sample("centre", dist.Normal(0, 1)))

    return model


def observe(y: Any, mean: Any, size: int | None = None, **plate: Any) -> None:
    with numpyro.plate("data", size or y.shape[0], **plate):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def local(y: Any, centre: Any) -> None:
    with numpyro.plate("data", y.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(centre, 1))
        numpyro.sample("y", dist.Normal(effect, 1), obs=y)


def one_for_each_row(y: Any, centre: Any) -> None:
    observe(y, numpyro.sample("effect", dist.Normal(centre, 1).expand([y.shape[0]])))


def one_event_for_all_rows(y: Any, centre: Any) -> None:
    effect = dist.Normal(centre, 1).expand([y.shape[0]]).to_event(1)
    observe(y, numpyro.sample("effect", effect))


def one_vector_of_a_fixed_length(y: Any, centre: Any) -> None:
    observe(y, numpyro.sample("effect", dist.Normal(centre, 1).expand([12]).to_event(1)))


def discrete(y: Any, centre: Any) -> None:
    observe(y, centre * numpyro.sample("which", dist.Bernoulli(0.5)))


def no_plate(y: Any, centre: Any) -> None:
    numpyro.sample("y", dist.Normal(centre, 1), obs=y)


def nothing_observed(y: Any, centre: Any) -> None:
    with numpyro.plate("data", y.shape[0]):
        numpyro.deterministic("mean", centre + y)


def two_sizes(y: Any, centre: Any) -> None:
    observe(y, centre)
    with numpyro.plate("few", 3):
        numpyro.sample("z", dist.Normal(centre, 1), obs=jnp.zeros(3))


def subsampled(y: Any, centre: Any) -> None:
    with numpyro.plate("data", y.shape[0], subsample_size=4) as rows:
        numpyro.sample("y", dist.Normal(centre, 1), obs=y[rows])


def optimised(y: Any, centre: Any) -> None:
    observe(y, centre + numpyro.param("shift", 0.0))


def prior_of_rows(y: Any, centre: Any) -> None:
    scale = numpyro.sample("scale", dist.HalfNormal(1 + jnp.mean(y) ** 2))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(centre, scale), obs=y)


def rows_together(y: Any, centre: Any) -> None:
    observe(y, centre + jnp.mean(y))


def size_from_values(y: Any, centre: Any) -> None:
    observe(y, centre * jnp.zeros(int(y.max())).sum())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (local, "site effect is a latent variable inside the data plate data"),
        (one_for_each_row, "site effect is a latent variable with one value for each row"),
        (one_event_for_all_rows, "site effect has as many values as there are rows, 12"),
        (one_vector_of_a_fixed_length, "site effect has as many values as there are rows, 12"),
        (discrete, "site which is a discrete latent variable"),
        (no_plate, "site y is observed outside of any plate; .* plate"),
        (nothing_observed, "no site is observed"),
        (two_sizes, "site z is observed inside plate few of size 3; the data have 12 rows"),
        (subsampled, r"plate data takes its own subsample \(4 of 12\)"),
        (optimised, r"site shift is a numpyro\.param"),
        (prior_of_rows, r"the prior depends on the rows .* model\.kwargs"),
        (rows_together, "rows must be independent given the parameters"),
        (size_from_values, r"line \d+: ConcretizationTypeError: .*a size that is computed"),
    ],
)
def test_what_minibatches_cannot_be_taken_of_is_refused_by_site(
    body: Callable[..., Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        from_numpyro(model_of(body), {"y": np.asarray(DATA["y"]) + 3})


def test_arguments_and_arrays_go_together() -> None:
    with pytest.raises(ConfigError, match="the data have an array z, which the model does not"):
        from_numpyro(regression, {**DATA, "z": DATA["y"]})
    with pytest.raises(ConfigError, match=r"needs x, and the data have y; .* '\+model\.kwargs\.x"):
        from_numpyro(regression, {"y": DATA["y"]})
    with pytest.raises(ConfigError, match=r"model\.kwargs has size, which the model does not"):
        from_numpyro(regression, DATA, kwargs={"size": 3})
    with pytest.raises(ConfigError, match=r"model\.kwargs\.y is among the arrays"):
        from_numpyro(regression, DATA, kwargs={"y": 3})


def test_a_file_and_its_data_are_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(
        "import numpyro\nimport numpyro.distributions as dist\n\n\ndef model(y):\n"
        "    centre = numpyro.sample('centre', dist.Normal(0, 1))\n"
        "    with numpyro.plate('data', len(y)):\n"
        "        numpyro.sample('y', dist.Normal(centre, 1), obs=y)\n"
    )
    np.save(tmp_path / "y.npy", np.zeros(4))
    model = from_target(f"{path}:model", str(tmp_path / "y.npy"))
    assert (model.name, model.dim, model.num_data) == ("numpyro", 1, 4)
    with pytest.raises(DataError, match="no such file"):
        from_target(f"{path}:model", str(tmp_path / "z.npy"))
    with pytest.raises(ConfigError, match=r"model\.data has no value"):
        from_target(f"{path}:model")
    with pytest.raises(ConfigError, match=r"model\.target has no value"):
        from_target(data="d.npz")
    with pytest.raises(ConfigError, match="is a module; expected a NumPyro model"):
        from_target(f"{path}:dist", str(tmp_path / "y.npy"))
