"""``comparison.md``: our numbers beside the published ones, and a verdict on the paper's claims.

A claim is a rule on the numbers of the tables and figures, written once and applied twice: to ours,
where one number beats another only beyond the noise of the repeats, and to those the paper prints,
taken at their word.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scipy import stats

from experiments.paper.cells import (
    AS_PUBLISHED,
    KSD_TESTS,
    SAMPLERS,
    SMALLER_GRID,
    STUDIES,
    TABLES,
    Scale,
    shown,
    table_cells,
)
from experiments.paper.figures import Point, end_of
from experiments.paper.published import Key, log10_h, published
from experiments.paper.schedule import is_finished
from experiments.paper.tables import (
    HYPERPARAMETERS,
    METRICS,
    SAMPLER_NAMES,
    SIGNIFICANCE,
    TUNER_NAMES,
    Sample,
    Summary,
    beats,
    cell_text,
    chains_failed,
    count_text,
    is_lower,
    summaries,
)
from mamba_cli.artifacts import atomic_write, read_metrics, read_table, write_table

COLUMNS = (
    "table",
    "sampler",
    "tuner",
    "metric",
    "ours",
    "sd",
    "repeats",
    "usable",
    "published",
    "ratio",
    "note",
)

PUBLISHED_SECONDS = {"logreg": 10.0, "pmf": 20.0, "bnn": 300.0}
"""Seconds that the paper gives a chain: its numbers of samples are compared per second."""

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be decided here"


class Evidence(Protocol):
    """Numbers that a claim is judged by."""

    def number(self, label: str, sampler: str, tuner: str, metric: str) -> Summary | None:
        """A number of a table; ``None`` where there is none at all."""
        ...

    def beats(self, first: Summary, second: Summary, lower_is_better: bool) -> bool:
        """Whether the first is better beyond doubt."""
        ...


class Ours:
    """The numbers of finished runs."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self._tables = {label: summaries(label, scale) for label in TABLES}

    def number(self, label: str, sampler: str, tuner: str, metric: str) -> Summary | None:
        found = self._tables[label].get((sampler, tuner, metric))
        return found if found is not None and (found.values or found.note) else None

    def beats(self, first: Summary, second: Summary, lower_is_better: bool) -> bool:
        return beats(first, second, lower_is_better)


class Theirs:
    """The numbers that the paper prints, which say nothing of their noise."""

    def __init__(self) -> None:
        self._tables = {label: published(label) for label in TABLES}

    def number(self, label: str, sampler: str, tuner: str, metric: str) -> Summary | None:
        metric = "rmse" if metric == "mse_of_draws" else metric
        found = self._tables[label].get(Key(sampler, tuner, metric))
        return None if found is None else Summary((found.value,), 1)

    def beats(self, first: Summary, second: Summary, lower_is_better: bool) -> bool:
        one, other = first.mean, second.mean
        assert one is not None
        assert other is not None
        return one < other if lower_is_better else one > other


