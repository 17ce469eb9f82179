"""Exact stationary laws of the samplers on a Gaussian target, in float64 NumPy.

A sampler with fixed friction is a linear recursion on a Gaussian target: a chain
whose state moves as x' = A x + B e, with e standard normal, has the stationary
covariance P = A P A' + B B' (the discrete Lyapunov equation). The matrices are
written here from the papers' equations, independently of the package.

Symbols: h step size, curvature the target's lambda, noise_variance the variance V
of the gradient noise, independent at every step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_discrete_lyapunov
from scipy.optimize import brentq


class Recursion(NamedTuple):
    """x' = transition x + noise e."""

    transition: np.ndarray
    noise: np.ndarray

    def stationary_covariance(self) -> np.ndarray:
        assert np.abs(np.linalg.eigvals(self.transition)).max() < 1, "unstable"
        return solve_discrete_lyapunov(self.transition, self.noise @ self.noise.T)


def sgld_recursion(h, curvature, noise_variance) -> Recursion:
    return Recursion(
        np.array([[1 - h * curvature / 2]]),
        np.array([[np.sqrt(h), h / 2 * np.sqrt(noise_variance)]]),
    )


def sghmc_recursion(integrator, h, curvature, noise_variance, injected, friction) -> Recursion:
    """State (position, momentum); injected noise of variance 2 * injected * h a step."""
    position, momentum = np.eye(2)
    new_momentum = (1 - friction) * momentum - h * curvature * position
    new_position = position + (momentum if integrator == "euler" else new_momentum)
    kick = np.sqrt([2 * injected * h, h**2 * noise_variance])
    moved_by_kick = 0 * kick if integrator == "euler" else kick
    return Recursion(np.array([new_position, new_momentum]), np.array([moved_by_kick, kick]))


def refreshed_position_variance(recursion: Recursion, h, num_integration_steps) -> float:
    """Variance of the position every L steps, the momentum redrawn from N(0, h) before."""
    reach = np.linalg.matrix_power(recursion.transition, num_integration_steps)
    added = reach[0, 1] ** 2 * h
    for steps_left in range(num_integration_steps):
        response = np.linalg.matrix_power(recursion.transition, steps_left) @ recursion.noise
        added += np.sum(response[0] ** 2)
    return added / (1 - reach[0, 0] ** 2)


class ThermostatLaw(NamedTuple):
    """Stationary values at the end of a step, in the limit of many dimensions.

    There the thermostat is a constant and the rest of the state a linear recursion.
    """

    thermostat: float
    position_variance: float
    momentum_variance: float


def sgnht_law(h, curvature, noise_variance, diffusion) -> ThermostatLaw:
    """SGHMC's symplectic law at the friction where the momentum variance is h.

    That variance is q / (friction (2 - friction - h lambda / 2)), q = 2ah + h^2 V, so
    the friction solves a quadratic; the smaller root is where the thermostat returns
    to. There the position variance is (1 - friction / 2) / lambda.
    """
    middle = 1 - h * curvature / 4
    thermostat = middle - np.sqrt(middle**2 - 2 * diffusion - h * noise_variance)
    recursion = sghmc_recursion("symplectic", h, curvature, noise_variance, diffusion, thermostat)
    covariance = recursion.stationary_covariance()
    return ThermostatLaw(thermostat, covariance[0, 0], covariance[1, 1])


def badodab_law(h, curvature, noise_variance, diffusion) -> ThermostatLaw:
    """State (position, momentum, gradient noise at the position).

    The friction in O settles where the momentum variance, averaged over the two points
    at which D reads it, is h.
    """
    # Rows over (position, momentum, gradient noise | noise in O, new gradient noise).
    position, momentum, noise, injected, new_noise = np.eye(5)
    scale = np.sqrt(noise_variance)

    def solve(friction):
        before = momentum + h / 2 * (-curvature * position + scale * noise)
        halfway = position + before / 2
        sd = np.sqrt(2 * diffusion * h * (1 - np.exp(-2 * friction)) / (2 * friction))
        after = np.exp(-friction) * before + sd * injected
        new_position = halfway + after / 2
        end = after + h / 2 * (-curvature * new_position + scale * new_noise)
        rows = np.array([new_position, end, new_noise])
        covariance = Recursion(rows[:, :3], rows[:, 3:]).stationary_covariance()
        joint = np.eye(5)
        joint[:3, :3] = covariance
        return before @ joint @ before, after @ joint @ after, covariance

    friction = brentq(lambda x: sum(solve(x)[:2]) / 2 - h, 1e-6, 3.0, xtol=1e-14)
    before_variance, _, covariance = solve(friction)
    # O sees the thermostat of the state after one half D.
    thermostat = friction - (before_variance - h) / 2
    return ThermostatLaw(thermostat, covariance[0, 0], covariance[1, 1])
