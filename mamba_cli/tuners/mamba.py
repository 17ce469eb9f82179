"""MAMBA: successive halving over a grid of arms (the paper's Algorithm 1).

Every arm is one chain. In rung i each surviving arm is continued for r_i seconds, scored,
and the best floor(|S_i| / eta) go on. A chain continues from rung to rung with its whole
state, and its reward is computed on the whole chain so far; ``score_on="rung"`` restarts
the auxiliary variables at the chain's last position and scores the new draws only, as the
paper's published code did.

An arm that fails (diverged, frozen, no draws, out of memory) has no reward: it is never
promoted, and its record says why. Where every arm of a rung fails, the tuning ends there without
a winner, also after rungs that had usable arms: an arm that came to fail is no result.

With ``guards`` an arm must have moved and be stable before its reward counts, and the best arm of
the last rung is continued in a check run before it wins; one that runs away or drifts there is
dropped for the next best. With ``keep_ties`` the seconds that failed arms left unspent keep arms
alive that cannot be told from the last promoted one. See ``guards`` and ``confidence``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from mamba_cli.chain import Chain, LayoutError
from mamba_cli.errors import first_line, is_out_of_memory
from mamba_cli.tuners.confidence import mark_best_set, promote_ties, unspent_s
from mamba_cli.tuners.guards import Guards, Verdict
from mamba_cli.tuners.halving import Rung, draws_to_score, promote, schedule, total_s
from mamba_cli.tuners.result import Checkpoints, Tuning
from mamba_cli.tuners.scoring import Score, Scorer, failure, record_of
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

FEWEST_CHECKED = 32
"""Draws of a check run that are looked at, where fewer are scored."""

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
    guards: Guards | None = None
    check_s: float = 0.0
    keep_ties: bool = False

    def __post_init__(self) -> None:
        self.scorer = Scorer(self.bench, self.reward, self.guards)

    @property
    def checks(self) -> bool:
        """Whether the winner has to pass a check run."""
        return self.guards is not None and self.check_s > 0

    def run_rung(
        self, number: int, arms: Sequence[Arm], earlier: Sequence[ArmRecord] = ()
    ) -> tuple[list[Arm], list[ArmRecord]]:
        """Continue and score every arm; return those that go on, best first, and the records.

        ``earlier`` are the records of the rungs before. From the last rung every usable arm goes
        on to the check run, where there is one, and none is promoted before it.
        """
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
        is_last = number == len(self.rungs) - 1
        if is_last and self.checks:
            return [after[index] for index in promote(values, len(values))], records
        num_extra = 0
        if self.keep_ties and not is_last:
            spent = [r._replace(elapsed_s=self.spent_s(r)) for r in (*earlier, *records)]
            left_s = unspent_s(self.rungs, spent)
            affordable = max(0, int(left_s // self.rungs[number + 1].seconds))
            num_extra = self.bench.pace.num_extra(f"rung {number}", affordable)
        errors = [record.reward_std_error for record in records]
        promoted = promote_ties(values, errors, rung.num_promoted, num_extra)
        indices = [arm.index for arm in arms]
        promoted = self.bench.pace.going_on(number, is_last, indices, promoted)
        if len(promoted) > rung.num_promoted:
            self.reporter.message(
                f"{len(promoted) - rung.num_promoted} more arms go on: they cannot be told from "
                f"the last promoted, and failed arms left seconds for {num_extra}"
            )
        records = [r._replace(promoted=index in promoted) for index, r in enumerate(records)]
        return [after[index] for index in promoted], records

    def check(self, arms: Sequence[Arm], records: Sequence[ArmRecord]) -> list[ArmRecord]:
        """The records with the first of ``arms`` promoted that stays stable in a longer run.

        Those before it, best first, get the status and the reason of what became of them.
        """
        records = list(records)
        place = {record.arm: index for index, record in enumerate(records)}
        for arm in arms:
            index = place[arm.index]
            verdict = self.check_arm(arm)
            if verdict is None:
                records[index] = records[index]._replace(promoted=True)
                break
            reason = (
                f"{self.reward.name} {records[index].reward:.4g}, but in a check run of "
                f"{self.check_s:.3g} s: {verdict.reason}"
            )
            records[index] = records[index]._replace(
                status=verdict.status, reason=reason, reward=math.nan, reward_std_error=math.nan
            )
            self.reporter.message(f"arm {arm.index} is dropped for the next best: {reason}")
        return records

    def check_arm(self, arm: Arm) -> Verdict | None:
        """Continue an arm for ``check_s`` seconds; why it cannot win, or None."""
        assert self.guards is not None
        assert arm.chain is not None
        self.reporter.start(f"check run: arm {arm.index}, {self.check_s:.3g} s", self.check_s, "s")
        place = f"check, arm {arm.index}"
        try:
            program, _ = self.bench.program(arm.hyperparameters.batch_size)
            chain = arm.chain.without_draws()
            before_s = chain.elapsed_s
            chain = self.bench.pace.run(program, chain, self.check_s, place, self.bench.clock)
            self.bench.seconds.check += chain.elapsed_s - before_s
            self.reporter.update(self.check_s)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return Verdict("out_of_memory", first_line(error))
        finally:
            self.reporter.finish()
        failed = failure(chain)
        if failed is not None:
            # Too slow to make two draws is no sign of anything: the arm was scored on others.
            return None if failed[0] == "no_draws" else Verdict(*failed)
        positions, _ = chain.thinned(max(self.max_draws, FEWEST_CHECKED))
        return self.guards.drift(positions)

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
            # By the plan, not by the clock: a run that is repeated decides the same.
            planned_s = [rung.seconds for rung in self.rungs]
            lifetimes = sum(planned_s) / sum(planned_s[: number + 1])
            score = self.scorer.score(chain, num_scored, key, rung.seconds, lifetimes)
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

    def spent_s(self, record: ArmRecord) -> float:
        """What an arm took of its seconds up to a record, by the pace of the run."""
        arm = Hyperparameters(record.step_size, record.batch_size, record.num_integration_steps)
        num_rows = self.bench.model.num_data
        return self.bench.pace.spent_s(arm, num_rows, record.num_steps, record.elapsed_s)

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
    guards: Guards | None = None,
    check_s: float = 0.0,
    keep_ties: bool = False,
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
    guards
        What an arm must pass before its reward counts; None: finite draws that differ.
    check_s
        Seconds of the check run of the winner, on top of T; 0, or no guards: none.
    keep_ties
        Whether unspent seconds keep ties of the last promoted arm alive.
    """
    reporter = reporter or SilentReporter()
    rungs = schedule(len(arms), reduction_factor, longest_arm_s)
    halving = Halving(
        bench, reward, rungs, max_draws, score_on, rng_key, reporter, guards, check_s, keep_ties
    )
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
        surviving, of_rung = halving.run_rung(number, surviving, records)
        records = records + of_rung
        if store is not None:
            store.write_tuning(records)
            _save(store, bench, number + 1, surviving)
    if not surviving:
        reporter.message(
            f"no arm of rung {records[-1].rung + 1}/{len(rungs)} was usable: the tuning ends "
            f"without a winner"
        )
    elif halving.checks:
        records = halving.check(surviving, records)
    return finished(records, len(rungs), halving.scorer.sign)


def finished(records: Sequence[ArmRecord], num_rungs: int, sign: float) -> Tuning:
    """The tuning that these records of all rungs are, with the set of arms that may be the best.

    ``sign`` times the reward gives a number of which lower is better.
    """
    marked = mark_best_set(records, sign)
    winners = [r for r in marked if r.rung == num_rungs - 1 and r.promoted]
    return Tuning(marked, winners[0] if winners else None)


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
