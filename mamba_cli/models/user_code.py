"""A user's own code: found, imported and called so that its faults name the place they are in."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from mamba_cli.errors import ConfigError, MambaError, first_line

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
        # What it imports is no model of its own.
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise ConfigError(
            f"model.target={target!r}: {place} has no {name}. It defines "
            f"{', '.join(known) or 'no function'}."
        )
    return Source(getattr(module, name), target, getattr(module, "__file__", None))


def _make_folder_importable() -> None:
    """Find modules in the folder that the command was given in, as Python does for a script."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _imported(name: str, target: str) -> Any:
    _make_folder_importable()
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


def sources_of(place: str) -> dict[str, Path]:
    """The source files of a module or file, and of what it imports beside it, by module name.

    Parameters
    ----------
    place
        ``package.module``, or the path of a ``.py`` file.

    Returns
    -------
    Of a module in a package, the modules of the package that it leads to, with their
    ``__init__.py``; of a file or a module in no package, those in its folder. They are found by
    their import statements: nothing is executed. Empty where there is no such source.
    """
    if place.endswith(".py"):
        path = Path(place).expanduser()
        if not path.is_file():
            return {}
        found = _sources_below(path.parent, path.stem, None)
        return {path.stem: path, **found}
    _make_folder_importable()
    top = place.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module that was made by hand
        return {}
    if spec is None or spec.origin is None:
        return {}
    origin = Path(spec.origin)
    if spec.submodule_search_locations is not None:
        return _sources_below(origin.parent.parent, place, top)
    is_installed = origin.parent.name in ("site-packages", "dist-packages")
    return _sources_below(origin.parent, place, top if is_installed else None)


def _sources_below(folder: Path, module: str, package: str | None) -> dict[str, Path]:
    """The sources that ``module`` leads to in ``folder``; only those of ``package`` if given."""
    found: dict[str, Path] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        if name in found or package not in (None, name.partition(".")[0]):
            continue
        path = folder.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
        if path.is_file():
            found[name] = path
            todo += _imports_of(path, name)
        if "." in name:
            todo.append(name.rpartition(".")[0])
    return dict(sorted(found.items()))


def _imports_of(path: Path, module: str) -> list[str]:
    """What may be modules among the names that a source imports, absolute."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it says so
        return []
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            start = above if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.strip(".")]


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
            said = first_line(error, silent="(no message)")
            raise ConfigError(
                f"{where}{line}: {type(error).__name__}: {said}{_hint(error)}"
            ) from error

    return call


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
