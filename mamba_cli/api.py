"""``mamba_cli`` from Python: tune a sampler for a model, and draw from it.

Everything goes through the same run as the command line's: configuration composed from ``conf/``,
checked by :mod:`mamba_cli.config`, carried out by :class:`mamba_cli.run.Run`. Without a
``run_dir`` the run's folder is a temporary one.
"""

from __future__ import annotations

import importlib
import io
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import hydra
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from jax import lax
from omegaconf import DictConfig, OmegaConf

from mamba_cli import gradients
from mamba_cli.artifacts import plain
from mamba_cli.chain import Budget, Chain, advance
from mamba_cli.config import build, did_you_mean, group_options
from mamba_cli.console import Console
from mamba_cli.errors import ConfigError, NothingUsableError
from mamba_cli.explain import CONFIG_MODULE, explanation
from mamba_cli.models.own import OwnModel
from mamba_cli.models.python import from_functions
from mamba_cli.posterior_summary import named_draws, summarise
from mamba_cli.run import Run, opened
from mamba_cli.types import (
    Array,
    GradientFn,
    HasNamedParameters,
    Hyperparameters,
    Kernel,
    Model,
    PyTree,
    Reporter,
)
from mamba_cli.workbench import Workbench

NUM_DRAWS = 1000
"""Draws that :func:`sample` keeps of each chain."""

NUM_PIECES = 50
"""In which a chain of a given number of steps is run, so that it can say how far it is."""

_SHOWN_RECORDS = 10


@dataclass(frozen=True, repr=False)
class Tuned:
    """A sampler whose hyperparameters are chosen.

    Attributes
    ----------
    sampler
        Its name, an option of the group ``sampler``.
    winner
        The hyperparameters: ``step_size`` h, ``batch_size`` n, ``num_integration_steps`` L.
    records
        One row an arm and rung: the columns of ``tuning.csv``.
    reward
        What ranked the arms; ``None`` where none was needed.
    bench
        The model, its MAP and the compiled chains.
    higher_is_better
        Of the reward.
    """

    sampler: str
    winner: Hyperparameters
    records: pd.DataFrame
    reward: str | None
    bench: Workbench
    higher_is_better: bool = False

    @property
    def model(self) -> Model:
        """The posterior that was tuned for."""
        return self.bench.model

    def sample(self, **options: Any) -> Draws:
        """:func:`sample` of this sampler."""
        return sample(self, **options)

    @property
    def best(self) -> pd.DataFrame:
        """The last record of every arm: the winner, then the furthest and of those the best."""
        last = self.records.groupby("arm", sort=False).tail(1)
        loss = last["reward"] * (-1.0 if self.higher_is_better else 1.0)
        order = last.assign(loss=loss).sort_values(
            ["promoted", "rung", "loss"], ascending=[False, False, True]
        )
        return order.drop(columns="loss")

    def __repr__(self) -> str:
        arm = self.winner
        length = f", L={arm.num_integration_steps}" if arm.num_integration_steps > 1 else ""
        by = f", by {self.reward} over {self.records['arm'].nunique()} arms" if self.reward else ""
        return (
            f"Tuned({self.model.name}, {self.sampler}: h={arm.step_size:.4g}, "
            f"n={arm.batch_size:,} of {self.model.num_data:,}{length}{by})"
        )

    def _repr_html_(self) -> str:
        columns = ["rung", "step_size", "batch_size", "num_integration_steps", "num_draws"]
        shown = self.best[[*columns, "reward", "status"]].head(_SHOWN_RECORDS)
        return f"<p><code>{self!r}</code></p>{shown.to_html(index=False)}"


