"""Ten NumPyro models of ten kinds, as their users write them, and simulated data for each.

Nothing here knows of mamba_cli: a model takes its arrays as keyword arguments and has a data
plate. ``MODELS`` has each with its data and its constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

NUM_CHAINS, NUM_DRAWS = 4, 2000
"""Of NUTS; draws of each chain."""


def linear(x, y=None):
    """Linear regression with an unknown scale of the noise."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    slopes = numpyro.sample("slopes", dist.Normal(0, 5).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(intercept + x @ slopes, sigma), obs=y)


def poisson(x, exposure, counts=None):
    """Poisson regression with an exposure."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    rate = exposure * jnp.exp(intercept + x @ slopes)
    with numpyro.plate("data", len(exposure)):
        numpyro.sample("counts", dist.Poisson(rate), obs=counts)


def negative_binomial(x, counts=None):
    """Negative binomial regression: counts more spread than Poisson."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Gamma(2, 0.5))
    mean = jnp.exp(intercept + x @ slopes)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("counts", dist.NegativeBinomial2(mean, concentration), obs=counts)


def robust(x, y=None):
    """Regression with Student-t noise of unknown degrees of freedom."""
    slopes = numpyro.sample("slopes", dist.Normal(0, 5).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(1))
    freedom = numpyro.sample("freedom", dist.Gamma(2, 0.1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.StudentT(freedom, x @ slopes, sigma), obs=y)


def multinomial(x, label=None, num_classes=3):
    """Multinomial logistic regression, the first class as the baseline."""
    with numpyro.plate("classes", num_classes - 1, dim=-2), numpyro.plate("columns", x.shape[1]):
        weights = numpyro.sample("weights", dist.Normal(0, 2))
    logits = jnp.concatenate([jnp.zeros((x.shape[0], 1)), x @ weights.T], axis=1)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("label", dist.Categorical(logits=logits), obs=label)


def hierarchical(x, group, y=None, num_groups=8):
    """Logistic regression with an intercept for each group, all of them global."""
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("groups", num_groups):
        offset = numpyro.sample("offset", dist.Normal(0, 1))
    effect = numpyro.deterministic("effect", mean + spread * offset)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=effect[group] + x @ slopes), obs=y)


