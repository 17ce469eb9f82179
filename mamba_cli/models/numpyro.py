"""A NumPyro model with a data plate, as it stands.

    def model(x, y=None):
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)

The arrays of the data file are its keyword arguments. A minibatch is the model called with some of
their rows: the sites that are observed inside the data plate give the likelihood of each row, all
other sites the prior. Every parameter is moved to the whole real line by the bijection of its
support, ``theta = T(u)``, and the prior has the logarithm of its Jacobian,

    log p(u) = sum over sites of [log p(T(u)) + log |det dT/du|].

So rows have to be independent given the parameters, and every parameter global. What is not is
refused, and the site named: latent variables inside the data plate, discrete latent variables,
observations outside of a data plate, plates of another size around observations.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.primitives import Messenger

from mamba_cli.data.arrays import Columns, checked_rows, on_device, read_data
from mamba_cli.errors import ConfigError
from mamba_cli.models.own import OwnModel, checked, num_rows_of, require_same_layout
from mamba_cli.models.user_code import guarded, load_target
from mamba_cli.types import Array, PyTree

Site = dict[str, Any]
Rows = dict[str, Any]

START_RADIUS = 0.5
"""Starts are uniform in a cube of this half width on the whole real line, as NumPyro's are in 2."""

NUM_STARTS = 50
"""Starts that are tried for one where every density is finite."""

LOCAL = (
    "A minibatch holds a part of the rows, so every parameter must be global: integrate local ones "
    "out, or index a global vector."
)

TRACING = threading.Lock()
"""NumPyro's stack of handlers is one for all threads, and programs are compiled in several."""

NUM_COMPARED = 5
"""Rows whose likelihoods, one at a time and together, must agree."""


def from_target(
    target: str | None = None,
    data: str | None = None,
    columns: Columns | None = None,
    test_data: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    name: str = "numpyro",
) -> OwnModel:
    """The posterior of a NumPyro model that can be imported, given a data file.

    Parameters
    ----------
    target
        ``package.module:name`` or ``path/of/file.py:name`` of the model.
    data
        The data file; see :func:`mamba_cli.data.arrays.read_data`. Its arrays are keyword
        arguments of the model; a bare array is its first argument.
    columns
        Which arrays are made of which columns of a table.
    test_data
        A file with test rows, laid out as ``data``.
    kwargs
        Further keyword arguments of the model, the same for every row.
    name
        Of result files.

    Raises
    ------
    ConfigError
        The model cannot be imported, or is not one that minibatches can be taken of.
    DataError
        The data are missing, or not arrays of one length with finite values.
    """
    for key, value, example in (
        ("target", target, "my_pkg.models:my_model, or my_model.py:my_model"),
        ("data", data, "data.npz"),
    ):
        if value is None:
            raise ConfigError(f"model.{key} has no value: give it, as model.{key}={example}.")
    assert target is not None
    assert data is not None
    source = load_target(target)
    if not callable(source.holder):
        kind = type(source.holder).__name__
        raise ConfigError(f"model.target={target!r}: is a {kind}; expected a NumPyro model.")
    return from_numpyro(
        source.holder,
        read_data(data, columns),
        kwargs=kwargs,
        test_data=None if test_data is None else read_data(test_data, columns),
        name=name,
        label=target,
        data_label=data,
    )


def from_numpyro(
    model: Callable[..., Any],
    data: Mapping[str, Any] | np.ndarray,
    *,
    kwargs: Mapping[str, Any] | None = None,
    test_data: Mapping[str, Any] | np.ndarray | None = None,
    name: str = "model",
    label: str | None = None,
    data_label: str = "data",
) -> OwnModel:
    """The posterior of a NumPyro model given data.

    Parameters
    ----------
    model
        Called with the arrays of ``data`` and ``kwargs`` as keyword arguments.
    data
        Arrays by argument, with a common leading axis; a bare array is the first argument.
    kwargs
        Arguments that are the same for every row: sizes, constants of the prior.
    test_data
        Test rows, laid out as ``data``: their density is measured.
    name
        Of result files.
    label, data_label
        What messages call the model and the data.

    Raises
    ------
    ConfigError
        The model is not one that minibatches can be taken of: the site is named.
    DataError
        The data are not arrays of one length with finite values.
    """
    label = label or str(getattr(model, "__name__", "model"))
    constants = dict(kwargs or {})
    by_name = _by_argument(model, data, label)
    _check_arguments(model, by_name, constants, label)
    rows = on_device(checked_rows(by_name, data_label))
    code = getattr(inspect.unwrap(model), "__code__", None)
    call = guarded(model, label, getattr(code, "co_filename", None))
    posterior = _Posterior(call, constants, _study(call, rows, constants, label), label)
    start = posterior.start_fn(rows)
    try:
        posterior = posterior.checked_rows_apart(rows, start(jax.random.key(0)))
    except ConfigError as error:
        for name in posterior.layout.as_long_as_rows:
            raise ConfigError(
                f"{label}: with a part of the rows the model fails ({error}), and site {name} has "
                f"as many values as there are rows, {num_rows_of(rows):,}. {LOCAL}"
            ) from error
        raise
    own = OwnModel(
        name=name,
        dim=posterior.layout.dim,
        data=rows,
        prior=partial(posterior.log_prior, _first(rows, 1)),
        row_likelihoods=posterior.row_likelihoods,
        start=start,
        named=partial(posterior.named, _first(rows, 1)),
        test_inputs=_test_rows(model, test_data, rows, label, data_label),
    )
    return checked(own, (f"{label}: the start", f"{label}: the prior", f"{label}: the likelihood"))


