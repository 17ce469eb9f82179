"""Types shared by every room of the package.

Conventions, the same everywhere
--------------------------------
* ``position`` is one flat float32 vector ``[dim]``.
* ``log_density`` is the unnormalised log posterior, -U in the paper; its
  gradient at a position is called ``gradient`` inside a sampler and ``score``
  where a Stein discrepancy reads it. Nothing in the package stores grad U.
* ``step_size`` is the paper's h (SGLD moves by h/2 times the gradient).
* Seconds, bytes: in the name's suffix, ``_s`` and ``_bytes``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from mamba_cli.whitening import Whitening

Array = jax.Array
PyTree = Any


class Hyperparameters(NamedTuple):
    """What a tuner chooses.

    ``step_size`` is traced: changing it compiles nothing. ``batch_size`` is a
    shape. ``num_integration_steps`` is L of SGHMC (1 for every sampler that does
    not redraw its momentum) and is traced too.
    """

    step_size: float
    batch_size: int
    num_integration_steps: int = 1


class Model(Protocol):
    """A posterior over one flat position, and what it predicts.

    ``data`` is a pytree of arrays that share the leading axis ``num_data``; a
    minibatch is the same pytree with a leading axis ``batch_size``.
    ``test_inputs`` is a pytree too, with leading axis ``num_test``. Neither is
    ever captured by a compiled program: both are passed as arguments.
    """

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    @property
    def num_data(self) -> int: ...

    @property
    def data(self) -> PyTree: ...

    @property
    def test_inputs(self) -> PyTree: ...

    @property
    def digest(self) -> str:
        """Sha256, in hex, of everything the posterior depends on: data and constants."""
        ...

    def initial_position(self, rng_key: Array) -> Array:
        """A start for the optimiser, ``[dim]``."""
        ...

    def log_prior(self, position: Array) -> Array:
        """Log prior density at ``position`` up to a constant, a scalar."""
        ...

    def log_likelihood(self, position: Array, minibatch: PyTree) -> Array:
        """Log likelihood summed over the rows of ``minibatch``, a scalar."""
        ...

    def predict(self, position: Array, inputs: PyTree) -> Array:
        """Prediction of one draw for ``inputs``, ``[num_inputs, ...]``.

        Its mean over draws is the posterior predictive: class probabilities for a
        classifier, expected ratings for matrix factorisation.
        """
        ...

    def predictive_metrics(self, prediction: Array) -> dict[str, float]:
        """Metrics of one prediction for ``test_inputs`` against the test targets.

        Keys are columns of ``metrics.csv`` (``accuracy``, ``log_loss``, ``rmse``,
        ``ece``, ``mce``); a metric that makes no sense for the model is absent.
        """
        ...


@runtime_checkable
class HasFullLikelihood(Protocol):
    """A model that has a faster likelihood of all rows than of a minibatch of all of them.

    ``full_log_likelihood(position, full_data)`` equals ``log_likelihood(position, data)``.
    """

    @property
    def full_data(self) -> PyTree: ...

    def full_log_likelihood(self, position: Array, full_data: PyTree) -> Array: ...


@runtime_checkable
class HasIdentified(Protocol):
    """A model whose predictions are cut off: what they are before that tells how chains mix.

    A prediction that is nearly always at its bound has no R-hat and no tail worth the name.
    """

    def identified(self, position: Array, inputs: PyTree) -> Array:
        """Smooth functions of the position that the data identify, ``[num_inputs]``."""
        ...


@runtime_checkable
class HasDensityPredictions(Protocol):
    """A model that may predict densities, which can be too small for float32: logs are averaged.

    Where ``predicts_densities``, the posterior predictive, and what ``predictive_metrics`` takes,
    is the log of the mean over draws of ``exp(log_prediction)``.
    """

    @property
    def predicts_densities(self) -> bool: ...

    def log_prediction(self, position: Array, inputs: PyTree) -> Array:
        """Log density of each row of ``inputs``, ``[num_inputs]``."""
        ...


@runtime_checkable
class HasSquaredError(Protocol):
    """A model that predicts numbers: its draws have a ``mse_of_draws``."""

    def squared_error(self, prediction: Array) -> Array:
        """Mean squared error of one prediction for ``test_inputs``, a scalar."""
        ...


@runtime_checkable
class HasLogLikelihoods(Protocol):
    """A model that evaluates many positions at once faster than ``vmap`` would."""

    def log_likelihoods(self, positions: Array, minibatch: PyTree) -> Array:
        """``log_likelihood`` at each of ``positions`` ``[m, dim]``, ``[m]``."""
        ...


@runtime_checkable
class HasNamedParameters(Protocol):
    """A model whose position is made of named parameters, each in its own space."""

    def constrain(self, position: Array) -> dict[str, Array]:
        """The parameters at ``position`` ``[dim]``, by name: what a user's model calls them."""
        ...


