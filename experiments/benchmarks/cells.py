"""Tables of measurements that go on where they were stopped, and what they were measured on."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import mamba_cli
from mamba_cli import artifacts

ROOT = Path(__file__).resolve().parents[2]

QUICK = bool(os.environ.get("QUICK"))
"""Whether to measure less, elsewhere: to see that everything runs."""

FOLDER = Path("results") / ("quick" if QUICK else "") / "benchmarks"
"""Where tables and pictures go, unless a program is told otherwise."""

Row = dict[str, str]


@cache
def machine() -> str:
    """Processor, cores, largest cache, device and versions, in one line."""
    found = artifacts.machine()
    largest = "/sys/devices/system/cpu/cpu0/cache/index3/size"
    cache_size = Path(largest).read_text().strip() if Path(largest).exists() else "of unknown size"
    device = found["device"]
    return ", ".join(
        [
            str(found["cpu"]),
            f"{found['num_threads']} of {found['num_cores']} cores",
            f"L3 {cache_size}",
            f"{device['count']} {device['platform']} {device['kind']}",
            f"Python {found['versions']['python']}",
            *(f"{name} {metadata.version(name)}" for name in ("jax", "numpy", "numpyro")),
        ]
    )


@cache
def code() -> str:
    """What was measured: the first digits of a checksum of the package and its configuration."""
    package = Path(mamba_cli.__file__).parent
    state = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *(package.parent / "conf").rglob("*.yaml")]):
        state.update(str(path.relative_to(package.parent)).encode() + path.read_bytes())
    return state.hexdigest()[:12]


class Table:
    """A CSV file of cells, written after each; a cell that is there is not measured again.

    Rows of another machine or of other code are left out when the file is read, and are gone
    with the first cell that is added.

    Parameters
    ----------
    path
        The file.
    keys
        The columns that name a cell.
    columns
        The others, without ``machine`` and ``code``, which every row has.
    """

    def __init__(self, path: Path, keys: Sequence[str], columns: Sequence[str]) -> None:
        self.path, self.keys = path, tuple(keys)
        self._columns = (*keys, *columns, "machine", "code")
        found = artifacts.read_table(path)[1]
        here = {"machine": machine(), "code": code()}
        self.rows = [row for row in found if here.items() <= row.items()]
        if len(self.rows) < len(found):
            print(f"{path}: {len(found) - len(self.rows)} cells of other code or another machine")

    def has(self, *key: Any) -> bool:
        """Whether the cell is measured."""
        wanted = [str(part) for part in key]
        return any([row[name] for name in self.keys] == wanted for row in self.rows)

    def add(self, **values: Any) -> Row:
        """Keep one cell, and show it."""
        given = values | {"machine": machine(), "code": code()}
        assert set(given) <= set(self._columns), set(given) - set(self._columns)
        row = {name: _text(given.get(name)) for name in self._columns}
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_table(self.path, self._columns, self.rows)
        shown = {name: row[name] for name in self._columns[:-2] if row[name]}
        print("  ".join(f"{name}={value}" for name, value in shown.items()), flush=True)
        return row


def rows_of(name: str, folder: Path = FOLDER) -> list[Row]:
    """All rows of a table that was written, whatever they were measured on."""
    return artifacts.read_table(folder / f"{name}.csv")[1]


def _text(value: Any) -> str:
    """Four digits: more of a time are noise."""
    if value is None or value != value:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def in_a_process(
    function: Callable[..., Mapping[str, Any]],
    *,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """What ``function(**arguments)`` returns in a new process, with its ``peak_gb`` of memory.

    Nothing is compiled there, and nothing of this process is in its memory.
    """
    module = Path(sys.modules[function.__module__].__file__ or "").stem
    script = (
        "import json, sys\n"
        f"from experiments.benchmarks import cells, {module}\n"
        f"found = {module}.{function.__name__}(**json.loads(sys.argv[1]))\n"
        "print(json.dumps(dict(found, peak_gb=cells.peak_gb())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def peak_gb() -> float:
    """The most memory this process has had, in 10^9 bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def pyplot() -> Any:
    """Matplotlib without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a picture, and forget it."""
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
