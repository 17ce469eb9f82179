"""What the numbers say of the paper's claims: the rules, on numbers whose verdict is plain."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_paper import HIGH, LOW, curve_of

from experiments.paper import claims, figures
from experiments.paper.cells import SAMPLERS, STUDIES, paper_scale, toy_scale
from experiments.paper.claims import FAILS, HOLDS, OPEN, Judge
from experiments.paper.tables import Summary, beats
from mamba_cli.artifacts import write_table

GOOD, BAD = (1.0, 1.1, 0.9), (5.0, 5.1, 4.9)
DIVERGED = Summary((), 3, "diverged: at 7")
NOT_RUN = Summary((), 3, "not run yet")
SCARRED = Summary((0.1, 0.1), 3, "diverged: at 7")

Numbers = dict[tuple[str, str], Summary]


def of(values: tuple[float, ...]) -> Summary:
    return Summary(values, len(values))


class Known:
    """Numbers by sampler and tuner, whatever the table and the metric."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def number(self, label: str, sampler: str, tuner: str, metric: str) -> Summary | None:
        return self.numbers.get((sampler, tuner))

    def beats(self, first: Summary, second: Summary, lower_is_better: bool) -> bool:
        return beats(first, second, lower_is_better)


def everywhere(mamba: Summary, grid: Summary, heuristic: Summary) -> Numbers:
    of_tuner = {"mamba_ksd": mamba, "grid": grid, "heuristic": heuristic}
    return {(s, t): number for s in SAMPLERS for t, number in of_tuner.items()}


def verdict(judge: Judge, numbers: Numbers) -> str:
    return judge(Known(numbers)).answer


def test_a_claim_holds_fails_or_cannot_be_decided() -> None:
    judge = claims.lowest("PMF_uncertainty_tests", "ksd", ["mamba_ksd"], 6)
    good, bad = of(GOOD), of(BAD)
    assert verdict(judge, everywhere(good, bad, bad)) == HOLDS
    assert verdict(judge, everywhere(good, good, good)) == OPEN
    assert verdict(judge, {}) == OPEN
    numbers = everywhere(good, good, good)
    # The heuristic is best for one of six: against "for all".
    numbers |= {("sgld", "mamba_ksd"): bad, ("sgld", "grid"): bad}
    assert verdict(judge, numbers) == FAILS


def test_a_favoured_tuner_whose_chains_all_failed_counts_against_its_claim() -> None:
    judge = claims.lowest("PMF_uncertainty_tests", "ksd", ["mamba_ksd"], 4)
    good = of(GOOD)
    assert verdict(judge, everywhere(DIVERGED, good, good)) == FAILS
    # One that is not run yet says nothing, and a survivor's mean beats nothing.
    assert verdict(judge, everywhere(NOT_RUN, good, good)) == OPEN
    assert verdict(judge, everywhere(of(BAD), SCARRED, SCARRED)) == OPEN
    assert verdict(judge, everywhere(good, DIVERGED, DIVERGED)) == HOLDS
    assert verdict(judge, everywhere(good, DIVERGED, NOT_RUN)) == OPEN


def test_rivals_can_be_named() -> None:
    heuristic = claims.lowest(
        "PMF_uncertainty_tests", "ksd", ["heuristic"], 2, rivals=["mamba_ksd"]
    )
    # Grid search is the lowest of all.
    numbers = everywhere(of(BAD), of((0.1, 0.11, 0.12)), of(GOOD))
    assert verdict(heuristic, numbers) == HOLDS


def test_most_runs_are_most_of_those_asked_for() -> None:
    judge = claims.chooses("LR_hyperparameters", "batch_percent", ["grid"], 1.0, 1, ["sgnht"])
    both = claims.all_choose(
        "LR_hyperparameters", "batch_percent", ["grid", "heuristic"], 1.0, "sgnht"
    )

    def chosen(*values: float, note: str = "") -> str:
        return verdict(judge, {("sgnht", "grid"): Summary(values, 3, note)})

    assert chosen(10.0) == chosen(1.0) == chosen(1.0, 10.0) == OPEN
    assert chosen(10.0, 10.0) == FAILS
    assert chosen(1.0, 10.0, 1.0) == HOLDS
    assert chosen(10.0, note="no winner: every arm failed") == FAILS  # in the two others
    one, other = Summary((1.0,) * 3, 3), Summary((10.0,) * 3, 3)
    assert verdict(both, {("sgnht", "grid"): one, ("sgnht", "heuristic"): one}) == HOLDS
    assert verdict(both, {("sgnht", "grid"): one, ("sgnht", "heuristic"): other}) == FAILS
    assert verdict(both, {("sgnht", "grid"): one}) == OPEN