class Verdict(NamedTuple):
    """What the numbers say of a claim, and the numbers."""

    answer: str
    figures: str


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the rule by which numbers decide it."""

    text: str
    where: str
    rule: str
    judge: Callable[[Evidence], Verdict]


# --- rules ----------------------------------------------------------------------------------------


def lowest(
    label: str,
    metric: str,
    tuners: Iterable[str],
    at_least: int,
    samplers: Sequence[str] = SAMPLERS,
) -> Callable[[Evidence], Verdict]:
    """One of ``tuners`` has the lowest ``metric`` for ``at_least`` of ``samplers``.

    A sampler counts for the claim where one of them beats every other tuner, against it where one
    of the others beats all of them, and else for neither.
    """
    chosen = tuple(tuners)

    def judge(evidence: Evidence) -> Verdict:
        won, lost, told = 0, 0, []
        for sampler in samplers:
            numbers = {
                tuner: evidence.number(label, sampler, tuner, metric)
                for tuner in STUDIES[TABLES[label]].tuners
            }
            known = {t: n for t, n in numbers.items() if n is not None and n.values}
            own = {t: n for t, n in known.items() if t in chosen}
            rest = {t: n for t, n in numbers.items() if t not in chosen and n is not None}
            if any(
                all(evidence.beats(n, o, True) for o in rest.values()) for n in own.values()
            ) and (rest):
                won += 1
            elif own and any(
                all(evidence.beats(o, n, True) for n in own.values())
                for t, o in rest.items()
                if t in known
            ):
                lost += 1
            told.append(_told(sampler, numbers, metric))
        figures = f"for {won} of {len(samplers)}, against {lost}; {'; '.join(told)}"
        return _counted(won, lost, at_least, len(samplers), figures)

    return judge


def chooses(
    label: str,
    metric: str,
    tuners: Sequence[str],
    value: float,
    at_least: int,
    samplers: Sequence[str] = SAMPLERS,
) -> Callable[[Evidence], Verdict]:
    """One of ``tuners`` chose ``value`` in most of its runs, for ``at_least`` of ``samplers``.

    A sampler counts against it once none of them can come to a majority any more.
    """
    chosen = [tuner for tuner in tuners if tuner in STUDIES[TABLES[label]].tuners]

    def judge(evidence: Evidence) -> Verdict:
        won, lost, told = 0, 0, []
        for sampler in samplers:
            found = {t: evidence.number(label, sampler, t, metric) for t in chosen}
            votes = [_votes(number, value) for number in found.values()]
            if any(2 * hits > runs for hits, _, runs in votes):
                won += 1
            elif all(2 * misses >= runs > 0 for _, misses, runs in votes):
                lost += 1
            told.append(_told(sampler, found, metric))
        figures = f"for {won} of {len(samplers)}, against {lost}; {'; '.join(told)}"
        return _counted(won, lost, at_least, len(samplers), figures)

    return judge


def _votes(number: Summary | None, value: float) -> tuple[int, int, int]:
    """Runs that chose ``value``, runs that did not, and all runs."""
    if number is None:
        return 0, 0, 0
    if chains_failed(number):
        return 0, number.repeats, number.repeats
    hits = sum(math.isclose(chosen, value, rel_tol=0.02) for chosen in number.values)
    return hits, len(number.values) - hits, number.repeats


def close_to_best(
    label: str, metric: str, tuner: str, factor: float
) -> Callable[[Evidence], Verdict]:
    """``tuner`` is within ``factor`` of the lowest ``metric`` for every sampler."""

    def judge(evidence: Evidence) -> Verdict:
        ratios: dict[str, float] = {}
        for sampler in SAMPLERS:
            found = {
                t: evidence.number(label, sampler, t, metric) for t in STUDIES[TABLES[label]].tuners
            }
            means = {t: n.mean for t, n in found.items() if n is not None and n.mean is not None}
            failed = {t for t, n in found.items() if n is not None and chains_failed(n)}
            if tuner in means and len(means) + len(failed) == len(found):
                ratios[sampler] = means[tuner] / min(means.values())
        worst = max(ratios, key=lambda sampler: ratios[sampler], default=None)
        told = ", ".join(f"{SAMPLER_NAMES[s]} {r:.2f}" for s, r in ratios.items())
        figures = f"over the lowest: {told or 'no numbers'}"
        if worst is not None and ratios[worst] > factor:
            return Verdict(FAILS, figures)
        return Verdict(HOLDS if len(ratios) == len(SAMPLERS) else OPEN, figures)

    return judge


def fails(
    label: str, metric: str, tuner: str, samplers: Sequence[str], factor: float
) -> Callable[[Evidence], Verdict]:
    """``tuner`` diverges, or is worse than the best by ``factor``, for all ``samplers``."""

    def judge(evidence: Evidence) -> Verdict:
        won, lost, told = 0, 0, []
        for sampler in samplers:
            own = evidence.number(label, sampler, tuner, metric)
            rivals = [t for t in STUDIES[TABLES[label]].tuners if t != tuner]
            others = [
                n.mean
                for t in rivals
                for n in [evidence.number(label, sampler, t, metric)]
                if n is not None and n.mean is not None
            ]
            if own is None or not others:
                told.append(f"{SAMPLER_NAMES[sampler]}: no number")
                continue
            if own.mean is None:
                won += own.note.startswith("diverged")
                told.append(f"{SAMPLER_NAMES[sampler]}: {own.note}")
                continue
            ratio = own.mean / min(others)
            # A rival still to be run may be better yet.
            is_lost = ratio < factor and len(others) == len(rivals)
            won, lost = won + (ratio >= factor), lost + is_lost
            told.append(f"{SAMPLER_NAMES[sampler]}: {own.mean:,.4g}, {ratio:.3g} times the best")
        return _counted(won, lost, len(samplers), len(samplers), "; ".join(told))

    return judge


def lowest_at_the_end(
    scale: Scale, name: str, tuners: Sequence[str], at_least: int
) -> Callable[[Evidence], Verdict]:
    """In a figure over time, one of ``tuners`` ends lowest, beyond the noise of its runs.

    As :func:`lowest`. A line that was run and does not reach the end is beaten by every one of
    which all runs do.
    """
    study = next(study for study in STUDIES.values() if study.curves == name)

    def judge(evidence: Evidence) -> Verdict:
        if isinstance(evidence, Theirs):
            return Verdict(OPEN, "the paper prints no numbers of its figure")
        path = scale.root / "figures" / f"{name}.csv"
        if not path.exists():
            return Verdict(OPEN, f"{name} has not been made")
        _, text = read_table(path)
        rows = [{k: v for k, v in row.items() if v != ""} for row in text]
        won, lost, told = 0, 0, []
        for sampler in SAMPLERS:
            run = {(r["sampler"], r["tuner"]) for r in rows if "point" in r}
            ends = {t: end_of(rows, sampler, t) for t in study.tuners if (sampler, t) in run}
            told.append(f"{SAMPLER_NAMES[sampler]}: {_ends_text(ends) or 'not run'}")
            own = [t for t in ends if t in tuners]
            rest = [t for t in ends if t not in tuners]
            if len(ends) < len(study.tuners):
                continue
            if any(all(_ends_lower(ends[t], ends[r]) for r in rest) for t in own):
                won += 1
            elif any(all(_ends_lower(ends[r], ends[t]) for t in own) for r in rest):
                lost += 1
        figures = f"for {won} of {len(SAMPLERS)}, against {lost}; {'; '.join(told)}"
        return _counted(won, lost, at_least, len(SAMPLERS), figures)

    return judge


def _ends_text(ends: Mapping[str, Point | None]) -> str:
    texts = []
    for tuner, point in ends.items():
        if point is None:
            texts.append(f"{TUNER_NAMES[tuner]} no value at the end")
            continue
        count = count_text(point.num_usable, point.num_runs)
        texts.append(f"{TUNER_NAMES[tuner]} {point.mean:.3g} ± {point.sd:.2g}{count}")
    return ", ".join(texts)


def _ends_lower(first: Point | None, second: Point | None) -> bool:
    """Whether the first mean is lower by more than the noise of both."""
    if first is None or first.num_usable < first.num_runs:
        return False
    if second is None:
        return True
    if first.num_usable < 2 or second.num_usable < 2:
        return False
    own, other = (Sample(p.mean, p.sd, p.num_usable) for p in (first, second))
    return is_lower(own, other)


def unstable_on_the_first_grid(scale: Scale) -> Callable[[Evidence], Verdict]:
    """SGNHT for the network, its steps from the whole grid: a long chain of both tuners fails.

    It fails where it is not finite, or where its ECE is more than twice that of the same tuner on
    the second grid.
    """

    def judge(evidence: Evidence) -> Verdict:
        if isinstance(evidence, Theirs):
            return Verdict(OPEN, "told in words only")
        won, lost, told = 0, 0, []
        cells = table_cells("NN_uncertainty_tests", scale)
        for tuner in ("mamba_ksd", "grid"):
            eces: dict[str, list[float]] = {"": [], SMALLER_GRID: []}
            failed = ""
            for cell in cells:
                if (cell.sampler, cell.tuner) != ("sgnht", tuner):
                    continue
                for row in read_metrics(cell.folder(scale) / "metrics.csv"):
                    if row["status"] == "ok":
                        eces[cell.variant].append(100 * float(row["ece"]))
                    elif not cell.variant:
                        failed = str(row["status"])
            first, second = (statistics.fmean(e) if e else None for e in eces.values())
            if failed:
                won += 1
                told.append(f"{TUNER_NAMES[tuner]}: {failed}")
            elif first is not None and second is not None:
                won, lost = won + (first > 2 * second), lost + (first <= 2 * second)
                told.append(f"{TUNER_NAMES[tuner]}: ECE {first:.3g} %, second grid {second:.3g} %")
        return _counted(won, lost, 2, 2, "; ".join(told) or "no runs")

    return judge


def stays_finite(label: str, sampler: str, tuner: str) -> Callable[[Evidence], Verdict]:
    """The chain of ``tuner`` is finite to its end."""

    def judge(evidence: Evidence) -> Verdict:
        number = evidence.number(label, sampler, tuner, "ece_percent")
        if number is None:
            return Verdict(OPEN, "no run")
        if "diverged" in number.note:
            return Verdict(FAILS, number.note)
        if number.mean is None:
            return Verdict(OPEN, number.note)
        is_whole = len(number.values) == number.repeats
        text = cell_text(number, "ece_percent")
        return Verdict(HOLDS if is_whole else OPEN, f"ECE {text} %")

    return judge


def follows(scale: Scale, least: float) -> Callable[[Evidence], Verdict]:
    """Over both figures, the KSD by stochastic gradients of all draws ranks as the full one does.

    By Spearman's correlation over the settings where both have a value, at least ``least`` in every
    panel with four or more of them.
    """

    def judge(evidence: Evidence) -> Verdict:
        if isinstance(evidence, Theirs):
            return Verdict(OPEN, "the paper prints no numbers of its figures")
        won, lost, told = 0, 0, []
        for name in KSD_TESTS:
            path = scale.root / "figures" / f"{name}.csv"
            if not path.exists():
                continue
            _, rows = read_table(path)
            for study in STUDIES.values():
                values = {
                    line: {
                        (row["step_size"], row["batch_size"]): float(row["ksd"])
                        for row in rows
                        if (row["model"], row["line"], row["status"]) == (study.model, line, "ok")
                    }
                    for line in ("full-all", "stochastic-all")
                }
                shared = sorted(values["full-all"].keys() & values["stochastic-all"].keys())
                if len(shared) < 4:
                    continue
                pairs = [[values[line][key] for key in shared] for line in values]
                rank = float(stats.spearmanr(*pairs).statistic)
                won, lost = won + (rank >= least), lost + (rank < least)
                told.append(f"{name}, {study.model}: {rank:.2f} over {len(shared)} settings")
        return _counted(won, lost, 6, 6, "; ".join(told) or "the figures have not been made")

    return judge


def _counted(won: int, lost: int, at_least: int, total: int, figures: str) -> Verdict:
    """A claim for ``at_least`` of ``total``, of which some are for it and some against."""
    if won >= at_least:
        return Verdict(HOLDS, figures)
    return Verdict(FAILS if lost > total - at_least else OPEN, figures)


def _told(sampler: str, numbers: Mapping[str, Summary | None], metric: str) -> str:
    texts = [
        f"{TUNER_NAMES[tuner]} {cell_text(number, metric)}"
        for tuner, number in numbers.items()
        if number is not None and (number.values or chains_failed(number))
    ]
    return f"{SAMPLER_NAMES[sampler]}: {', '.join(texts) or 'no number'}"


MAMBA = ("mamba_ksd", "mamba_fssd")
HMC = ("sghmc", "sghmc_cv")


def claims(scale: Scale) -> list[Claim]:
    """The claims of the paper's text, in its order."""
    lr, lr_h, _ = STUDIES["LR"].tables
    pmf, _, _ = STUDIES["PMF"].tables
    nn, nn_h, _ = STUDIES["NN"].tables
    return [
        Claim(
            "MAMBA, with KSD or FSSD, has the lowest KSD over all but one of the six samplers",
            f"section 4.1, {lr}",
            "MAMBA lowest for at least 5 of 6",
            lowest(lr, "ksd", MAMBA, 5),
        ),
        Claim(
            "the same, of the KSD curves",
            "section 4.1, LR_ksd_curves",
            "MAMBA lowest at the end for at least 5 of 6",
            lowest_at_the_end(scale, "LR_ksd_curves", MAMBA, 5),
        ),
        Claim(
            "for SGNHT the heuristic gives the lowest KSD",
            f"section 4.1, {lr}",
            "the heuristic lowest for SGNHT",
            lowest(lr, "ksd", ["heuristic"], 1, ["sgnht"]),
        ),
        Claim(
            "MAMBA-FSSD finds h = 1/N for SGNHT",
            f"section 4.1, {lr_h}",
            "most runs choose 10^-6",
            chooses(lr_h, "log10_step_size", ["mamba_fssd"], -6.0, 1, ["sgnht"]),
        ),
        Claim(
            "for five of six samplers MAMBA chooses a batch size of 1 %",
            f"section 4.1, {lr_h}",
            "most runs of MAMBA-KSD or MAMBA-FSSD choose 1 % for at least 5 of 6",
            chooses(lr_h, "batch_percent", MAMBA, 1.0, 5),
        ),
        Claim(
            "the posterior sds of the MAMBA-optimised samplers generally perform well",
            f"section 4.1, {lr}",
            "MAMBA has the lowest ξ for at least 3 of 6",
            lowest(lr, "relative_std_error_percent", MAMBA, 3),
        ),
        Claim(
            "SGHMC with the heuristic fails (a KSD of 53,972)",
            f"{lr}",
            "diverged, or more than 100 times the best KSD, with and without control variates",
            fails(lr, "ksd", "heuristic", HMC, 100.0),
        ),
        Claim(
            "MAMBA consistently identifies hyperparameters that give the lowest KSD",
            f"section 4.2, {pmf}",
            "MAMBA lowest for all 6",
            lowest(pmf, "ksd", MAMBA, 6),
        ),
        Claim(
            "the samplers tuned using MAMBA tend to outperform the others",
            "section 4.2, PMF_ksd_curves",
            "MAMBA lowest at the end for at least 4 of 6",
            lowest_at_the_end(scale, "PMF_ksd_curves", MAMBA, 4),
        ),
        Claim(
            "for some samplers the heuristic gives a lower error of the sd",
            f"section 4.2, {pmf}",
            "the heuristic has the lowest ξ for at least 1 of 6",
            lowest(pmf, "relative_std_error_percent", ["heuristic"], 1),
        ),
        Claim(
            "the samplers tuned using MAMBA tend to outperform the others in terms of ECE",
            f"section 4.3, {nn}",
            "MAMBA lowest for at least 4 of 6",
            lowest(nn, "ece_percent", MAMBA, 4),
        ),
        Claim(
            "the same, of the ECE curves",
            "section 4.3, NN_ksd_curves",
            "MAMBA lowest at the end for at least 4 of 6",
            lowest_at_the_end(scale, "NN_ksd_curves", MAMBA, 4),
        ),
        Claim(
            "where MAMBA is not the best it is very close to the best",
            f"section 4.3, {nn}",
            "its ECE is at most 1.5 times the lowest for every sampler",
            close_to_best(nn, "ece_percent", "mamba_ksd", 1.5),
        ),
        Claim(
            "for all samplers MAMBA finds a batch size of 1 %",
            f"section 4.3, {nn_h}",
            "most runs choose 1 % for all 6",
            chooses(nn_h, "batch_percent", MAMBA, 1.0, 6),
        ),
        Claim(
            "for SGNHT the steps that MAMBA and grid search find lose stability in long chains",
            "section 4.3",
            "with the whole grid both diverge, or have twice the ECE they have with smaller steps",
            unstable_on_the_first_grid(scale),
        ),
        Claim(
            "for SGNHT the heuristic remains stable",
            "section 4.3",
            "its chain of 300 s is finite",
            stays_finite(nn, "sgnht", "heuristic"),
        ),
        Claim(
            "the KSD by stochastic gradients of all draws follows that by full gradients well",
            "appendix, KSD_test_step_size and KSD_test_batch_size",
            "rank correlation of at least 0.9 in each of the six panels",
            follows(scale, 0.9),
        ),
    ]


