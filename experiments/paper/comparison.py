"""``comparison.md``: our numbers beside the published ones, and a verdict on the paper's claims."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from experiments.paper.cells import AS_PUBLISHED, STUDIES, TABLES, Scale, metrics_of, shown
from experiments.paper.claims import Ours, Theirs, claims
from experiments.paper.published import log10_h, published
from experiments.paper.tables import (
    HYPERPARAMETERS,
    METRICS,
    SAMPLER_NAMES,
    SIGNIFICANCE,
    TUNER_NAMES,
    Summary,
    cell_text,
    count_text,
    summaries,
    values_of,
)
from mamba_cli.artifacts import atomic_write, write_table

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
        if (cell.sampler, cell.tuner) != (sampler, tuner):
            continue
        numbers, _ = values_of(cell, "num_samples", scale)
        for row in metrics_of(cell.folder(scale)) if numbers else []:
            if row["status"] == "ok":
                found.append(float(row["elapsed_s"]) - float(row.get("burn_in_s") or 0.0))
    return statistics.fmean(found) if found else None


NOTES = (
    "Step sizes are the paper's h. Its tables print the step of the library that was used, which "
    "for SGLD is h/2: they are converted here. The ratio is that of h, not of its logarithm. The "
    "paper prints one or two digits, so that a ratio of 0.99 or 1.05 is its rounding.",
    "What the paper calls RMSE is a mean of squared errors, averaged over draws, without a root. "
    "It is compared with the same of ours (mse_of_draws); our RMSE is in our own tables.",
    "ECE and MCE are not the same number on both sides. Ours bin the probability of the predicted "
    "class, averaged over draws, into equal bins of [0, 1]. The published code averaged "
    "log-probabilities, binned the range that it observed and left out the largest value: its "
    "numbers of overconfident chains can be far larger than ours.",
    "A KSD is that of a number of draws, which a chain's own noise enters by its size: at most "
    "1,000 thinned draws of a chain in the tables of logistic regression and 300 in those of PMF "
    "(evaluation.max_draws), 500 and 50 in the figures over time. The paper thins by 10 and does "
    "not say how many are left. Compare tuners within a column rather than ours with theirs. The "
    "figures over time have shorter chains, from the MAP on and with nothing left out as burn-in, "
    "so that they can rank tuners otherwise than the tables do, as for SGNHT in PMF.",
    "Of hyperparameters, what every run chose is listed; the ratio is that of the median.",
    "Numbers of samples are compared per second: machines differ, and so do the chosen batch sizes "
    "and L. Ours are counted after the burn-in, over the seconds after it; the paper's over all of "
    "a chain's, and it does not say whether its count leaves out the burn-in.",
    "SGNHT has one thermostat for the whole position here, as in the paper's equations; the "
    "library that the paper used has one for every array of parameters.",
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
        "(`experiments/paper_tables`). Verdicts are computed: ours by one-sided Welch tests at "
        f"{100 * SIGNIFICANCE:g} % between the repeats, the paper's from its printed numbers as "
        "they are. A claim holds or does not hold only where the noise allows to say so: three "
        "runs are few, and a difference of half the number can still be undecided. With a single "
        "repeat the noise is not known, and nothing beats anything but a tuner without a number, "
        "all of whose chains failed. Rules that name a factor, and those on what was chosen or how "
        "many draws were made, are decided by the means or the choices, of one run too.",
        "",
        '"Tend to" and "generally" are read as at least four of six samplers, "all but one" as '
        'five, "consistently" and "all" as six, "some" as two. Repeats of a table are runs with '
        "seeds of their own, tuning included; those of a figure over time are ten chains with the "
        "hyperparameters that the tuning of seed 0 chose, so that a verdict on a figure is about "
        "these choices. (1 of 3): of one run, while three are asked for.",
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
        f"({AS_PUBLISHED}, one run of each), and as it is printed. Not reproduced of that code: a "
        "MAP that was not found to the end, and ten test locations of the FSSD that were one. Its "
        "N is 800,000, so that the heuristic's 1/N is 10^-5.90, where the paper prints 10^-6.",
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
