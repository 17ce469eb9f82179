"""``make tables`` and ``make figures``: run what is missing, write what the paper shows.

    python -m experiments.paper tables                       # all nine
    python -m experiments.paper tables LR_std_estimates      # make table-LR_std_estimates
    python -m experiments.paper tables --quick               # make tables QUICK=1: toy sizes

Exit codes are those of ``mamba-run``: that of the first run which could not be finished, else 0.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from experiments.paper import comparison, figures, tables
from experiments.paper.cells import (
    ALL_TABLES,
    FIGURES,
    KSD_TESTS,
    Cell,
    Scale,
    curve_cells,
    ksd_test_cells,
    paper_scale,
    table_cells,
    toy_scale,
    with_best,
)
from experiments.paper.schedule import Batch, Failure, alone, announce, missing, run_cells, say
from experiments.readme import write_between
from mamba_cli.artifacts import read_json
from mamba_cli.cli import INTERRUPTED
from mamba_cli.compilation import use_cache
from mamba_cli.errors import DataError, MambaError, first_line

KINDS: dict[str, Sequence[str]] = {"tables": list(ALL_TABLES), "figures": FIGURES}

Runner = Callable[[str, Sequence[Cell], Scale, float], list[Failure]]

README = Path("README.md")
"""Of the project; results of its own sizes, in their own place, are shown in it."""

ANY = {"step_size": 1e-6, "batch_size": 1000}
"""Hyperparameters of a line whose tuning is still to be done, to say how long it takes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and write the tables or figures asked for; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.paper",
        description="Make the paper's tables and figures, beside the published numbers.",
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, names in KINDS.items():
        own = kinds.add_parser(kind)
        own.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
        own.add_argument("--quick", action="store_true", help="toy sizes, into results/quick")
        own.add_argument("--root", type=Path, help="in place of results or results/quick")
        if kind == "tables":
            own.add_argument(
                "--bnn-repeats",
                type=_repeats,
                help="runs of each cell of the network, of 300 s; as many as there are, 1 at first",
            )
        own.add_argument("--dry-run", action="store_true", help="how long it takes, and no more")
        own.add_argument("--no-run", action="store_true", help="show the runs that there are")
    asked = parser.parse_args(arguments)
    known = KINDS[asked.kind]
    unknown = [name for name in asked.names if name not in known]
    if unknown:
        parser.error(f"{unknown[0]} is none of the {asked.kind}: {', '.join(known)}")
    repeats = getattr(asked, "bnn_repeats", None)
    if asked.quick and repeats:
        parser.error("--bnn-repeats is of the paper's sizes: --quick has one run of everything")
    if asked.quick:
        scale = toy_scale(asked.root or Path("results/quick"))
    else:
        scale = paper_scale(asked.root or Path("results"))
        scale = paper_scale(scale.root, {"bnn": repeats or repeats_of("bnn", scale)})
    if scale.note:
        say(f"*** {scale.note} ***")
    elif not (asked.dry_run or asked.no_run):
        say("runs are timed: they are made one after the other, and want the machine to themselves")
    use_cache()
    try:
        names = asked.names or known
        if asked.dry_run:
            announce(batches_of(asked.kind, names, scale))
            return 0
        # What there is can be shown while other runs go on.
        with nullcontext() if asked.no_run else alone(scale):
            make = make_tables if asked.kind == "tables" else make_figures
            if asked.no_run:
                failures = make(names, scale, _no_run, itertools.repeat(0.0))
            else:
                batches = batches_of(asked.kind, names, scale)
                announce(batches)
                failures = make(names, scale, run_cells, afterwards(batches))
            comparison.write(scale)
            if not (asked.root or scale.note) and tables.IN_README in names:
                text = tables.body(tables.IN_README, scale)
                write_between(README, tables.BEGIN, tables.END, text)
            say(f"written to {scale.root / 'tables' / 'comparison'}.md (.csv)")
    except MambaError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted: what is finished is kept, and the same command goes on from there")
        return INTERRUPTED
    if failures:
        runs = "1 run" if len(failures) == 1 else f"{len(failures)} runs"
        say(f"{runs} could not be finished:")
        for failure in failures:
            say(f"  {failure.cell.name}: {failure.reason}\n    {failure.cell.command(scale)}")
        return failures[0].exit_code
    return 0


