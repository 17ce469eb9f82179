"""Models from a Python file or from functions: densities, digest, messages for the user."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from mamba_cli.errors import ConfigError, DataError
from mamba_cli.models.own import OwnModel
from mamba_cli.models.python import from_file, from_functions
from mamba_cli.types import HasHoldOut, HasNamedParameters

LINES = {
    "head": "import jax\nimport jax.numpy as jnp\nimport numpy as np",
    "data": "data = {'x': np.arange(12.0).reshape(6, 2) / 6, 'y': np.arange(6.0)}",
    "init": "def init(key):\n    return {'slope': jnp.array([0.1, 0.2]), 'log_sigma': 0.0}",
    "prior": (
        "def log_prior(params):\n"
        "    return -0.5 * (jnp.sum(params['slope'] ** 2) + params['log_sigma'] ** 2)"
    ),
    "likelihood": (
        "def log_likelihood(params, datum):\n"
        "    mean = datum['x'] @ params['slope']\n"
        "    return jax.scipy.stats.norm.logpdf(datum['y'], mean, jnp.exp(params['log_sigma']))"
    ),
}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """``written(likelihood=...)``: the file with one of its parts replaced; its path."""

    def write(**parts: str) -> str:
        path = tmp_path / "my_model.py"
        text = {**LINES, **{name: textwrap.dedent(part) for name, part in parts.items()}}
        path.write_text("\n\n".join(text.values()) + "\n")
        return str(path)

    return write


def test_the_densities_are_those_of_the_file(written: Callable[..., str]) -> None:
    model = from_file(written())
    assert (model.name, model.dim, model.num_data) == ("python", 3, 6)
    assert isinstance(model, HasHoldOut)
    assert isinstance(model, HasNamedParameters)
    # ravel_pytree goes through a dict by key: log_sigma, then slope.
    position = np.array([0.3, -0.5, 0.7])
    x, y = np.arange(12.0).reshape(6, 2) / 6, np.arange(6.0)
    by_row = scipy.stats.norm.logpdf(y, x @ position[1:], np.exp(position[0]))
    at = jnp.asarray(position, jnp.float32)
    assert float(model.log_prior(at)) == pytest.approx(-0.5 * np.sum(position**2), rel=1e-6)
    assert float(model.log_likelihood(at, model.data)) == pytest.approx(by_row.sum(), rel=1e-6)
    part = jax.tree.map(lambda leaf: leaf[2:4], model.data)
    assert float(model.log_likelihood(at, part)) == pytest.approx(by_row[2:4].sum(), rel=1e-6)
    named = model.constrain(at)
    assert {name: value.shape for name, value in named.items()} == {"log_sigma": (), "slope": (2,)}
    np.testing.assert_array_equal(named["slope"], at[1:])
    np.testing.assert_allclose(model.initial_position(jax.random.key(0)), [0, 0.1, 0.2])


def test_a_function_may_return_the_data_and_params_may_be_one_array() -> None:
    model = from_functions(
        lambda params: -0.5 * params @ params,
        lambda params, datum: -0.5 * jnp.sum((datum - params) ** 2),
        lambda: np.ones((4, 2)),
        jnp.zeros(2),
    )
    assert (model.dim, model.num_data, list(model.constrain(jnp.zeros(2)))) == (2, 4, ["params"])
    assert float(model.log_likelihood(jnp.zeros(2), model.data)) == -4.0


def test_whole_numbers_stay_whole_and_pytrees_keep_their_structure() -> None:
    model = from_functions(
        lambda params: -0.5 * jnp.sum(params[0] ** 2),
        lambda params, datum: params[0][datum[1]] * datum[0]["a"],
        ({"a": np.ones(3)}, np.array([0, 1, 1])),
        (jnp.ones(2),),
    )
    assert model.data[1].dtype == jnp.int32
    assert float(model.log_likelihood(jnp.array([2.0, 3.0]), model.data)) == 8.0


def test_the_digest_follows_the_computation_and_the_data(written: Callable[..., str]) -> None:
    first = from_file(written()).digest
    assert from_file(written()).digest == first
    assert from_file(written(data=LINES["data"] + "  # the same")).digest == first
    assert from_file(written(data=LINES["data"].replace("/ 6", "/ 7"))).digest != first
    wider = LINES["prior"].replace("-0.5", "-0.25")
    assert from_file(written(prior=wider)).digest != first


def test_the_digest_sees_a_constant_that_a_function_closes_over() -> None:
    def digest(scale: Any) -> str:
        return from_functions(
            lambda params: -0.5 * jnp.sum(params**2),
            lambda params, datum: -0.5 * jnp.sum(scale * (datum - params) ** 2),
            np.ones((3, 2)),
            jnp.zeros(2),
        ).digest

    assert len({digest(1.0), digest(2.0), digest(jnp.array([1.0, 2.0]))}) == 3
    assert digest(jnp.array([1.0, 2.0])) != digest(jnp.array([1.0, 3.0]))
    assert digest(jnp.array([1.0, 3.0])) == digest(jnp.array([1.0, 3.0]))


def jitted(params: Any, constant: Any) -> Any:
    return jax.jit(lambda p: jnp.sum(p * constant))(params)


def twice_jitted(params: Any, constant: Any) -> Any:
    return jax.jit(lambda p: jitted(p, constant))(params)


def scanned(params: Any, constant: Any) -> Any:
    return jax.lax.scan(lambda total, p: (total + jnp.sum(p * constant), None), 0.0, params)[0]


def chosen(params: Any, constant: Any) -> Any:
    return jax.lax.cond(params[0] > 0, lambda: jnp.sum(params * constant), lambda: 0.0)


def with_derivative(params: Any, constant: Any) -> Any:
    function = jax.custom_jvp(lambda p: jnp.sum(p * constant))
    function.defjvp(lambda primals, tangents: (function(*primals), jnp.sum(tangents[0] * constant)))
    return function(params)


@pytest.mark.parametrize("inner", [jitted, twice_jitted, scanned, chosen, with_derivative])
@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_the_digest_sees_the_constants_of_inner_functions(inner: Any, array: Any) -> None:
    def digest(constant: list[float]) -> str:
        return from_functions(
            lambda params: -0.5 * jnp.sum(params**2),
            lambda params, datum: inner(params, array(constant, "float32")) * datum,
            np.ones(3),
            jnp.zeros(2),
        ).digest

    assert digest([1.0, 2.0]) == digest([1.0, 2.0])
    assert digest([1.0, 2.0]) != digest([1.0, 3.0])


def regression(**test_part: Any) -> OwnModel:
    return from_functions(
        lambda params: -0.5 * params**2,
        lambda params, datum: jax.scipy.stats.norm.logpdf(datum["y"], params * datum["x"]),
        {"x": np.ones(10), "y": np.arange(10.0)},
        jnp.array(0.5),
        **test_part,
    )


def test_without_a_test_part_there_is_nothing_to_predict() -> None:
    model = regression()
    prediction = model.predict(jnp.array([0.5]), model.test_inputs)
    assert prediction.shape == (0,)
    assert model.predictive_metrics(prediction) == {}


def test_test_rows_without_predict_are_measured_by_their_density() -> None:
    model = regression(test_data={"x": np.array([1.0, 2.0]), "y": np.array([0.0, 3.0])})
    draws = [0.5, 1.5]
    densities = np.mean(
        [model.predict(jnp.array([draw]), model.test_inputs) for draw in draws], axis=0
    )
    exact = np.mean([scipy.stats.norm.pdf([0, 3], [d, 2 * d]) for d in draws], axis=0)
    np.testing.assert_allclose(densities, exact, rtol=1e-5)
    metrics = model.predictive_metrics(jnp.log(jnp.asarray(densities)))
    assert metrics == {"log_loss": pytest.approx(-np.mean(np.log(exact)), rel=1e-5)}


def test_predictions_are_measured_against_targets() -> None:
    numbers = regression(
        predict=lambda params, inputs: params * inputs, test_data=(np.ones(3), np.zeros(3))
    )
    assert numbers.predictive_metrics(jnp.array([3.0, 0.0, 4.0])) == {
        "rmse": pytest.approx(np.sqrt(25 / 3))
    }
    labels = regression(
        predict=lambda params, inputs: jax.nn.sigmoid(params * inputs),
        test_data=(np.ones(3), np.array([0, 1, 1])),
    )
    metrics = labels.predictive_metrics(jnp.array([0.2, 0.9, 0.4]))
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert metrics["log_loss"] == pytest.approx(-np.mean(np.log([0.8, 0.9, 0.4])))


def test_rows_held_out_are_the_test_part_of_what_is_left() -> None:
    part = regression().hold_out(0.3, seed=0)
    assert part.num_data == 7
    left, out = np.asarray(part.data["y"]), np.asarray(part.test_inputs["y"])
    assert sorted([*left, *out]) == list(range(10))
    density = part.predict(jnp.array([2.0]), part.test_inputs)
    np.testing.assert_allclose(density, scipy.stats.norm.pdf(out, 2.0), rtol=1e-5)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"prior": ""}, r"my_model\.py: defines no log_prior\. Expected log_prior\(params\)"),
        ({"init": "init = 3"}, r"my_model\.py: init is a int; expected a function"),
        ({"data": ""}, r"my_model\.py: defines no data\. Expected arrays .* model\.data=data\.npz"),
        (
            {"likelihood": "def log_likelihood(params, datum):\n    return datum['x']"},
            r"log_likelihood: returned an array of shape \(2,\); expected one number",
        ),
        (
            {"likelihood": "def log_likelihood(params, datum):\n    return None"},
            r"log_likelihood: returned NoneType; expected one number",
        ),
        (
            {"likelihood": "def log_likelihood(params, datum):\n\n    return datum['z']"},
            r"my_model\.py: log_likelihood, line \d+: KeyError: 'z'",
        ),
        (
            {"likelihood": LINES["likelihood"].replace("jnp.exp", "jnp.log")},
            r"log_likelihood: is .* for row 0 of the data .* 6 of 6 rows",
        ),
        (
            {"prior": "def log_prior(params):\n    return jnp.log(-1 - params['log_sigma'] ** 2)"},
            r"log_prior: is nan at the start that .* init gives",
        ),
        (
            {"prior": "def log_prior(params):\n    return jnp.sqrt(params['log_sigma'])"},
            r"log_prior: its gradient is not finite at the start",
        ),
        (
            {"prior": "def log_prior(p):\n    return 0.0 if p['log_sigma'] > 0 else 1.0"},
            r"log_prior, line \d+: TracerBoolConversionError: .*use jax\.numpy instead of numpy",
        ),
        ({"init": "def init(key):\n    return {'a': jnp.nan}"}, r"init: a is not finite"),
        ({"init": "def init(key):\n    return {}"}, r"init: returned no array"),
        ({"head": "import no_such_thing"}, r"my_model\.py, line 1: ModuleNotFoundError: No module"),
        ({"head": "1 +"}, r"my_model\.py.*: SyntaxError: invalid syntax"),
        (
            {"data": LINES["data"] + "\ndef predict(params, inputs):\n    return inputs"},
            r"defines predict but no test_data; expected test_data = \(inputs, targets\)",
        ),
        (
            {"data": LINES["data"] + "\ntest_data = {'x': np.ones((2, 3)), 'y': np.ones(2)}"},
            r"test_data: is laid out as .* expected rows like data",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_by_name(
    written: Callable[..., str], parts: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_file(written(**parts))


def test_predictions_have_a_row_for_every_input() -> None:
    model = regression(
        predict=lambda params, inputs: params * jnp.sum(inputs),
        test_data=(np.ones(3), np.zeros(3)),
    )
    with pytest.raises(
        ConfigError, match=r"predict: returned shape \(\); expected .* \[3, \.\.\.\]"
    ):
        model.predict(jnp.array([1.0]), model.test_inputs)


def test_bad_data_of_a_file_are_a_data_error(written: Callable[..., str]) -> None:
    lengths = "data = {'x': np.ones((6, 2)), 'y': np.ones(5)}"
    with pytest.raises(DataError, match=r"my_model\.py, data: x has 6 rows and y has 5"):
        from_file(written(data=lengths))
    nan = "data = {'x': np.ones((6, 2)), 'y': np.array([1, 2, np.nan, 4, 5, 6])}"
    with pytest.raises(DataError, match=r"y, row 2 \(counted from 0\) is nan"):
        from_file(written(data=nan))


@pytest.mark.parametrize(
    ("file", "target", "message"),
    [
        (None, None, "neither is given"),
        ("a.py", "a:b", "both are given"),
        ("no_such.py", None, r"model\.file='no_such\.py' is not allowed: .* that exists"),
        (None, "nonsense", r"model\.target='nonsense' is not allowed: it must be package\.module"),
        (None, "no_such_package.x:model", "cannot import no_such_package.x"),
        (None, "math:model", "math has no model"),
        (None, "bisect:model", r"It defines no function\."),
        (None, "json:model", r"It defines dump, dumps, ((?!JSON).)*\.$"),
    ],
)
def test_where_the_model_is_must_be_said_once(
    file: str | None, target: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_file(file, target)


def test_a_target_is_an_object_or_a_function_that_makes_one(written: Callable[..., str]) -> None:
    expected = from_file(written()).digest
    tail = textwrap.dedent(
        """
        class Regression:
            def __init__(self):
                self.data = data

            init = staticmethod(init)
            log_prior = staticmethod(log_prior)
            log_likelihood = staticmethod(log_likelihood)


        model = Regression()


        def make():
            return Regression()
        """
    )
    path = written(likelihood=LINES["likelihood"] + "\n" + tail)
    assert from_file(target=f"{path}:model").digest == expected
    assert from_file(target=f"{path}:Regression").digest == expected
    assert from_file(target=f"{path}:make").digest == expected


def test_a_data_file_takes_the_place_of_the_models_data(
    written: Callable[..., str], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.npz"
    np.savez(rows, x=np.ones((9, 2)), y=np.zeros(9))
    assert from_file(written(data=""), data=str(rows)).num_data == 9
