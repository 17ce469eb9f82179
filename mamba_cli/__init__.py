"""Tunes stochastic gradient MCMC with a multi-armed bandit, and says how good the result is.

``mamba-run`` is the command line; from Python::

    import mamba_cli as mamba

    tuned = mamba.tune(model, sampler="sgld_cv", longest_arm_s=10, seed=0)
    draws = mamba.sample(tuned, seconds=30)

Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mamba_cli.api import Draws, Tuned, from_log_density, kernel, sample, tune
    from mamba_cli.models.numpyro import from_numpyro
    from mamba_cli.models.python import from_functions

_HOMES = {
    "tune": "mamba_cli.api",
    "sample": "mamba_cli.api",
    "kernel": "mamba_cli.api",
    "from_log_density": "mamba_cli.api",
    "Tuned": "mamba_cli.api",
    "Draws": "mamba_cli.api",
    "from_functions": "mamba_cli.models.python",
    "from_numpyro": "mamba_cli.models.numpyro",
}

__all__ = [
    "Draws",
    "Tuned",
    "from_functions",
    "from_log_density",
    "from_numpyro",
    "kernel",
    "sample",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
