"""What Hydra refused of a command line, in words that name what would be accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf

from mamba_cli.config import did_you_mean, group_options
from mamba_cli.errors import first_line

CONFIG_MODULE = "mamba_cli.conf"

LAUNCHERS = ("joblib", "ray", "submitit")
"""Extras of the package that bring launchers of jobs side by side."""


def explanation(error: Exception, overrides: Sequence[str]) -> str:
    """One message for what Hydra or OmegaConf refused of ``overrides``, as they were typed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _explain_missing_option(error.missing_cfg_file)
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read as KEY=VALUE: {first_line(error)}."
    if isinstance(error, ConfigCompositionException):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        specific = _explain_unknown_key(parsed) or _explain_several_values(parsed)
        if specific is not None:
            return specific
    cause = error.__cause__
    detail = f" ({first_line(cause)})" if cause is not None else ""
    return f"{first_line(error)}{detail}"


def _explain_missing_option(missing: str) -> str:
    group, _, option = missing.rpartition("/")
    options = group_options().get(group, [])
    extra = option.partition("_")[0]
    if group == "hydra/launcher" and extra in LAUNCHERS:
        return f"{group}={option} is not installed: pip install 'mamba-cli[{extra}]'."
    if not options:
        return f"{missing}: there is no such configuration file."
    return (
        f"{group}={option} is not an option.{did_you_mean(option, options)} "
        f"Options of {group}: {', '.join(options)}."
    )


def _explain_unknown_key(overrides: Sequence[Override]) -> str | None:
    """Name the first override whose key does not exist, and the nearest one that does."""
    options = group_options()
    choices = [
        f"{override.key_or_group}={override.value()}"
        for override in overrides
        if override.package is None
        and str(override.value()) in options.get(override.key_or_group, [])
    ]
    keys = _known_keys(*choices)
    suggested = [key for key in keys if _is_for_people(key)]
    elsewhere = [f"{group}@{key}" for group in options for key in keys if key.endswith(f".{group}")]
    for override in overrides:
        key = override.key_or_group
        is_new = override.is_add() or override.is_force_add()
        if is_new or override.is_hydra_override() or override.package or key in keys:
            continue
        owners = _options_with(key)
        if owners:
            return f"{key} is not a key of this configuration, but of {', '.join(owners)}."
        candidates = [name for name in (*elsewhere, *suggested) if not key.startswith(f"{name}.")]
        section = key.rpartition(".")[0]
        siblings = [name for name in suggested if name.rpartition(".")[0] == section]
        listed = f" Known: {', '.join(siblings)}." if siblings else ""
        return f"{key} is not a key of this configuration.{did_you_mean(key, candidates)}{listed}"
    return None


def _is_for_people(key: str) -> bool:
    """Whether a key is worth suggesting: not Hydra's own, nor the sizes behind a budget."""
    is_hydras = any(part.startswith("_") for part in key.split("."))
    return not is_hydras and not key.startswith("model.budgets.")


def _options_with(key: str) -> list[str]:
    """The other options of the key's group that have it, as ``group=option``."""
    group = key.partition(".")[0]
    choices = (f"{group}={option}" for option in group_options().get(group, []))
    return [choice for choice in choices if key in _known_keys(choice)]


def _explain_several_values(overrides: Sequence[Override]) -> str | None:
    for override in overrides:
        if override.is_sweep_override():
            key, _, values = str(override.input_line).partition("=")
            return (
                f"{key}={values} names several values: add -m for one run of each, or write "
                f"'{key}=[{values}]' for a list."
            )
    return None


@cache
def _known_keys(*choices: str) -> tuple[str, ...]:
    """The keys of the configuration those options make, or else of the default one."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            return tuple(_dotted_keys(hydra.compose("config", overrides=list(choices))))
        except HydraException:
            return tuple(_dotted_keys(hydra.compose("config")))


def _dotted_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in map(str, node):
        key = f"{prefix}{name}"
        yield key
        is_value = OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name)
        child = None if is_value else node[name]
        if isinstance(child, DictConfig):
            yield from _dotted_keys(child, f"{key}.")
