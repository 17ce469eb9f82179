"""What a person sees: on a terminal, away from one, and on a poor one."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mamba_cli.console import Console, duration, size_note
from mamba_cli.types import Reporter


class Terminal(io.StringIO):
    """A terminal of 100 columns that keeps all that was written to it."""

    def isatty(self) -> bool:
        return True


class Encoded(io.TextIOWrapper):
    def __init__(self, encoding: str, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(self.encoding)


class Broken(io.StringIO):
    """A terminal that has gone away."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(self.code, os.strerror(self.code))


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def console(terminal: Terminal) -> Iterator[Console]:
    with Console(terminal, io.StringIO()) as console:
        yield console


def run_through(console: Console) -> None:
    console.banner("quick", False)
    console.stage(1, 3, "MAP")
    console.message("gradient norm 3e-4")
    console.stage(2, 3, "tune", "56 arms, 12.9 s")
    console.start("rung 0: 56 arms", 4.3, "s")
    for _ in range(4):
        console.update(1.0, "best KSD 0.31")
    console.finish()


def test_a_console_is_a_reporter(console: Console) -> None:
    reporter: Reporter = console
    reporter.message("typed as the protocol asks")


def test_a_terminal_shows_stages_messages_bars_and_the_best_so_far(
    console: Console, terminal: Terminal
) -> None:
    run_through(console)
    text = terminal.getvalue()
    assert "budget=quick: NOT the paper's size" in text
    assert "[1/3] MAP" in text
    assert "gradient norm 3e-4" in text
    assert "[2/3] tune: 56 arms, 12.9 s" in text
    assert "rung 0: 56 arms" in text
    assert re.search(r"rung 0: 56 arms: done in [\d.]+ m?s, best KSD 0\.31\n", text)


def test_a_bar_says_how_much_is_left(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(terminal, io.StringIO())
    console.start("NUTS", 20_000, "draws")
    bar = console._bar
    assert bar is not None
    bar.update(5_000)
    bar.set_postfix_str("R-hat 1.003", refresh=False)
    # 5,000 draws in 10 seconds: 15,000 are left, 30 seconds.
    monkeypatch.setattr(bar, "_time", lambda: bar.start_t + 10.0)
    bar._ema_dn = bar._ema_dt = lambda *_: 0.0
    shown = str(bar)
    console.finish()
    assert "5,000/20,000 draws" in shown
    assert "00:30 left" in shown
    assert shown.endswith("R-hat 1.003")


def test_a_bar_in_seconds_shows_tenths(terminal: Terminal) -> None:
    console = Console(terminal, io.StringIO())
    console.start("rung 1", 4.31, "s")
    console.update(1.25)
    shown = str(console._bar)
    console.finish()
    assert "1.2/4.3 s" in shown


@pytest.mark.parametrize("amounts", [[2.0, 2.0], [-1.0], [float("inf")]])
def test_a_bar_never_leaves_its_range(console: Console, amounts: list[float]) -> None:
    console.start("rung", 3.0, "s")
    for amount in amounts:
        console.update(amount)
        assert console._bar is not None
        assert 0 <= console._bar.n <= 3.0


@pytest.mark.parametrize("total", [0.0, float("inf"), float("nan")])
def test_an_unknown_total_is_no_crash(console: Console, total: float) -> None:
    console.start("something", total, "s")
    console.update(1.0, "note")
    console.finish()


def test_update_and_finish_without_a_bar_do_nothing(console: Console, terminal: Terminal) -> None:
    console.update(1.0)
    console.finish()
    assert terminal.getvalue() == ""


def test_a_new_bar_closes_the_open_one(console: Console, terminal: Terminal) -> None:
    console.start("first", 1.0, "s")
    console.start("second", 1.0, "s")
    assert "first: done in" in terminal.getvalue()


def test_lines_written_under_an_open_bar_stay_whole(console: Console, terminal: Terminal) -> None:
    console.start("rung", 3.0, "s")
    console.update(1.0)
    console.message("arm 3 diverged")
    console.finish()
    assert re.search(r"(^|\r) *arm 3 diverged\n", terminal.getvalue())


def test_leaving_the_console_closes_the_bar(terminal: Terminal) -> None:
    with Console(terminal, io.StringIO()) as console:
        console.start("rung", 3.0, "s")
    assert console._bar is None
    # The bar is wiped, so that the shell's prompt starts on a clean line.
    assert terminal.getvalue().endswith("\r")


def test_away_from_a_terminal_there_is_one_line_a_stage() -> None:
    stream = io.StringIO()
    with Console(stream, io.StringIO()) as console:
        run_through(console)
    assert stream.getvalue() == (
        "*** budget=quick: NOT the paper's size ***\n[1/3] MAP\n[2/3] tune: 56 arms, 12.9 s\n"
    )


def test_a_terminal_can_be_told_to_be_quiet(terminal: Terminal) -> None:
    with Console(terminal, io.StringIO(), quiet=True) as console:
        run_through(console)
    assert "rung 0" not in terminal.getvalue()
    assert "[2/3] tune" in terminal.getvalue()


def test_everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "mamba_cli"),
        Console(io.StringIO(), io.StringIO()) as console,
    ):
        run_through(console)
        console.summary([("winner", "h = 1e-5")], "logreg")
    for text in (
        "NOT the paper's size",
        "[1/3] MAP",
        "gradient norm 3e-4",
        "rung 0: 56 arms: 4.3 s",
        "rung 0: 56 arms: done in",
        "best KSD 0.31",
        "winner  h = 1e-5",
    ):
        assert text in caplog.text
    assert {record.name for record in caplog.records} == {"mamba_cli.console"}