@dataclass(frozen=True, repr=False)
class Draws(Mapping[str, np.ndarray]):
    """Draws of a posterior: a dict from a parameter's name to its draws, ``[num_draws, ...]``.

    Chains stand one after the other; ``draws.by_chain[name]`` is ``[num_chains, draws, ...]``. A
    model that does not name its parameters has one, ``position``, ``[num_draws, dim]``.

    Attributes
    ----------
    model
        The posterior.
    sampler, hyperparameters
        What made them.
    positions
        The kept draws, flat, ``[num_chains, draws, dim]`` float32.
    steps
        Gradient steps done when each was made, ``[num_chains, draws]``.
    num_samples
        Draws made, of which those kept are an even selection, over all chains.
    mean, std
        Moments of *all* draws made, ``[num_chains, dim]`` float64, of the flat position.
    elapsed_s
        Seconds of sampling, over all chains.
    """

    model: Model
    sampler: str
    hyperparameters: Hyperparameters
    positions: np.ndarray
    steps: np.ndarray
    num_samples: int
    mean: np.ndarray
    std: np.ndarray
    elapsed_s: float

    @cached_property
    def by_chain(self) -> dict[str, np.ndarray]:
        """The draws of each parameter, ``[num_chains, draws, ...]``."""
        if not isinstance(self.model, HasNamedParameters):
            return {"position": self.positions}
        chains, draws, dim = self.positions.shape
        named = named_draws(self.model, self.positions.reshape(chains * draws, dim))
        return {
            name: array.reshape(chains, draws, *array.shape[1:]) for name, array in named.items()
        }

    def __getitem__(self, name: str) -> np.ndarray:
        array = self.by_chain[name]
        return array.reshape(-1, *array.shape[2:])

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_chain)

    def __len__(self) -> int:
        return len(self.by_chain)

    def summary(self) -> pd.DataFrame:
        """Mean, sd and quantiles of every number, a row each."""
        return pd.DataFrame(summarise(dict(self))).set_index("parameter")

    def log_density(self) -> np.ndarray:
        """Log posterior density of the flat positions over all rows, up to a constant.

        ``[num_chains, draws]``; one pass over the data a draw.
        """
        model, data = self.model, gradients.all_data(self.model)

        @jax.jit
        def of_all(positions: Array, data: PyTree) -> Array:
            def of_one(position: Array) -> Array:
                likelihood = gradients.over_all_rows(model, lambda f: f(position), data)
                return model.log_prior(position) + likelihood

            return lax.map(of_one, positions)

        return np.stack([np.asarray(of_all(jnp.asarray(p), data)) for p in self.positions])

    def to_arviz(self, *, log_density: bool = False) -> Any:
        """The draws as ArviZ has them: ``InferenceData``, or a ``DataTree`` from version 1 on.

        Groups ``posterior`` and ``sample_stats`` (``num_steps``, gradient steps when the draw was
        made; with ``log_density`` also ``lp``, one pass over the data a draw). What made them is in
        the attributes of the posterior.

        Raises
        ------
        ConfigError
            ArviZ is not installed.
        """
        try:
            arviz = importlib.import_module("arviz")
        except ImportError as error:
            raise ConfigError(
                "to_arviz needs ArviZ: pip install 'mamba-cli[arviz]' (or arviz itself)."
            ) from error
        stats = {"num_steps": self.steps}
        if log_density:
            stats["lp"] = self.log_density()
        attributes = {
            "inference_library": "mamba-cli",
            "model": self.model.name,
            "sampler": self.sampler,
            **self.hyperparameters._asdict(),
            "num_samples": self.num_samples,
            "sampling_time": self.elapsed_s,
        }
        return _to_arviz(arviz, self.by_chain, stats, attributes)

    def __repr__(self) -> str:
        chains, draws, _ = self.positions.shape
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in self.items())
        of = f"{chains} x {draws:,} draws" if chains > 1 else f"{draws:,} draws"
        return f"Draws({self.model.name}, {self.sampler}: {of} of {self.num_samples:,}; {shapes})"

    def _repr_html_(self) -> str:
        return f"<p><code>{self!r}</code></p>{self.summary().to_html(max_rows=20)}"


