"""What a person sees while a run goes on: stages and bars on stderr, tables on stdout.

Away from a terminal there is one line a stage and nothing else; everything is logged besides.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

_INDENT = "      "
_COUNTED = "| {{n:{0}}}/{{total:{0}}} {{unit}}, {{remaining}} left{{postfix}}"
_BAR_FORMAT = "{{l_bar}}{{bar}}" + _COUNTED
# A narrow one has no per cent: what is done of the total says the same.
_NARROW_BAR_FORMAT = "{{desc}}: |{{bar}}" + _COUNTED
_USUAL_COLUMNS = 80
# Below this a bar has the first words of its description alone.
_WIDE_COLUMNS = 120
_LEAST_BAR = 10
# What the terminal echoes for Ctrl-C must not wrap: the line could not be cleared then.
_ROOM_FOR_ECHO = 3

# What a terminal without UTF-8 shows instead.
_ASCII = str.maketrans(
    {
        "─": "-",
        "·": "-",
        "–": "-",
        "—": "-",
        "−": "-",
        "×": "x",
        "±": "+/-",
        "…": "...",
        "→": "->",
        "≤": "<=",
        "≥": ">=",
        "η": "eta",
        "θ": "theta",
        "µ": "u",
        "μ": "mu",
        "√": "sqrt",
        "‖": "||",
        "‘": "'",
        "’": "'",
        "“": '"',
        "”": '"',
        "\u00a0": " ",
    }
)


def size_note(budget: str, paper_size: bool) -> str:
    """The warning that every output of a small run carries; empty at the paper's size.

    Parameters
    ----------
    budget
        The name of the budget.
    paper_size
        Whether the run has the paper's size: a single key can take it away from ``paper``.
    """
    return "" if paper_size else f"budget={budget}: NOT the paper's size"


def duration(seconds: float) -> str:
    """Seconds as a person says them: ``0.42 s``, ``12.9 s``, ``2 min 05 s``, ``1 h 02 min``."""
    if not 0 <= seconds < float("inf"):
        return "unknown"
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds < 0.995 else f"{seconds:.1f} s"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def align(rows: Sequence[Sequence[str]], title: str) -> str:
    """Lay out a table: columns aligned, ``title`` above a rule.

    Each row has as many cells as the first.
    """
    lines = [[cell.replace("\n", " ") for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    body = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    ]
    return "\n".join([title, "─" * max(len(line) for line in [title, *body]), *body])


class _Stream:
    """A text stream that a run outlives.

    A terminal that goes away (a closed pipe, a lost connection) silences the stream instead of
    ending hours of sampling; what the encoding cannot show is replaced.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False
        self.full: OSError | None = None
        self.encoding = getattr(stream, "encoding", None) or "ascii"
        self.is_utf8 = self.encoding.lower().replace("-", "").replace("_", "") == "utf8"
        try:
            self.is_terminal = bool(stream.isatty())
        except (AttributeError, ValueError):
            self.is_terminal = False

    def spelt(self, text: str) -> str:
        """``text`` in the characters that the encoding has."""
        if self.is_utf8:
            return text
        return text.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)

    def write(self, text: str) -> int:
        if self._gone:
            return len(text)
        try:
            return self._stream.write(self.spelt(text))
        except (OSError, ValueError) as error:
            self._silence(error)
            return len(text)

    def flush(self) -> None:
        if self._gone:
            return
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._silence(error)

    def _silence(self, error: Exception) -> None:
        self._gone = True
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            self.full = error
        logger.info("the terminal is gone (%s); the run goes on without it", error)

    def columns(self) -> int:
        """The width of the terminal; 80 where it has no size (some containers) or is none."""
        try:
            return os.get_terminal_size(self.fileno()).columns or _USUAL_COLUMNS
        except (OSError, ValueError):
            return _USUAL_COLUMNS

    def isatty(self) -> bool:
        return self.is_terminal

    def fileno(self) -> int:
        return self._stream.fileno()


