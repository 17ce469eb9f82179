"""The claims of the paper's text, and the rules by which numbers decide them.

A claim is a rule on the numbers of the tables and figures, written once and applied twice: to ours,
where one number beats another only beyond the noise of the repeats, and to those the paper prints,
taken at their word. The paper's words are read alike throughout: "tend to" and "generally" are at
least four of six samplers, "all but one" is five, "consistently" and "all" are six, "some" is two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scipy import stats

from experiments.paper.cells import (
    KSD_TESTS,
    SAMPLERS,
    SMALLER_GRID,
    STUDIES,
    TABLES,
    Scale,
    table_cells,
)
from experiments.paper.figures import Point, end_of
from experiments.paper.published import Key, published
from experiments.paper.tables import (
    SAMPLER_NAMES,
    TUNER_NAMES,
    Sample,
    Summary,
    beats,
    cell_text,
    chains_failed,
    count_text,
    failures_of,
    is_lower,
    summary_of,
    summary_of_runs,
)
from mamba_cli.artifacts import read_table

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be decided here"

NO_NUMBERS = "the paper prints no numbers of this"


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

    def number(self, label: str, sampler: str, tuner: str, metric: str) -> Summary | None:
        found = summary_of(label, sampler, tuner, metric, self.scale)
        return found if found.values or found.note else None

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


Judge = Callable[[Evidence], Verdict]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the rule by which numbers decide it."""

    text: str
    where: str
    rule: str
    judge: Judge


# --- rules ----------------------------------------------------------------------------------------


def lowest(
    label: str,
    metric: str,
    tuners: Iterable[str],
    at_least: int,
    samplers: Sequence[str] = SAMPLERS,
    rivals: Sequence[str] | None = None,
) -> Judge:
    """One of ``tuners`` has a lower ``metric`` than all ``rivals`` for ``at_least`` samplers.

    A sampler counts for the claim where one of them beats every rival, against it where a rival
    beats all of them (as it does where their chains failed), and else for neither. Rivals are all
    other tuners unless some are named.
    """
    chosen = tuple(tuners)
    others = rivals or [t for t in STUDIES[TABLES[label]].tuners if t not in chosen]

    def judge(evidence: Evidence) -> Verdict:
        won, lost, told = 0, 0, []
        for sampler in samplers:
            numbers = _numbers(evidence, label, sampler, metric, (*chosen, *others))
            own, rest = (
                [n for t in names if (n := numbers[t]) is not None] for names in (chosen, others)
            )
            if _one_beats_all(evidence, own, rest):
                won += 1
            elif _one_beats_all(evidence, rest, own):
                lost += 1
            told.append(_told(sampler, numbers, metric))
        return _counted(won, lost, at_least, len(samplers), told)

    return judge


def _one_beats_all(evidence: Evidence, own: Sequence[Summary], rest: Sequence[Summary]) -> bool:
    usable = [number for number in own if number.values]
    return bool(rest) and any(all(evidence.beats(n, o, True) for o in rest) for n in usable)


def _numbers(
    evidence: Evidence, label: str, sampler: str, metric: str, tuners: Iterable[str] = ()
) -> dict[str, Summary | None]:
    """A metric of a sampler by tuner; by all of the table's where none are named."""
    named = tuple(tuners) or STUDIES[TABLES[label]].tuners
    return {tuner: evidence.number(label, sampler, tuner, metric) for tuner in named}


def _means(numbers: Mapping[str, Summary | None]) -> dict[str, float]:
    """The means of the tuners that have one."""
    return {t: n.mean for t, n in numbers.items() if n is not None and n.mean is not None}


def _is_known(numbers: Mapping[str, Summary | None]) -> bool:
    """Whether every tuner has a number, or chains that failed: none may yet turn out the best."""
    return all(n is not None and (n.mean is not None or chains_failed(n)) for n in numbers.values())


def _of_ours(judge: Callable[[], Verdict]) -> Judge:
    """A rule on what the paper does not print."""

    def judge_ours(evidence: Evidence) -> Verdict:
        return Verdict(OPEN, NO_NUMBERS) if isinstance(evidence, Theirs) else judge()

    return judge_ours


