"""The paper's tables and figures: what is transcribed, what is run, how it is shown."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
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
    Scale,
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
from mamba_cli import replay
from mamba_cli.artifacts import read_json, read_table, write_json, write_table
from mamba_cli.config import group_options, settings_from
from mamba_cli.errors import ConfigError, NothingUsableError
from mamba_cli.types import ArmRecord

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
                few += own[:2]
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


def test_a_line_of_the_ksd_figures_scores_the_chains_of_the_timed_one(tmp_path: Path) -> None:
    scale = toy_scale(tmp_path)
    first, *others = ksd_test_cells("KSD_test_step_size", scale)[:4]
    assert first.rescores is None
    there = OmegaConf.to_container(first.config(scale), resolve=True)
    write_json(first.folder(scale) / "provenance.json", {"config": there, "end": "today"})
    for cell in others:
        assert cell.rescores == first
        name, *words = shlex.split(cell.command(scale))
        assert name == "mamba-run"
        given = OmegaConf.create({"run_dir": str(cell.folder(scale)), "results_dir": str(tmp_path)})
        given.merge_with_dotlist(cell.keys)
        typed = replay.configuration_of(first.folder(scale), words, given)
        asked = OmegaConf.to_container(typed, resolve=True)
        assert OmegaConf.to_container(cell.config(scale), resolve=True) == asked
    # Made again, the timed chains have other draws.
    write_json(first.folder(scale) / "steps.json", {"dispatches": {"rung 0, arm 0": [7]}})
    last = others[-1]
    for cell in (first, last):
        folder = finished(cell, scale)
        write_table(folder / "tuning.csv", ArmRecord._fields, [arm(status="ok")._asdict()])
        write_json(folder / "steps.json", {"dispatches": {"rung 0, arm 0": [7]}})
        assert cell.state(scale) == (State.DONE, "")
    write_json(first.folder(scale) / "steps.json", {"dispatches": {"rung 0, arm 0": [8]}})
    others_now = (State.CHANGED, "the chains that it scores are others by now")
    assert last.state(scale) == others_now
    # Nor is a line kept whose chains are to be made again, or are on no record.
    (first.folder(scale) / "steps.json").unlink()
    assert first.state(scale) == (State.DAMAGED, "steps.json has gone")
    assert last.state(scale) == others_now
    write_json(first.folder(scale) / "steps.json", {"dispatches": {"rung 0, arm 0": [7]}})
    assert last.state(scale) == (State.DONE, "")
    (last.folder(scale) / "tuning.csv").unlink()
    assert last.state(scale) == (State.DAMAGED, "tuning.csv has gone")
    # The folders may lie elsewhere: whose chains they are is told by the steps.
    moved = toy_scale(tmp_path / "." / "moved")
    shutil.copytree(tmp_path / "runs", moved.runs / "runs")
    assert last.state(moved)[0] is State.DAMAGED


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


def test_hyperparameters_are_listed_beside_the_papers_and_not_averaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {("sgld", "grid", "batch_percent"): Summary((100.0, 0.1, 10.0), 4, "not run yet")}
    monkeypatch.setattr(comparison, "summaries", lambda label, scale: found)
    rows = comparison.rows_of("LR_hyperparameters", paper_scale())
    (row,) = [r for r in rows if (r["sampler"], r["tuner"], r["metric"]) == next(iter(found))]
    assert (row["text"], row["ours"], row["sd"]) == ("100 / 0.1 / 10 (3 of 4)", 10.0, None)
    assert row["ratio"] == 1.0  # the paper's is 10 %


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
    assert schedule.run_cells("again", [cell], longer) == []
    assert (cell.folder(scale) / "provenance.json").read_bytes() != before


def finished(cell: Cell, scale: Scale, **files: object) -> Path:
    """A cell's folder as a run leaves it that came to its end."""
    folder = cell.folder(scale)
    config = OmegaConf.to_container(cell.config(scale), resolve=True)
    write_json(folder / "provenance.json", {"config": config, "end": "2026-01-01T00:00:00Z"})
    if files.get("winner", True):
        write_json(folder / "best.json", {"step_size": 1e-4, "batch_percent": 1.0})
    row = {"repeat": 0, "status": "ok", "reason": "", "ksd": 3.0, **files}
    row.pop("winner", None)
    write_table(folder / "metrics.csv", tuple(row), [row] if files.get("winner", True) else [])
    return folder


