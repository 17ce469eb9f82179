"""The timed loop that ``published.py`` runs, in an environment that has SGMCMCJax.

    python sgmcmcjax_loop.py ARRAYS.npz MODEL '[["sgld", 1000], ...]' SECONDS

The kernel of one step is compiled; a Python loop calls it, keeps every draw and looks at the clock,
as the paper's experiments did. Writes one line of JSON for each sampler and batch size: the best of
three runs.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sgmcmcjax import kernels

LENGTH = 5
DT = 1e-9  # a chain that is only timed stays where it is


def logistic_regression(arrays: dict[str, np.ndarray]) -> tuple[Any, Any, Any]:
    variance = float(arrays["prior_variance"])

    def log_likelihood(theta: Any, x: Any, y: Any) -> Any:
        return -jnp.logaddexp(0.0, -(2 * y - 1) * jnp.dot(x, theta))

    return log_likelihood, lambda theta: -0.5 / variance * jnp.sum(theta**2), arrays["start_theta"]


def matrix_factorisation(arrays: dict[str, np.ndarray]) -> tuple[Any, Any, Any]:
    alpha, mu0, a0, b0 = (float(arrays[name]) for name in ("alpha", "mu0", "a0", "b0"))
    blocks = [name.removeprefix("start_") for name in arrays if name.startswith("start_")]

    def log_likelihood(p: Any, pair: Any, rating: Any) -> Any:
        return -0.5 * alpha * (rating - jnp.dot(p["users"][pair[0]], p["items"][pair[1]])) ** 2

    def of_side(latent: Any, mean: Any, log_precision: Any) -> Any:
        precision = jnp.exp(log_precision)
        squares = jnp.sum((latent - mean) ** 2, axis=0) + (mean - mu0) ** 2
        normal = 0.5 * (latent.shape[0] + 1) * log_precision - 0.5 * precision * squares
        return jnp.sum(normal + a0 * log_precision - b0 * precision)

    def log_prior(p: Any) -> Any:
        sides = (
            [p[f"{side}{part}"] for part in ("", "_mean", "_log_precision")]
            for side in ("users", "items")
        )
        return sum(of_side(*side) for side in sides)

    return log_likelihood, log_prior, {name: arrays[f"start_{name}"] for name in blocks}


def neural_network(arrays: dict[str, np.ndarray]) -> tuple[Any, Any, Any]:
    names = ("hidden_weights", "hidden_biases", "output_weights", "output_biases")

    def log_likelihood(p: Any, image: Any, one_hot: Any) -> Any:
        hidden = jax.nn.softmax(jnp.dot(image, p["hidden_weights"]) + p["hidden_biases"])
        logits = jnp.dot(hidden, p["output_weights"]) + p["output_biases"]
        return jnp.sum(one_hot * jax.nn.log_softmax(logits))

    def log_prior(p: Any) -> Any:
        return -0.5 * sum(jnp.sum(block**2) for block in p.values())

    return log_likelihood, log_prior, {name: arrays[f"start_{name}"] for name in names}


MODELS = {"logreg": logistic_regression, "pmf": matrix_factorisation, "bnn": neural_network}
BUILD = {
    "sgld": kernels.build_sgld_kernel,
    "sgld_cv": kernels.build_sgldCV_kernel,
    "sghmc": kernels.build_sghmc_kernel,
    "sghmc_cv": kernels.build_sghmcCV_kernel,
    "sgnht": kernels.build_sgnht_kernel,
    "sgnht_cv": kernels.build_sgnhtCV_kernel,
}


def draws_per_s(sampler: str, n: int, model: tuple[Any, Any, Any], data: Any, s: float) -> float:
    """The best of three runs of so many seconds, the draws waited for."""
    log_likelihood, log_prior, start = model
    start = jax.tree_util.tree_map(jnp.asarray, start)
    own: dict[str, Any] = {"L": LENGTH} if sampler.startswith("sghmc") else {}
    if sampler.endswith("_cv"):
        own["centering_value"] = start
    init, kernel, get = BUILD[sampler](
        dt=DT, loglikelihood=log_likelihood, logprior=log_prior, data=data, batch_size=n, **own
    )
    kernel = jax.jit(kernel)
    key = jax.random.PRNGKey(0)
    state = jax.block_until_ready(kernel(0, key, init(key, start)))
    began = time.perf_counter()
    state = jax.block_until_ready(kernel(0, key, state))
    # What is asked for faster than it is made would pile up.
    num_pending = max(1, int(s / 10 / (time.perf_counter() - began)))
    best = 0.0
    for _ in range(3):
        draws: list[Any] = []
        began = time.perf_counter()
        while time.perf_counter() - began < s:
            key, key_step = jax.random.split(key)
            state = kernel(len(draws), key_step, state)
            draws.append(get(state))
            if len(draws) % num_pending == 0:
                jax.block_until_ready(state)
        jax.block_until_ready(draws)
        best = max(best, len(draws) / (time.perf_counter() - began))
    return best


def main() -> None:
    path, name, wanted, seconds = sys.argv[1:]
    arrays = dict(np.load(path))
    model, data = MODELS[name](arrays), (jnp.asarray(arrays["x"]), jnp.asarray(arrays["y"]))
    versions = f"SGMCMCJax 0.2.13, jax {jax.__version__}"
    for sampler, n in json.loads(wanted):
        speed = draws_per_s(sampler, n, model, data, float(seconds))
        line = {"sampler": sampler, "batch_size": n, "draws_per_s": speed, "versions": versions}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