def chooses(
    label: str,
    metric: str,
    tuners: Sequence[str],
    value: float,
    at_least: int,
    samplers: Sequence[str] = SAMPLERS,
) -> Judge:
    """One of ``tuners`` chose ``value`` in most of its runs, for ``at_least`` of ``samplers``.

    A sampler counts against it once none of them can come to a majority any more.
    """
    chosen = [tuner for tuner in tuners if tuner in STUDIES[TABLES[label]].tuners]

    def judge(evidence: Evidence) -> Verdict:
        won, lost, told = 0, 0, []
        for sampler in samplers:
            found = _numbers(evidence, label, sampler, metric, chosen)
            votes = [_vote(number, value) for number in found.values()]
            won += any(vote is True for vote in votes)
            lost += all(vote is False for vote in votes)
            told.append(_told(sampler, found, metric))
        return _counted(won, lost, at_least, len(samplers), told)

    return judge


def all_choose(label: str, metric: str, tuners: Sequence[str], value: float, sampler: str) -> Judge:
    """Every one of ``tuners`` chose ``value`` in most of its runs."""

    def judge(evidence: Evidence) -> Verdict:
        found = _numbers(evidence, label, sampler, metric, tuners)
        votes = [_vote(number, value) for number in found.values()]
        return _unanimous(votes, [_told(sampler, found, metric)])

    return judge


def _vote(number: Summary | None, value: float) -> bool | None:
    """Whether most runs chose ``value``; ``None`` while both may come to be."""
    if number is None:
        return None
    hits = sum(math.isclose(chosen, value, rel_tol=0.02) for chosen in number.values)
    misses = len(number.values) - hits + failures_of(number)
    if 2 * hits > number.repeats:
        return True
    return False if 2 * misses >= number.repeats > 0 else None


def chooses_where_best(
    label: str, metric: str, tuners: Sequence[str], value: float, best_by: tuple[str, str]
) -> Judge:
    """Where one of ``tuners`` has the lowest mean of another table's metric, it chose ``value``.

    In most of its runs, and for every such sampler. ``best_by`` is that table and metric.
    """

    def judge(evidence: Evidence) -> Verdict:
        votes: list[bool | None] = []
        told = []
        for sampler in SAMPLERS:
            found = _numbers(evidence, best_by[0], sampler, best_by[1])
            means = _means(found)
            best = min(means, key=lambda tuner: means[tuner], default="")
            if not _is_known(found):
                votes.append(None)  # one that is still to be run may be the best
            elif best in tuners:
                number = evidence.number(label, sampler, best, metric)
                votes.append(_vote(number, value))
                told.append(_told(sampler, {best: number}, metric))
        if not votes:
            return Verdict(OPEN, "none of them has the lowest")
        return _unanimous(votes, told)

    return judge


def close_to_best(label: str, metric: str, tuner: str, factor: float) -> Judge:
    """``tuner`` is within ``factor`` of the lowest mean ``metric`` for every sampler."""

    def judge(evidence: Evidence) -> Verdict:
        ratios: dict[str, float] = {}
        for sampler in SAMPLERS:
            found = _numbers(evidence, label, sampler, metric)
            means, own = _means(found), found[tuner]
            if means and own is not None and chains_failed(own):
                ratios[sampler] = math.inf
            elif tuner in means and _is_known(found):
                ratios[sampler] = means[tuner] / min(means.values())
        told = ", ".join(f"{SAMPLER_NAMES[s]} {r:.2f}" for s, r in ratios.items())
        figures = f"over the lowest: {told}" if told else "no numbers to compare"
        if max(ratios.values(), default=0.0) > factor:
            return Verdict(FAILS, figures)
        return Verdict(HOLDS if len(ratios) == len(SAMPLERS) else OPEN, figures)

    return judge