# --- cell by cell ---------------------------------------------------------------------------------


def rows_of(label: str, scale: Scale) -> list[dict[str, object]]:
    """Every printed number beside ours. Step sizes are compared as the paper's h."""
    ours = summaries(label, scale)
    model = STUDIES[TABLES[label]].model
    rows: list[dict[str, object]] = []
    for (sampler, tuner, metric), printed in published(label).items():
        own = "mse_of_draws" if metric == "rmse" else metric
        number = ours.get((sampler, tuner, own), Summary((), 0, "not in ours"))
        mean, sd, theirs = number.mean, number.sd, printed.value
        name, ratio, text = own, None, cell_text(number, own)
        if metric in HYPERPARAMETERS:
            is_log = metric == "log10_step_size"
            theirs = log10_h(sampler, theirs) if is_log else theirs
            mean, sd = (statistics.median(number.values) if number.values else None), None
            if mean is not None:
                ratio = 10 ** (mean - theirs) if is_log else mean / theirs
        elif metric == "num_samples":
            name = "samples_per_s"
            theirs /= PUBLISHED_SECONDS[model]
            seconds = _seconds(label, sampler, tuner, scale)
            mean = None if mean is None or not seconds else mean / seconds
            sd = None if sd is None or not seconds else sd / seconds
            ratio = None if mean is None else mean / theirs
            if mean is not None:
                text = f"{mean:,.4g}" + ("" if sd is None else f" ± {sd:,.4g}")
                text += count_text(len(number.values), number.repeats)
        elif mean is not None and theirs:
            ratio = mean / theirs
        rows.append(
            {
                "table": label,
                "sampler": sampler,
                "tuner": tuner,
                "metric": name,
                "ours": mean,
                "sd": sd,
                "repeats": number.repeats,
                "usable": len(number.values),
                "text": text,
                "published": theirs,
                "ratio": ratio,
                "note": number.note,
            }
        )
    return rows


