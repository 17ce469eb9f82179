"""MAMBA: successive halving over a grid of arms (the paper's Algorithm 1).

Every arm is one chain. In rung i each surviving arm is continued for r_i seconds, scored,
and the best floor(|S_i| / eta) go on. A chain continues from rung to rung with its whole
state, and its reward is computed on the whole chain so far; ``score_on="rung"`` restarts
the auxiliary variables at the chain's last position and scores the new draws only, as the
paper's published code did.

An arm that fails (diverged, frozen, no draws, out of memory) has no reward: it is never
promoted, and its record says why. Where every arm of a rung fails, the tuning ends there without
a winner, also after rungs that had usable arms: an arm that came to fail is no result.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from mamba_cli.chain import Chain, LayoutError
from mamba_cli.errors import first_line, is_out_of_memory
from mamba_cli.tuners.halving import Rung, draws_to_score, promote, schedule, total_s
from mamba_cli.tuners.result import Checkpoints, Tuning
from mamba_cli.tuners.scoring import Score, Scorer, record_of
from mamba_cli.types import (
    AnyReward,
    ArmRecord,
    Array,
    Hyperparameters,
    Reporter,
    SilentReporter,
)
from mamba_cli.workbench import Workbench

CHECKPOINT = "tuning"

CHECKPOINT_VERSION = 1
"""Raised when what is saved after a rung is laid out in another way, chains apart."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arm:
    """One configuration and its chain; ``earlier_*`` count chains a restart left behind."""

    index: int
    hyperparameters: Hyperparameters
    chain: Chain | None = None
    earlier_s: float = 0.0
    earlier_steps: int = 0
    earlier_draws: int = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds of sampling in all rungs so far."""
        return self.earlier_s + (self.chain.elapsed_s if self.chain else 0.0)

    @property
    def num_steps(self) -> int:
        """Gradient steps in all rungs so far."""
        return self.earlier_steps + (self.chain.num_steps if self.chain else 0)

    @property
    def num_draws(self) -> int:
        """Draws in all rungs so far."""
        return self.earlier_draws + (self.chain.num_draws if self.chain else 0)

    def restarted(self) -> Arm:
        """The same arm before a new chain, its counts kept."""
        return replace(
            self,
            chain=None,
            earlier_s=self.elapsed_s,
            earlier_steps=self.num_steps,
            earlier_draws=self.num_draws,
        )


@dataclass
class Halving:
    """A MAMBA run in progress: what the rungs share."""

    bench: Workbench
    reward: AnyReward
    rungs: tuple[Rung, ...]
    max_draws: int
    score_on: str
    rng_key: Array
    reporter: Reporter

    def __post_init__(self) -> None:
        self.scorer = Scorer(self.bench, self.reward)

    def run_rung(self, number: int, arms: Sequence[Arm]) -> tuple[list[Arm], list[ArmRecord]]:
        """Continue and score every arm; return those promoted, best first, and the records."""
        rung = self.rungs[number]
        num_scored = draws_to_score(rung, self.rungs, self.max_draws)
        self.reporter.start(
            f"rung {number + 1}/{len(self.rungs)}: {len(arms)} arms x {rung.seconds:.3g} s",
            len(arms) * rung.seconds,
            "s",
        )
        compile_s = self.bench.compile(arm.hyperparameters.batch_size for arm in arms)
        scorer_compile_s = self.scorer.warm_up(num_scored)
        self.bench.calibrate(arm.hyperparameters for arm in arms)
        after: list[Arm] = []
        records: list[ArmRecord] = []
        values: list[float] = []
        best: ArmRecord | None = None
        for arm in arms:
            continued, record = self.run_arm(arm, number, rung, num_scored)
            record = record._replace(
                compile_s=record.compile_s
                + compile_s.pop(record.batch_size, 0.0)
                + (0.0 if records else scorer_compile_s)
            )
            after.append(continued)
            records.append(record)
            values.append(self.scorer.sign * record.reward)
            if promote(values, 1) == [len(values) - 1]:
                best = record
            self.reporter.update(rung.seconds, self.describe(best))
        self.reporter.finish()
        promoted = promote(values, rung.num_promoted)
        records = [r._replace(promoted=index in promoted) for index, r in enumerate(records)]
        return [after[index] for index in promoted], records

    def run_arm(self, arm: Arm, number: int, rung: Rung, num_scored: int) -> tuple[Arm, ArmRecord]:
        """Continue one arm for the rung's seconds and score it."""
        compile_s = 0.0
        try:
            program, compile_s = self.bench.program(arm.hyperparameters.batch_size)
            chain, position = arm.chain, self.bench.start
            if chain is not None and self.score_on == "rung":
                position, arm, chain = chain.position, arm.restarted(), None
            if chain is None:
                key = jax.random.fold_in(jax.random.fold_in(self.rng_key, arm.index), number)
                chain = program.start(key, position, arm.hyperparameters)
            before_s = chain.elapsed_s
            place = f"rung {number}, arm {arm.index}"
            chain = self.bench.pace.run(program, chain, rung.seconds, place, self.bench.clock)
            self.bench.seconds.sampling += chain.elapsed_s - before_s
            chain = chain.compact(2 * num_scored)
            arm = replace(arm, chain=chain)
            key = jax.random.fold_in(jax.random.fold_in(self.rng_key, arm.index), 1000 + number)
            score = self.scorer.score(chain, num_scored, key, rung.seconds)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            score = Score(float("nan"), 0, 0.0, "out_of_memory", first_line(error))
        record = record_of(
            arm.index,
            arm.hyperparameters,
            score,
            rung=number,
            budget_s=rung.seconds,
            compile_s=compile_s,
            elapsed_s=arm.elapsed_s,
            num_steps=arm.num_steps,
            num_draws=arm.num_draws,
        )
        return arm, record

    def describe(self, best: ArmRecord | None) -> str:
        if best is None:
            return "no usable arm yet"
        length = f", L={best.num_integration_steps}" if best.num_integration_steps > 1 else ""
        return (
            f"{self.reward.name} {best.reward:.3g}, "
            f"h={best.step_size:.3g}, n={best.batch_size}{length}"
        )