@pytest.mark.parametrize("terminal_or_not", [Terminal, io.StringIO])
def test_warnings_of_the_package_are_shown_once(terminal_or_not: type[io.StringIO]) -> None:
    stream = terminal_or_not()
    package = logging.getLogger("mamba_cli")
    before = list(package.handlers)
    with Console(stream, io.StringIO()) as console:
        console.start("rung", 3.0, "s")
        logging.getLogger("mamba_cli.artifacts").warning("%s is damaged", "arm.npz")
        logging.getLogger("mamba_cli.artifacts").info("not shown")
    assert stream.getvalue().count("warning: arm.npz is damaged\n") == 1
    assert "not shown" not in stream.getvalue()
    assert package.handlers == before


@pytest.mark.parametrize(
    ("variable", "value", "bold"),
    [("NO_COLOR", "1", False), ("NO_COLOR", "", True), ("TERM", "dumb", False)],
)
def test_no_color_is_respected(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, bold: bool
) -> None:
    monkeypatch.setenv(variable, value)
    with Console(terminal, io.StringIO()) as console:
        console.stage(1, 3, "MAP")
    assert ("\033[" in terminal.getvalue()) == bold


def test_no_escape_codes_away_from_a_terminal() -> None:
    stream, out = io.StringIO(), io.StringIO()
    with Console(stream, out) as console:
        run_through(console)
        console.summary([("a", "b")], "title")
    assert "\033" not in stream.getvalue() + out.getvalue()


def test_the_summary_is_aligned_on_stdout() -> None:
    stream, out = Encoded("utf-8"), Encoded("utf-8")
    with Console(stream, out) as console:
        console.summary(
            [("winner", "h = 3.2e-05, n = 10,000"), ("relative sd error", "0.02 ± 0.01")],
            "logreg · sgld",
        )
    assert stream.text() == ""
    assert out.text() == (
        "\n"
        "logreg · sgld\n"
        "──────────────────────────────────────────\n"
        "winner             h = 3.2e-05, n = 10,000\n"
        "relative sd error  0.02 ± 0.01\n"
    )