def arm(**changes: object) -> ArmRecord:
    values = dict.fromkeys(ArmRecord._fields, 0) | {"reason": "", "promoted": False}
    return ArmRecord(**{**values, **ArmRecord._field_defaults, **changes})  # type: ignore[arg-type]


def test_a_run_out_of_memory_is_no_result(tmp_path: Path) -> None:
    scale = toy_scale(tmp_path)
    cell, other = few("", scale)
    finished(cell, scale, status="out_of_memory", reason="12 GiB asked for")
    assert cell.state(scale) == (State.OUT_OF_MEMORY, "12 GiB asked for")
    values, note = tables.values_of(cell, "ksd", scale)
    assert (values, note) == ([], "out of memory: 12 GiB asked for")
    assert not tables.chains_failed(Summary((), 1, note))
    # The same of a tuning that found nothing for want of memory, or of time; not of one that
    # diverged.
    folder = finished(other, scale, winner=False)
    for status, state, is_chain in (
        ("out_of_memory", State.OUT_OF_MEMORY, False),
        ("no_draws", State.DONE, False),
        ("diverged", State.DONE, True),
    ):
        write_table(
            folder / "tuning.csv", ArmRecord._fields, [arm(status=status, reason="why")._asdict()]
        )
        tables._states.clear()
        assert other.state(scale)[0] is state
        note = tables.values_of(other, "ksd", scale)[1]
        assert tables.chains_failed(Summary((), 1, note)) == is_chain


def test_a_failure_is_not_taken_for_the_end_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = toy_scale(tmp_path)
    cell = few("", scale)[0]
    folder = finished(cell, scale)
    values = read_json(folder / "provenance.json")
    assert values is not None
    values["config"]["stages"] = ["tune"]
    write_json(folder / "provenance.json", values)

    def run_one(plan: schedule.Plan) -> None:
        raise NothingUsableError("the data have gone")

    monkeypatch.setattr(schedule, "run_one", run_one)
    (failure,) = schedule.run_cells("tables", [cell], scale)
    assert (failure.reason, failure.exit_code) == ("the data have gone", 4)
    assert tables.values_of(cell, "ksd", scale) == ([], "the data have gone")


def test_a_run_of_another_configuration_is_not_shown_as_this_one(tmp_path: Path) -> None:
    scale = toy_scale(tmp_path)
    cell = few("", scale)[0]
    finished(cell, scale)
    assert tables.values_of(cell, "ksd", scale) == ([3.0], "")
    longer = scale._replace(sizes={"logreg": (*scale.sizes["logreg"], "evaluation.budget_s=0.05")})
    values, note = tables.values_of(cell, "ksd", longer)
    assert values == []
    assert note == "made otherwise: evaluation.budget_s: there 0.1, asked for 0.05"


def test_one_damaged_file_does_not_stop_the_others(tmp_path: Path) -> None:
    scale = toy_scale(tmp_path)
    cell, other = few("", scale)
    folder = finished(cell, scale)
    finished(other, scale)
    whole = (folder / "metrics.csv").read_text()
    for text, state in (
        ("ksd,status\n1.0\n", State.DAMAGED),  # a row that is cut
        ("a,b\n1,2\n", State.DAMAGED),
        (whole.splitlines()[0] + "\n", State.UNFINISHED),  # its row has gone
    ):
        (folder / "metrics.csv").write_text(text)
        tables._states.clear()
        assert cell.state(scale)[0] is state, text
        values, note = tables.values_of(cell, "ksd", scale)
        assert (values, note.partition(":")[0]) == (
            [],
            "damaged" if state is State.DAMAGED else tables.NOT_RUN,
        )
    (folder / "metrics.csv").write_text(whole)
    (folder / "best.json").unlink()  # a winner that is lost is not a tuning without one
    write_table(
        folder / "tuning.csv", ArmRecord._fields, [arm(status="ok", promoted=True)._asdict()]
    )
    assert cell.state(scale) == (State.UNFINISHED, "best.json has gone")
    (folder / "provenance.json").write_text("{")
    (plan,) = schedule.planned([cell, other], scale)  # to be made again
    assert (plan.cell, plan.state) == (cell, State.DAMAGED)
    lines = [(cell, ""), (other, "")]
    assert [row["status"] for row in figures.curve_rows(lines, scale)] == ["missing"] * 2


