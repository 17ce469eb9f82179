"""Stochastic gradient Nosé-Hoover thermostat (Ding et al., 2014)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mamba_cli.samplers import is_number, require_parameter
from mamba_cli.types import Array, GradientFn, InitFn, Kernel, PyTree


class ThermostatState(NamedTuple):
    """A position, its momentum, the thermostat, and the gradient to follow next."""

    position: Array  # [dim] float32
    gradient: Array  # [dim] float32, of the log posterior at ``position``, on one minibatch
    momentum: Array  # [dim] float32, v: what the position moves by in one step
    thermostat: Array  # [] float32, alpha: friction per step, one for the whole position


def sgnht(gradient: GradientFn, *, diffusion: float = 0.01) -> Kernel:
    r"""SGNHT: Langevin dynamics whose friction adapts to the gradient noise.

    .. math::
        v_{k+1} &= v_k + h\, g(\theta_k) - \alpha_k v_k + \sqrt{2ah}\;\xi_k, \\
        \theta_{k+1} &= \theta_k + v_{k+1}, \\
        \alpha_{k+1} &= \alpha_k + \frac{v_{k+1}^\top v_{k+1}}{D} - h,

    with :math:`\alpha_0 = a`, :math:`v_0 \sim N(0, hI)`, :math:`g = -\nabla\tilde U`,
    :math:`h` = ``step_size``, :math:`a` = ``diffusion`` and :math:`D` the dimension.
    The thermostat stands still on average only where
    :math:`E\|v\|^2/D = h`, whatever the variance of the gradient noise.

    On a Gaussian of curvature :math:`\lambda` with gradient noise of variance :math:`V`,
    in the limit of many dimensions, the thermostat settles at the smaller root of
    :math:`\alpha(2 - \alpha - h\lambda/2) = 2a + hV` and the positions have the variance
    :math:`(1 - \alpha/2)/\lambda`. Without a real root,
    :math:`2a + hV > (1 - h\lambda/4)^2`, there is no such law and the chain runs away.

    The paper's line for the position, :math:`x_{n+1} = x_{n+1} + v_n`, is a misprint;
    the order here (momentum, position with the *new* momentum, thermostat) is that of
    Ding et al., Algorithm 2.

    Parameters
    ----------
    gradient
        Estimate of the gradient of the log posterior, ``[dim]``.
    diffusion
        :math:`a`, per step, the injected noise and the initial thermostat; 0 or more.
        With 0 all randomness comes from the gradient noise and :math:`v_0`.

    Returns
    -------
    Kernel
        ``init`` draws :math:`v_0`, ``step`` draws :math:`\xi`, each from its whole key.

    Raises
    ------
    ConfigError
        If ``diffusion`` is negative or not a finite number.

    References
    ----------
    Coullon, South and Nemeth, appendix "Samplers", SGNHT.
    Ding et al., "Bayesian sampling using stochastic gradient thermostats" (NeurIPS
    2014), Algorithm 2.
    """
    require_diffusion(diffusion)

    def step(
        rng_key: Array, state: ThermostatState, minibatch: PyTree, step_size: Array
    ) -> ThermostatState:
        noise = jax.random.normal(rng_key, state.position.shape, state.position.dtype)
        momentum = (
            state.momentum
            + step_size * state.gradient
            - state.thermostat * state.momentum
            + jnp.sqrt(2.0 * diffusion * step_size) * noise
        )
        position = state.position + momentum
        thermostat = state.thermostat + jnp.mean(jnp.square(momentum)) - step_size
        return ThermostatState(position, gradient(position, minibatch), momentum, thermostat)

    return Kernel(thermostat_init(gradient, diffusion), step)


def thermostat_init(gradient: GradientFn, diffusion: float) -> InitFn:
    r"""The start of a thermostatted chain: :math:`v_0 \sim N(0, hI)`, :math:`\alpha_0 = a`.

    Shared by every integrator of the SGNHT diffusion.
    """

    def init(
        rng_key: Array, position: Array, minibatch: PyTree, step_size: Array
    ) -> ThermostatState:
        noise = jax.random.normal(rng_key, position.shape, position.dtype)
        return ThermostatState(
            position=position,
            gradient=gradient(position, minibatch),
            momentum=jnp.sqrt(step_size) * noise,
            thermostat=jnp.asarray(diffusion, position.dtype),
        )

    return init


def require_diffusion(diffusion: float) -> None:
    """Refuse a ``diffusion`` that is negative or not a finite number (ConfigError)."""
    require_parameter(
        "diffusion",
        diffusion,
        within=is_number(diffusion) and 0 <= diffusion < float("inf"),
        allowed="a finite number, 0 or above",
    )