def _seconds(label: str, sampler: str, tuner: str, scale: Scale) -> float | None:
    """Seconds in which the draws were made that are counted: those after the burn-in."""
    found = []
    for cell in shown(label, scale):
        if (cell.sampler, cell.tuner) != (sampler, tuner) or not is_finished(cell.folder(scale)):
            continue
        for row in read_metrics(cell.folder(scale) / "metrics.csv"):
            if row["status"] == "ok":
                found.append(float(row["elapsed_s"]) - float(row.get("burn_in_s") or 0.0))
    return statistics.fmean(found) if found else None


NOTES = (
    "Step sizes are the paper's h. Its tables print the step of the library that was used, which "
    "for SGLD is h/2: they are converted here. The ratio is that of h, not of its logarithm.",
    "What the paper calls RMSE is a mean of squared errors, averaged over draws, without a root. "
    "It is compared with the same of ours (mse_of_draws); our RMSE is in our own tables.",
    "Of hyperparameters, every choice is listed; the ratio is that of the median over the runs.",
    "Numbers of samples are compared per second: machines differ.",
    "The published code departed from the paper's text: minibatches with replacement, rewards of "
    "the last rung alone, an unbiased FSSD without a root, 800,000 training rows. Ours follows the "
    "text.",
)


def write(scale: Scale) -> None:
    """Write ``comparison.md`` and its rows as ``comparison.csv``. Raises ``StorageError``."""
    rows = [row for label in TABLES for row in rows_of(label, scale)]
    folder = scale.root / "tables"
    write_table(folder / "comparison.csv", COLUMNS, rows)
    atomic_write(folder / "comparison.md", markdown(rows, scale).encode())