class Layout(NamedTuple):
    """Where each latent site is in the flat, unconstrained position."""

    unravel: Callable[[Array], dict[str, Array]]
    dim: int
    plates: frozenset[str]  # the data plates
    deterministic: dict[str, tuple[int, ...]]  # shapes of deterministic sites, with all rows
    as_long_as_rows: tuple[str, ...]  # latent sites with an axis of that length, outside of plates


class _OfRows(Messenger):
    """Makes data plates as long as the minibatch, whatever size the model gives them.

    NumPyro scales the sites of a plate that is cut short; ``scales`` has by how much, so that it
    can be taken back: the scale N / n is the gradient estimator's business.
    """

    def __init__(self, fn: Any, plates: frozenset[str], num_rows: int) -> None:
        self.plates, self.num_rows = plates, num_rows
        self.scales: dict[str, float] = {}
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        if msg["type"] == "plate" and msg["name"] in self.plates:
            size = msg["args"][0]
            if size != self.num_rows:
                msg["value"] = jnp.arange(self.num_rows)
                self.scales[msg["name"]] = size / self.num_rows


@dataclass(frozen=True)
class _Posterior:
    """The densities of a NumPyro model as functions of a flat position and of rows."""

    call: Callable[..., Any]
    kwargs: Mapping[str, Any]
    layout: Layout
    label: str
    reported: tuple[str, ...] = ()  # deterministic sites

    def trace(
        self, position: Array, rows: Rows
    ) -> tuple[dict[str, Site], dict[str, Array], dict[str, float]]:
        """The trace at ``position``, the log Jacobian of each site, the scales to take back."""
        unconstrained = self.layout.unravel(position)
        jacobians: dict[str, Array] = {}

        def value_of(site: Site) -> Array | None:
            name = site["name"]
            if site["type"] != "sample" or name not in unconstrained:
                return None
            transform = biject_to(site["fn"].support)
            value = transform(unconstrained[name])
            jacobian = transform.log_abs_det_jacobian(unconstrained[name], value)
            jacobians[name] = jnp.sum(jacobian) * _scale_of(site)
            return value

        resized = _OfRows(self.call, self.layout.plates, num_rows_of(rows))
        # The key is for sites without a value: predictions that the model draws and nobody reads.
        seeded = handlers.seed(handlers.substitute(resized, substitute_fn=value_of), 0)
        with TRACING:
            trace = handlers.trace(seeded).get_trace(**rows, **self.kwargs)
        return trace, jacobians, resized.scales

    def log_prior(self, row: Rows, position: Array) -> Array:
        """Log density of the parameters on the whole real line; ``row`` is any row."""
        trace, jacobians, _ = self.trace(position, row)
        total = jnp.zeros((), jnp.float32)
        for name, jacobian in jacobians.items():
            site = trace[name]
            density = site["fn"].log_prob(site["value"])
            total += jnp.sum(density) * _scale_of(site) + jacobian
        return total

    def row_likelihoods(self, position: Array, rows: Rows) -> Array:
        """Log likelihood of each row, ``[n]``: over the observed sites of the data plates."""
        trace, _, cut = self.trace(position, rows)
        total = jnp.zeros(num_rows_of(rows), jnp.float32)
        for site in trace.values():
            if not _is_observed(site):
                continue
            (frame,) = (f for f in site["cond_indep_stack"] if f.name in self.layout.plates)
            density = site["fn"].log_prob(site["value"])
            rows_first = jnp.moveaxis(density, frame.dim, 0).reshape(len(total), -1)
            scale = _scale_of(site) / cut.get(frame.name, 1.0)
            total += jnp.sum(rows_first, axis=1) * scale
        return total

    def named(self, row: Rows, position: Array) -> dict[str, Array]:
        """Latent sites, constrained, and deterministic sites of the parameters, by name."""
        trace, _, _ = self.trace(position, row)
        names = [*self.layout.unravel(position), *self.reported]
        return {name: trace[name]["value"] for name in trace if name in names}

    def start_fn(self, rows: Rows) -> Callable[[Array], Array]:
        """A key to the first of some random positions where prior and likelihood are finite."""
        some, row = _first(rows, 1024), _first(rows, 1)

        @jax.jit
        def finite(position: Array) -> Array:
            prior = self.log_prior(row, position)
            return jnp.isfinite(prior + jnp.sum(self.row_likelihoods(position, some)))

        def start(rng_key: Array) -> Array:
            for attempt in range(NUM_STARTS):
                position = _uniform(jax.random.fold_in(rng_key, attempt), self.layout.dim)
                if finite(position):
                    break
            return position

        return start

    def checked_rows_apart(self, rows: Rows, position: Array) -> _Posterior:
        """This posterior, once rows have proved independent, with the sites that it reports.

        Raises
        ------
        ConfigError
            The prior, or the likelihood of a row, depends on the other rows.
        """
        some = _first(rows, min(NUM_COMPARED, num_rows_of(rows)))
        found = jax.tree.map(np.asarray, jax.jit(self._apart)(position, some))
        together, alone, priors = found["together"], found["alone"], found["priors"]
        if not np.allclose(together, alone, rtol=1e-3, atol=1e-3):
            raise ConfigError(
                f"{self.label}: the log likelihood of rows together is {together}, and one at a "
                f"time {alone}; rows must be independent given the parameters. If the model "
                "computes something of all rows (a mean, a count), compute it beforehand and pass "
                "it by model.kwargs."
            )
        if not np.allclose(priors, priors[0], rtol=1e-4, atol=1e-4):
            raise ConfigError(
                f"{self.label}: the prior depends on the rows (its log density is {priors} for "
                "different ones); compute what it needs beforehand and pass it by model.kwargs."
            )
        # A deterministic site is worth reporting where it is the same whatever the rows.
        reported = tuple(
            name
            for name, values in found["deterministic"].items()
            if values.shape[1:] == self.layout.deterministic[name] and (values == values[0]).all()
        )
        return replace(self, reported=reported)

    def _apart(self, position: Array, some: Rows) -> dict[str, PyTree]:
        """Densities of some rows together and one at a time, and deterministic sites of each."""
        single = jax.tree.map(lambda leaf: leaf[:, None], some)

        def of_one(row: Rows) -> tuple[Array, Array, dict[str, Array]]:
            trace, _, _ = self.trace(position, row)
            values = {name: jnp.asarray(trace[name]["value"]) for name in self.layout.deterministic}
            return self.row_likelihoods(position, row)[0], self.log_prior(row, position), values

        alone, priors, values = jax.vmap(of_one)(single)
        return {
            "together": self.row_likelihoods(position, some),
            "alone": alone,
            "priors": jnp.append(priors, self.log_prior(some, position)),
            "deterministic": values,
        }