def test_stdout_that_is_not_utf8_gets_ascii() -> None:
    stream, out = Encoded("ascii", terminal=True), Encoded("ascii")
    with Console(stream, out) as console:
        console.stage(2, 3, "tune", "η = 3 · 56 arms")
        console.start("rung", 3.0, "s")
        console.update(1.5, "best → 0.3")
        console.finish()
        console.summary([("θ", "0.1 ± 0.2"), ("ü", "1×2")], "title…")
    assert "eta = 3 - 56 arms" in stream.text()
    assert "best -> 0.3" in stream.text()
    assert out.text() == "\ntitle...\n------------------\ntheta  0.1 +/- 0.2\n?      1x2\n"


@pytest.mark.parametrize("code", [errno.EPIPE, errno.EIO])
def test_a_terminal_that_goes_away_does_not_end_the_run(code: int) -> None:
    with Console(Broken(code), Broken(code)) as console:
        run_through(console)
        console.summary([("a", "b")], "title")


def test_a_closed_stream_does_not_end_the_run() -> None:
    stream = io.StringIO()
    with Console(stream, stream) as console:
        stream.close()
        run_through(console)
        console.summary([("a", "b")], "title")


def test_a_real_terminal_of_unknown_size_shows_the_bar() -> None:
    code = (
        "import time\n"
        "from mamba_cli.console import Console\n"
        "with Console() as console:\n"
        "    console.start('rung 0', 1.0, 's')\n"
        "    for _ in range(4):\n"
        "        time.sleep(0.12)\n"
        "        console.update(0.25, 'best KSD 0.3')\n"
    )
    main, worker = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stderr=worker,
            cwd=Path(__file__).parent,
            timeout=60,
            check=False,
        )
        shown = os.read(main, 100_000).decode()
    finally:
        os.close(main)
        os.close(worker)
    assert done.returncode == 0
    assert re.search(r"rung 0: \|.+\| [01]\.\d/1\.0 s, 00:0\d left, best KSD 0\.3", shown)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.4182, "0.42 s"),
        (0.9999, "1.0 s"),
        (12.94, "12.9 s"),
        (59.97, "1 min 00 s"),
        (125.2, "2 min 05 s"),
        (3_725, "1 h 02 min"),
        (float("nan"), "unknown"),
        (-1.0, "unknown"),
    ],
)
def test_durations_are_said_as_a_person_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_only_a_run_of_the_papers_size_carries_no_note() -> None:
    assert size_note("quick", False) == "budget=quick: NOT the paper's size"
    assert size_note("paper", False) == "budget=paper: NOT the paper's size"
    assert size_note("paper", True) == ""


def test_nothing_is_said_at_the_papers_size(console: Console, terminal: Terminal) -> None:
    console.banner("paper", True)
    assert terminal.getvalue() == ""


def drawn(terminal: Terminal) -> str:
    """The line that was drawn last, apart from the blanks that clear one."""
    return [line for line in terminal.getvalue().split("\r") if line.strip()][-1]


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_a_bar_has_ten_columns_at_least(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr("mamba_cli.console._Stream.columns", lambda stream: columns)
    with Console(terminal, io.StringIO()) as console:
        console.start("rung 1/3: 56 arms x 0.43 s", 24.1, "s")
        for _ in range(3):
            console.update(6.0, "best ksd 5.412: h=1e-05, n=10000, L=10")
            assert console._bar is not None
            console._bar.refresh()
        line = drawn(terminal)
    assert "best ksd 5.412" in line
    # Two columns are left for the terminal's own ^C.
    assert len(line.rstrip()) <= columns - 3
    bar = line.split("|")[1]
    assert len(bar) >= 10


def test_ctrl_c_leaves_no_bar(terminal: Terminal) -> None:
    def interrupted() -> None:
        with Console(terminal, io.StringIO()) as console:
            console.start("rung 1/3", 10.0, "s")
            console.update(5.0, "a note")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert terminal.getvalue().endswith("\r" + " " * 79 + "\r")


def test_a_table_that_a_full_disk_swallows_is_an_error(terminal: Terminal) -> None:
    console = Console(terminal, Broken(errno.ENOSPC))
    with pytest.raises(OSError, match="standard output"):
        console.summary([("metric", "1")], "a title")
    Console(terminal, Broken(errno.EPIPE)).summary([("metric", "1")], "a title")
