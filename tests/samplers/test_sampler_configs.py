"""The contract of every sampler that has a file in conf/sampler."""

from __future__ import annotations

from functools import cache, partial
from importlib.resources import files

import hydra
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from mamba_cli.types import Kernel

OPTIONS = sorted(
    path.name.removesuffix(".yaml")
    for path in files("mamba_cli.conf").joinpath("sampler").iterdir()
    if path.name.endswith(".yaml")
)
DIM = 3
PRECISION = jnp.array([[2.0, 0.3, 0.0], [0.3, 1.0, -0.2], [0.0, -0.2, 0.5]])


def compose(option: str, *overrides: str) -> DictConfig:
    with hydra.initialize_config_module("mamba_cli.conf", version_base="1.3"):
        return hydra.compose(overrides=[f"+sampler={option}", *overrides]).sampler


def gradient(position: jax.Array, minibatch: jax.Array) -> jax.Array:
    return -PRECISION @ position + minibatch


def instantiate(option: str, gradient_fn=gradient) -> Kernel:
    return hydra.utils.instantiate(compose(option).kernel, _convert_="all")(gradient_fn)


def kernel_of(option: str) -> Kernel:
    """The kernel on the Gaussian, one object for twins that differ in the gradient alone."""
    return _kernel_of(OmegaConf.to_yaml(compose(option).kernel))


@cache
def _kernel_of(kernel_yaml: str) -> Kernel:
    return hydra.utils.instantiate(OmegaConf.create(kernel_yaml), _convert_="all")(gradient)


@partial(jax.jit, static_argnums=0)
def run(kernel: Kernel, rng_key: jax.Array, step_size: jax.Array):
    """The state before the first of 50 steps, those after each, and their minibatches."""
    init_key, refresh_key, steps_key, minibatch_key = jax.random.split(rng_key, 4)
    minibatches = jax.random.normal(minibatch_key, (51, DIM))
    start = kernel.init(init_key, jnp.ones(DIM), minibatches[0], step_size)
    if kernel.refresh is not None:
        start = kernel.refresh(refresh_key, start, step_size)

    def step(state, inputs):
        new = kernel.step(inputs[0], state, inputs[1], step_size)
        return new, new

    _, states = jax.lax.scan(step, start, (jax.random.split(steps_key, 50), minibatches[1:]))
    return start, states, minibatches


def test_the_options_are_those_promised():
    methods = ("sgld", "sghmc", "sgnht", "badodab")
    assert {f"{m}{suffix}" for m in methods for suffix in ("", "_cv")} <= set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_file_says_what_it_is(option):
    config = compose(option)
    assert set(config) == {"name", "gradient", "kernel", "uses_integration_steps"}
    assert config.name == option
    expected = "control_variates" if option.endswith("_cv") else "standard"
    assert config.gradient == expected
    kernel = kernel_of(option)
    assert config.uses_integration_steps == (kernel.refresh is not None)


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.endswith("_cv")])
def test_control_variates_change_the_gradient_and_nothing_else(option):
    assert compose(option).kernel == compose(option.removesuffix("_cv")).kernel


def test_a_kernel_parameter_can_be_overridden():
    config = compose("sghmc_cv", "sampler.kernel.integrator=symplectic")
    assert config.kernel.integrator == "symplectic"


@pytest.mark.parametrize("option", OPTIONS)
def test_the_state_keeps_its_shapes_and_is_float32(option):
    kernel, key, step_size = kernel_of(option), jax.random.key(0), jnp.float32(0.01)
    position, minibatch = jnp.ones(DIM), jnp.zeros(DIM)
    start = jax.eval_shape(kernel.init, key, position, minibatch, step_size)
    assert start.position.shape == start.gradient.shape == (DIM,)
    assert all(x.dtype == jnp.float32 and not x.weak_type for x in jax.tree.leaves(start))
    assert jax.eval_shape(kernel.step, key, start, minibatch, step_size) == start
    if kernel.refresh is not None:
        assert jax.eval_shape(kernel.refresh, key, start, step_size) == start


@pytest.mark.parametrize("option", OPTIONS)
def test_the_gradient_kept_is_that_of_the_position_and_the_last_minibatch(option):
    start, states, minibatches = run(kernel_of(option), jax.random.key(0), jnp.float32(0.01))
    np.testing.assert_allclose(start.gradient, gradient(start.position, minibatches[0]), rtol=1e-6)
    expected = jax.vmap(gradient)(states.position, minibatches[1:])
    np.testing.assert_allclose(states.gradient, expected, rtol=1e-5, atol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states))
    assert np.unique(states.position[:, 0]).size == 50


@pytest.mark.parametrize("option", OPTIONS)
def test_a_step_evaluates_one_gradient_and_a_new_step_size_compiles_nothing(option):
    traced = []

    def counting(position, minibatch):
        traced.append(position)
        return gradient(position, minibatch)

    kernel = instantiate(option, counting)
    state = kernel.init(jax.random.key(0), jnp.ones(DIM), jnp.zeros(DIM), jnp.float32(0.1))
    traced.clear()
    step = jax.jit(kernel.step)
    for step_size in (0.1, 1e-5, 10.0):
        step(jax.random.key(1), state, jnp.zeros(DIM), jnp.float32(step_size))
    assert len(traced) == 1


@pytest.mark.parametrize("option", OPTIONS)
def test_the_same_key_gives_the_same_chain_and_another_key_another(option):
    first, again, other = (
        run(kernel_of(option), jax.random.key(seed), jnp.float32(0.01))[1] for seed in (1, 1, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first.position, other.position)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_huge_step_size_ends_in_numbers_that_are_not_finite(option):
    _, states, _ = run(kernel_of(option), jax.random.key(0), jnp.float32(1e6))
    assert not np.isfinite(states.position[-1]).all()
