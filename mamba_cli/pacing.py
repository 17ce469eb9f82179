"""How many gradient steps a chain's seconds are, and the ledger that makes it repeatable.

A chain is a deterministic function of its key and of the steps it made, so that a run timed by
the wall clock is repeated exactly by whoever knows the steps. A :class:`Pace` turns seconds into
steps, and notes every compiled dispatch in a :class:`StepLedger`:

* :class:`WallClock`: a chain runs until its seconds are over. What else the machine does takes
  steps away.
* :class:`Calibrated`: the cost per step c(n, L) of a batch size and a number of integration steps
  is measured once, with nothing else running, and s seconds are then round(s / c(n, L)) steps.
* :class:`Replayed`: the steps of an earlier run's ledger.

The sums that a chain keeps are in single precision within a dispatch and in double precision
between dispatches, which is why the ledger has the length of every dispatch and not their total.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from mamba_cli import quiet
from mamba_cli.chain import Budget, Chain, ChainProgram, Clock, advance
from mamba_cli.errors import DataError, first_line, is_out_of_memory
from mamba_cli.types import Hyperparameters

LEDGER_VERSION = 1
"""Raised when what a ledger holds changes its meaning."""

PIECE_S = 0.5
"""How often a long chain says how far it is; a piece loses at most half a percent of it."""

NUM_TIMED = 5
"""Dispatches of which a calibration takes the median."""

TIMED_S = 0.04
"""Seconds that each of them aims for: many steps where a step is short, one where it is long."""

CALIBRATION_STEP_SIZE = 1e-12
"""A chain that is only timed stays where it is, so that it cannot diverge."""

Tick = Callable[[float], None]
"""Told the seconds of budget that went by since the last call."""


@dataclass
class StepLedger:
    """Every dispatch of every chain of a run, and what the steps cost.

    Parameters
    ----------
    dispatches
        Gradient steps of each dispatch, by place (``"rung 0, arm 12"``). Steps asked for: one
        that was not finite ends its dispatch early.
    failures
        Places where there was not enough memory, with the system's words.
    costs_s
        Seconds per gradient step by shape (``"n=1000 of 100000, L=1"``), where they were measured.
    num_extra
        Arms that unspent seconds were enough for after a rung, beyond those that it promotes, by
        rung (``"rung 0"``).
    """

    dispatches: dict[str, list[int]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    costs_s: dict[str, float] = field(default_factory=dict)
    num_extra: dict[str, int] = field(default_factory=dict)

    def to_dict(self, clock: str) -> dict[str, Any]:
        """The content of ``steps.json``; ``clock`` is what paced the run."""
        return {"version": LEDGER_VERSION, "clock": clock, **vars(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepLedger:
        """What :meth:`to_dict` made. Raises ``ValueError`` where it is something else."""
        if values.get("version") != LEDGER_VERSION:
            raise ValueError(f"version {values.get('version')!r}, expected {LEDGER_VERSION}")
        try:
            return cls(
                {str(k): [int(n) for n in v] for k, v in values["dispatches"].items()},
                {str(k): str(v) for k, v in values["failures"].items()},
                {str(k): float(v) for k, v in values["costs_s"].items()},
                # Not in the ledgers of runs before there were any.
                {str(k): int(v) for k, v in values.get("num_extra", {}).items()},
            )
        except (KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"not a ledger of steps: {error!r}") from error


class Pace(Protocol):
    """Continues chains for a budget of seconds, and notes what it did."""

    name: str
    ledger: StepLedger

    def prepare(
        self, programs: Iterable[tuple[ChainProgram, Hyperparameters]], start: Any, clock: Clock
    ) -> None:
        """Called with compiled programs before any of them is paced, while nothing else runs."""
        ...

    def run(
        self,
        program: ChainProgram,
        chain: Chain,
        seconds: float,
        place: str,
        clock: Clock,
        tick: Tick | None = None,
    ) -> Chain:
        """``chain`` continued by ``seconds``, or up to where it diverged. Consumes ``chain``.

        ``place`` names the piece in the ledger; running it again overwrites what is there.
        """
        ...

    def left_s(self, end_s: float, chain: Chain, planned_s: float) -> float:
        """What is left of ``end_s`` for a chain that was given ``planned_s`` of it before."""
        ...

    def spent_s(
        self, arm: Hyperparameters, num_rows: int, num_steps: int, elapsed_s: float
    ) -> float:
        """What an arm took of its seconds, by what they are here; ``elapsed_s`` by the clock."""
        ...

    def num_extra(self, place: str, affordable: int) -> int:
        """How many more arms go on after a rung, where seconds are left for ``affordable``."""
        ...

    def going_on(
        self, number: int, is_last: bool, arms: Sequence[int], promoted: list[int]
    ) -> list[int]:
        """Which of ``arms`` go on after rung ``number``, as places in it; ``promoted`` should."""
        ...


class _Noting:
    """What every pace does with its ledger."""

    name = ""

    def __init__(self, ledger: StepLedger | None = None) -> None:
        self.ledger = ledger or StepLedger()

    def prepare(
        self, programs: Iterable[tuple[ChainProgram, Hyperparameters]], start: Any, clock: Clock
    ) -> None: ...

    def left_s(self, end_s: float, chain: Chain, planned_s: float) -> float:
        return end_s - planned_s

    def spent_s(
        self, arm: Hyperparameters, num_rows: int, num_steps: int, elapsed_s: float
    ) -> float:
        return elapsed_s

    def num_extra(self, place: str, affordable: int) -> int:
        self.ledger.num_extra[place] = affordable
        return affordable

    def going_on(
        self, number: int, is_last: bool, arms: Sequence[int], promoted: list[int]
    ) -> list[int]:
        return promoted

    @contextmanager
    def _noting(self, place: str) -> Iterator[list[int]]:
        """The list that the dispatches of ``place`` are noted in, empty at first."""
        noted: list[int] = []
        self.ledger.failures.pop(place, None)
        self.ledger.dispatches[place] = noted
        try:
            yield noted
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if is_out_of_memory(error):
                del self.ledger.dispatches[place]
                self.ledger.failures[place] = first_line(error)
            raise


class WallClock(_Noting):
    """Seconds are those of the clock.

    With a ``tick``, a chain is run in pieces of ``PIECE_S``.
    """

    name = "wall"

    def run(
        self,
        program: ChainProgram,
        chain: Chain,
        seconds: float,
        place: str,
        clock: Clock,
        tick: Tick | None = None,
    ) -> Chain:
        with self._noting(place) as noted:
            if tick is None:
                return advance(program, chain, Budget(seconds=seconds), clock, noted)
            end_s, piece_s = chain.elapsed_s + seconds, PIECE_S
            while chain.nonfinite_step is None:
                remaining_s = end_s - chain.elapsed_s
                pieces = max(1, round(remaining_s / piece_s))
                steps_before, before_s = chain.num_steps, chain.elapsed_s
                chain = advance(program, chain, Budget(seconds=remaining_s / pieces), clock, noted)
                tick(min(chain.elapsed_s, end_s) - min(before_s, end_s))
                if pieces == 1 or chain.elapsed_s >= end_s:
                    break
                if chain.num_steps == steps_before:
                    piece_s = remaining_s  # a step is longer than a piece: the rest in one go
        return chain

    def left_s(self, end_s: float, chain: Chain, planned_s: float) -> float:
        return end_s - chain.elapsed_s


class Calibrated(_Noting):
    """Seconds are steps at a cost that was measured before, with nothing else running."""

    name = "calibrated"

    def prepare(
        self, programs: Iterable[tuple[ChainProgram, Hyperparameters]], start: Any, clock: Clock
    ) -> None:
        for program, hyperparameters in programs:
            try:
                self.cost_s(program, hyperparameters, start, clock)
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                if not is_out_of_memory(error):  # the arm that needs it will say so
                    raise

    def cost_s(
        self, program: ChainProgram, arm: Hyperparameters, start: Any, clock: Clock
    ) -> float:
        """Seconds per gradient step of a shape, measured the first time it is asked for."""
        shape = shape_of(program.num_rows, arm)
        if shape not in self.ledger.costs_s:
            program.compile(start)
            with quiet.alone():
                self.ledger.costs_s[shape] = measure_cost_s(program, arm, start, clock)
        return self.ledger.costs_s[shape]

    def spent_s(
        self, arm: Hyperparameters, num_rows: int, num_steps: int, elapsed_s: float
    ) -> float:
        cost_s = self.ledger.costs_s.get(shape_of(num_rows, arm))
        return elapsed_s if cost_s is None else num_steps * cost_s

    def run(
        self,
        program: ChainProgram,
        chain: Chain,
        seconds: float,
        place: str,
        clock: Clock,
        tick: Tick | None = None,
    ) -> Chain:
        cost_s = self.cost_s(program, chain.hyperparameters, chain.position, clock)
        remaining = round(seconds / cost_s)
        piece = remaining if tick is None else max(1, round(PIECE_S / cost_s))
        with quiet.shared(), self._noting(place) as noted:
            while remaining > 0 and chain.nonfinite_step is None:
                steps = min(piece, remaining)
                chain = advance(program, chain, Budget(steps=steps), clock, noted)
                remaining -= steps
                if tick is not None:
                    tick(steps * cost_s)
        return chain


class Replayed(_Noting):
    """Steps are those of an earlier run.

    One that ``follows`` it has its arms go on from rung to rung too, whatever they are worth now.
    """

    name = "replay"

    def __init__(self, earlier: StepLedger, *, follows: bool = False) -> None:
        super().__init__(StepLedger(costs_s=dict(earlier.costs_s)))
        self.earlier, self.follows = earlier, follows

    def run(
        self,
        program: ChainProgram,
        chain: Chain,
        seconds: float,
        place: str,
        clock: Clock,
        tick: Tick | None = None,
    ) -> Chain:
        if place in self.earlier.failures:
            raise MemoryError(self.earlier.failures[place])
        if place not in self.earlier.dispatches:
            raise DataError(
                f"the ledger of steps has no entry for {place}: the run that is to be repeated "
                f"did not come so far, or took another turn"
            )
        planned = self.earlier.dispatches[place]
        with self._noting(place) as noted:
            for steps in planned:
                chain = advance(program, chain, Budget(steps=steps), clock, noted)
                if tick is not None:
                    tick(seconds * steps / sum(planned))
        return chain

    def num_extra(self, place: str, affordable: int) -> int:
        # What was left by the clock is not left again.
        return super().num_extra(place, self.earlier.num_extra.get(place, affordable))

    def going_on(
        self, number: int, is_last: bool, arms: Sequence[int], promoted: list[int]
    ) -> list[int]:
        if is_last or not self.follows:
            return promoted
        # Those whose chains have steps on record, the ones that would go on by themselves first.
        went = self.earlier.dispatches.keys() | self.earlier.failures.keys()
        there = [i for i, arm in enumerate(arms) if f"rung {number + 1}, arm {arm}" in went]
        return [i for i in promoted if i in there] + [i for i in there if i not in promoted]


def shape_of(num_rows: int, arm: Hyperparameters) -> str:
    """What the cost of a step depends on, as the ledger writes it."""
    return f"n={arm.batch_size} of {num_rows}, L={arm.num_integration_steps}"


def measure_cost_s(program: ChainProgram, arm: Hyperparameters, start: Any, clock: Clock) -> float:
    """The cost of a gradient step in seconds: the median of ``NUM_TIMED`` warm dispatches.

    Parameters
    ----------
    program
        Compiled or not.
    arm
        Its L is that of the steps timed. The step size is not: a chain that hardly moves costs
        the same and cannot diverge.
    start
        Where the chain is, ``[dim]``.
    clock
        Seconds.
    """
    program.compile(start)
    # A whole number of draws, so that a draw's share of the work is in it.
    length = arm.num_integration_steps
    guess_s = program.cost_per_step_s or TIMED_S
    timed = arm._replace(step_size=CALIBRATION_STEP_SIZE)
    chain = program.start(jax.random.key(0), start, timed)
    costs: list[float] = []
    for warming in (True, *(False for _ in range(NUM_TIMED))):
        draws = max(1, round(TIMED_S / max(guess_s, 1e-9) / length))
        before = chain.elapsed_s
        chain = advance(program, chain, Budget(steps=draws * length), clock)
        guess_s = (chain.elapsed_s - before) / (draws * length)
        if not warming:
            costs.append(guess_s)
    return statistics.median(costs)
