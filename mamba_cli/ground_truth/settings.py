"""What is asked of the ground truth, and the digest of a question."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from mamba_cli import artifacts
from mamba_cli.errors import ConfigError
from mamba_cli.types import Model

ALGORITHM_VERSION = 1
"""Part of the digest: raised when the draws would follow another law, or moments be others."""

CRITERIA = ("positions", "predictions")


def require(name: str, value: object, allowed: bool, what: str) -> None:
    """Refuse ``value`` of the setting ``name`` where it is not ``allowed``: it must be ``what``."""
    if not allowed:
        raise ConfigError(f"ground_truth.{name}={value}: must be {what}")


@dataclass(frozen=True)
class NutsSettings:
    """What is asked of the ground truth.

    Attributes
    ----------
    num_draws
        Draws after warm-up over all chains together; rounded up to a multiple of ``num_chains``.
    num_warmup
        Steps of adaptation of each chain, not kept.
    num_chains
        Chains, from over-dispersed starts; at least two, so that R-hat means something.
    seed
        Of the starts and the chains.
    whiten
        Sample in coordinates whitened by the Laplace approximation; in many dimensions, scaled one
        by one. Without it NumPyro adapts a diagonal mass matrix.
    target_accept, max_tree_depth
        Of NUTS.
    start_scale
        Standard deviation of the starts, in units of the posterior's.
    max_r_hat, min_ess
        Largest split R-hat and smallest bulk or tail effective sample size, over all coordinates,
        of a result that may be used.
    criterion
        What ``max_r_hat`` and ``min_ess`` are asked of: ``positions``, every coordinate, or
        ``predictions``, those for the test inputs and the log posterior.
    converged_share
        Share of the coordinates, or of the predictions, of which that is asked. The log posterior
        is always among them, and the worst of all is reported.
    block_draws
        Draws per chain between two checkpoints. Changes no draw.
    max_stored_bytes
        Draws beyond this are thinned for R-hat and ESS. Moments are always those of all draws.
    """

    num_draws: int = 20_000
    num_warmup: int = 1_000
    num_chains: int = 4
    seed: int = 0
    whiten: bool = True
    target_accept: float = 0.8
    max_tree_depth: int = 10
    start_scale: float = 1.5
    max_r_hat: float = 1.01
    min_ess: float = 400.0
    criterion: str = "positions"
    converged_share: float = 1.0
    block_draws: int = 50
    max_stored_bytes: int = 256 * 1024**2

    def __post_init__(self) -> None:
        require("num_chains", self.num_chains, self.num_chains >= 2, "an integer, at least 2")
        require(
            "num_draws",
            self.num_draws,
            self.num_draws >= 4 * self.num_chains,
            f"an integer, at least 4 for each of the {self.num_chains} chains",
        )
        require("num_warmup", self.num_warmup, self.num_warmup >= 1, "an integer, at least 1")
        require("max_r_hat", self.max_r_hat, self.max_r_hat > 1, "a number above 1")
        require("min_ess", self.min_ess, self.min_ess > 0, "a number above 0")
        require("start_scale", self.start_scale, self.start_scale > 0, "a number above 0")
        require("block_draws", self.block_draws, self.block_draws >= 1, "an integer, at least 1")
        require(
            "max_tree_depth",
            self.max_tree_depth,
            self.max_tree_depth >= 1,
            "an integer, at least 1",
        )
        require(
            "criterion",
            self.criterion,
            self.criterion in CRITERIA,
            " or ".join(CRITERIA),
        )
        require(
            "converged_share",
            self.converged_share,
            0 < self.converged_share <= 1,
            "above 0 and at most 1",
        )
        require("target_accept", self.target_accept, 0 < self.target_accept < 1, "between 0 and 1")

    @property
    def draws_per_chain(self) -> int:
        return -(-self.num_draws // self.num_chains)


DEFAULT_SETTINGS = NutsSettings()

# Settings that decide whether a result is good enough, or when it is saved; not which it is.
_WITHOUT_EFFECT = (
    "max_r_hat",
    "min_ess",
    "criterion",
    "converged_share",
    "block_draws",
    "max_stored_bytes",
)


def digest(model: Model, settings: NutsSettings) -> str:
    """First 16 hex digits of the sha256 of everything the ground truth depends on.

    That is the model with its data and hyperparameters, the settings that change draws, the seed,
    and the version of this algorithm. Not the MAP: it changes the coordinates, not the posterior.
    """
    chosen = {k: v for k, v in asdict(settings).items() if k not in _WITHOUT_EFFECT}
    question = {
        "algorithm": ALGORITHM_VERSION,
        "model": model.name,
        "model_digest": model.digest,
        "settings": chosen,
    }
    return hashlib.sha256(artifacts.to_json(question).encode()).hexdigest()[:16]