def tune(
    bench: Workbench,
    reward: AnyReward,
    arms: Sequence[Hyperparameters],
    *,
    reduction_factor: int,
    longest_arm_s: float,
    max_draws: int,
    score_on: str,
    rng_key: Array,
    store: Checkpoints | None = None,
    reporter: Reporter | None = None,
) -> Tuning:
    """Run MAMBA and return the records of all rungs and the winner.

    Parameters
    ----------
    bench
        The model, its start and its compiled chains.
    reward
        What ranks the arms.
    arms
        The hyperparameters to choose from; arms of one batch size share a program.
    reduction_factor
        eta.
    longest_arm_s
        R, the seconds of an arm that reaches the end; compilation and rewards come on top
        and are reported apart.
    max_draws
        Thinned draws scored per arm in the last rung; see ``halving.draws_to_score``.
    score_on
        ``"chain"`` or ``"rung"``.
    rng_key
        Key of the whole tuning; arm and rung are folded in.
    store
        Where finished rungs are kept. A tuning that finds rungs there goes on after them.
    reporter
        Told which rung, how many arms and the best so far.
    """
    reporter = reporter or SilentReporter()
    rungs = schedule(len(arms), reduction_factor, longest_arm_s)
    halving = Halving(bench, reward, rungs, max_draws, score_on, rng_key, reporter)
    everyone = [Arm(index, hyperparameters) for index, hyperparameters in enumerate(arms)]
    records, surviving, first = _resume(store, bench, everyone)
    if first:
        reporter.message(f"resuming after rung {first}/{len(rungs)}: {len(surviving)} arms left")
    else:
        reporter.message(
            f"{len(arms)} arms, {len(rungs)} rungs, {total_s(rungs):.1f} s of sampling in all"
        )
    for number in range(first, len(rungs)):
        if not surviving:
            break
        surviving, of_rung = halving.run_rung(number, surviving)
        records = records + of_rung
        if store is not None:
            store.write_tuning(records)
            _save(store, bench, number + 1, surviving)
    if not surviving:
        reporter.message(
            f"no arm of rung {records[-1].rung + 1}/{len(rungs)} was usable: the tuning ends "
            f"without a winner"
        )
    winners = [r for r in records if r.rung == len(rungs) - 1 and r.promoted]
    return Tuning(records, winners[0] if winners else None)


def _save(store: Checkpoints, bench: Workbench, next_rung: int, arms: Sequence[Arm]) -> None:
    arrays: dict[str, np.ndarray] = {}
    for arm in arms:
        assert arm.chain is not None
        program, _ = bench.program(arm.hyperparameters.batch_size)
        for name, array in program.to_arrays(arm.chain).items():
            arrays[f"arm-{arm.index}/{name}"] = array
    counts = [[a.index, a.earlier_s, a.earlier_steps, a.earlier_draws] for a in arms]
    meta = {"version": CHECKPOINT_VERSION, "next_rung": next_rung, "arms": counts}
    store.save_checkpoint(CHECKPOINT, arrays, meta)


def _resume(
    store: Checkpoints | None, bench: Workbench, arms: Sequence[Arm]
) -> tuple[list[ArmRecord], list[Arm], int]:
    """Records of the finished rungs, the arms that go on, and the number of the next rung.

    What another version of the code saved is not used: the tuning starts again.
    """
    saved = store.load_checkpoint(CHECKPOINT) if store is not None else None
    if store is None or saved is None:
        return [], list(arms), 0
    arrays, meta = saved
    try:
        surviving = _restored(arrays, meta, bench, arms)
    except LayoutError:
        logger.warning("another version saved the finished rungs: the tuning starts again")
        return [], list(arms), 0
    next_rung = int(meta["next_rung"])
    records = [record for record in store.read_tuning() if record.rung < next_rung]
    return records, surviving, next_rung


def _restored(
    arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], bench: Workbench, arms: Sequence[Arm]
) -> list[Arm]:
    if meta.get("version") != CHECKPOINT_VERSION:
        raise LayoutError
    surviving = []
    for index, earlier_s, earlier_steps, earlier_draws in meta["arms"]:
        arm = arms[index]
        program, _ = bench.program(arm.hyperparameters.batch_size)
        prefix = f"arm-{index}/"
        own = {name[len(prefix) :]: a for name, a in arrays.items() if name.startswith(prefix)}
        chain = program.from_arrays(own, arm.hyperparameters, bench.start)
        surviving.append(
            replace(
                arm,
                chain=chain,
                earlier_s=earlier_s,
                earlier_steps=earlier_steps,
                earlier_draws=earlier_draws,
            )
        )
    return surviving
