"""How programs are compiled: cheaply, and once for all runs."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax
import pooch

QUICK_ON_CPU: dict[str, bool] = {"xla_cpu_use_fusion_emitters": False}
"""Halves the time to compile a chain on a CPU.

A short vector costs the same when the program runs; normal variates in 52,580 dimensions take
2.7 times as long.
"""


def compile_quickly(lowered: Any) -> Any:
    """Compile a lowered program with ``QUICK_ON_CPU`` where this JAX knows it."""
    if jax.default_backend() == "cpu":
        try:
            return lowered.compile(compiler_options=QUICK_ON_CPU)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if "xla_cpu_use_fusion_emitters" not in str(error):
                raise
    return lowered.compile()


def cpu_threads() -> int:
    """The threads of XLA's CPU pool: the cores this process may use, or NPROC where it is set."""
    wanted = os.environ.get("NPROC", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_fully(lowered: Any) -> Any:
    """Compile a lowered program for speed."""
    return lowered.compile()


def use_cache() -> None:
    """Keep compiled programs in the user's cache folder, for this process.

    ``JAX_COMPILATION_CACHE_DIR`` is respected. Programs made for one kind of CPU are kept
    apart from those of another, since a home folder may be shared among machines.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") is None:
        folder = Path(pooch.os_cache("mamba-cli")) / "compiled" / _cpu_kind()
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def _cpu_kind() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]
