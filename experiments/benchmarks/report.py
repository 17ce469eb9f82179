"""The figures of ``make bench`` against what was to be reached: ``report.md``, from the tables.

Every line is met or is not, by the figures of one machine; a cell that is not says where its time
goes. ``published`` is SGMCMCJax's timed loop on the same machine; ``quoted`` what it was said to
reach on another one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks import cells
from experiments.benchmarks.cells import Row, rows_of
from experiments.benchmarks.chain import BLACKJAX, FEW, KINDS
from experiments.benchmarks.published import quoted
from experiments.readme import write_between
from mamba_cli import artifacts
from mamba_cli.run import COMMITTED_GROUND_TRUTH

SPEED: Sequence[tuple[str, str, Mapping[float, float]]] = (
    ("logreg", "without_replacement", {0.1: 7, 1: 2.2, 10: 1.6}),
    ("logreg", "reshuffle", {0.1: 20, 1: 12, 10: 6}),
    ("pmf", "without_replacement", {1: 1.4, 10: 1.5, 100: 3}),
    ("bnn", "without_replacement", {1: 1.2, 10: 1.2}),
)
"""Times the draws a second of the published library: model, minibatches, by percent of the rows."""

CENTRED_MODELS, CENTRED_COST = ("pmf", "bnn"), 1.3
"""The control variates' cost over that of the plain sampler, at most."""

WALL_OVER_T = {"logreg": 1.25, "pmf": 1.5, "bnn": 2.0}
KSD_RATIO = {("8000", "10"): 10.0, ("512", "52580"): 30.0}
NUTS: Mapping[str, tuple[int, float]] = {"logreg": (20_000, 8 * 60), "pmf": (10_000, 90 * 60)}
"""Draws, and the seconds they may take."""
FAR = 2.0
"""Times the floor's time from which a cell has to say why."""

FLATNESS = 0.8

ROW_BY_ROW = "ksd, row by row"

BEGIN = "<!-- The benchmarks' targets: written by make bench -->"
END = "<!-- End of the benchmarks' targets -->"

Lines = list[str]


def number(row: Row | None, column: str) -> float:
    """A cell as a number, NaN where there is none."""
    return float(row[column]) if row is not None and row.get(column) else float("nan")


def micros(per_second: float) -> float:
    """Microseconds of one, NaN where none was made in the time of the measurement."""
    return 1e6 / per_second if per_second else float("nan")


def short(value: float, unit: str = "") -> str:
    """Three digits, or a dash for NaN."""
    if value != value:
        return "-"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text + unit


def verdict(met: bool | None) -> str:
    return "-" if met is None else "yes" if met else "**no**"


def at_least(value: float, wanted: float) -> bool | None:
    return None if value != value else value >= wanted


def at_most(value: float, wanted: float) -> bool | None:
    return None if value != value else value <= wanted


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> Lines:
    """A table, or a word where there is nothing to show."""
    body = [f"| {' | '.join(line)} |" for line in lines]
    if not body:
        return ["(not measured)"]
    return [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}", *body]


