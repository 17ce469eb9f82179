"""BADODAB, a symmetric splitting of the SGNHT diffusion (Leimkuhler and Shang, 2016)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mamba_cli.samplers.sgnht import ThermostatState, require_diffusion, thermostat_init
from mamba_cli.types import Array, GradientFn, Kernel, PyTree


def badodab(gradient: GradientFn, *, diffusion: float = 0.01) -> Kernel:
    r"""BADODAB in the parameterisation of SGNHT, so that ``step_size`` means the same.

    **The diffusion.** The adaptive Langevin system with unit mass and temperature is

    .. math::
        dq = p\,dt, \quad
        dp = g(q)\,dt - \xi p\,dt + \sigma_A\,dW, \quad
        d\xi = \mu^{-1}(p^\top p - D)\,dt .

    SGNHT is this system with thermal mass :math:`\mu = D` and
    :math:`\sigma_A^2 = 2A`. It is split into four parts, each solved exactly over a
    time :math:`t`:

    .. math::
        \text{A:}&\quad q \leftarrow q + t\,p \\
        \text{B:}&\quad p \leftarrow p + t\,g(q) \\
        \text{D:}&\quad \xi \leftarrow \xi + \frac{t}{\mu}(p^\top p - D) \\
        \text{O:}&\quad p \leftarrow e^{-\xi t} p
            + \sigma_A \sqrt{\frac{1 - e^{-2\xi t}}{2\xi}}\;\eta,
            \qquad \eta \sim N(0, I)

    and BADODAB applies B, A, D for half a step :math:`\Delta t/2`, O for a whole one,
    then D, A, B for half a step, the last B with the gradient at the new position.

    **Per step instead of per unit of time.** Put :math:`v = p\,\Delta t`,
    :math:`h = \Delta t^2`, :math:`\alpha = \xi\,\Delta t`, :math:`a = A\,\Delta t` and
    :math:`\mu = D`. Then

    * A over :math:`\Delta t/2`: :math:`\theta \leftarrow \theta + v/2`;
    * B over :math:`\Delta t/2`, times :math:`\Delta t`:
      :math:`v \leftarrow v + \tfrac h2 g`;
    * D over :math:`\Delta t/2`, times :math:`\Delta t`:
      :math:`\tfrac{\Delta t^2}{2D}(p^\top p - D) = \tfrac12(v^\top v/D - h)`, so
      :math:`\alpha \leftarrow \alpha + \tfrac12(v^\top v/D - h)`;
    * O over :math:`\Delta t`, times :math:`\Delta t`: the decay is :math:`e^{-\alpha}` and
      the variance of the noise :math:`\Delta t^2\, 2A\,(1 - e^{-2\alpha})\Delta t/(2\alpha)
      = 2ah\,\frac{1 - e^{-2\alpha}}{2\alpha}`, so
      :math:`v \leftarrow e^{-\alpha} v
      + \sqrt{2ah\,\frac{1 - e^{-2\alpha}}{2\alpha}}\;\eta`.

    To first order in :math:`\alpha`, :math:`a` and :math:`h` the sum of the parts is the
    step of ``sgnht``. The variance in O is positive for either sign of :math:`\alpha`
    and tends to :math:`2ah` as :math:`\alpha \to 0`; see ``exprel``.

    **What holds exactly.** The thermostat stands still on average only where
    :math:`v^\top v/D`, averaged over the two D parts (immediately before and after O),
    is :math:`h`. These lie a half kick on either side of the momentum of the state, so
    that :math:`E\|v\|^2/D + \tfrac{h^2}{4} E\|g\|^2/D = h` in the states returned. On a
    Gaussian of curvature :math:`\lambda`, with exact gradients and in the limit of many
    dimensions, the positions have exactly the variance :math:`1/\lambda` for every
    :math:`h\lambda < 4`; with noisy gradients the error is of second order in
    :math:`\Delta t`, where that of ``sgnht`` is of first.

    Parameters
    ----------
    gradient
        Estimate of the gradient of the log posterior, ``[dim]``.
    diffusion
        :math:`a`, per step, the injected noise and the initial thermostat; 0 or more.

    Returns
    -------
    Kernel
        ``init`` draws :math:`v_0 \sim N(0, hI)`, ``step`` draws :math:`\eta`, each from
        its whole key. The gradient of the last B is kept for the first B of the next
        step: one evaluation a step.

    Raises
    ------
    ConfigError
        If ``diffusion`` is negative or not a finite number.

    References
    ----------
    Leimkuhler and Shang, "Adaptive thermostats for noisy gradient systems", SIAM J.
    Sci. Comput. 38(2), A712-A736 (2016): the adaptive Langevin system and its BADODAB
    splitting. Ding et al. (2014) for the diffusion in the parameterisation of SGNHT.
    """
    require_diffusion(diffusion)

    def step(
        rng_key: Array, state: ThermostatState, minibatch: PyTree, step_size: Array
    ) -> ThermostatState:
        noise = jax.random.normal(rng_key, state.position.shape, state.position.dtype)
        half_kick = 0.5 * step_size

        momentum = state.momentum + half_kick * state.gradient
        position = state.position + 0.5 * momentum
        thermostat = _half_thermostat(state.thermostat, momentum, step_size)
        momentum = _ornstein_uhlenbeck(momentum, thermostat, diffusion, step_size, noise)
        thermostat = _half_thermostat(thermostat, momentum, step_size)
        position = position + 0.5 * momentum
        new_gradient = gradient(position, minibatch)
        momentum = momentum + half_kick * new_gradient
        return ThermostatState(position, new_gradient, momentum, thermostat)

    return Kernel(thermostat_init(gradient, diffusion), step)


def _half_thermostat(thermostat: Array, momentum: Array, step_size: Array) -> Array:
    """D over half a step."""
    return thermostat + 0.5 * (jnp.mean(jnp.square(momentum)) - step_size)


def _ornstein_uhlenbeck(
    momentum: Array, thermostat: Array, diffusion: float, step_size: Array, noise: Array
) -> Array:
    """O over a whole step: the exact solution at fixed friction, of either sign."""
    variance = 2.0 * diffusion * step_size * exprel(-2.0 * thermostat)
    return jnp.exp(-thermostat) * momentum + jnp.sqrt(variance) * noise


def exprel(x: Array) -> Array:
    r"""The relative exponential :math:`(e^x - 1)/x`, continued by 1 at :math:`x = 0`.

    Positive for every :math:`x`, and without cancellation or 0/0 near zero.
    """
    return jnp.where(jnp.abs(x) < 1e-6, 1.0 + 0.5 * x, jnp.expm1(x) / x)