def mixture(y=None):
    """A mixture of three Gaussians, assignments summed out, means in order."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(3, 2.0)))
    ordered = dist.TransformedDistribution(
        dist.Normal(0, 4).expand([3]).to_event(1), dist.transforms.OrderedTransform()
    )
    means = numpyro.sample("means", ordered)
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("data", y.shape[0]):
        parts = dist.Normal(means, sigma)
        assignment = dist.Categorical(probs=weights)
        numpyro.sample("y", dist.MixtureSameFamily(assignment, parts), obs=y)


def factorisation(row, column, value=None, num_rows=12, num_columns=10):
    """Matrix factorisation of rank one, its sign fixed by positive column factors."""
    with numpyro.plate("rows", num_rows):
        left = numpyro.sample("left", dist.Normal(0, 1))
    with numpyro.plate("columns", num_columns):
        right = numpyro.sample("right", dist.LogNormal(0, 0.5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("data", len(row)):
        numpyro.sample("value", dist.Normal(left[row] * right[column], sigma), obs=value)


def network(x, y=None, num_hidden=4):
    """A network with one small hidden layer.

    Its weights are not identified (units can change places and signs); the curve that it draws
    is, at five inputs.
    """
    first = numpyro.sample("first", dist.Normal(0, 1).expand([num_hidden]).to_event(1))
    biases = numpyro.sample("biases", dist.Normal(0, 1).expand([num_hidden]).to_event(1))
    last = numpyro.sample("last", dist.Normal(0, 1).expand([num_hidden]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))

    def curve(at):
        return jnp.tanh(at[:, None] * first + biases) @ last

    numpyro.deterministic("curve", curve(jnp.linspace(-2.0, 2.0, 5)))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(curve(x), sigma), obs=y)


def ordinal(x, rating=None, num_levels=4):
    """Ordered logistic regression with unknown cut points."""
    slopes = numpyro.sample("slopes", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    cutpoints = numpyro.sample(
        "cutpoints",
        dist.TransformedDistribution(
            dist.Normal(0, 2).expand([num_levels - 1]).to_event(1),
            dist.transforms.OrderedTransform(),
        ),
    )
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("rating", dist.OrderedLogistic(x @ slopes, cutpoints), obs=rating)


class Example(NamedTuple):
    """A model, how its data are simulated, its constants, and what of it is identified.

    ``longer`` is by how much a chain must be longer than those of the others, for the same
    effective draws.
    """

    model: Callable[..., None]
    simulate: Callable[[np.random.Generator, int], dict[str, np.ndarray]]
    kwargs: dict[str, Any]
    identified: tuple[str, ...] = ()  # all parameters where it is empty
    longer: int = 1


def _covariates(rng: np.random.Generator, num_rows: int, dim: int = 3) -> np.ndarray:
    return rng.standard_normal((num_rows, dim))


def _linear_data(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    x = _covariates(rng, num_rows)
    return {"x": x, "y": 1 + x @ [2.0, -1.0, 0.5] + 0.7 * rng.standard_normal(num_rows)}


def _poisson_data(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    x, exposure = _covariates(rng, num_rows), rng.uniform(0.5, 2, num_rows)
    counts = rng.poisson(exposure * np.exp(0.5 + x @ [0.4, -0.3, 0.2]))
    return {"x": x, "exposure": exposure, "counts": counts}


def _negative_binomial_data(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    x = _covariates(rng, num_rows)
    mean = np.exp(1 + x @ [0.4, -0.3, 0.2])
    return {"x": x, "counts": rng.poisson(mean * rng.gamma(3.0, 1 / 3.0, num_rows))}


def _robust_data(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    x = _covariates(rng, num_rows)
    return {"x": x, "y": x @ [2.0, -1.0, 0.5] + 0.5 * rng.standard_t(4, num_rows)}


def _multinomial_data(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    x = _covariates(rng, num_rows)
    logits = np.c_[np.zeros(num_rows), x @ np.array([[1.0, -1, 0], [0.5, 0.5, -1]]).T]
    return {"x": x, "label": (logits + rng.gumbel(size=logits.shape)).argmax(1)}


def _hierarchical_data(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    x, group = _covariates(rng, num_rows, 2), rng.integers(0, 8, num_rows)
    logits = 0.5 + 0.8 * rng.standard_normal(8)[group] + x @ [1.0, -0.5]
    return {"x": x, "group": group, "y": (logits + rng.logistic(size=num_rows) > 0).astype(int)}


def _mixture_data(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    part = rng.choice(3, num_rows, p=[0.3, 0.5, 0.2])
    return {"y": np.array([-3.0, 0.5, 4.0])[part] + 0.8 * rng.standard_normal(num_rows)}


def _factorisation_data(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    left, right = rng.standard_normal(12), np.exp(0.5 * rng.standard_normal(10))
    row, column = rng.integers(0, 12, num_rows), rng.integers(0, 10, num_rows)
    value = left[row] * right[column] + 0.3 * rng.standard_normal(num_rows)
    return {"row": row, "column": column, "value": value}


def _network_data(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    x = rng.uniform(-2, 2, num_rows)
    return {"x": x, "y": np.sin(1.5 * x) + 0.3 * rng.standard_normal(num_rows)}


def _ordinal_data(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
    x = _covariates(rng, num_rows, 2)
    latent = x @ [1.0, -0.5] + rng.logistic(size=num_rows)
    return {"x": x, "rating": np.searchsorted([-1.0, 0.5, 2.0], latent)}


MODELS = {
    "linear": Example(linear, _linear_data, {}),
    "poisson": Example(poisson, _poisson_data, {}),
    "negative_binomial": Example(negative_binomial, _negative_binomial_data, {}),
    "robust": Example(robust, _robust_data, {}),
    "multinomial": Example(multinomial, _multinomial_data, {"num_classes": 3}),
    "hierarchical": Example(hierarchical, _hierarchical_data, {"num_groups": 8}),
    "mixture": Example(mixture, _mixture_data, {}),
    "factorisation": Example(factorisation, _factorisation_data, {}),
    "network": Example(network, _network_data, {"num_hidden": 4}, ("curve", "sigma"), longer=10),
    "ordinal": Example(ordinal, _ordinal_data, {"num_levels": 4}),
}


def data_of(name: str, num_rows: int) -> dict[str, np.ndarray]:
    """The simulated data of a model; the same for the same name and size."""
    seed = sorted(MODELS).index(name)
    return MODELS[name].simulate(np.random.default_rng(seed), num_rows)


def nuts(
    name: str, data: dict[str, np.ndarray], num_draws: int = NUM_DRAWS, num_warmup: int = 1000
) -> numpyro.infer.MCMC:
    """NumPyro's own NUTS on the model as it stands, its chains in step with one another."""
    example = MODELS[name]
    mcmc = numpyro.infer.MCMC(
        numpyro.infer.NUTS(example.model),
        num_warmup=num_warmup,
        num_samples=num_draws,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), **jax.tree.map(jnp.asarray, data), **example.kwargs)
    return mcmc
