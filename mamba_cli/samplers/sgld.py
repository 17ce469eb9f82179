"""Stochastic gradient Langevin dynamics (Welling and Teh, 2011)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mamba_cli.types import Array, GradientFn, Kernel, PyTree


class SGLDState(NamedTuple):
    """A position and the gradient the next step will follow."""

    position: Array  # [dim] float32
    gradient: Array  # [dim] float32, of the log posterior at ``position``, on one minibatch


def sgld(gradient: GradientFn) -> Kernel:
    r"""SGLD: the Euler discretisation of the overdamped Langevin diffusion.

    .. math::
        \theta_{k+1} = \theta_k + \frac{h}{2} g(\theta_k) + \sqrt{h}\,\xi_k,
        \qquad \xi_k \sim N(0, I),

    where :math:`g = -\nabla\tilde U` is the gradient estimate and ``step_size`` is
    :math:`h`. Libraries that write :math:`\theta + \epsilon g + \sqrt{2\epsilon}\,\xi`
    have :math:`\epsilon = h/2`.

    On a Gaussian of curvature :math:`\lambda` with gradient noise of variance
    :math:`V` it is stable for :math:`h\lambda < 4` and targets the variance
    :math:`(2 + hV/2) / (\lambda(2 - h\lambda/2))`.

    Parameters
    ----------
    gradient
        Estimate of the gradient of the log posterior, ``[dim]``.

    Returns
    -------
    Kernel
        ``init`` draws nothing; ``step`` draws :math:`\xi` from its whole key.

    References
    ----------
    Coullon, South and Nemeth, "Efficient and generalizable tuning strategies for
    stochastic gradient MCMC", the SGLD equation of the background section.
    Welling and Teh, "Bayesian learning via stochastic gradient Langevin dynamics"
    (ICML 2011), Eq. 4.
    """

    def init(rng_key: Array, position: Array, minibatch: PyTree, step_size: Array) -> SGLDState:
        del rng_key, step_size
        return SGLDState(position, gradient(position, minibatch))

    def step(rng_key: Array, state: SGLDState, minibatch: PyTree, step_size: Array) -> SGLDState:
        noise = jax.random.normal(rng_key, state.position.shape, state.position.dtype)
        position = state.position + 0.5 * step_size * state.gradient + jnp.sqrt(step_size) * noise
        return SGLDState(position, gradient(position, minibatch))

    return Kernel(init, step)
