"""Fixtures that more than one test module needs."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import hydra
import jax
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from mamba_cli.config import group_options


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs compiled for one test are there for the next, and for the processes it starts.

    Most of a small run's time is compilation, and most runs here have the same programs. The cache
    is the session's own: the user's is neither read nor written.
    """
    base = tmp_path_factory.getbasetemp()
    # Of several workers, each has a folder of its own in the session's.
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = str(session / "compiled")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JAX_COMPILATION_CACHE_DIR", folder)
        yield


@pytest.fixture(autouse=True)
def _environment_of_a_fresh_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders a developer has set for their own runs must not reach the tests."""
    monkeypatch.delenv("MAMBA_DATA_DIR", raising=False)
    monkeypatch.delenv("MAMBA_RESULTS_DIR", raising=False)


@pytest.fixture(autouse=True)
def _few_pictures_are_rendered(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendering takes as long as a small run: a run's figures are made, and their files empty.

    Not for tests marked ``rendered``.
    """
    if request.node.get_closest_marker("rendered") is None:
        monkeypatch.setattr("mamba_cli.plots.save_picture", lambda _, path: Path(path).touch())


@pytest.fixture(autouse=True)
def _no_command_line_left_over() -> Iterator[None]:
    """A command line run in this process leaves Hydra's configuration of it behind."""
    yield
    HydraConfig.instance().cfg = None


@pytest.fixture(autouse=True)
def _interrupts_reach_children() -> Iterator[None]:
    """What is started in the background of a shell ignores Ctrl-C, and so do its children."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def compose() -> Callable[..., DictConfig]:
    """``compose("sampler=sgld_cv", "seed=1")`` is what ``mamba-run`` would hand to the run."""

    def composed(*overrides: str) -> DictConfig:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        groups = group_options()
        chosen = [override for override in parsed if override.key_or_group in groups]
        cfg = copy.deepcopy(_composed(tuple(str(override.input_line) for override in chosen)))
        keys = [override for override in parsed if override not in chosen]
        ConfigLoaderImpl._apply_overrides_to_config(keys, cfg)
        return cfg

    return composed


@cache
def _composed(choices: tuple[str, ...]) -> DictConfig:
    """One composition for each set of options: reading the files is nearly all of the time."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("mamba_cli.conf", version_base="1.3"):
        return hydra.compose("config", overrides=list(choices))