def _uniform(rng_key: Array, dim: int) -> Array:
    return jax.random.uniform(rng_key, (dim,), minval=-START_RADIUS, maxval=START_RADIUS)


def _study(call: Callable[..., Any], rows: Rows, kwargs: Mapping[str, Any], label: str) -> Layout:
    """Trace the model with all rows, refuse what cannot be treated, and lay the position out."""
    num_rows = num_rows_of(rows)
    shapes: dict[str, Array] = {}
    sites: dict[str, Site] = {}

    def traced(rows: Rows) -> dict[str, Array]:
        trace = handlers.trace(handlers.seed(call, 0)).get_trace(**rows, **kwargs)
        sites.update(trace)
        latent = [site for site in trace.values() if _is_latent(site)]
        _refuse_untreatable(trace, num_rows, label)
        return {site["name"]: biject_to(site["fn"].support).inv(site["value"]) for site in latent}

    shapes = jax.eval_shape(traced, rows)
    if not shapes:
        raise ConfigError(f"{label}: has no latent site, so there is nothing to sample.")
    zeros = {name: jnp.zeros(shape.shape, jnp.float32) for name, shape in shapes.items()}
    flat, unravel = ravel_pytree(zeros)
    plates = frozenset(
        frame.name
        for site in sites.values()
        if _is_observed(site)
        for frame in site["cond_indep_stack"]
        if frame.size == num_rows
    )
    deterministic = {
        name: tuple(site["value"].shape)
        for name, site in sites.items()
        if site["type"] == "deterministic"
    }
    as_long = tuple(
        name for name, shape in shapes.items() if num_rows > 1 and num_rows in shape.shape
    )
    return Layout(unravel, len(flat), plates, deterministic, as_long)