def test_what_was_chosen_where_a_tuner_is_best() -> None:
    judge = claims.chooses_where_best(
        "PMF_hyperparameters", "batch_percent", ["mamba_ksd"], 1.0, ("PMF_uncertainty_tests", "ksd")
    )
    # The number of a tuner is its KSD and its batch size at once.
    one, ten = of((1.0, 1.0, 1.0)), of((10.0, 10.0, 10.0))
    assert verdict(judge, everywhere(one, ten, ten)) == HOLDS
    assert verdict(judge, everywhere(ten, of((11.0,) * 3), of((12.0,) * 3))) == FAILS
    assert verdict(judge, everywhere(ten, one, ten)) == OPEN  # it is nowhere the best
    numbers = everywhere(ten, one, ten) | {("sgld", "grid"): ten, ("sgld", "mamba_ksd"): one}
    assert verdict(judge, numbers) == HOLDS  # SGLD alone counts
    # One that is still to be run may be the best.
    assert verdict(judge, everywhere(one, ten, NOT_RUN)) == OPEN
    assert verdict(judge, everywhere(one, ten, DIVERGED)) == HOLDS


def test_close_to_the_best_is_so_for_every_sampler() -> None:
    judge = claims.close_to_best("PMF_uncertainty_tests", "ksd", "mamba_ksd", 1.5)
    numbers = everywhere(of((1.4, 1.4)), of((1.0, 1.0)), DIVERGED)
    assert verdict(judge, numbers) == HOLDS
    assert verdict(judge, numbers | {("sgnht", "mamba_ksd"): of((1.6, 1.6))}) == FAILS
    assert verdict(judge, numbers | {("sgnht", "mamba_ksd"): DIVERGED}) == FAILS
    assert verdict(judge, numbers | {("sgnht", "heuristic"): NOT_RUN}) == OPEN
    assert verdict(judge, {}) == OPEN


def test_a_tuner_fails_by_divergence_or_by_a_factor_in_most_runs() -> None:
    judge = claims.fails("PMF_uncertainty_tests", "ksd", "heuristic", ["sgld"], 100.0)
    fine = of(GOOD)
    assert verdict(judge, everywhere(fine, fine, DIVERGED)) == HOLDS
    assert verdict(judge, everywhere(fine, fine, of((200.0, 300.0, 1.0)))) == HOLDS
    assert verdict(judge, everywhere(fine, fine, of(BAD))) == FAILS
    # Two of three diverged; one of three did; one did and one is still to be run.
    assert verdict(judge, everywhere(fine, fine, Summary((1.0,), 3, "diverged: at 7"))) == HOLDS
    assert verdict(judge, everywhere(fine, fine, Summary((1.0, 1.0), 3, "diverged: at 7"))) == FAILS
    some = Summary((1.0,), 3, "diverged: at 7; not run yet")
    assert verdict(judge, everywhere(fine, fine, some)) == OPEN
    assert verdict(judge, everywhere(fine, NOT_RUN, of(BAD))) == OPEN


def test_faster_is_more_draws_than_by_every_other_tuner() -> None:
    judge = claims.is_faster("PMF_uncertainty_tests_full", "mamba_ksd", 6)
    many, few = of((900.0,)), of((100.0,))
    assert verdict(judge, everywhere(many, few, few)) == HOLDS
    assert verdict(judge, everywhere(many, few, few) | {("sgld", "grid"): of((901.0,))}) == FAILS
    assert verdict(judge, everywhere(many, few, NOT_RUN)) == OPEN


def by_the_first_grid(
    monkeypatch: pytest.MonkeyPatch, first: dict[str, Summary], shown: dict[str, Summary]
) -> None:
    """SGNHT's numbers for the network by the whole grid, and those that the tables show."""
    monkeypatch.setattr(claims, "_of_the_first_grid", lambda scale, tuner, metric: first[tuner])
    monkeypatch.setattr(
        claims, "summary_of", lambda label, sampler, tuner, metric, scale: shown[tuner]
    )


def test_stability_of_sgnht_by_both_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = paper_scale()
    unstable, alone = claims.unstable_on_the_first_grid(scale), claims.alone_is_finite(scale)
    steps = claims.chose_on_the_first_grid(scale, {"mamba_ksd": -4.5, "grid": -4.0})
    fine, twice, gone = Summary((1.5,), 1), Summary((3.1,), 1), Summary((), 1, "diverged: at 7")
    shown = {"mamba_ksd": fine, "grid": fine, "heuristic": fine}

    def verdicts(mamba: Summary, grid: Summary) -> tuple[str, str]:
        by_the_first_grid(monkeypatch, {"mamba_ksd": mamba, "grid": grid}, shown)
        return verdict(unstable, {}), verdict(alone, {})

    assert verdicts(gone, gone) == (HOLDS, HOLDS)
    assert verdicts(gone, twice) == (HOLDS, FAILS)
    assert verdicts(gone, fine) == (FAILS, FAILS)
    assert verdicts(gone, Summary((), 1, "not run yet")) == (OPEN, OPEN)
    # Two of three chains diverged, and one of three.
    assert verdicts(gone, Summary((1.5,), 3, "diverged: at 7"))[0] == HOLDS
    assert verdicts(gone, Summary((1.5, 1.5), 3, "diverged: at 7"))[0] == OPEN
    shown["heuristic"] = gone
    assert verdicts(gone, gone)[1] == FAILS
    chosen = {"mamba_ksd": Summary((-4.5,), 1), "grid": Summary((-4.0,), 1)}
    by_the_first_grid(monkeypatch, chosen, shown)
    assert verdict(steps, {}) == HOLDS
    by_the_first_grid(monkeypatch, {**chosen, "grid": Summary((-4.5,), 1)}, shown)
    assert verdict(steps, {}) == FAILS