def tune(
    model: Model | str,
    sampler: str = "sgld_cv",
    reward: str | None = None,
    *,
    longest_arm_s: float = 1.0,
    seed: int = 0,
    clock: str = "wall",
    step_sizes: Sequence[float] | None = None,
    batch_percents: Sequence[float] | None = None,
    overrides: Sequence[str] = (),
    run_dir: str | Path | None = None,
    progress: bool = True,
) -> Tuned:
    """Tune a sampler's hyperparameters for a model, by MAMBA.

    Parameters
    ----------
    model
        A :class:`mamba_cli.types.Model`, as :func:`from_functions`, :func:`from_numpyro` and
        :func:`from_log_density` make them; or an option of the group ``model``: ``"logreg"``.
    sampler
        An option of the group ``sampler``: ``"sgld"``, ``"sghmc_cv"``, ...
    reward
        An option of the group ``reward``: ``"ksd"``, ``"fssd"``, ...; ranked as the paper does.
        ``None`` is the recommended tuner, ``tuner=mamba`` of the command line.
    longest_arm_s
        R, the seconds of sampling that the arm which goes furthest gets.
    seed
        Of the tuning's chains.
    clock
        ``"wall"``, or ``"calibrated"``: the same steps whatever else the machine does.
    step_sizes, batch_percents
        The grid; where they are left out it is laid around the model's curvature at its MAP.
    overrides
        Any other key of the configuration, as on the command line:
        ``["tuner.reduction_factor=4", "sampler.kernel.friction=0.1"]``.
    run_dir
        Where the results of ``mamba-run`` are kept, and gone on from if there are some.
    progress
        Whether stages and bars are shown on stderr.

    Returns
    -------
    Tuned
        The winner, the records, and the sampler that is ready to be run.

    Raises
    ------
    ConfigError
        A name or a value is not allowed, or ``run_dir`` holds another run.
    NothingUsableError
        No arm was usable.
    DataError, StorageError
        Data cannot be read; results cannot be written.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mamba_cli as mamba
    >>> def log_density(params):
    ...     return -0.5 * jnp.sum((params["x"] - 3.0) ** 2)
    >>> model = mamba.from_log_density(log_density, {"x": jnp.zeros(2)})
    >>> tuned = mamba.tune(model, "sgld", longest_arm_s=0.2, progress=False)
    >>> draws = tuned.sample(num_steps=20_000)
    >>> draws["x"].shape
    (1000, 2)
    """
    keys = [f"tuner.longest_arm_s={_number('longest_arm_s', longest_arm_s)!r}"]
    if step_sizes is not None:
        keys.append(f"tuner.grid.step_size={[float(size) for size in step_sizes]}")
    if batch_percents is not None:
        keys.append(f"tuner.grid.batch_percent={[float(percent) for percent in batch_percents]}")
    groups = ["tuner=mamba"]
    if reward is not None:
        _check_option("reward", reward)
        groups = ["tuner=mamba_ksd", f"reward@tuner.reward={reward}"]
    asked = [*groups, f"budget.clock={clock}", *keys, *overrides]
    with _run(model, sampler, seed, asked, run_dir, progress) as run:
        best = run.winner()
        bench = run.prepare()
        if best is None:
            best = run.tune(bench)
        records = pd.DataFrame(run.folder.read_tuning())
        ranks = run.parts.reward
    winner = Hyperparameters(
        float(best["step_size"]), int(best["batch_size"]), int(best["num_integration_steps"])
    )
    name, higher = (ranks.name, ranks.higher_is_better) if ranks is not None else (None, False)
    return Tuned(sampler, winner, records, name, bench, higher)


