"""What counts as out of memory, and one line of an error for a table."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from mamba_cli.errors import first_line, is_out_of_memory


class OfJax(jax.errors.JaxRuntimeError):
    """JAX may derive from its own class."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 9 GB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 GB"),
        OfJax("RESOURCE_EXHAUSTED: Out of memory: 9 GB"),
    ],
)
def test_a_failed_allocation(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [jax.errors.JaxRuntimeError("INTERNAL: a mistake"), ValueError("RESOURCE_EXHAUSTED: quota")],
)
def test_another_error(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_jax_itself_says_so() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(lambda: jnp.ones(2**48, "int8"))())
    assert is_out_of_memory(caught.value)


def test_errors_do_not_wait_for_jax() -> None:
    code = "import sys, mamba_cli.errors; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_first_line() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(MemoryError()) == "MemoryError"