class Figures:
    """The tables of one folder."""

    def __init__(self, folder: Path) -> None:
        read = {
            name: rows_of(name, folder)
            for name in (
                "chain", "published", "tuning", "rewards", "rewards_step", "scaling_rows",
                "scaling_ksd", "accuracy", "accuracy_table",
            )
        }  # fmt: skip
        self.tables = read
        self.chain = {
            (r["model"], r["sampler"], int(r["batch_size"]), r["kind"]): r for r in read["chain"]
        }
        self.published = {
            (r["model"], r["sampler"], int(r["batch_size"])): number(r, "draws_per_s")
            for r in read["published"]
        }

    def speed(self, *key: Any) -> float:
        return number(self.chain.get(key), "draws_per_s")

    def measured_on(self) -> Lines:
        found: dict[tuple[str, str], list[str]] = {}
        for name, rows in self.tables.items():
            for row in rows:
                names = found.setdefault((row["machine"], row["code"]), [])
                if name not in names:
                    names.append(name)
        return [f"* {machine}; code {code}: {', '.join(n)}" for (machine, code), n in found.items()]

    def against(
        self, model: str, kind: str, percent: float
    ) -> Iterator[tuple[str, int, float, float]]:
        """Sampler, n, draws a second of ours and of the published library, at part of the rows."""
        for (name, sampler, n, by), row in self.chain.items():
            share = 100 * n / int(row["num_data"])
            if (name, by) == (model, kind) and abs(share / percent - 1) <= 0.01:
                theirs = self.published.get((name, sampler, n), float("nan"))
                yield sampler, n, number(row, "draws_per_s"), theirs

    def costs_of_centring(self) -> Iterator[tuple[str, str, int, str, float]]:
        """Model, sampler, n, minibatches, and a step with control variates over a plain one."""
        for (model, sampler, n, kind), row in self.chain.items():
            centred = self.speed(model, f"{sampler}_cv", n, kind)
            if model in CENTRED_MODELS and kind != BLACKJAX and n != FEW and centred == centred:
                cost = number(row, "draws_per_s") * micros(centred) / 1e6
                yield model, sampler, n, kind, cost

    def speeds(self) -> Lines:
        lines = []
        for model, kind, factors in SPEED:
            for percent, factor in factors.items():
                for sampler, n, ours, theirs in self.against(model, kind, percent):
                    told = quoted(model, sampler, n) or float("nan")
                    blackjax = self.speed(model, sampler, n, BLACKJAX)
                    lines.append(
                        [
                            model, kind, f"{n:,}", sampler, short(ours), short(blackjax),
                            short(theirs), short(ours / theirs), short(factor),
                            verdict(at_least(ours / theirs, factor)), short(ours / told),
                        ]
                    )  # fmt: skip
        header = [
            "model", "minibatches", "n", "sampler", "ours /s", "BlackJAX /s", "published /s",
            "ours / published", "target", "met", "ours / quoted",
        ]  # fmt: skip
        return markdown(header, lines)

    def targets(self) -> Lines:
        """A line a target: what was to be reached, what was, and in how many cells."""
        lines = []
        for model, kind, factors in SPEED:
            for percent, factor in factors.items():
                found = self.against(model, kind, percent)
                ratios = [ours / theirs for _, _, ours, theirs in found]
                what = f"{model}, n = {percent:g} % of the rows, `{kind}`: draws/s over SGMCMCJax's"
                lines.append(_line(what, factor, ratios, at_least))
        ratios = [
            self.speed(*key, "without_replacement") / theirs
            for key, theirs in self.published.items()
        ]
        lines.append(
            _line("every cell, `without_replacement`, over SGMCMCJax", 1, ratios, at_least)
        )
        for model in CENTRED_MODELS:
            costs = [cost for name, *_, cost in self.costs_of_centring() if name == model]
            what = f"{model}: a step with control variates over a plain one"
            lines.append(_line(what, CENTRED_COST, costs, at_most))
        for model, limit in WALL_OVER_T.items():
            walls = [
                number(row, "wall_over_t") for row in self.tables["tuning"] if row["model"] == model
            ]
            lines.append(_line(f"{model}: wall time of a MAMBA run over T", limit, walls, at_most))
        for (draws, dim), factor in KSD_RATIO.items():
            ratios = [
                number(row, "row_by_row_s") / number(row, "seconds")
                for row in self.tables["rewards"]
                if (row["num_draws"], row["dim"], row["reward"]) == (draws, dim, ROW_BY_ROW)
            ]
            what = f"KSD of {int(draws):,} draws x {int(dim):,}: row by row over ours"
            lines.append(_line(what, factor, ratios, at_least))
        return markdown(["what", "target", "measured", "cells that meet it"], lines)

    def slower(self) -> Lines:
        if not self.published:
            return ["(not measured: the published library was not timed on this machine)"]
        found = []
        for (model, sampler, n), theirs in self.published.items():
            ours = max((self.speed(model, sampler, n, kind) for kind in KINDS), default=0.0)
            exact = self.speed(model, sampler, n, "without_replacement")
            if not exact >= theirs:  # a cell of ours that is missing is not a faster one
                found.append([model, sampler, f"{n:,}", short(exact), short(ours), short(theirs)])
        if not found:
            return ["None: every measured cell is faster, rows drawn without replacement."]
        header = ["model", "sampler", "n", "without replacement /s", "best of ours /s", "published"]
        return markdown(header, found)

    def centred(self) -> Lines:
        lines = [
            [model, kind, f"{n:,}", sampler, short(cost), verdict(at_most(cost, CENTRED_COST))]
            for model, sampler, n, kind, cost in self.costs_of_centring()
        ]
        return markdown(["model", "minibatches", "n", "sampler", "cost with CV", "met"], lines)

    def tunings(self) -> Lines:
        lines = [
            [
                row["model"], row["sampler"], row["cache"],
                short(number(row, "full_budget_s"), " s"), short(number(row, "wall_over_t")),
                short(WALL_OVER_T[row["model"]]),
                verdict(at_most(number(row, "wall_over_t"), WALL_OVER_T[row["model"]])),
                *(short(number(row, f"{p}_s"), " s") for p in
                  ("compile", "sampling", "gradients", "reward", "other")),
                short(number(row, "peak_gb"), " GB"),
            ]
            for row in self.tables["tuning"]
        ]  # fmt: skip
        header = [
            "model", "sampler", "compiled programs", "T", "wall over T", "target", "met",
            "compiling", "sampling", "gradients", "rewards", "other", "peak memory",
        ]  # fmt: skip
        return markdown(header, lines)

    def discrepancies(self) -> Lines:
        lines = []
        for row in self.tables["rewards"]:
            ratio = number(row, "row_by_row_s") / number(row, "seconds")
            target = KSD_RATIO.get((row["num_draws"], row["dim"]), float("nan"))
            is_ksd = row["reward"] == ROW_BY_ROW
            met = at_least(ratio, target) if is_ksd and target == target else None
            lines.append(
                [
                    row["reward"], f"{int(row['num_draws']):,} x {int(row['dim']):,}",
                    short(number(row, "first_s"), " s"), short(number(row, "seconds"), " s"),
                    short(ratio), short(target if is_ksd else float("nan")), verdict(met),
                    short(number(row, "relative_difference")), short(number(row, "peak_gb"), " GB"),
                ]
            )  # fmt: skip
        header = [
            "reward", "draws x dimension", "first", "then", "row by row / ours", "target", "met",
            "relative difference", "memory",
        ]  # fmt: skip
        return markdown(header, lines)

    def steps(self) -> Lines:
        lines = [
            [
                row["model"], row["batch_size"], short(number(row, "step_us"), " us"),
                short(number(row, "added_us"), " us"),
            ]
            for row in self.tables["rewards_step"]
        ]  # fmt: skip
        return markdown(["model", "n", "a step of SGLD", "stein_moments adds"], lines)

    def accuracies(self) -> Lines:
        columns = ("before_sampling_s", "s_to_10_percent", "s_to_5_percent", "s_to_2_percent")
        lines = [
            [
                row["sampler"], row["tuner"], *(short(number(row, column)) for column in columns),
                short(100 * number(row, "last_error"), " %"),
            ]
            for row in self.tables["accuracy_table"]
        ]  # fmt: skip
        header = ["sampler", "tuner", "s before sampling", "s to 10 %", "5 %", "2 %", "last error"]
        return markdown(header, lines)

    def nuts(self) -> Lines:
        looks = [row for row in self.tables["accuracy"] if row["tuner"] == "nuts"]
        if not looks:
            return ["(not measured)"]
        rate = number(looks[-1], "num_draws") / number(looks[-1], "sampling_s")
        before_s = number(looks[-1], "wall_s") - number(looks[-1], "sampling_s")
        draws, target_s = NUTS["logreg"]
        seconds = before_s + draws / rate
        return [
            f"{short(rate)} draws a second after {short(before_s)} s of MAP, compilation and "
            f"warm-up; {draws:,} draws after that warm-up: {short(seconds)} s "
            f"(target {target_s} s; met: {verdict(at_most(seconds, target_s))}). The ground"
            " truth's warm-up is longer."
        ]

    def ground_truths(self) -> Lines:
        """The whole runs that came with the program, for as many draws as the target names."""
        lines = []
        for path in sorted(COMMITTED_GROUND_TRUTH.glob("*.json")):
            truth = artifacts.read_json(path) or {}
            name = truth["provenance"]["model"]
            draws, target_s = NUTS[name]
            sampling_s = truth["elapsed_s"] - truth["warmup_s"]
            seconds = truth["warmup_s"] + sampling_s * draws / truth["num_draws"]
            lines.append(
                [
                    name, f"{draws:,}", f"{truth['num_chains']} x {truth['num_warmup']:,}",
                    short(seconds, " s"), short(target_s, " s"),
                    verdict(at_most(seconds, target_s)), truth["provenance"]["finished"][:10],
                ]
            )  # fmt: skip
        header = ["model", "draws", "warm-up", "seconds", "target", "met", "run on"]
        return markdown(header, lines)

    def scaling(self) -> Lines:
        lines = []
        first: dict[tuple[str, str], Row] = {}
        for row in self.tables["scaling_rows"]:
            least = first.setdefault((row["batch_size"], row["scheme"]), row)
            n = int(row["batch_size"])
            kept = number(row, "draws_per_s") * micros(number(least, "draws_per_s")) / 1e6
            slower = micros(number(row, "draws_per_s")) - micros(number(least, "draws_per_s"))
            added_ns = 1e3 / n * slower
            miss_ns = number(row, "access_ns") - number(least, "access_ns")
            flat = kept >= FLATNESS or added_ns <= max(miss_ns, 0.0)
            lines.append(
                [
                    row["scheme"], f"{n:,}", f"{int(row['num_data']):,}",
                    short(number(row, "draws_per_s")), short(kept), short(added_ns, " ns"),
                    short(miss_ns, " ns"), verdict(flat),
                ]
            )  # fmt: skip
        header = [
            "minibatches", "n", "N", "draws /s", "of those at the smallest N", "more a row",
            "more an access", "met",
        ]  # fmt: skip
        return markdown(header, lines)

    def far_from_floor(self) -> Lines:
        """Cells of ours above ``FAR`` floors: what few rows cost, and what a row adds."""
        lines = []
        for (model, sampler, n, kind), row in self.chain.items():
            if kind == BLACKJAX or n == FEW:
                continue
            length = int(row["num_integration_steps"])
            step_us = micros(number(row, "draws_per_s")) / length
            floor_us = micros(number(row, "floor_draws_per_s")) / length
            if not step_us > FAR * floor_us:
                continue
            fixed = self.speed(model, sampler, FEW, "without_replacement")
            fixed_us = micros(fixed) / length
            row_ns = 1e3 * (step_us - fixed_us) / (n - FEW)
            lines.append(
                [
                    model, sampler, f"{n:,}", kind, short(step_us / floor_us), short(step_us),
                    short(floor_us), short(fixed_us),
                    short(100 * min(fixed_us / step_us, 1.0), " %"), short(row_ns),  # NaN stays
                    short(1e3 * floor_us / n),
                ]
            )  # fmt: skip
        header = [
            "model", "sampler", "n", "minibatches", "x floor", "us a step", "floor us",
            f"us at {FEW} rows", "share of it", "ns a row above that", "floor ns a row",
        ]  # fmt: skip
        return markdown(header, lines)