def sample(
    model: Tuned | Model | str,
    sampler: str | None = None,
    *,
    step_size: float | None = None,
    batch_size: int | None = None,
    num_integration_steps: int | None = None,
    seconds: float | None = None,
    num_steps: int | None = None,
    num_draws: int = NUM_DRAWS,
    num_chains: int = 1,
    burn_in_fraction: float = 0.0,
    seed: int = 1,
    overrides: Sequence[str] = (),
    progress: bool = False,
) -> Draws:
    """Draw from a posterior.

    Parameters
    ----------
    model
        What :func:`tune` returned; or a model, with hyperparameters of your own.
    sampler
        With a model: an option of the group ``sampler``.
    step_size, batch_size, num_integration_steps
        With a model: h; n, a tenth of the rows where it is left out; L, 10 where it is left out
        and the sampler redraws its momentum.
    seconds, num_steps
        How long each chain runs: one of the two. With steps, the result depends on the seed alone.
    num_draws
        Draws kept of each chain, evenly spaced; fewer where it does not make so many.
    num_chains
        Chains, one after the other, each from the MAP with a key of its own.
    burn_in_fraction
        Of the seconds or steps, the first, whose draws are dropped; in [0, 1).
    seed
        Of the chains.
    overrides
        With a model: any other key of the configuration.
    progress
        Whether a bar is shown on stderr.

    Raises
    ------
    ConfigError
        A name or a value is not allowed.
    NothingUsableError
        A chain diverged, or made no draw.
    """
    _check_sampling(seconds, num_steps, num_draws, num_chains, burn_in_fraction)
    if isinstance(model, Tuned):
        own = (sampler, step_size, batch_size, num_integration_steps)
        if any(value is not None for value in own) or overrides:
            raise ConfigError(
                "a tuned sampler has its hyperparameters: give sample() a model instead, to choose "
                "sampler, step_size, batch_size, num_integration_steps or overrides."
            )
        tuned = model
    else:
        if sampler is None or step_size is None:
            raise ConfigError("sample() of a model needs a sampler and a step_size.")
        if batch_size is None and not isinstance(model, str):
            batch_size = max(1, model.num_data // 10)
        given = {
            "step_size": step_size,
            "batch_size": batch_size,
            "num_integration_steps": num_integration_steps,
        }
        # Not their repr, which for NumPy's numbers is no number to Hydra.
        keys = [f"tuner.{key}={value}" for key, value in given.items() if value is not None]
        with _run(model, sampler, seed, ["tuner=fixed", *keys, *overrides], None, progress) as run:
            bench = run.prepare()
            point = run.settings.tuner.points(bench.model.num_data)[0]
        tuned = Tuned(sampler, Hyperparameters(*point), pd.DataFrame(), None, bench)
    bench = tuned.bench
    if bench.capacity < 2 * num_draws:
        bench = replace(bench, capacity=2 * num_draws, _programs={})
    with _console(progress) as console:
        chains = [
            _chain(bench, tuned.winner, key, seconds, num_steps, burn_in_fraction, console)
            for key in jax.random.split(jax.random.key(seed), num_chains)
        ]
    kept = min(num_draws, *(chain.num_kept for chain in chains))
    length = tuned.winner.num_integration_steps
    return Draws(
        model=bench.model,
        sampler=tuned.sampler,
        hyperparameters=tuned.winner,
        positions=np.stack([chain.thinned(kept)[0] for chain in chains]),
        steps=np.stack([length * chain.thinned_numbers(kept) for chain in chains]),
        num_samples=sum(chain.num_draws for chain in chains),
        mean=np.stack([chain.mean for chain in chains]),
        std=np.stack([chain.std for chain in chains]),
        elapsed_s=sum(chain.elapsed_s for chain in chains),
    )


def from_log_density(
    log_density: Callable[[PyTree], Array], init: PyTree, *, name: str = "log_density"
) -> OwnModel:
    """A model from a log density without data: whatever JAX can differentiate.

    Every gradient is then exact, and a batch is the whole of it.

    Parameters
    ----------
    log_density
        Of parameters, up to a constant; a scalar.
    init
        A start: a pytree of arrays like the parameters, or a function of a key that returns one.
    name
        Of messages.

    Raises
    ------
    ConfigError
        ``log_density`` or its gradient is not finite at the start, or not a scalar.
    """
    return from_functions(
        log_prior=log_density,
        log_likelihood=lambda params, datum: 0.0,
        data=np.zeros(1, np.float32),
        init=init,
        name=name,
    )


def kernel(sampler: str, gradient: GradientFn, **parameters: Any) -> Kernel:
    """The transition of a sampler alone, for a loop of your own.

    Parameters
    ----------
    sampler
        An option of the group ``sampler``, which is one for its plain gradient and its control
        variates: the gradient is given here.
    gradient
        ``gradient(position, minibatch)``, an estimate of the gradient of the log posterior.
    parameters
        The sampler's own, in place of those of its file: ``friction=0.1``.

    Returns
    -------
    Kernel
        ``init(rng_key, position, minibatch, step_size)``, ``step(rng_key, state, minibatch,
        step_size)`` and for some ``refresh(rng_key, state, step_size)``, pure and jittable.

    Raises
    ------
    ConfigError
        There is no such sampler, or it has no such parameter.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import mamba_cli as mamba
    >>> sgld = mamba.kernel("sgld", jax.grad(lambda x, batch: -0.5 * jnp.sum(x**2)))
    >>> state = sgld.init(jax.random.key(0), jnp.zeros(2), None, 0.1)
    >>> state = jax.jit(sgld.step)(jax.random.key(1), state, None, 0.1)
    >>> state.position.shape
    (2,)
    """
    _check_option("sampler", sampler)
    cfg = _composed([f"sampler={sampler}"])
    own = OmegaConf.to_container(cfg.sampler.kernel)
    assert isinstance(own, dict)
    node = OmegaConf.create({**own, **parameters})
    made: Kernel = build(node, "sampler.kernel")(gradient)
    return made


def _check_option(group: str, option: str) -> None:
    options = group_options()[group]
    if option not in options:
        raise ConfigError(
            f"{group}={option!r} is not an option.{did_you_mean(str(option), options)} "
            f"Options of {group}: {', '.join(options)}."
        )


def _composed(overrides: Sequence[str]) -> DictConfig:
    """The configuration that the command line would compose, whatever Hydra is doing besides."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            return hydra.compose("config", overrides=list(overrides))
    except HydraException as error:
        raise ConfigError(explanation(error, overrides)) from error
    finally:
        GlobalHydra.instance().hydra = outer


@contextmanager
def _run(
    model: Model | str,
    sampler: str,
    seed: int,
    overrides: Sequence[str],
    run_dir: str | Path | None,
    progress: bool,
) -> Iterator[Run]:
    """The run that the arguments describe, in ``run_dir`` or a folder that is gone afterwards."""
    _check_option("sampler", sampler)
    if isinstance(model, str):
        _check_option("model", model)
    elif not callable(getattr(model, "log_likelihood", None)):
        raise ConfigError(
            f"model is a {type(model).__name__}; expected what from_functions, from_numpyro or "
            "from_log_density returns, or the name of an option of the group model."
        )
    own = model if not isinstance(model, str) else None
    chosen = [f"model={model}"] if isinstance(model, str) else ["model=python"]
    with ExitStack() as stack:
        if run_dir is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mamba-")))
        else:
            folder = Path(run_dir)
        cfg = _composed([*chosen, f"sampler={sampler}", f"seed={seed}", *overrides])
        cfg.run_dir = cfg.results_dir = str(folder)
        if own is not None:
            cfg.model.name = own.name
        cfg.stages = ["tune"]
        console = stack.enter_context(_console(progress))
        yield stack.enter_context(opened(cfg, console, model=own, pictures=run_dir is not None))


@contextmanager
def _console(progress: bool) -> Iterator[Console]:
    yield Console() if progress else Console(stream=io.StringIO(), quiet=True)


def _number(name: str, value: float) -> float:
    """``value`` as a float. Raises ``ConfigError`` where it is not a finite number."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} is not allowed: it must be a finite number.")
    return float(value)