def is_faster(label: str, tuner: str, at_least: int) -> Judge:
    """``tuner`` makes more draws in the same time than every other, for ``at_least`` samplers."""

    def judge(evidence: Evidence) -> Verdict:
        won, lost, told = 0, 0, []
        for sampler in SAMPLERS:
            found = _numbers(evidence, label, sampler, "num_samples")
            means = _means(found)
            others = [mean for t, mean in means.items() if t != tuner]
            if tuner in means and others:
                is_most = means[tuner] > max(others)
                won, lost = won + (is_most and len(means) == len(found)), lost + (not is_most)
            told.append(_told(sampler, found, "num_samples"))
        return _counted(won, lost, at_least, len(SAMPLERS), told)

    return judge


def fails(label: str, metric: str, tuner: str, samplers: Sequence[str], factor: float) -> Judge:
    """``tuner`` diverges, or is worse than the best by ``factor``, for all ``samplers``.

    In most of its runs.
    """
    rivals = [t for t in STUDIES[TABLES[label]].tuners if t != tuner]

    def judge(evidence: Evidence) -> Verdict:
        won, lost, told = 0, 0, []
        for sampler in samplers:
            own = evidence.number(label, sampler, tuner, metric)
            means = list(_means(_numbers(evidence, label, sampler, metric, rivals)).values())
            if own is None or not means:
                told.append(f"{SAMPLER_NAMES[sampler]}: no number")
                continue
            best = min(means)
            bad = failures_of(own) + sum(value >= factor * best for value in own.values)
            good = sum(value < factor * best for value in own.values)
            won += 2 * bad > own.repeats
            # A rival still to be run may be better yet.
            lost += 2 * good >= own.repeats and len(means) == len(rivals)
            ratio = f", {own.mean / best:.3g} times the best" if own.mean is not None else ""
            told.append(f"{SAMPLER_NAMES[sampler]}: {cell_text(own, metric)}{ratio}")
        return _counted(won, lost, len(samplers), len(samplers), told)

    return judge


def lowest_at_the_end(
    scale: Scale,
    name: str,
    tuners: Sequence[str],
    at_least: int,
    samplers: Sequence[str] = SAMPLERS,
    rivals: Sequence[str] | None = None,
) -> Judge:
    """In a figure over time, one of ``tuners`` ends lower than all ``rivals``, beyond the noise.

    As :func:`lowest`. A line that was run and does not reach the end is beaten by every one of
    which all runs do.
    """
    study = next(study for study in STUDIES.values() if study.curves == name)
    others = rivals or [t for t in study.tuners if t not in tuners]

    def judge() -> Verdict:
        path = scale.root / "figures" / f"{name}.csv"
        if not path.exists():
            return Verdict(OPEN, f"{name} has not been made")
        _, text = read_table(path)
        rows = [{k: v for k, v in row.items() if v != ""} for row in text]
        won, lost, told = 0, 0, []
        for sampler in samplers:
            run = {(r["sampler"], r["tuner"]) for r in rows if "point" in r}
            ends = {t: end_of(rows, sampler, t) for t in (*tuners, *others) if (sampler, t) in run}
            factor = 100.0 if study.model == "bnn" else 1.0  # an ECE, in per cent as elsewhere
            told.append(f"{SAMPLER_NAMES[sampler]}: {_ends_text(ends, factor) or 'not run'}")
            if len(ends) < len(tuners) + len(others):
                continue
            if any(all(_ends_lower(ends[t], ends[r]) for r in others) for t in tuners):
                won += 1
            elif any(all(_ends_lower(ends[r], ends[t]) for t in tuners) for r in others):
                lost += 1
        return _counted(won, lost, at_least, len(samplers), told)

    return _of_ours(judge)


def _ends_text(ends: Mapping[str, Point | None], factor: float) -> str:
    texts = []
    for tuner, point in ends.items():
        if point is None:
            texts.append(f"{TUNER_NAMES[tuner]} no value at the end")
            continue
        count = count_text(point.num_usable, point.num_runs)
        mean, sd = factor * point.mean, factor * point.sd
        unit = " %" if factor == 100.0 else ""
        texts.append(f"{TUNER_NAMES[tuner]} {mean:.3g} ± {sd:.2g}{unit}{count}")
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


# --- SGNHT for the network, by both grids ---------------------------------------------------------

FIRST_GRID_TUNERS = ("mamba_ksd", "grid")