class _Warnings(logging.Handler):
    """Shows the warnings that any part of the package logs, above the bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != __name__:
            self._console.show(f"{record.levelname.lower()}: {record.getMessage()}")


class Console:
    """The package's ``Reporter``: stages, bars and tables for a person.

    Parameters
    ----------
    stream
        Where stages and bars go; stderr by default.
    out
        Where tables go; stdout by default.
    quiet
        No bars and no messages, one line a stage alone; by default where ``stream`` is not a
        terminal.

    Notes
    -----
    As a context manager it also shows warnings that the package logs, and leaves no open bar.
    Everything is logged under ``mamba_cli.console``. ``NO_COLOR`` is respected.
    """

    def __init__(
        self, stream: TextIO | None = None, out: TextIO | None = None, quiet: bool | None = None
    ) -> None:
        self._stream = _Stream(sys.stderr if stream is None else stream)
        self._out = _Stream(sys.stdout if out is None else out)
        self.quiet = not self._stream.is_terminal if quiet is None else quiet
        self._bar: tqdm[Any] | None = None
        self._description = ""
        self._note = ""
        self._begun = 0.0
        self._handler: logging.Handler | None = None

    def __enter__(self) -> Self:
        self._handler = _Warnings(self)
        logging.getLogger("mamba_cli").addHandler(self._handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handler is not None:
            logging.getLogger("mamba_cli").removeHandler(self._handler)
            self._handler = None
        had_bar = self._bar is not None
        self._close_bar()
        if had_bar and kind is not None and issubclass(kind, KeyboardInterrupt):
            # The terminal has put ^C behind the bar.
            self._stream.write("\r" + " " * (self._stream.columns() - 1) + "\r")
            self._stream.flush()

    # --- the Reporter protocol ---

    def message(self, text: str) -> None:
        """One line above any bar; away from a terminal it is only logged."""
        logger.info("%s", text)
        if not self.quiet:
            self.show(_INDENT + text)

    def start(self, description: str, total: float, unit: str) -> None:
        """Open a bar over ``total`` units (seconds, draws); one that is still open is closed."""
        self.finish()
        logger.info("%s: %g %s", description, total, unit)
        self._description, self._note = description, ""
        self._begun = time.monotonic()
        if self.quiet:
            return
        from tqdm import tqdm

        known = 0 < total < float("inf")
        is_wide = self._stream.columns() >= _WIDE_COLUMNS
        bar_format = _BAR_FORMAT if is_wide else _NARROW_BAR_FORMAT
        self._bar = tqdm(
            total=total if known else None,
            desc=_INDENT + description if is_wide else description.partition(":")[0],
            unit=unit,
            file=self._stream,
            ncols=self._bar_columns(),
            nrows=24,
            leave=False,
            ascii=not self._stream.is_utf8,
            bar_format=bar_format.format(".1f" if unit == "s" else ",.0f") if known else None,
            smoothing=0.1,
        )

    def update(self, amount: float, note: str = "") -> None:
        """Advance the open bar by ``amount``; ``note`` is shown at its end."""
        self._note = note or self._note
        if self._bar is None:
            return
        self._bar.ncols = self._bar_columns()
        if note:
            self._bar.set_postfix_str(self._fitting(note), refresh=False)
        if self._bar.total is not None:
            # A last step overshoots its budget a little; a bar beyond its end says nothing.
            amount = min(amount, self._bar.total - self._bar.n)
        self._bar.update(max(amount, 0.0))

    def finish(self) -> None:
        """Close the open bar, leaving one line that says how long it took."""
        if not self._description:
            return
        self._close_bar()
        spent = duration(time.monotonic() - self._begun)
        text = f"{self._description}: done in {spent}" + (f", {self._note}" if self._note else "")
        self._description = ""
        logger.info("%s", text)
        if not self.quiet:
            self.show(_INDENT + text)

    # --- what run.py says besides ---

    def stage(self, index: int, total: int, name: str, detail: str = "") -> None:
        """Say which stage of the run begins: ``[2/5] tune: 56 arms, 12.9 s``."""
        self.finish()
        text = f"[{index}/{total}] {name}" + (f": {detail}" if detail else "")
        logger.info("%s", text)
        self.show(self._bold(text))

    def say(self, text: str) -> None:
        """One line that is shown away from a terminal too: what was decided for the user."""
        logger.info("%s", text)
        self.show(_INDENT + text)

    def banner(self, budget: str, paper_size: bool) -> None:
        """Say loudly that a run is not the paper's size, where it is not."""
        note = size_note(budget, paper_size)
        if note:
            logger.info("%s", note)
            self.show(self._bold(f"*** {note} ***"))

    def summary(self, rows: Sequence[tuple[str, str]], title: str) -> None:
        """Print the closing table: a name and a value a line, on stdout.

        Raises ``OSError`` where stdout is a file on a full disk.
        """
        self.finish()
        for line in align(rows, title).splitlines():
            logger.info("%s", line)
        # Spelt before it is aligned: a letter may become several.
        spelt = self._out.spelt
        text = align([[spelt(cell) for cell in row] for row in rows], spelt(title))
        self._out.write(f"\n{text}\n")
        self._out.flush()
        if self._out.full is not None:
            full = self._out.full
            raise OSError(full.errno, full.strerror, "standard output") from full

    def show(self, text: str) -> None:
        """Write one line to the terminal, above the bar; not logged."""
        if self._bar is not None:
            self._bar.clear()
        self._stream.write(text + "\n")
        self._stream.flush()
        if self._bar is not None:
            self._bar.refresh()

    def _bar_columns(self) -> int:
        return max(self._stream.columns() - _ROOM_FOR_ECHO, 1)

    def _fitting(self, note: str) -> str:
        """As much of ``note`` as leaves the bar its least width."""
        assert self._bar is not None
        total = f"{self._bar.total or 0:{'.1f' if self._bar.unit == 's' else ',.0f'}}"
        percent = "" if (self._bar.bar_format or "").startswith("{desc}") else "100%"
        around = f"{self._bar.desc}: {percent}|| {total}/{total} {self._bar.unit}, 00:00 left, "
        room = max(self._bar_columns() - _LEAST_BAR - len(around), 0)
        note = self._stream.spelt(note)
        mark = self._stream.spelt("…")
        if len(note) <= room:
            return note
        return note[: room - len(mark)] + mark if room > len(mark) else ""

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _bold(self, text: str) -> str:
        plain = (
            not self._stream.is_terminal
            or os.environ.get("NO_COLOR")
            or os.environ.get("TERM") == "dumb"
        )
        return text if plain else f"\033[1m{text}\033[0m"