def _check_sampling(
    seconds: float | None,
    num_steps: int | None,
    num_draws: int,
    num_chains: int,
    burn_in_fraction: float,
) -> None:
    if (seconds is None) == (num_steps is None):
        raise ConfigError("give one of seconds and num_steps: how long each chain runs.")
    if seconds is not None and not _number("seconds", seconds) > 0:
        raise ConfigError(f"seconds={seconds!r} is not allowed: it must be above 0.")
    counts = {"num_steps": num_steps, "num_draws": num_draws, "num_chains": num_chains}
    for name, value in counts.items():
        if value is not None and not (isinstance(value, Integral) and value >= 1):
            raise ConfigError(
                f"{name}={value!r} is not allowed: it must be an integer of at least 1."
            )
    if not 0.0 <= _number("burn_in_fraction", burn_in_fraction) < 1.0:
        raise ConfigError(
            f"burn_in_fraction={burn_in_fraction!r} is not allowed: it must be at least 0 and "
            "below 1."
        )


def _chain(
    bench: Workbench,
    arm: Hyperparameters,
    rng_key: Array,
    seconds: float | None,
    num_steps: int | None,
    burn_in_fraction: float,
    reporter: Reporter,
) -> Chain:
    """One finished chain from the MAP, its burn-in dropped."""
    program, _ = bench.program(arm.batch_size)
    chain = program.start(rng_key, bench.start, arm)
    total, unit = (seconds, "s") if seconds is not None else (float(num_steps or 0), "step")

    def continued(chain: Chain, share: float) -> Chain:
        if seconds is None:
            return _steps(bench, chain, round(share * total), reporter)
        clock, tick = bench.clock, reporter.update
        return bench.pace.run(program, chain, share * seconds, "sample", clock, tick)

    reporter.start("sampling", total, unit)
    try:
        if burn_in_fraction > 0:
            chain = continued(chain, burn_in_fraction)
            if chain.nonfinite_step is None:
                chain = chain.without_draws()
        chain = continued(chain, 1.0 - burn_in_fraction)
    finally:
        reporter.finish()
    if chain.nonfinite_step is not None:
        raise NothingUsableError(
            f"the chain diverged at step {chain.nonfinite_step} (h={arm.step_size:g}, "
            f"n={arm.batch_size}): choose a smaller step size."
        )
    if chain.num_draws == 0:
        raise NothingUsableError(
            f"no draw in {chain.num_steps} gradient steps: let the chain run for longer."
        )
    return chain.compact()