def markdown(rows: Sequence[Mapping[str, object]], scale: Scale) -> str:
    """The comparison for a reader."""
    ours, theirs = Ours(scale), Theirs()
    lines = ["# Our numbers and the paper's", ""]
    whose = "ours" if not scale.note else "toy runs, which say nothing of the claim"
    if scale.note:
        lines += [f"**{scale.note}**", ""]
    lines += [
        "Made by `make tables` from the runs' own files and the numbers that the paper prints "
        "(`experiments/paper_tables`). Verdicts are computed: ours by Welch tests at "
        f"{100 * SIGNIFICANCE:g} % between the repeats, the paper's from its printed numbers as "
        "they are. With a single repeat the noise is not known, and nothing beats anything but a "
        "tuner without a number, all of whose chains failed; a rule that names a factor is decided "
        "by the means, of one run too. (1 of 3): of one run, while three are asked for.",
        "",
        "## Claims",
        "",
        f"| claim | where | rule | {whose} | the paper's own numbers |",
        "| --- | --- | --- | --- | --- |",
    ]
    judged = [(c, c.judge(ours), c.judge(theirs)) for c in claims(scale)]
    for number, (claim, own, printed) in enumerate(judged, start=1):
        lines.append(
            f"| {number}. {claim.text} | {claim.where} | {claim.rule} | **{own.answer}** "
            f"| {printed.answer} |"
        )
    lines += ["", "The figures behind them:", ""]
    for number, (_, own, printed) in enumerate(judged, start=1):
        lines += [f"{number}. ours: {own.figures}.", f"   The paper's: {printed.figures}."]
    lines += as_published(scale)
    lines += ["", "## Cell by cell", "", *(f"* {note}" for note in NOTES)]
    for label in TABLES:
        lines += [
            "",
            f"### {label}",
            "",
            "| sampler | tuner | | ours | published | ratio |",
            "| --- | --- | --- | ---: | ---: | ---: |",
        ]
        for row in rows:
            if row["table"] == label:
                lines.append(_row_text(row))
    return "\n".join(lines) + "\n"