def _of_the_first_grid(scale: Scale, tuner: str, metric: str) -> Summary:
    """A number of SGNHT for the network, its step from the whole grid, which no table shows."""
    cells = [
        cell
        for cell in table_cells("NN_uncertainty_tests", scale)
        if (cell.sampler, cell.tuner) == ("sgnht", tuner) and cell.variant != SMALLER_GRID
    ]
    return summary_of_runs(cells, metric, scale)


def chose_on_the_first_grid(scale: Scale, steps: Mapping[str, float]) -> Judge:
    """The tuners chose these log10 h on the whole grid, in most of their runs."""

    def judge() -> Verdict:
        found = {tuner: _of_the_first_grid(scale, tuner, "log10_step_size") for tuner in steps}
        votes = [_vote(found[tuner], step) for tuner, step in steps.items()]
        return _unanimous(votes, [_told("sgnht", found, "log10_step_size")])

    return _of_ours(judge)


def unstable_on_the_first_grid(scale: Scale) -> Judge:
    """SGNHT for the network, its steps from the whole grid: a long chain of both tuners fails.

    It fails where it is not finite, or where its mean ECE is more than twice that of the same tuner
    on the second grid.
    """

    def judge() -> Verdict:
        won, lost, told = 0, 0, []
        for tuner in FIRST_GRID_TUNERS:
            first = _of_the_first_grid(scale, tuner, "ece_percent")
            second = summary_of("NN_uncertainty_tests", "sgnht", tuner, "ece_percent", scale)
            told.append(
                f"{TUNER_NAMES[tuner]}: ECE {cell_text(first, 'ece_percent')} %, second grid "
                f"{cell_text(second, 'ece_percent')} %"
            )
            lost_chains = failures_of(first)
            if 2 * lost_chains > first.repeats:
                won += 1
            elif not lost_chains and first.mean is not None and second.mean is not None:
                is_worse = first.mean > 2 * second.mean
                won, lost = won + is_worse, lost + (not is_worse)
        return _counted(won, lost, 2, 2, told)

    return _of_ours(judge)


def alone_is_finite(scale: Scale) -> Judge:
    """Of SGNHT for the network by the whole grid, the heuristic's chain alone is finite."""

    def judge() -> Verdict:
        own = summary_of("NN_uncertainty_tests", "sgnht", "heuristic", "ece_percent", scale)
        rest = {t: _of_the_first_grid(scale, t, "ece_percent") for t in FIRST_GRID_TUNERS}
        told = _told("sgnht", {"heuristic": own, **rest}, "ece_percent")
        if failures_of(own) or any(number.values for number in rest.values()):
            return Verdict(FAILS, told)
        is_whole = len(own.values) == own.repeats and all(map(chains_failed, rest.values()))
        return Verdict(HOLDS if is_whole else OPEN, told)

    return _of_ours(judge)


def follows(scale: Scale, least: float) -> Judge:
    """Over both figures, the KSD by stochastic gradients of all draws ranks as the full one does.

    By Spearman's correlation over the settings where both have a value, at least ``least`` in every
    panel with four or more of them.
    """

    def judge() -> Verdict:
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
                told.append(f"{name}, {study.model}: {rank:.3f} over {len(shared)} settings")
        return _counted(won, lost, 6, 6, told or ["the figures have not been made"])

    return _of_ours(judge)


def _counted(won: int, lost: int, at_least: int, total: int, told: Sequence[str]) -> Verdict:
    """A claim for ``at_least`` of ``total``, of which some are for it and some against."""
    figures = f"for {won} of {total}, against {lost}; {'; '.join(told)}"
    if won >= at_least:
        return Verdict(HOLDS, figures)
    return Verdict(FAILS if lost > total - at_least else OPEN, figures)


def _unanimous(votes: Sequence[bool | None], told: Sequence[str]) -> Verdict:
    """A claim for all of those that vote."""
    return _counted(votes.count(True), votes.count(False), len(votes), len(votes), told)


