"""A user's own code: found, imported and called so that its faults name the place they are in."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from mamba_cli.errors import ConfigError, MambaError

T = TypeVar("T")


class Source:
    """Where a user's objects come from: the object, what messages call it, its file."""

    def __init__(self, holder: Any, label: str, path: str | None) -> None:
        self.holder, self.label, self.path = holder, label, path

    def get(self, name: str) -> Any:
        if isinstance(self.holder, Mapping):
            return self.holder.get(name)
        return getattr(self.holder, name, None)


def load_file(path: Path) -> Source:
    """The module that a file is, its folder importable as it is for a script.

    Raises
    ------
    ConfigError
        There is no such file, or it raises.
    """
    path = path.expanduser()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(
            f"model.file={str(path)!r} is not allowed: it must be the path of a Python file (.py) "
            f"that exists; looked for {path.absolute()}."
        )
    resolved = str(path.resolve())
    spec = importlib.util.spec_from_file_location(f"mamba_model_{path.stem}", resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What the file itself defines (dataclasses, pickles) looks its module up by name.
    sys.modules[spec.name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    guarded(spec.loader.exec_module, str(path), resolved)(module)
    return Source(module, str(path), resolved)


def load_target(target: str) -> Source:
    """The object that ``package.module:name`` or ``path/of/file.py:name`` names.

    Raises
    ------
    ConfigError
        It cannot be imported, or has no such name.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(
            f"model.target={target!r} is not allowed: it must be package.module:name, or "
            "path/of/file.py:name."
        )
    if place.endswith(".py"):
        source = load_file(Path(place))
        module = source.holder
    else:
        module = _imported(place, target)
    if not hasattr(module, name):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(
            f"model.target={target!r}: {place} has no {name}. It has {', '.join(known) or 'none'}."
        )
    return Source(getattr(module, name), target, getattr(module, "__file__", None))


def _imported(name: str, target: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"model.target={target!r}: cannot import {name}: {error}. Install its package, or "
            "start where it is."
        ) from error
    except Exception as error:
        raise ConfigError(
            f"model.target={target!r}: importing {name} failed: {type(error).__name__}: {error}"
        ) from error


def guarded(function: Callable[..., T], where: str, file: str | None = None) -> Callable[..., T]:
    """``function`` of the user's, whose exceptions say where they came from.

    Parameters
    ----------
    function
        What the user wrote. It is called with tracers, so that its faults show while a program
        is traced, whenever that is.
    where
        ``my_model.py: log_likelihood``.
    file
        The user's file: the line that failed there is named.

    Raises
    ------
    ConfigError
        In place of any exception of ``function``, which is its cause.
    """

    def call(*arguments: Any, **named: Any) -> T:
        try:
            return function(*arguments, **named)
        except MambaError:
            raise
        except Exception as error:
            lines = [
                frame.lineno
                for frame in traceback.extract_tb(error.__traceback__)
                if file is not None and frame.filename == file
            ]
            line = f", line {lines[-1]}" if lines else ""
            raise ConfigError(
                f"{where}{line}: {type(error).__name__}: {_first_line(error)}{_hint(error)}"
            ) from error

    return call


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else "(no message)"


def _hint(error: Exception) -> str:
    if isinstance(
        error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError
    ):
        return (
            " (the function is compiled by JAX: use jax.numpy instead of numpy, and jnp.where "
            "instead of if on parameters or data; a size that is computed from the data must be "
            "a constant)"
        )
    return ""