def _repeats(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def repeats_of(model: str, scale: Scale) -> int:
    """Runs of each cell of a model that were asked for before, by the folders that there are."""
    found = [0]
    for folder in (scale.runs / "runs" / model).glob("*/*/seed-*"):
        number = folder.name.removeprefix("seed-")
        found += [int(number)] if number.isdecimal() else []
    return max(found) + 1


def make_tables(
    labels: Sequence[str], scale: Scale, run: Runner, later: Iterator[float]
) -> list[Failure]:
    """Run what the tables lack, study by study, and write each; the runs that failed.

    ``later`` has the seconds that come after each batch of :func:`batches_of`.
    """
    failures: list[Failure] = []
    for title, own, cells in studies_of(labels, scale):
        failures += run(title, cells, scale, next(later))
        for label in own:
            for line in tables.write(label, scale):
                say(f"    {label}: {line}")
            say(f"written to {scale.root / 'tables' / label}.md (.csv, _long.csv)")
    return failures


def studies_of(labels: Sequence[str], scale: Scale) -> Iterator[tuple[str, list[str], list[Cell]]]:
    """Of each study among the tables its title, its tables, and their runs, each once."""
    for key in dict.fromkeys(ALL_TABLES[label] for label in labels):
        own = [label for label in labels if ALL_TABLES[label] == key]
        cells = dict.fromkeys(cell for label in own for cell in table_cells(label, scale))
        yield f"tables of {key}", own, list(cells)


def make_figures(
    names: Sequence[str], scale: Scale, run: Runner, later: Iterator[float]
) -> list[Failure]:
    """Run what the figures lack and write each; the runs that failed.

    The lines of a figure over time have the hyperparameters of finished runs of the tables, which
    are made first where they are missing. ``later`` is as in :func:`make_tables`.
    """
    failures: list[Failure] = []
    for name in names:
        if name in KSD_TESTS:
            failures += run(name, ksd_test_cells(name, scale), scale, next(later))
            rows = figures.test_rows(name, scale)
        else:
            pairs = curve_cells(name, scale)
            first = [cell for cell, _ in pairs]
            failures += run(f"{name}: its tuning", first, scale, next(later))
            lines = [_tuned(cell, line, scale) for cell, line in pairs]
            ready = [line for line, why in lines if not why]
            failures += run(name, ready, scale, next(later))
            rows = figures.curve_rows(lines, scale)
        for line in figures.write(name, rows, scale):
            say(f"    {name}: {line}")
        say(f"written to {scale.root / 'figures' / name}.png (.csv)")
    return failures


def _tuned(cell: Cell, line: Cell, scale: Scale) -> tuple[Cell, str]:
    """``line`` with what ``cell`` chose; as it is where that found nothing, and why it did not."""
    try:
        if tables.why_not_shown(cell, scale):
            return line, figures.NOT_TUNED
        best = read_json(cell.folder(scale) / "best.json")
    except DataError as error:
        return line, first_line(error)
    if best is None:
        return line, figures.NO_WINNER
    return with_best(line, best, line.sampler.startswith("sghmc")), ""


def batches_of(kind: str, names: Sequence[str], scale: Scale) -> list[Batch]:
    """What is missing of the tables or figures, in the order in which they are made."""
    if kind == "tables":
        return [missing(title, cells, scale) for title, _, cells in studies_of(names, scale)]
    batches = []
    for name in names:
        if name in KSD_TESTS:
            batches.append(missing(name, ksd_test_cells(name, scale), scale))
            continue
        pairs = curve_cells(name, scale)
        first = missing(f"{name}: its tuning", [cell for cell, _ in pairs], scale)
        lines = [_tuned(cell, line, scale) for cell, line in pairs]
        # What is still to be tuned takes as long whatever it will be.
        guessed = [with_best(line, ANY, False) if why else line for line, why in lines]
        batches += [first, missing(name, guessed, scale)]
    return batches


def afterwards(batches: Sequence[Batch]) -> Iterator[float]:
    """The seconds that come after each of the batches."""
    left_s = sum(batch.total_s for batch in batches)
    for batch in batches:
        left_s -= batch.total_s
        yield max(0.0, left_s)


def _no_run(title: str, cells: Sequence[Cell], scale: Scale, later_s: float) -> list[Failure]:
    return []


if __name__ == "__main__":
    sys.exit(main())
