"""One transition of each sampler, from its paper's equations: one file each.

A file defines a factory that takes a gradient function and keyword parameters
and returns a ``Kernel``. Every ``step`` evaluates the gradient once, at the
position it arrives at, and leaves it in the state: the next step moves with it.
A kernel uses the random key it is given once, and splits nothing off it for
later, so the caller hands a fresh key to every call.
"""

from __future__ import annotations

from numbers import Real

from mamba_cli.errors import ConfigError


def require_parameter(key: str, value: float, *, within: bool, allowed: str) -> None:
    """Refuse a sampler's parameter that is out of range.

    Parameters
    ----------
    key
        Name of the factory's parameter.
    value
        What it was given.
    within
        Whether the value is allowed; NaN compares false, so it is refused too.
    allowed
        The range in words, for the message.

    Raises
    ------
    ConfigError
        Naming ``sampler.kernel.<key>``, the value and the range.
    """
    if not within:
        raise ConfigError(f"sampler.kernel.{key}={value!r}: must be {allowed}")


def is_number(value: object) -> bool:
    """Whether a configured value can be compared with numbers (YAML may give text)."""
    return isinstance(value, Real) and not isinstance(value, bool)
