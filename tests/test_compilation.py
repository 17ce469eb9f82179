"""Programs are compiled with options this JAX knows, and kept for the next process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mamba_cli import compilation


def lowered() -> object:
    return jax.jit(lambda x: 2.0 * x).lower(jnp.float32(0))


def test_a_program_compiled_quickly_is_the_same_program() -> None:
    assert float(compilation.compile_quickly(lowered())(jnp.float32(21))) == 42.0


def test_an_option_this_jax_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfAnotherVersion:
        def compile(self, compiler_options: dict[str, bool] | None = None) -> str:
            if compiler_options:
                raise ValueError(f"No such compile option: {next(iter(compiler_options))!r}")
            return "compiled without"

    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert compilation.compile_quickly(OfAnotherVersion()) == "compiled without"


def test_another_failure_to_compile_is_raised() -> None:
    class TooLarge:
        def compile(self, compiler_options: dict[str, bool] | None = None) -> str:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compilation.compile_quickly(TooLarge())


CODE = """
import jax, jax.numpy as jnp
from mamba_cli.compilation import use_cache
use_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones(50)).block_until_ready()
print(sum(name.endswith("cache_hits") for name in hits))
"""


def test_a_second_process_finds_the_programs_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))
    hits = [
        int(
            subprocess.run(
                [sys.executable, "-c", CODE], check=True, capture_output=True, text=True
            ).stdout
        )
        for _ in range(2)
    ]
    assert hits[0] == 0
    assert hits[1] > 0
    assert any((tmp_path / "mine").iterdir())


def test_without_a_setting_the_users_cache_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True)
    assert list((tmp_path / "mamba-cli" / "compiled").glob("*/*"))
