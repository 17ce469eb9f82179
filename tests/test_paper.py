"""The paper's tables and figures: what is transcribed, what is run, how it is shown."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from experiments.paper import __main__ as paper
from experiments.paper import comparison, figures, schedule, tables
from experiments.paper.cells import (
    ALL_TABLES,
    AS_PUBLISHED,
    FIGURES,
    SAMPLERS,
    STUDIES,
    TABLES,
    Cell,
    State,
    curve_cells,
    ksd_test_cells,
    paper_scale,
    shown,
    table_cells,
    toy_scale,
    with_best,
)
from experiments.paper.figures import Row
from experiments.paper.published import Key, log10_h, published
from experiments.paper.tables import Summary, beats, is_better, mark_best
from experiments.readme import between
from mamba_cli.artifacts import read_json, read_table, write_json
from mamba_cli.config import group_options, settings_from
from mamba_cli.errors import ConfigError, NothingUsableError

ROOT = Path(__file__).parents[1]
REAL = Path(os.environ.get("MAMBA_DATA_DIR") or ROOT.parent / "shared" / "data")


@pytest.mark.parametrize("label", TABLES)
def test_a_transcribed_table_has_every_number_of_its_rows_and_columns(label: str) -> None:
    study, numbers = STUDIES[TABLES[label]], published(label)
    metrics = [m for m in tables.ROWS[label] if m != "mse_of_draws"]
    expected = {
        Key(sampler, tuner, metric)
        for sampler in SAMPLERS
        for tuner in study.tuners
        for metric in metrics
        if metric != "num_integration_steps" or sampler.startswith("sghmc")
    }
    assert set(numbers) == expected


@pytest.mark.parametrize(
    ("label", "key", "value", "is_bold"),
    [  # read off the paper
        ("LR_std_estimates", ("sghmc", "heuristic", "ksd"), 53972, False),
        ("LR_std_estimates", ("sgnht_cv", "mamba_ksd", "ksd"), 3, True),
        ("LR_hyperparameters", ("sgnht_cv", "grid", "log10_step_size"), -4.5, False),
        ("LR_std_estimates_full", ("sgld_cv", "mamba_ksd", "num_samples"), 55580, False),
        ("LR_std_estimates_full", ("sghmc", "mamba_fssd", "num_samples"), 5145, False),
        ("PMF_uncertainty_tests", ("sghmc_cv", "grid", "ksd"), 4289, False),
        ("PMF_hyperparameters", ("sghmc", "mamba_ksd", "num_integration_steps"), 5, False),
        ("PMF_uncertainty_tests_full", ("sgnht", "heuristic", "rmse"), 1.11, True),
        ("NN_uncertainty_tests", ("sghmc", "heuristic", "ece_percent"), 50.9, False),
        ("NN_hyperparameters", ("sgnht_cv", "mamba_ksd", "log10_step_size"), -7.5, False),
        ("NN_uncertainty_tests_full", ("sgld", "mamba_ksd", "ece_percent"), 1.04, False),
    ],
)
def test_some_transcribed_numbers(
    label: str, key: tuple[str, str, str], value: float, is_bold: bool
) -> None:
    assert published(label)[Key(*key)] == (value, is_bold)


def test_tables_in_short_have_the_numbers_of_those_in_full() -> None:
    for study in STUDIES.values():
        short, full = published(study.tables[0]), published(study.tables[2])
        for key, number in short.items():
            assert number.is_bold == full[key].is_bold
            # One number is printed with another digit in full: 1.0 and 1.04.
            assert number.value == pytest.approx(full[key].value, abs=0.05)


def test_the_printed_step_of_sgld_is_half_of_h() -> None:
    assert 10 ** log10_h("sgld", -6.0) == pytest.approx(2e-6)
    assert log10_h("sghmc", -6.0) == -6.0


def test_every_cell_is_a_sound_command_with_a_folder_of_its_own() -> None:
    for scale in (paper_scale(), toy_scale()):
        cells = [cell for study in STUDIES.values() for cell in table_cells(study.tables[0], scale)]
        cells += table_cells(AS_PUBLISHED, scale)
        folders = [cell.folder(scale) for cell in cells]
        best = {"step_size": 1e-5, "batch_size": 100, "num_integration_steps": 5}
        one_each = {(c.experiment, c.tuner): c for c in cells if c.sampler in ("sghmc", "sgnht")}
        few = [c for c in one_each.values() if c.tuner in ("mamba_ksd", "heuristic")]
        for name in FIGURES:
            if name.startswith("KSD"):
                own = ksd_test_cells(name, scale)
                few += own[1:2]
            else:
                lines = [line for _, line in curve_cells(name, scale)]
                own = [with_best(line, best, "hmc" in line.sampler) for line in lines]
                few += own[6:7]
            folders += [cell.folder(scale) for cell in own]
        assert len(folders) == len(set(folders))
        for cell in few:
            settings = settings_from(cell.config(scale))
            assert settings.run_dir == cell.folder(scale)
            assert (settings.model, settings.sampler.name) == (cell.model, cell.sampler)
            is_other = scale.note or cell.experiment in (*FIGURES, AS_PUBLISHED)
            assert settings.is_paper_size or is_other


def test_a_cell_has_the_configuration_of_its_command(compose: Callable[..., DictConfig]) -> None:
    scale = paper_scale()
    cell = table_cells("PMF_hyperparameters", scale)[-1]
    assert cell.seed == 2
    name, *words = shlex.split(cell.command(scale))
    assert name == "mamba-run"
    asked = OmegaConf.to_container(compose(*words), resolve=True)
    assert OmegaConf.to_container(cell.config(scale), resolve=True) == asked


def test_the_published_code_is_made_of_the_same_options() -> None:
    found = {}
    for cell in table_cells(AS_PUBLISHED, paper_scale()):
        if cell.sampler in ("sgld", "sgnht"):
            found[cell.sampler, cell.tuner] = cell.config(paper_scale())
    for cfg in found.values():
        assert cfg.model.posterior.num_train == 800_000
        assert cfg.minibatch._target_ == "mamba_cli.minibatch.with_replacement"
    assert found["sgld", "mamba_fssd"].tuner.reward.statistic == "u"
    assert found["sgnht", "mamba_ksd"].tuner.score_on == "rung"
    # SGMCMCJax's dt of the paper's grid is half of h for SGLD, and h itself for SGNHT.
    assert found["sgld", "grid"].tuner.grid.step_size[:2] == pytest.approx([0.2, 0.2 / 10**0.5])
    assert found["sgnht", "grid"].tuner.grid.step_size[0] == 0.1
    assert found["sgld", "heuristic"].tuner.step_size == 2 / 800_000
    assert found["sgnht", "heuristic"].tuner.step_size is None


def test_there_is_an_experiment_for_every_table_and_figure() -> None:
    assert {*ALL_TABLES, *FIGURES} <= set(group_options()["experiment"])


def test_of_sgnht_for_the_network_the_second_grid_is_shown() -> None:
    cells = shown("NN_uncertainty_tests", paper_scale())
    own = {(c.tuner, c.variant) for c in cells if c.sampler == "sgnht"}
    assert own == {("mamba_ksd", "smaller_grid"), ("grid", "smaller_grid"), ("heuristic", "")}


def test_the_best_is_marked_only_beyond_the_noise() -> None:
    clear, noisy, far = (1.0, 1.1, 0.9), (1.2, 3.0, 0.1), (9.0, 9.5, 9.1)
    place = ("sgld", "mamba_ksd", "ksd")
    others = [("sgld", tuner, "ksd") for tuner in ("grid", "heuristic")]

    def marked(*values: tuple[float, ...]) -> list[str]:
        found = {p: Summary(v, 3) for p, v in zip([place, *others], values, strict=True)}
        return [tuner for (_, tuner, _), s in mark_best(found).items() if s.is_best]

    assert marked(clear, far, far) == ["mamba_ksd"]
    assert marked(clear, noisy, far) == []
    assert marked((1.0,), (9.0,), (9.0,)) == []  # no repeats, no noise
    assert marked(far, far, clear) == ["heuristic"]
    # A tuner that is still to be run is not beaten, one of which every chain diverged is; one that
    # lost a chain beats nothing.
    unknown, lost = Summary((), 3, "not run yet"), Summary((), 3, "diverged: at 7; diverged: at 9")
    scarred = Summary((0.1, 0.1), 3, "diverged: at 7")
    assert not beats(Summary(clear, 3), unknown, True)
    assert beats(Summary(clear, 3), lost, True)
    assert not beats(scarred, Summary(far, 3), True)
    assert not beats(Summary(clear, 3), lost._replace(note="diverged: at 7; not run yet"), True)
    assert not is_better(Summary((1.0, 1.0), 2), Summary((1.0, 1.0), 2), True)
    # One of equal numbers has no noise, the other has.
    assert is_better(Summary((1.0, 1.0), 2), Summary((1.4, 1.41), 2), True)
    # Accuracy: the higher is the better.
    assert is_better(Summary((94.0, 94.1), 2), Summary((90.0, 90.1), 2), False)


class Known:
    """Numbers of a table, as given."""

    def __init__(self, numbers: dict[tuple[str, str], tuple[float, ...]]) -> None:
        self.numbers = numbers

    def number(self, label: str, sampler: str, tuner: str, metric: str) -> Summary | None:
        values = self.numbers.get((sampler, tuner))
        return None if values is None else Summary(values, len(values))

    def beats(self, first: Summary, second: Summary, lower_is_better: bool) -> bool:
        return is_better(first, second, lower_is_better)


def test_a_claim_holds_fails_or_cannot_be_decided() -> None:
    judge = comparison.lowest("PMF_uncertainty_tests", "ksd", ["mamba_ksd"], 6)
    good, bad = (1.0, 1.1, 0.9), (5.0, 5.1, 4.9)

    def verdict(mamba: tuple[float, ...], others: tuple[float, ...]) -> str:
        numbers = {
            (sampler, tuner): mamba if tuner == "mamba_ksd" else others
            for sampler in SAMPLERS
            for tuner in STUDIES["PMF"].tuners
        }
        return judge(Known(numbers)).answer

    assert verdict(good, bad) == comparison.HOLDS
    assert verdict(good, good) == comparison.OPEN
    assert judge(Known({})).answer == comparison.OPEN
    numbers = {(s, t): good for s in SAMPLERS for t in STUDIES["PMF"].tuners}
    # The heuristic is best for one of six: against "for all".
    numbers |= {("sgld", "mamba_ksd"): bad, ("sgld", "grid"): bad}
    assert judge(Known(numbers)).answer == comparison.FAILS


def test_most_runs_are_most_of_those_asked_for() -> None:
    judge = comparison.chooses("LR_hyperparameters", "batch_percent", ["grid"], 1.0, 1, ["sgnht"])

    def verdict(*chosen: float) -> str:
        known = Known({})
        known.number = lambda *_: Summary(chosen, 3)  # type: ignore[method-assign]
        return judge(known).answer

    assert verdict(10.0) == verdict(1.0) == verdict(1.0, 10.0) == comparison.OPEN
    assert verdict(10.0, 10.0) == comparison.FAILS
    assert verdict(1.0, 10.0, 1.0) == comparison.HOLDS


def test_hyperparameters_are_listed_beside_the_papers_and_not_averaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {("sgld", "grid", "batch_percent"): Summary((100.0, 0.1, 10.0), 4, "not run yet")}
    monkeypatch.setattr(comparison, "summaries", lambda label, scale: found)
    rows = comparison.rows_of("LR_hyperparameters", paper_scale())
    (row,) = [r for r in rows if (r["sampler"], r["tuner"], r["metric"]) == next(iter(found))]
    assert (row["text"], row["ours"], row["sd"]) == ("100 / 0.1 / 10 (3 of 4)", 10.0, None)
    assert row["ratio"] == 1.0  # the paper's is 10 %


def test_the_papers_own_numbers_bear_out_what_it_says_of_them() -> None:
    theirs = comparison.Theirs()
    answers = [claim.judge(theirs).answer for claim in comparison.claims(paper_scale())]
    by_text = dict(zip((c.text for c in comparison.claims(paper_scale())), answers, strict=True))
    # 13, 58, 18, 56, 3 against the rest, 51 of the heuristic for SGNHT.
    first = "MAMBA, with KSD or FSSD, has the lowest KSD over all but one of the six samplers"
    assert by_text[first] == comparison.HOLDS
    # 0.1 % for SGLD-CV with KSD, 1 % with FSSD; SGNHT-CV 1 %: every sampler has a MAMBA at 1 %.
    assert by_text["for all samplers MAMBA finds a batch size of 1 %"] == comparison.HOLDS
    # An ECE of 9.3 % against 5.4 %.
    close = "where MAMBA is not the best it is very close to the best"
    assert by_text[close] == comparison.FAILS


def test_a_line_is_the_mean_of_the_runs_that_have_a_value() -> None:
    row = {"sampler": "sgld", "tuner": "grid", "point": 0, "elapsed_s": "0.5", "status": "ok"}
    rows: list[dict[str, object]] = [
        {**row, "repeat": "0", "value": "1.0"},
        {**row, "repeat": "1", "value": "3.0"},
        {**row, "repeat": "2", "value": "", "status": "diverged"},
        {**row, "repeat": "0", "value": "9.0", "tuner": "heuristic"},
        {"sampler": "sgld", "tuner": "grid", "status": "missing"},
    ]
    (point,) = figures.points_of(rows, "sgld", "grid")
    assert point == (0, 0.5, 2.0, pytest.approx(2**0.5), 2, 3)
    assert figures.points_of(rows, "sgnht", "grid") == []
    assert figures.shortfall(rows, "sgld", "grid") == "2 of 3 runs at the end"


def curve_of(tuner: str, values: dict[int, tuple[float, ...]], status: str) -> list[Row]:
    """Of a line for SGLD, the values at each point; a run without one there ends with a status."""
    names = {"sampler": "sgld", "tuner": tuner}
    rows: list[Row] = []
    for repeat in range(max(len(own) for own in values.values())):
        for point in range(3):
            row = {**names, "repeat": repeat, "point": point, "elapsed_s": 0.1 * (1 + point)}
            if repeat >= len(values.get(point, ())):
                rows.append({**row, "value": None, "status": status, "reason": "it did"})
                break  # as a curve does
            rows.append({**row, "value": values[point][repeat], "status": "ok", "reason": ""})
    return rows


LOW, HIGH = (1.0, 1.1, 0.9), (5.0, 5.1, 4.9)


def test_a_line_that_breaks_off_is_not_at_the_end() -> None:
    rows = curve_of("mamba_ksd", {0: HIGH, 1: HIGH, 2: HIGH}, "")
    rows += curve_of("heuristic", {0: LOW, 1: LOW}, "diverged")
    assert figures.points_of(rows, "sgld", "heuristic")[-1].num_usable == 3  # of the second point
    assert figures.end_of(rows, "sgld", "heuristic") is None
    assert figures.shortfall(rows, "sgld", "heuristic") == "diverged in all 3 runs"
    assert figures.shortfall(rows, "sgld", "mamba_ksd") == ""
    rows += [{"sampler": "sgld", "tuner": "grid", "status": "missing", "reason": "no data"}]
    assert figures.shortfall(rows, "sgld", "grid") == "could not be run"
    picture = figures.curves_figure("PMF_ksd_curves", rows, "")
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert texts == ["Heuristic: diverged in all 3 runs", "Grid search: could not be run"]


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
    judge = comparison.lowest_at_the_end(scale, "PMF_ksd_curves", ["mamba_ksd"], 4)
    assert judge(Known({})).figures.startswith(won)


def test_a_figure_of_the_ksd_says_what_it_lacks() -> None:
    arm = {"model": "logreg", "batch_size": 100, "ksd": 1.0, "status": "ok"}
    bad = {**arm, "step_size": 0.1, "ksd": None, "status": "diverged"}
    rows: list[Row] = []
    for line in figures.TEST_LOOKS:
        rows += [{**arm, "line": line, "step_size": 1e-4}, {**bad, "line": line}]
        rows += [{"model": "pmf", "line": line, "status": "missing", "reason": "no data"}]
    del rows[0:2]
    picture = figures.ksd_test_figure("KSD_test_step_size", rows, "")
    told = [[text.get_text() for text in axes.texts] for axes in picture.axes]
    assert told[1:] == [["every line: could not be run"], ["every line: not run yet"]]
    assert sorted(told[0]) == sorted(
        ["full, all: not run yet"]
        + [
            f"{line}: 1 of 2 missing"
            for line in ("full, thinned", "stochastic, all", "stochastic, thinned")
        ]
    )


def few(label: str, scale: object) -> list[Cell]:
    """Two runs of the first study."""
    return [Cell("LR_std_estimates", "logreg", "sgld", t) for t in ("mamba_ksd", "heuristic")]


def test_runs_are_made_resumed_redone_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paper, "table_cells", few)
    arguments = [
        "tables",
        "LR_std_estimates",
        "LR_hyperparameters",
        "--quick",
        f"--root={tmp_path}",
    ]
    real, failing = schedule.run_one, "sgld"

    def run_one(plan: schedule.Plan) -> None:
        if plan.cell.sampler == failing and plan.cell.tuner == "heuristic":
            raise NothingUsableError("the dog ate it\nand more")
        real(plan)

    monkeypatch.setattr(schedule, "run_one", run_one)
    assert paper.main(arguments) == 4
    said = capsys.readouterr().err
    assert "2 runs, 0 of them done before; the other 2 take about" in said
    assert "mamba-run experiment=LR_std_estimates sampler=sgld tuner=heuristic seed=0" in said
    table = (tmp_path / "tables" / "LR_std_estimates.md").read_text()
    assert "NOT the paper's" in table
    assert "* the dog ate it: SGLD, Heuristic (1 of 1)\n" in table
    assert "SGNHT, Grid search (1 of 1)" in table.partition("* not run yet: ")[2]
    compared = (tmp_path / "tables" / "comparison.md").read_text()
    assert "toy runs, which say nothing of the claim" in compared
    assert not list((tmp_path / "runs").rglob("*.png"))  # toy runs are not looked at

    # The same again: only what failed is tried, and now it works.
    failing = ""
    assert paper.main(arguments) == 0
    said = capsys.readouterr().err
    assert "2 runs, 1 of them done before; the other 1 take about" in said
    assert "the dog" not in (tmp_path / "tables" / "LR_std_estimates.md").read_text()

    # A line of a figure has the hyperparameters of the table's run.
    def one_pair(figure: str, scale: object) -> list[tuple[Cell, Cell]]:
        return [(few("", scale)[0], Cell(figure, "logreg", "sgld", "mamba_ksd"))]

    monkeypatch.setattr(paper, "curve_cells", one_pair)
    assert paper.main(["figures", "LR_ksd_curves", "--quick", f"--root={tmp_path}"]) == 0
    assert (tmp_path / "figures" / "LR_ksd_curves.png").read_bytes()[:4] == b"\x89PNG"
    _, rows = read_table(tmp_path / "figures" / "LR_ksd_curves.csv")
    assert [(row["repeat"], row["point"]) for row in rows] == [(r, p) for r in "01" for p in "012"]
    _, (chosen,) = read_table(
        tmp_path / "runs/LR_ksd_curves/logreg/sgld/mamba_ksd/seed-0/tuning.csv"
    )
    best = read_json(tmp_path / "runs/logreg/sgld/mamba_ksd/seed-0/best.json")
    assert best is not None
    assert float(chosen["step_size"]) == best["step_size"]
    assert int(chosen["batch_size"]) == best["batch_size"]

    # Another configuration is another run.
    scale = toy_scale(tmp_path)
    cell = few("", scale)[0]
    assert cell.state(scale, cell.config(scale)) == (State.DONE, "")
    longer = scale._replace(sizes={"logreg": (*scale.sizes["logreg"], "evaluation.budget_s=0.05")})
    state, why = cell.state(longer, cell.config(longer))
    assert state is State.CHANGED
    assert why == "evaluation.budget_s: there 0.1, asked for 0.05"
    before = (cell.folder(scale) / "provenance.json").read_bytes()
    assert schedule.run_cells([cell], longer, "again") == []
    assert (cell.folder(scale) / "provenance.json").read_bytes() != before


@pytest.mark.parametrize(
    ("stages", "state"),
    [(["tune"], State.UNFINISHED), (["tune", "ground_truth", "evaluate"], State.DONE)],
)
def test_a_run_that_was_asked_to_tune_alone_does_not_finish_its_cell(
    stages: list[str], state: State, tmp_path: Path
) -> None:
    scale = toy_scale(tmp_path)
    cell = few("", scale)[0]
    there = cell.config(scale)
    there.stages = stages
    cell.folder(scale).mkdir(parents=True)
    provenance = {
        "config": OmegaConf.to_container(there, resolve=True),
        "end": "2026-01-01T00:00:00Z",
    }
    write_json(cell.folder(scale) / "provenance.json", provenance)
    assert cell.state(scale, cell.config(scale)) == (state, "")


@pytest.mark.parametrize("key", STUDIES)
def test_the_tables_of_a_study_are_made_at_toy_sizes(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run of them: the three together are what ``make tables QUICK=1`` does."""
    if key != "LR":
        if not REAL.is_dir():
            pytest.skip("needs MovieLens 100K and MNIST (MAMBA_DATA_DIR)")
        monkeypatch.setenv("MAMBA_DATA_DIR", str(REAL))
    labels = [label for label, study in ALL_TABLES.items() if study == key]
    assert paper.main(["tables", *labels, "--quick", f"--root={tmp_path}"]) == 0
    scale = toy_scale(tmp_path)
    for label in labels:
        found = tables.summaries(label, scale)
        assert [name for name, summary in found.items() if summary.note == "not run yet"] == []
        _, rows = read_table(tmp_path / "tables" / f"{label}.csv")
        assert len(rows) == len(tables.laid_out(label, found)[1])
        assert tables.body(label, scale).startswith("**QUICK=1")
    for cell in dict.fromkeys(cell for label in labels for cell in table_cells(label, scale)):
        assert cell.state(scale, cell.config(scale)) == (State.DONE, "")
    assert scale.note in (tmp_path / "tables" / "comparison.md").read_text()


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("tables", "QUICK=1"), "tables --quick"),
        (("figures", "QUICK=1"), "figures --quick"),
        (("table-NN_hyperparameters",), "tables NN_hyperparameters"),
        (("figure-PMF_ksd_curves", "ARGS=--dry-run"), "figures PMF_ksd_curves --dry-run"),
    ],
)
def test_a_target_of_make_is_a_command(words: tuple[str, ...], command: str) -> None:
    told = ("make", "--dry-run", "--assume-old=.venv/.package", "VENV=.venv", *words)
    bare = {"PATH": os.environ["PATH"]}  # the tests may be run by make, with ARGS of their own
    done = subprocess.run(told, cwd=ROOT, capture_output=True, text=True, check=True, env=bare)
    assert done.stdout.split() == [".venv/bin/python", "-m", "experiments.paper", *command.split()]


def test_the_readme_shows_the_table_as_it_is_committed() -> None:
    text = between(ROOT / "README.md", tables.BEGIN, tables.END)
    assert text == tables.body(tables.IN_README, paper_scale(ROOT / "results"))


def test_two_commands_at_once_are_refused(tmp_path: Path) -> None:
    scale = toy_scale(tmp_path)
    (tmp_path / ".lock").write_text("4711\n")
    with (tmp_path / ".lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="being made by process 4711"), schedule.alone(scale):
            pass
        words = ["tables", "--quick", f"--root={tmp_path}", "--no-run", "LR_std_estimates"]
        assert paper.main(words) == 0  # they are shown all the same
        assert (tmp_path / "tables" / "LR_std_estimates.md").exists()
    with schedule.alone(scale):
        pass


def test_a_folder_that_cannot_be_written_to_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert paper.main(["tables", "--quick", f"--root={tmp_path / 'file' / 'results'}"]) == 4
    assert "a folder that can be written to" in capsys.readouterr().err


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        paper.main(["tables", "LR"])
    assert left.value.code == 2
    assert "LR is none of the tables: LR_std_estimates," in capsys.readouterr().err