def test_the_networks_repeats_stay_as_many_as_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = paper_scale(tmp_path)
    assert paper.repeats_of("bnn", scale) == 1
    cell = table_cells("NN_uncertainty_tests", paper_scale(tmp_path, {"bnn": 3}))[-1]
    cell.folder(scale).mkdir(parents=True)
    assert paper.repeats_of("bnn", scale) == 3
    for words, said in (
        (["--bnn-repeats=0"], "0 is no whole number above 0"),
        (["--bnn-repeats=x"], "x is no whole number above 0"),
        (["--quick", "--bnn-repeats=2"], "one run of everything"),
    ):
        with pytest.raises(SystemExit) as left:
            paper.main(["tables", *words])
        assert left.value.code == 2
        assert said in capsys.readouterr().err


def test_the_time_for_all_of_it_is_said_first_and_after_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = toy_scale(tmp_path)
    one, other = few("", scale)
    monkeypatch.setattr(schedule, "expected_s", lambda plan: 60.0)
    batches = [schedule.missing("first", [one], scale), schedule.missing("second", [other], scale)]
    schedule.announce(batches)
    said = capsys.readouterr().err
    assert "first: 1 runs, 0 of them done before; the other 1 take about 1 min 00 s" in said
    assert "all of it takes about 2 min 00 s" in said
    assert list(paper.afterwards(batches)) == [60.0, 0.0]

    def fails_at_once(plan: schedule.Plan) -> None:
        raise NothingUsableError("no")

    monkeypatch.setattr(schedule, "run_one", fails_at_once)
    schedule.run_cells("first", [one], scale, 60.0)
    # What failed at once does not say that the rest will be over at once.
    said = capsys.readouterr().err
    assert "failed: no in " in said
    assert ", about 1 min 00 s left in all" in said


def test_the_lines_of_a_ksd_figure_score_the_same_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_panel(figure: str, scale: Scale) -> list[Cell]:
        return [cell for cell in ksd_test_cells(figure, scale) if cell.model == "logreg"]

    for module in (paper, figures):
        monkeypatch.setattr(module, "ksd_test_cells", one_panel)
    assert paper.main(["figures", "KSD_test_batch_size", "--quick", f"--root={tmp_path}"]) == 0
    _, rows = read_table(tmp_path / "figures" / "KSD_test_batch_size.csv")
    by_arm: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        by_arm.setdefault(row["batch_size"], {})[row["line"]] = row
    usable = [own for own in by_arm.values() if all(r["status"] == "ok" for r in own.values())]
    assert len(usable) > 1
    for own in usable:
        assert set(own) == set(figures.TEST_LOOKS)
        assert len({row["num_draws"] for row in own.values()}) == 1
        scored = {line: int(row["num_scored"]) for line, row in own.items()}
        assert scored["full-all"] == scored["stochastic-all"]
        assert scored["full-thinned"] == scored["stochastic-thinned"] == scored["full-all"] // 5
    # On all rows the sampler's own gradients are the full ones, at the same draws.
    whole = {line: float(row["ksd"]) for line, row in by_arm["4000"].items()}
    part = {line: float(row["ksd"]) for line, row in by_arm["400"].items()}
    for which in ("all", "thinned"):
        assert whole[f"full-{which}"] == pytest.approx(whole[f"stochastic-{which}"], rel=1e-3)
        assert part[f"full-{which}"] != pytest.approx(part[f"stochastic-{which}"], rel=1e-3)


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
    finished(cell, scale)
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


def test_a_toy_run_says_whose_seconds_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule, "MACHINE_LOCK", tmp_path / "paper.lock")
    with schedule.alone(paper_scale(tmp_path)):
        with schedule.alone(toy_scale(tmp_path)):
            assert f"process {os.getpid()} makes timed runs meanwhile" in capsys.readouterr().err
        other = schedule.alone(paper_scale(tmp_path / "other"))
        with pytest.raises(ConfigError, match="being made by process"), other:
            pass
    with schedule.alone(toy_scale(tmp_path)):
        assert capsys.readouterr().err == ""


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
