"""A model from a Python file, or from functions: log densities in JAX, one datum at a time.

The file defines

* ``log_prior(params)`` and ``log_likelihood(params, datum)``, scalars, ``datum`` one row of the
  data;
* ``init(key)``, a start; its pytree of arrays is what ``params`` is;
* ``data``, a pytree of arrays with a common leading axis, or a function that returns it;
* optionally ``test_data``: rows like ``data``, whose density is then measured. With
  ``predict(params, inputs)``, which returns ``[num_inputs, ...]``, it is ``(inputs, targets)``.

Densities are up to a constant. The likelihood of a minibatch is the sum over its rows, so rows are
independent given the parameters; parameters live on the whole real line (transform a scale by
``jnp.exp`` and add the Jacobian to ``log_prior``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mamba_cli.data.arrays import Columns, checked_rows, on_device, read_data
from mamba_cli.errors import ConfigError
from mamba_cli.models.own import OwnModel, checked, require_same_layout, require_scalar
from mamba_cli.models.user_code import Source, guarded, load_file, load_target
from mamba_cli.types import Array, PyTree

REQUIRED = ("log_prior", "log_likelihood", "init")
OPTIONAL = ("data", "predict", "test_data")


def from_file(
    file: str | None = None,
    target: str | None = None,
    data: str | None = None,
    columns: Columns | None = None,
    name: str = "python",
) -> OwnModel:
    """The model that a Python file, or an object in an importable module, defines.

    Parameters
    ----------
    file
        Path of the file.
    target
        ``package.module:name`` of an object with the same attributes, or of a function without
        arguments that returns one; ``path/of/file.py:name`` too. Instead of ``file``.
    data
        A data file in place of what the model itself calls ``data``; see
        :func:`mamba_cli.data.arrays.read_data`. A datum is then a dict.
    columns
        Which arrays are made of which columns of a table.
    name
        Of result files.

    Raises
    ------
    ConfigError
        The file, the module or one of the names is missing, or a function is not what it should
        be: the file, the function and what was expected are named.
    DataError
        The data are not arrays of one length with finite values.
    """
    if (file is None) == (target is None):
        given = "both are given" if file is not None else "neither is given"
        raise ConfigError(
            f"model.file and model.target: {given}; give one, as model.file=my_model.py or "
            "model.target=package.module:name."
        )
    source = load_file(Path(file)) if file is not None else load_target(str(target))
    found = parts_of(source)
    if data is not None:
        found["data"] = read_data(data, columns)
    elif columns is not None:
        raise ConfigError("model.columns is given without model.data, the table it is about.")
    return _build(found, source.label, data or f"{source.label}, data", source.path, name)


def from_functions(
    log_prior: Callable[[PyTree], Any],
    log_likelihood: Callable[[PyTree, PyTree], Any],
    data: PyTree | Callable[[], PyTree],
    init: Callable[[Array], PyTree] | PyTree,
    *,
    predict: Callable[[PyTree, PyTree], Any] | None = None,
    test_data: PyTree = None,
    name: str = "model",
) -> OwnModel:
    """A model from functions, as a file would define them; see the module's docstring.

    Parameters
    ----------
    log_prior, log_likelihood
        Log density of parameters, and of one datum given parameters; scalars, up to a constant.
    data
        A pytree of arrays with a common leading axis, or a function that returns it.
    init
        ``init(key)`` returns a start; or the start itself.
    predict, test_data
        Optional; see the module's docstring.
    name
        Of result files and messages.

    Raises
    ------
    ConfigError
        A function is not what it should be.
    DataError
        The data are not arrays of one length with finite values.
    """
    found = {
        "log_prior": log_prior,
        "log_likelihood": log_likelihood,
        "data": data,
        "init": init if callable(init) else lambda key: init,
        "predict": predict,
        "test_data": test_data,
    }
    path = getattr(getattr(log_likelihood, "__code__", None), "co_filename", None)
    return _build(found, name, f"{name}, data", path, name)


def parts_of(source: Source) -> dict[str, Any]:
    """The functions and data of a source, by name.

    Raises
    ------
    ConfigError
        A required name is missing, or is not a function.
    """
    is_class = isinstance(source.holder, type)
    if is_class or (callable(source.holder) and source.get("log_prior") is None):
        made = guarded(source.holder, f"{source.label}()", source.path)()
        source = Source(made, source.label, source.path)
    for name in REQUIRED:
        value = source.get(name)
        if value is None:
            raise ConfigError(
                f"{source.label}: defines no {name}. Expected log_prior(params), "
                "log_likelihood(params, datum), init(key) and data; predict(params, inputs) and "
                "test_data are optional."
            )
        if not callable(value):
            raise ConfigError(
                f"{source.label}: {name} is a {type(value).__name__}; expected a function."
            )
    return {name: source.get(name) for name in (*REQUIRED, *OPTIONAL)}


def _build(
    found: Mapping[str, Any], label: str, data_label: str, path: str | None, name: str
) -> OwnModel:
    user = {
        part: guarded(function, f"{label}: {part}", path)
        for part, function in found.items()
        if callable(function)
    }
    if found["data"] is None:
        raise ConfigError(
            f"{label}: defines no data. Expected arrays with a common leading axis, or a function "
            "that returns them; or give a file, as model.data=data.npz."
        )
    data = user["data"]() if callable(found["data"]) else found["data"]
    rows = on_device(checked_rows(data, data_label))
    start = _start_fn(user["init"], label)
    flat, unravel = start(jax.random.key(0))

    def prior(position: Array) -> Array:
        value = user["log_prior"](unravel(position))
        return require_scalar(value, f"{label}: log_prior", "one number, the log prior density")

    def of_datum(position: Array, datum: PyTree) -> Array:
        value = user["log_likelihood"](unravel(position), datum)
        return require_scalar(
            value, f"{label}: log_likelihood", "one number, the log likelihood of one datum"
        )

    def initial_position(key: Array) -> Array:
        return start(key)[0]

    def named(position: Array) -> dict[str, Array]:
        leaves = jax.tree_util.tree_flatten_with_path(unravel(position))[0]
        return {
            jax.tree_util.keystr(where, simple=True, separator=".") or "params": leaf
            for where, leaf in leaves
        }

    model = OwnModel(
        name=name,
        dim=len(flat),
        data=rows,
        prior=prior,
        row_likelihoods=jax.vmap(of_datum, in_axes=(None, 0)),
        start=initial_position,
        named=named,
        **_test_part(found, user, unravel, rows, label),
    )
    names = (f"{label}: init", f"{label}: log_prior", f"{label}: log_likelihood")
    return checked(model, names)


def _start_fn(
    init: Callable[[Array], PyTree], label: str
) -> Callable[[Array], tuple[Array, Callable[[Array], PyTree]]]:
    """A key to the flat start and what makes a pytree of it again."""

    def start(key: Array) -> tuple[Array, Callable[[Array], PyTree]]:
        params = init(key)
        leaves = jax.tree_util.tree_flatten_with_path(params)[0]
        if not leaves:
            raise ConfigError(f"{label}: init: returned no array; expected the parameters.")
        for where, leaf in leaves:
            at = jax.tree_util.keystr(where, simple=True, separator=".") or "params"
            array = np.asarray(leaf)
            if array.dtype.kind not in "fiu":
                raise ConfigError(
                    f"{label}: init: {at} holds {array.dtype} values; expected real numbers."
                )
            if not np.all(np.isfinite(array)):
                raise ConfigError(f"{label}: init: {at} is not finite; expected a finite start.")
        as_float = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        flat, unravel = ravel_pytree(as_float)
        return flat, unravel

    return start


def _test_part(
    found: Mapping[str, Any],
    user: Mapping[str, Callable[..., Any]],
    unravel: Callable[[Array], PyTree],
    rows: PyTree,
    label: str,
) -> dict[str, Any]:
    """The model's test part: predictions with targets, rows like the data, or nothing."""
    given, where = found["test_data"], f"{label}, test_data"
    if given is None:
        if found["predict"] is not None:
            raise ConfigError(
                f"{label}: defines predict but no test_data; expected test_data = "
                "(inputs, targets)."
            )
        return {}
    given = user["test_data"]() if callable(given) else given
    if found["predict"] is None:
        test_rows = checked_rows(given, where)
        require_same_layout(test_rows, rows, where)
        return {"test_inputs": on_device(test_rows)}
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ConfigError(
            f"{where}: is a {type(given).__name__}; expected the pair (inputs, targets), because "
            "the model defines predict."
        )
    inputs, targets = checked_rows(tuple(given), where)

    def predict(position: Array, inputs: PyTree) -> Array:
        value = user["predict"](unravel(position), inputs)
        shape, wanted = getattr(value, "shape", ()), len(targets)
        if not shape or shape[0] != jax.tree.leaves(inputs)[0].shape[0]:
            raise ConfigError(
                f"{label}: predict: returned shape {tuple(shape)}; expected a prediction for each "
                f"of the inputs, [{wanted}, ...]."
            )
        return jnp.asarray(value, jnp.float32)

    return {
        "prediction": predict,
        "test_inputs": on_device(inputs),
        "test_targets": np.asarray(targets),
    }