class Columns(NamedTuple):
    """Rows of one array, the rows on the fastest axis: ``values`` is ``[dim, n]``.

    Neighbouring rows are then read and worked on as vectors, whatever their length.
    """

    values: Array


@runtime_checkable
class ReadsColumns(Protocol):
    """A model whose likelihood takes its data as :class:`Columns` too, and faster."""

    @property
    def reads_columns(self) -> bool: ...


@runtime_checkable
class HasControlVariates(Protocol):
    """A model that knows a cheap way to the difference of two gradients on the same rows.

    ``centre_statistics(centre, rows)`` are arrays with the leading axis of ``rows``, made once
    for all data; a minibatch of them comes with the minibatch of the data. They may be none.
    ``gradient_difference(position, centre, rows, statistics)`` is the gradient of
    ``log_likelihood(., rows)`` at ``position`` less that at ``centre``, ``[dim]``.
    """

    def centre_statistics(self, centre: Array, rows: PyTree) -> PyTree: ...

    def gradient_difference(
        self, position: Array, centre: Array, rows: PyTree, statistics: PyTree
    ) -> Array: ...


class GradientFn(Protocol):
    """An estimate of the gradient of the log posterior from one minibatch."""

    def __call__(self, position: Array, minibatch: PyTree) -> Array: ...


class SamplerState(Protocol):
    """What every sampler's state has; each sampler adds its own fields.

    ``gradient`` is the estimate made at ``position``: it drives the next step,
    so that one step costs one gradient, and it is there for whoever wants the
    score of the draw.
    """

    @property
    def position(self) -> Array: ...

    @property
    def gradient(self) -> Array: ...


class InitFn(Protocol):
    def __call__(
        self, rng_key: Array, position: Array, minibatch: PyTree, step_size: Array
    ) -> Any: ...


class StepFn(Protocol):
    def __call__(self, rng_key: Array, state: Any, minibatch: PyTree, step_size: Array) -> Any: ...


class RefreshFn(Protocol):
    def __call__(self, rng_key: Array, state: Any, step_size: Array) -> Any: ...


class Kernel(NamedTuple):
    """A sampler, bound to a gradient.

    ``init`` makes a state at a position (auxiliary variables drawn, gradient
    evaluated). ``step`` makes one transition with *one* gradient evaluation, at
    the new position, on the minibatch handed to it. ``refresh``, where there is
    one, is called before the first of every ``num_integration_steps`` steps
    (SGHMC redraws its momentum there) and a draw is saved after the last of
    them; a sampler without it saves a draw every step.
    """

    init: InitFn
    step: StepFn
    refresh: RefreshFn | None = None


class Sampler(Protocol):
    """Makes the kernel for a gradient: the only thing a sampler's file must define."""

    def __call__(self, gradient: GradientFn) -> Kernel: ...


