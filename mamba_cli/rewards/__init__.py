"""What a tuner optimises: discrepancies between draws and the posterior.

A reward is a frozen dataclass that satisfies :class:`mamba_cli.types.Reward`; the numbers behind
it are pure functions of arrays.
"""

from mamba_cli.rewards.fssd import FiniteSetSteinDiscrepancy, fssd, optimise_test_locations
from mamba_cli.rewards.ksd import KernelSteinDiscrepancy, ksd

__all__ = [
    "FiniteSetSteinDiscrepancy",
    "KernelSteinDiscrepancy",
    "fssd",
    "ksd",
    "optimise_test_locations",
]
