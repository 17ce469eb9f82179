"""What a tuner optimises: discrepancies between draws and the posterior, and predictions.

A reward is a frozen dataclass that satisfies :class:`mamba_cli.types.Reward` or
:class:`mamba_cli.types.PredictiveReward`; the numbers behind it are pure functions of arrays.
"""

from mamba_cli.rewards.fssd import FiniteSetSteinDiscrepancy, fssd, optimise_test_locations
from mamba_cli.rewards.ksd import KernelSteinDiscrepancy, ksd
from mamba_cli.rewards.linear_ksd import LinearKernelSteinDiscrepancy, linear_ksd
from mamba_cli.rewards.ood import OutOfDistribution
from mamba_cli.rewards.predictive import PredictiveMetric
from mamba_cli.rewards.psd import PolynomialSteinDiscrepancy, psd
from mamba_cli.rewards.sliced_ksd import SlicedKernelSteinDiscrepancy, sliced_ksd
from mamba_cli.rewards.stein_moments import SteinMoments
from mamba_cli.rewards.whitened_ksd import WhitenedKernelSteinDiscrepancy

__all__ = [
    "FiniteSetSteinDiscrepancy",
    "KernelSteinDiscrepancy",
    "LinearKernelSteinDiscrepancy",
    "OutOfDistribution",
    "PolynomialSteinDiscrepancy",
    "PredictiveMetric",
    "SlicedKernelSteinDiscrepancy",
    "SteinMoments",
    "WhitenedKernelSteinDiscrepancy",
    "fssd",
    "ksd",
    "linear_ksd",
    "optimise_test_locations",
    "psd",
    "sliced_ksd",
]