class Selection(NamedTuple):
    """A minibatch that has not been gathered: ``indices`` ``[batch_size]`` into ``rows``.

    Gradients gather it block by block, so that a block is still in the cache when it is used.
    """

    rows: PyTree
    indices: Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["columns"],
    meta_fields=["num_data", "block_rows"],
)
@dataclass(frozen=True)
class Blocks:
    """Rows as columns in blocks, leaves ``[num_blocks, ..., block_rows]``.

    A block is in one piece of memory. The end of the last one may be padding.
    """

    columns: PyTree
    num_data: int
    block_rows: int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["blocks", "chosen"],
    meta_fields=["size", "whole"],
)
@dataclass(frozen=True)
class BlockSelection:
    """A minibatch of whole blocks, which are read where they lie: those numbered ``chosen``.

    Of the last one only so many rows are part of it that there are ``size`` in all. ``whole``
    says that these are all rows of the data.
    """

    blocks: Blocks
    chosen: Array
    size: int
    whole: bool


class AllRows(NamedTuple):
    """The minibatch of all rows, as a model with a likelihood of all rows in one piece has them."""

    full_data: PyTree


class Arrangement(NamedTuple):
    """How a scheme wants the rows to lie.

    ``order_seed`` is the seed of a random order, None for the order they have. Where
    ``block_rows`` is not 0, a model that reads columns gets :class:`Blocks` of so many.
    ``whole`` says that every minibatch is of all rows.
    """

    order_seed: int | None
    block_rows: int
    whole: bool


class Minibatcher(NamedTuple):
    """How minibatches are drawn.

    ``init(rng_key) -> state``, ``draw(rng_key, state, rows) -> (minibatch, state)`` and
    ``select(rng_key, state, rows) -> (selection, state)``, the same minibatch as a
    :class:`Selection` or :class:`BlockSelection` (or the rows themselves, where nothing need be
    gathered). ``rows`` is a pytree with leading axis ``num_data``, or, for a scheme with an
    ``arrangement``, what ``minibatch.arrange`` made of it. All are pure and are called inside
    compiled loops.
    """

    init: Any
    draw: Any
    select: Any
    arrangement: Arrangement | None = None


class FeatureFn(Protocol):
    """Features of a draw whose sum over all draws a chain keeps.

    Called with ``position - origin`` and the sampler's gradient, ``[dim]`` each; the
    value is any pytree of arrays.
    """

    def __call__(self, delta: Array, gradient: Array) -> PyTree: ...


class ScoredDraws(NamedTuple):
    """What a reward sees: thinned draws of one arm and their scores.

    ``positions`` and ``scores`` are ``[num_draws, dim]``; ``scores`` is the
    gradient of the log posterior, over all rows or over the sampler's own
    minibatch, as the reward's ``gradients`` asks. ``whitening`` is there for a
    reward that asks for one, and the same for every arm.
    """

    positions: Array
    scores: Array
    rng_key: Array
    whitening: Whitening | None = None


class Scored(NamedTuple):
    """A reward and its standard error, NaN where there is none.

    The error is that of the estimate, autocorrelation included: how far the value would be
    another time, not how far the draws are from the posterior.
    """

    value: float
    std_error: float


class Reward(Protocol):
    """What a tuner optimises. Lower is better unless ``higher_is_better``.

    One that knows how sure it is returns a :class:`Scored`, any other a number.
    """

    @property
    def name(self) -> str: ...

    @property
    def gradients(self) -> str:
        """Which scores it reads: ``"full"`` (all rows) or ``"stochastic"`` (the sampler's own)."""
        ...

    @property
    def higher_is_better(self) -> bool: ...

    def __call__(self, draws: ScoredDraws) -> float | Scored: ...


@runtime_checkable
class AsksForWhitening(Protocol):
    """A reward in whitened coordinates; the run computes them once, for all arms."""

    @property
    def whitening(self) -> str:
        """Which: a name that ``curvature.whitening_at`` knows."""
        ...