def _refuse_untreatable(trace: Mapping[str, Site], num_rows: int, label: str) -> None:
    for site in trace.values():
        if site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
            raise ConfigError(
                f"{label}: plate {site['name']} takes its own subsample ({site['args'][1]} of "
                f"{site['args'][0]}); leave subsample_size out, minibatches are drawn for it."
            )
    observed = [site for site in trace.values() if _is_observed(site)]
    if not observed:
        raise ConfigError(
            f"{label}: no site is observed; expected sites with obs= inside a data plate, and "
            "their values among the arrays of the data."
        )
    data_plates: set[str] = set()
    for site in observed:
        frames = site["cond_indep_stack"]
        if not frames:
            raise ConfigError(
                f"{label}: site {site['name']} is observed outside of any plate; expected a data "
                f'plate around it: with numpyro.plate("data", {num_rows}).'
            )
        around = [frame for frame in frames if frame.size == num_rows]
        if len(around) != 1:
            listed = ", ".join(f"{frame.name} of size {frame.size}" for frame in frames)
            raise ConfigError(
                f"{label}: site {site['name']} is observed inside plate {listed}; the data have "
                f"{num_rows:,} rows, and exactly one plate around it must have that size."
            )
        data_plates.add(around[0].name)
    for site in trace.values():
        _refuse_site(site, data_plates, num_rows, label)


def _refuse_site(site: Site, data_plates: set[str], num_rows: int, label: str) -> None:
    name = site["name"]
    if site["type"] == "param":
        raise ConfigError(
            f"{label}: site {name} is a numpyro.param, which is optimised and not sampled; give it "
            "a prior, as numpyro.sample, or a value, by model.kwargs."
        )
    if not _is_latent(site):
        return
    if site["fn"].support.is_discrete:
        raise ConfigError(
            f"{label}: site {name} is a discrete latent variable, and gradients need continuous "
            "ones; sum it out, as numpyro.distributions.MixtureSameFamily does."
        )
    inside = [frame.name for frame in site["cond_indep_stack"] if frame.name in data_plates]
    local = num_rows > 1 and num_rows in site["fn"].batch_shape and not site["cond_indep_stack"]
    if inside or local:
        where = f"inside the data plate {inside[0]}" if inside else "with one value for each row"
        raise ConfigError(f"{label}: site {name} is a latent variable {where}. {LOCAL}")


def _is_observed(site: Site) -> bool:
    return site["type"] == "sample" and site["is_observed"]


def _is_latent(site: Site) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


def _scale_of(site: Site) -> Any:
    return 1.0 if site.get("scale") is None else site["scale"]


def _first(rows: Rows, count: int) -> Rows:
    first: Rows = jax.tree.map(lambda leaf: leaf[:count], rows)
    return first


def _by_argument(
    model: Callable[..., Any], data: Mapping[str, Any] | np.ndarray, label: str
) -> Rows:
    if isinstance(data, Mapping):
        return dict(data)
    names = list(inspect.signature(model).parameters)
    if not names:
        raise ConfigError(f"{label}: takes no argument; expected one for the data.")
    return {names[0]: data}


def _check_arguments(
    model: Callable[..., Any], data: Rows, kwargs: Mapping[str, Any], label: str
) -> None:
    parameters = inspect.signature(model).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    listed = ", ".join(parameters) or "no arguments"
    for name in (*data, *kwargs):
        if name not in parameters and not takes_any:
            where = "the data have an array" if name in data else "model.kwargs has"
            raise ConfigError(f"{label}: {where} {name}, which the model does not take: {listed}.")
    both = sorted(set(data) & set(kwargs))
    if both:
        raise ConfigError(f"model.kwargs.{both[0]} is among the arrays of the data, too.")
    for name, parameter in parameters.items():
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if needed and name not in data and name not in kwargs:
            raise ConfigError(
                f"{label}: needs {name}, and the data have {', '.join(data)}; name the array so, "
                f"or give a constant, as '+model.kwargs.{name}=3'."
            )


def _test_rows(
    model: Callable[..., Any],
    test_data: Mapping[str, Any] | np.ndarray | None,
    rows: Rows,
    label: str,
    data_label: str,
) -> PyTree:
    if test_data is None:
        return None
    test_rows = checked_rows(
        _by_argument(model, test_data, label), f"the test part of {data_label}"
    )
    require_same_layout(test_rows, rows, "model.test_data", "model.data")
    return on_device(test_rows)