@pytest.mark.parametrize(
    ("stochastic", "answer"),
    [([1.0, 2.0, 3.0, 4.0], HOLDS), ([2.0, 1.0, 3.0, 4.0], FAILS)],  # ranks: 1, and 0.8
)
def test_the_ksd_of_stochastic_gradients_has_to_rank_alike(
    stochastic: list[float], answer: str, tmp_path: Path
) -> None:
    scale = toy_scale(tmp_path)
    judge = claims.follows(scale, 0.9)
    assert verdict(judge, {}) == OPEN
    lines = {"full-all": [10.0, 20.0, 30.0, 40.0], "stochastic-all": stochastic}
    rows = [
        {"model": study.model, "line": line, "step_size": place, "ksd": ksd, "status": "ok"}
        for study in STUDIES.values()
        for line, values in lines.items()
        for place, ksd in enumerate(values)
    ]
    for name in figures.KSD_TESTS:
        path = scale.root / "figures" / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(path, figures.TEST_COLUMNS, rows)
    assert verdict(judge, {}) == answer


def test_the_papers_own_numbers_bear_out_what_it_says_of_them() -> None:
    theirs = claims.Theirs()
    own = [(c.text, c.where, c.judge(theirs)) for c in claims.claims(paper_scale())]

    def answer(text: str, where: str = "") -> str:
        (found,) = [v.answer for t, w, v in own if t.startswith(text) and where in w]
        return found

    # 58, 13, 56, 18, 3 against the rest, 51 of the heuristic for SGNHT.
    assert answer("the MAMBA-optimised samplers perform the best in KSD") == HOLDS
    # With KSD at 0.1 % for SGLD-CV and SGHMC-CV, where that one is the best.
    assert answer("where MAMBA performs the best in KSD") == FAILS
    # 5.2, 8.4, 0.8; 12.0, 34.5, 15.0 of grid search.
    assert answer("their estimates of the posterior sds generally perform well") == FAILS
    assert answer("SGHMC with the heuristic fails") == HOLDS
    assert answer("MAMBA consistently identifies") == HOLDS
    # 50.3 against 79.9, 53.2 against 83.7, 40.6 against 40.8.
    assert answer("for some samplers the heuristic gives a lower error") == HOLDS
    # ECE: 0.7, 0.7, 0.9 of six. MCE: 15.7, 47.1, 21.3, 27.4.
    assert answer("the same of the chains of 300 s") == FAILS
    assert answer("the same of their MCE") == HOLDS
    # 9.3 % against 5.4 %.
    assert answer("the same in terms of ECE") == FAILS
    assert answer("for all samplers MAMBA finds a batch size of 1 %") == HOLDS
    assert answer("on the second grid both find a step of 10^-5") == HOLDS
    # What is in its figures or in words only.
    assert answer("MAMBA, using either KSD or FSSD") == OPEN
    assert answer("with these steps SGNHT loses stability") == OPEN
    assert answer("the KSD by stochastic gradients") == OPEN


@pytest.mark.parametrize(
    ("mamba", "heuristic", "grid", "won"),
    [
        ({0: LOW, 1: LOW, 2: LOW}, {0: HIGH, 1: HIGH, 2: HIGH}, HIGH, "for 1 of 6, against 0"),
        # Lower while it lasts: what diverges does not beat what stays.
        ({0: HIGH, 1: HIGH, 2: HIGH}, {0: LOW, 1: LOW}, HIGH, "for 0 of 6, against 0"),
        ({0: LOW, 1: LOW, 2: LOW}, {0: LOW, 1: LOW}, HIGH, "for 1 of 6, against 0"),
        # A survivor of three is no winner, and no rival that is still to be run is beaten.
        ({0: LOW, 1: LOW, 2: LOW[:2]}, {0: HIGH, 1: HIGH, 2: HIGH}, HIGH, "for 0 of 6, against 0"),
        ({0: LOW, 1: LOW, 2: LOW}, {0: HIGH, 1: HIGH, 2: HIGH}, (), "for 0 of 6, against 0"),
    ],
)
def test_the_lowest_curve_is_the_lowest_at_the_end(
    mamba: dict[int, tuple[float, ...]],
    heuristic: dict[int, tuple[float, ...]],
    grid: tuple[float, ...],
    won: str,
    tmp_path: Path,
) -> None:
    scale = toy_scale(tmp_path)
    rows = curve_of("mamba_ksd", mamba, "diverged") + curve_of("heuristic", heuristic, "diverged")
    if grid:
        rows += curve_of("grid", dict.fromkeys(range(3), grid), "")
    else:
        rows += [{"sampler": "sgld", "tuner": "grid", "status": "missing", "reason": "not run yet"}]
    figures.write("PMF_ksd_curves", rows, scale)
    judge = claims.lowest_at_the_end(scale, "PMF_ksd_curves", ["mamba_ksd"], 4)
    assert judge(Known({})).figures.startswith(won)