def _told(sampler: str, numbers: Mapping[str, Summary | None], metric: str) -> str:
    texts = [
        f"{TUNER_NAMES[tuner]} {cell_text(number, metric)}"
        for tuner, number in numbers.items()
        if number is not None and (number.values or chains_failed(number))
    ]
    return f"{SAMPLER_NAMES[sampler]}: {', '.join(texts) or 'no number'}"


# --- the claims -----------------------------------------------------------------------------------

MAMBA = ("mamba_ksd", "mamba_fssd")
OTHERS = ("grid", "heuristic")
HMC = ("sghmc", "sghmc_cv")


def claims(scale: Scale) -> list[Claim]:
    """The claims of the paper's text, in its order, and what becomes of them split or elsewhere."""
    return [*_of_logistic_regression(scale), *_of_factorisation(scale), *_of_the_network(scale)]


def _of_logistic_regression(scale: Scale) -> list[Claim]:
    lr, lr_h, _ = STUDIES["LR"].tables
    curves = STUDIES["LR"].curves
    return [
        Claim(
            "MAMBA, using either KSD or FSSD, has the lowest KSD over all but one of the samplers",
            f"section 4.1, {curves}",
            "the better of the two lowest at the end for at least 5 of 6",
            lowest_at_the_end(scale, curves, MAMBA, 5),
        ),
        Claim(
            "the same of MAMBA-KSD alone",
            curves,
            "lower than grid search and heuristic at the end for at least 5 of 6",
            lowest_at_the_end(scale, curves, MAMBA[:1], 5, rivals=OTHERS),
        ),
        Claim(
            "the same of MAMBA-FSSD alone",
            curves,
            "lower than grid search and heuristic at the end for at least 5 of 6",
            lowest_at_the_end(scale, curves, MAMBA[1:], 5, rivals=OTHERS),
        ),
        Claim(
            "for SGNHT the heuristic gives the lowest KSD",
            f"section 4.1, {curves}",
            "the heuristic lowest at the end for SGNHT",
            lowest_at_the_end(scale, curves, ["heuristic"], 1, ["sgnht"]),
        ),
        Claim(
            "for SGNHT MAMBA-FSSD finds h = 1/N",
            f"section 4.1, {lr_h}",
            "most runs choose 10^-6",
            chooses(lr_h, "log10_step_size", ["mamba_fssd"], -6.0, 1, ["sgnht"]),
        ),
        Claim(
            "for SGNHT MAMBA-FSSD finds a batch size of 1 %",
            f"section 4.1, {lr_h}",
            "most runs choose 1 %",
            chooses(lr_h, "batch_percent", ["mamba_fssd"], 1.0, 1, ["sgnht"]),
        ),
        Claim(
            "where MAMBA performs the best in KSD it chooses a batch size of 1 %",
            f"section 4.1, {lr_h} and {lr}",
            "for every sampler where MAMBA-KSD or MAMBA-FSSD has the lowest mean KSD, most runs of "
            "that one choose 1 %",
            chooses_where_best(lr_h, "batch_percent", MAMBA, 1.0, (lr, "ksd")),
        ),
        Claim(
            "the MAMBA-optimised samplers perform the best in KSD",
            f"section 4.1, {lr}",
            "the better of MAMBA-KSD and MAMBA-FSSD lowest for at least 5 of 6",
            lowest(lr, "ksd", MAMBA, 5),
        ),
        Claim(
            "their estimates of the posterior sds generally perform well",
            f"section 4.1, {lr}",
            "the better of MAMBA-KSD and MAMBA-FSSD has the lowest ξ for at least 4 of 6",
            lowest(lr, "relative_std_error_percent", MAMBA, 4),
        ),
        Claim(
            "SGHMC with the heuristic fails (a KSD of 53,972)",
            lr,
            "diverged, or more than 100 times the best KSD, with and without control variates",
            fails(lr, "ksd", "heuristic", HMC, 100.0),
        ),
    ]