def _line(
    what: str, target: float, values: Iterable[float], met: Callable[[float, float], bool | None]
) -> list[str]:
    """A target with the least and the largest value, and how many meet it."""
    known = [value for value in values if value == value]
    sign = "at least" if met is at_least else "at most"
    ends = (min(known), max(known)) if known else (float("nan"),)
    shown = " to ".join(dict.fromkeys(map(short, ends)))
    number_met = sum(bool(met(value, target)) for value in known)
    return [what, f"{sign} {target:g}", shown, f"{number_met} of {len(known)}"]


SECTIONS: Sequence[tuple[str, Callable[[Figures], Lines]]] = (
    ("Measured on", Figures.measured_on),
    ("The targets", Figures.targets),
    ("Draws a second against the published library", Figures.speeds),
    ("Cells slower than the published library", Figures.slower),
    ("Control variates: cost over the plain sampler, at most 1.3", Figures.centred),
    ("Whole MAMBA runs", Figures.tunings),
    ("Rewards", Figures.discrepancies),
    ("Rewards read off a chain's sums", Figures.steps),
    ("Time to accuracy, logistic regression", Figures.accuracies),
    ("NUTS, logistic regression", Figures.nuts),
    ("NUTS, the ground truths that come with the program", Figures.ground_truths),
    ("Scaling with the rows of the data", Figures.scaling),
    ("Cells more than twice above their floor, and where their time goes", Figures.far_from_floor),
)


def report(folder: Path) -> str:
    """All sections as Markdown."""
    figures = Figures(folder)
    parts = [
        "# `make bench`",
        "",
        "Made by `experiments/benchmarks/report.py` from the tables here.",
    ]
    for title, lines in SECTIONS:
        parts += ["", f"## {title}", "", *lines(figures)]
    return "\n".join(parts) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=cells.FOLDER)
    parser.add_argument("--readme", type=Path, help="whose table of targets is set; README.md")
    arguments = parser.parse_args(words)
    folder = arguments.out
    text = report(folder)
    (folder / "report.md").write_text(text, encoding="utf-8")
    is_real = folder == cells.FOLDER and not cells.QUICK
    readme = arguments.readme or (Path("README.md") if is_real else None)
    if readme is not None:
        table = "\n".join(Figures(folder).targets())
        write_between(readme, BEGIN, END, table)
    print(text)


if __name__ == "__main__":
    main()
