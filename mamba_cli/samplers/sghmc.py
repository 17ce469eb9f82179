"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin, 2014)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mamba_cli.errors import ConfigError
from mamba_cli.samplers import is_number, require_parameter
from mamba_cli.types import Array, GradientFn, Kernel, PyTree

INTEGRATORS = ("euler", "symplectic")


class SGHMCState(NamedTuple):
    """A position, its momentum, and the gradient the next step will follow."""

    position: Array  # [dim] float32
    gradient: Array  # [dim] float32, of the log posterior at ``position``, on one minibatch
    momentum: Array  # [dim] float32, v: what the position moves by in one step


def sghmc(
    gradient: GradientFn,
    *,
    friction: float = 0.01,
    noise_estimate: float = 0.0,
    integrator: str = "euler",
) -> Kernel:
    r"""SGHMC in the parameterisation of momentum per step.

    ``refresh`` redraws :math:`v \sim N(0, hI)`, and is called before the first of
    every :math:`L` steps; a draw is saved after the last of them. One step is

    .. math::
        v_{k+1} &= (1 - \alpha) v_k + h\, g(\theta_k)
                   + \sqrt{2(\alpha - \hat\beta) h}\;\xi_k, \\
        \theta_{k+1} &= \theta_k + \begin{cases}
            v_k     & \text{euler, the equation as the paper prints it} \\
            v_{k+1} & \text{symplectic}
        \end{cases}

    with :math:`g = -\nabla\tilde U`, :math:`h` = ``step_size``, :math:`\alpha` =
    ``friction`` and :math:`\hat\beta` = ``noise_estimate``. In both the gradient is
    the one at the position the step starts from. In units of time
    :math:`\Delta t = \sqrt h` the velocity is :math:`v / \Delta t`.

    The paper's reading is explicit Euler, which on a Gaussian of curvature
    :math:`\lambda` is stable only for :math:`h\lambda < \alpha` when the momentum is
    not redrawn; the symplectic order is stable for :math:`h\lambda < 4 - 2\alpha`.

    Parameters
    ----------
    gradient
        Estimate of the gradient of the log posterior, ``[dim]``.
    friction
        :math:`\alpha`, per step, in (0, 1].
    noise_estimate
        :math:`\hat\beta`, the estimate of the friction that the gradient noise
        amounts to (:math:`hV/2` for noise of variance :math:`V`), in [0, friction].
    integrator
        ``"euler"`` or ``"symplectic"``.

    Returns
    -------
    Kernel
        ``init`` and ``refresh`` draw :math:`v`, ``step`` draws :math:`\xi`, each from
        its whole key.

    Raises
    ------
    ConfigError
        If a parameter is outside its range.

    References
    ----------
    Coullon, South and Nemeth, appendix "Samplers", SGHMC.
    Chen, Fox and Guestrin, "Stochastic gradient Hamiltonian Monte Carlo" (ICML
    2014), Eq. 15.
    """
    require_parameter(
        "friction",
        friction,
        within=is_number(friction) and 0 < friction <= 1,
        allowed="a number above 0 and at most 1",
    )
    require_parameter(
        "noise_estimate",
        noise_estimate,
        within=is_number(noise_estimate) and 0 <= noise_estimate <= friction,
        allowed=f"a number from 0 to friction={friction}",
    )
    if integrator not in INTEGRATORS:
        raise ConfigError(
            f"sampler.kernel.integrator={integrator!r}: must be one of {', '.join(INTEGRATORS)}"
        )
    noise_variance_per_step_size = 2.0 * (friction - noise_estimate)

    def init(rng_key: Array, position: Array, minibatch: PyTree, step_size: Array) -> SGHMCState:
        momentum = _draw_momentum(rng_key, position, step_size)
        return SGHMCState(position, gradient(position, minibatch), momentum)

    def refresh(rng_key: Array, state: SGHMCState, step_size: Array) -> SGHMCState:
        return state._replace(momentum=_draw_momentum(rng_key, state.position, step_size))

    def step(rng_key: Array, state: SGHMCState, minibatch: PyTree, step_size: Array) -> SGHMCState:
        noise = jax.random.normal(rng_key, state.position.shape, state.position.dtype)
        momentum = (
            (1.0 - friction) * state.momentum
            + step_size * state.gradient
            + jnp.sqrt(noise_variance_per_step_size * step_size) * noise
        )
        displacement = state.momentum if integrator == "euler" else momentum
        position = state.position + displacement
        return SGHMCState(position, gradient(position, minibatch), momentum)

    return Kernel(init, step, refresh)


def _draw_momentum(rng_key: Array, position: Array, step_size: Array) -> Array:
    return jnp.sqrt(step_size) * jax.random.normal(rng_key, position.shape, position.dtype)