def _of_factorisation(scale: Scale) -> list[Claim]:
    pmf, _, _ = STUDIES["PMF"].tables
    curves = STUDIES["PMF"].curves
    return [
        Claim(
            "the samplers tuned using MAMBA tend to outperform the others",
            f"section 4.2, {curves}",
            "MAMBA lowest at the end for at least 4 of 6",
            lowest_at_the_end(scale, curves, MAMBA[:1], 4),
        ),
        Claim(
            "MAMBA consistently identifies hyperparameters that give the lowest KSD",
            f"section 4.2, {pmf}",
            "MAMBA lowest for all 6",
            lowest(pmf, "ksd", MAMBA[:1], 6),
        ),
        Claim(
            "for some samplers the heuristic gives a lower error of the sds than MAMBA",
            f"section 4.2, {pmf}",
            "its ξ is lower than MAMBA's for at least 2 of 6",
            lowest(pmf, "relative_std_error_percent", ["heuristic"], 2, rivals=MAMBA[:1]),
        ),
    ]


def _of_the_network(scale: Scale) -> list[Claim]:
    nn, nn_h, nn_full = STUDIES["NN"].tables
    curves = STUDIES["NN"].curves
    tests = " and ".join(KSD_TESTS)
    return [
        Claim(
            "the samplers tuned using MAMBA tend to outperform the others in terms of ECE",
            f"section 4.3, {curves}",
            "MAMBA lowest at the end for at least 4 of 6",
            lowest_at_the_end(scale, curves, MAMBA[:1], 4),
        ),
        Claim(
            "the same of the chains of 300 s (not said in the paper)",
            nn,
            "MAMBA has the lowest ECE for at least 4 of 6",
            lowest(nn, "ece_percent", MAMBA[:1], 4),
        ),
        Claim(
            "the same of their MCE (not said in the paper)",
            nn,
            "MAMBA has the lowest MCE for at least 4 of 6",
            lowest(nn, "mce_percent", MAMBA[:1], 4),
        ),
        Claim(
            "the MAMBA-optimised samplers tend to perform best in terms of KSD",
            f"section 4.3, {nn} (whose columns are ECE and MCE)",
            "MAMBA has the lowest KSD for at least 4 of 6",
            lowest(nn, "ksd", MAMBA[:1], 4),
        ),
        Claim(
            "where they are not the best they are very close to the best",
            f"section 4.3, {nn} (the same)",
            "their KSD is at most 1.5 times the lowest for every sampler",
            close_to_best(nn, "ksd", "mamba_ksd", 1.5),
        ),
        Claim(
            "the same in terms of ECE (not said in the paper)",
            nn,
            "their ECE is at most 1.5 times the lowest for every sampler",
            close_to_best(nn, "ece_percent", "mamba_ksd", 1.5),
        ),
        Claim(
            "for all samplers MAMBA finds a batch size of 1 %",
            f"section 4.3, {nn_h}",
            "most runs choose 1 % for all 6",
            chooses(nn_h, "batch_percent", MAMBA, 1.0, 6),
        ),
        Claim(
            "which results in a faster algorithm",
            f"section 4.3, {nn_full}",
            "more draws in the same time than by the other tuners, for all 6",
            is_faster(nn_full, "mamba_ksd", 6),
        ),
        Claim(
            "for SGNHT MAMBA and grid search find steps of 10^-4.5 and 10^-4 on the first grid",
            "section 4.3",
            "most runs choose these",
            chose_on_the_first_grid(scale, {"mamba_ksd": -4.5, "grid": -4.0}),
        ),
        Claim(
            "with these steps SGNHT loses stability in long chains",
            "section 4.3",
            "both diverge, or have more than twice the ECE they have with the second grid",
            unstable_on_the_first_grid(scale),
        ),
        Claim(
            "for SGNHT the heuristic is the only one that remains stable",
            "section 4.3",
            "its chain of 300 s is finite, and those of the first grid are not",
            alone_is_finite(scale),
        ),
        Claim(
            "on the second grid both find a step of 10^-5",
            f"section 4.3, {nn_h}",
            "most runs choose it",
            all_choose(nn_h, "log10_step_size", FIRST_GRID_TUNERS, -5.0, "sgnht"),
        ),
        Claim(
            "the KSD by stochastic gradients of all draws follows that by full gradients well",
            f"appendix, {tests}",
            "rank correlation of at least 0.9 in each of the six panels",
            follows(scale, 0.9),
        ),
    ]
