"""The errors a person can act on, and the exit code each one means."""

from __future__ import annotations


class MambaError(Exception):
    """Base: ``str(error)`` is the one message the user reads."""

    exit_code = 1


class ConfigError(MambaError):
    """A key, its value and what is allowed; also a run folder made with another configuration."""

    exit_code = 2


class DataError(MambaError):
    """Data missing or corrupt: the path, what was expected, what was found, what to do."""

    exit_code = 3


class NothingUsableError(MambaError):
    """The run ended without a result: every arm failed, or the ground truth did not converge."""

    exit_code = 4


class StorageError(MambaError):
    """A result could not be written (disk full, no permission). Earlier files are intact."""

    exit_code = 4


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on the device.

    JAX's own class is known by its name: comparing with it would import JAX, which takes
    seconds that a wrong key on the command line need not wait for.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    from_jax = not names.isdisjoint(("JaxRuntimeError", "XlaRuntimeError"))
    return isinstance(error, MemoryError) or (from_jax and "RESOURCE_EXHAUSTED" in str(error))


def first_line(error: BaseException, silent: str | None = None) -> str:
    """The first line of an error's message without its full stop; ``silent``, or else its kind,
    where it has none.
    """
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else silent or type(error).__name__