def as_published(scale: Scale) -> list[str]:
    """The first table by the paper's text, as its code did it, and as it is printed."""
    text, code = (summaries(label, scale) for label in ("LR_std_estimates", AS_PUBLISHED))
    lines = [
        "",
        "## What the paper says, and what its code did",
        "",
        f"Logistic regression by the text (LR_std_estimates), with what the published code did "
        f"({AS_PUBLISHED}), and as it is printed.",
        "",
        "| sampler | tuner | | by the text | as the code did it | printed |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for (sampler, tuner, metric), printed in published("LR_std_estimates").items():
        own = [cell_text(found[sampler, tuner, metric], metric) for found in (text, code)]
        lines.append(
            f"| {SAMPLER_NAMES[sampler]} | {TUNER_NAMES[tuner]} | {METRICS[metric].heading} "
            f"| {own[0]} | {own[1]} | {printed.value:,.4g} |"
        )
    return lines


def _row_text(row: Mapping[str, object]) -> str:
    def number(value: object) -> str:
        return f"{value:,.4g}" if isinstance(value, float) else ""

    heading = METRICS[str(row["metric"])].heading if row["metric"] in METRICS else "samples / s"
    return (
        f"| {SAMPLER_NAMES[str(row['sampler'])]} | {TUNER_NAMES[str(row['tuner'])]} | {heading} "
        f"| {row['text']} | {number(row['published'])} | {number(row['ratio'])} |"
    )