def _steps(bench: Workbench, chain: Chain, num_steps: int, reporter: Reporter) -> Chain:
    """``chain`` continued by ``num_steps``, or up to where it diverged.

    In pieces whose number does not hang on the clock: sums are rounded between them.
    """
    program, _ = bench.program(chain.hyperparameters.batch_size)
    piece = max(1, num_steps // NUM_PIECES)
    for first in range(0, num_steps, piece):
        if chain.nonfinite_step is not None:
            break
        steps = min(piece, num_steps - first)
        chain = advance(program, chain, Budget(steps=steps), bench.clock)
        reporter.update(steps)
    return chain


def _to_arviz(
    arviz: Any,
    posterior: Mapping[str, np.ndarray],
    stats: Mapping[str, np.ndarray],
    attributes: Mapping[str, Any],
) -> Any:
    """The groups in the type of the ArviZ that is installed."""
    values = {key: plain(value) for key, value in attributes.items()}
    if int(arviz.__version__.split(".")[0]) >= 1:
        tree = arviz.from_dict({"posterior": dict(posterior), "sample_stats": dict(stats)})
        tree["posterior"].attrs.update(values)
        return tree
    data = arviz.from_dict(posterior=dict(posterior), sample_stats=dict(stats))
    data.posterior.attrs.update(values)
    return data