class BlockSums(NamedTuple):
    """Sums of features over consecutive blocks of a chain's draws, from its first draw on.

    ``features`` is the pytree of the features with a leading axis ``num_blocks``, float64;
    ``num_draws`` ``[num_blocks]`` counts the draws of each. All blocks are of one length but the
    last, which may be shorter. ``origin`` ``[dim]`` is what deviations are relative to.
    """

    features: PyTree
    num_draws: np.ndarray
    origin: np.ndarray


@runtime_checkable
class AccumulatedReward(Protocol):
    """A reward read off every draw of an arm, by features summed while sampling.

    The features are of the position and of the sampler's own minibatch gradient there: no draw
    need be stored, and no gradient is computed for the reward.
    """

    @property
    def name(self) -> str: ...

    @property
    def higher_is_better(self) -> bool: ...

    @property
    def whitening(self) -> str: ...

    def features(self, dim: int) -> FeatureFn:
        """What is to be summed, in the coordinates of the sampler."""
        ...

    def __call__(self, sums: BlockSums, whitening: Whitening) -> Scored: ...


class PredictFn(Protocol):
    """The posterior predictive of an arm's thinned draws."""

    def __call__(self, inputs: PyTree) -> Array: ...


@runtime_checkable
class PredictiveReward(Protocol):
    """A reward that reads predictions for rows of the training data that the arms do not see.

    ``model.hold_out(hold_out_fraction, hold_out_seed)`` is what the arms sample; the reward is
    called with that model, whose test part is the rows held out.
    """

    @property
    def name(self) -> str: ...

    @property
    def higher_is_better(self) -> bool: ...

    @property
    def hold_out_fraction(self) -> float: ...

    @property
    def hold_out_seed(self) -> int: ...

    def check(self, model: Model) -> None:
        """Raise ``ConfigError`` where the reward makes no sense for the model."""
        ...

    def __call__(self, model: Model, predict: PredictFn) -> float: ...


AnyReward = Reward | PredictiveReward | AccumulatedReward


@runtime_checkable
class HasHoldOut(Protocol):
    """A model that can set a part of its training rows aside, as its test part."""

    def hold_out(self, fraction: float, seed: int) -> Model: ...


class ArmRecord(NamedTuple):
    """One row of ``tuning.csv``: one arm in one rung.

    ``elapsed_s``, ``num_steps`` and ``num_draws`` count the arm's whole chain so
    far; ``budget_s``, ``compile_s`` and ``reward_s`` this rung alone.
    ``reward_std_error`` is NaN where the reward has none. ``in_best_set`` is true in the last row
    of an arm that may be the best; see ``tuners.confidence``.
    """

    rung: int
    arm: int
    step_size: float
    batch_size: int
    num_integration_steps: int
    budget_s: float
    elapsed_s: float
    compile_s: float
    reward_s: float
    num_steps: int
    num_draws: int
    num_scored: int
    reward: float
    status: str  # ok | diverged | frozen | no_draws | out_of_memory
    reason: str
    promoted: bool
    reward_std_error: float = math.nan
    in_best_set: bool = False


class Reporter(Protocol):
    """Where a long computation says how far it is. The package's own is ``console.Console``."""

    def message(self, text: str) -> None:
        """One line, above any bar."""
        ...

    def start(self, description: str, total: float, unit: str) -> None:
        """Open a bar over ``total`` units (seconds, draws)."""
        ...

    def update(self, amount: float, note: str = "") -> None:
        """Advance the open bar by ``amount``; ``note`` is shown at its end."""
        ...

    def finish(self) -> None:
        """Close the open bar."""
        ...


class SilentReporter:
    """A ``Reporter`` that says nothing."""

    def message(self, text: str) -> None: ...

    def start(self, description: str, total: float, unit: str) -> None: ...

    def update(self, amount: float, note: str = "") -> None: ...

    def finish(self) -> None: ...
