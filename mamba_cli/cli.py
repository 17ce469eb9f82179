"""The console script ``mamba-run``: Hydra composes, :mod:`mamba_cli.run` runs, errors become exits.

Exit codes: 0 done, 1 a fault of the program itself, 2 bad configuration or the run folder in use,
3 data missing or corrupt, 4 nothing usable came out, it could not be written, or memory ran out,
130 interrupted. A person sees one message; a traceback is shown for faults of the program and with
``hydra.verbose=true``.
JAX is imported only once a configuration has proved sound.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.main import get_args_parser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mamba_cli.config import group_options, settings_from
from mamba_cli.errors import (
    ConfigError,
    MambaError,
    NothingUsableError,
    StorageError,
    first_line,
    is_out_of_memory,
)
from mamba_cli.explain import CONFIG_MODULE, explanation
from mamba_cli.sweeps import (
    LOST_JOB_S,
    THREADS,
    UNKNOWN,
    Outcome,
    Sweep,
    is_parallel,
    planned,
    refuse_shared_clock,
)

INTERRUPTED = 130


def main() -> None:
    """Entry point of ``mamba-run``; leaves by ``SystemExit`` with one of the codes above."""
    _open_missing_streams()
    code = 0
    try:
        code = _print_version() if "--version" in sys.argv[1:] else _exit_code(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output (head, less) has enough.
        _discard(sys.stdout)
        code = 0
    except OSError as error:
        _discard(sys.stdout)
        # A run that has failed has said why.
        if code == 0:
            code = _report(StorageError(_explain_os_error(error, "standard output")), False)
    try:
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)
    sys.exit(code)


def _open_missing_streams() -> None:
    """Discard what goes to a stream that the caller closed (``>&-``): Python has ``None`` there.

    Opened first of all, they also take the closed descriptors, which a file of results would.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _discard(stream: TextIO) -> None:
    """Send what a stream still holds nowhere, so that Python's own last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_version() -> int:
    print(f"mamba-cli {importlib.metadata.version('mamba-cli')}")
    return 0


@dataclass
class Jobs:
    """The jobs of one command line: one, or all those of a multirun.

    A failing job is recorded rather than raised, so that the others still run. Under a parallel
    launcher the record is a file of the ``sweep``, since one made in a worker would be lost.
    """

    verbose: bool
    sweep: Sweep | None = None
    is_multirun: bool = False
    run_dir: Path | None = None
    error: Exception | None = None
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, cfg: DictConfig) -> None:
        """Run one job: what Hydra calls for each configuration."""
        if self.sweep is not None:
            self.sweep.enter()
        settings = HydraConfig.get()
        self.is_multirun = settings.mode == RunMode.MULTIRUN
        # Unresolved: an override may itself hold an interpolation that leads nowhere.
        task_overrides = OmegaConf.to_container(settings.overrides.task, resolve=False)
        assert isinstance(task_overrides, list)
        overrides = " ".join(str(override) for override in task_overrides)
        number = int(settings.job.num) if self.is_multirun else 0
        if self.is_multirun:
            _say(f"job {number}: {overrides}")
        code, message = 0, ""
        try:
            cfg = self._configuration(cfg, [str(override) for override in task_overrides])
            checked = settings_from(cfg)
            self.run_dir = checked.run_dir
            launcher = str(settings.launcher.get("_target_", ""))
            if self.is_multirun and is_parallel(launcher):
                refuse_shared_clock(launcher, cfg)
            from mamba_cli.compilation import use_cache
            from mamba_cli.run import run

            use_cache()
            run(cfg, wait_s=LOST_JOB_S if self.sweep is not None else 0.0)
        except Exception as error:
            self.error = error
            known = _as_mamba_error(error)
            code, message = (1, _fault(error)) if known is None else (known.exit_code, str(known))
            if self.is_multirun:
                _report(error, self.verbose, prefix=f"job {number}: ")
        outcome = Outcome(number, overrides, code, message)
        if self.sweep is not None:
            self.sweep.leave(outcome)
        self.outcomes.append(outcome)

    def _configuration(self, cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """``cfg``, or that of the run which it asks to repeat."""
        folder = OmegaConf.select(cfg, "replay")
        if folder is None:
            return cfg
        from mamba_cli.replay import configuration_of

        return configuration_of(str(folder), overrides, cfg)


def _exit_code(arguments: Sequence[str]) -> int:
    jobs = Jobs(verbose=_is_verbose(arguments))
    OmegaConf.register_new_resolver("mamba_options", _options_page, replace=True)
    try:
        with _hydra_errors_raised():
            jobs.sweep = _planned_sweep(arguments)
            hydra.main(
                version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name="config"
            )(jobs.run)()
    except SystemExit as leaving:
        # After a page of help, or for flags that argparse refused and has explained.
        return leaving.code if isinstance(leaving.code, int) else 0
    except KeyboardInterrupt:
        where = f": what is finished is kept in {jobs.run_dir}" if jobs.run_dir else ""
        _say(f"interrupted{where}")
        return INTERRUPTED
    except ValueError as error:
        # No job raises through Hydra, so this is its word on flags that do not go together.
        return _report(ConfigError(str(error)), jobs.verbose)
    except BrokenPipeError:
        raise
    except Exception as error:
        if jobs.sweep is not None:
            error = _of_the_launcher(error, jobs.sweep)
        return _report(error, jobs.verbose, get_args_parser().parse_args(arguments).overrides)
    if jobs.sweep is not None:
        return _report_failed_jobs(jobs.sweep.outcomes())
    if jobs.is_multirun:
        return _report_failed_jobs(jobs.outcomes)
    return 0 if jobs.error is None else _report(jobs.error, jobs.verbose)


def _planned_sweep(arguments: Sequence[str]) -> Sweep | None:
    """The sweep of a parallel launcher, with its number of threads set for jobs to inherit."""
    given = get_args_parser().parse_args(arguments)
    if not given.multirun or given.help or given.hydra_help or given.info or given.cfg:
        return None
    try:
        sweep = planned(CONFIG_MODULE, given.multirun, given.overrides)
    except (HydraException, OmegaConfBaseException):
        return None  # Hydra composes it again, and says what is wrong
    if sweep is not None:
        for name in THREADS:
            if name in sweep.environment:
                os.environ.setdefault(name, sweep.environment[name])
    return sweep


def _report(
    error: Exception, verbose: bool, overrides: Sequence[str] = (), prefix: str = ""
) -> int:
    """Say what went wrong on stderr, and return the exit code it means."""
    known = _as_mamba_error(error, overrides)
    if known is None:
        traceback.print_exception(error)
        _say(f"{prefix}{_fault(error)}")
        return 1
    if verbose:
        traceback.print_exception(error)
    _say(f"{prefix}{known}")
    return known.exit_code


def _of_the_launcher(error: Exception, sweep: Sweep) -> Exception:
    """What ended a sweep early, after a list of the jobs that did not come to their end."""
    outcomes = sweep.outcomes()
    if any(outcome.overrides != UNKNOWN for outcome in outcomes):
        _report_failed_jobs(outcomes)
    if _as_mamba_error(error) is not None:
        return error
    ended = NothingUsableError(
        f"{sweep.launcher.rpartition('.')[2]} ended early ({type(error).__name__}: "
        f"{first_line(error)}); what is finished is kept, and the same command does the rest"
    )
    ended.__cause__ = error
    return ended


def _fault(error: Exception) -> str:
    return f"a fault of mamba-run itself: {type(error).__name__}: {error}"


def _report_failed_jobs(outcomes: Sequence[Outcome]) -> int:
    """List the jobs that failed, and return the exit code of the first of them, or 0."""
    failed = [outcome for outcome in outcomes if outcome.exit_code != 0]
    if not failed:
        return 0
    _say(f"{len(failed)} of {len(outcomes)} jobs failed:")
    for outcome in failed:
        said = f": {outcome.message}" if outcome.overrides == UNKNOWN else ""
        _say(f"  job {outcome.number} (exit {outcome.exit_code}): {outcome.overrides}{said}")
    return failed[0].exit_code


def _as_mamba_error(error: Exception, overrides: Sequence[str] = ()) -> MambaError | None:
    """The error a person can act on, or None where only the program is at fault."""
    if isinstance(error, MambaError):
        return error
    # Before OSError: a missing configuration file is one, too.
    if isinstance(error, HydraException | OmegaConfBaseException):
        return ConfigError(explanation(error, overrides))
    if isinstance(error, OSError):
        return StorageError(_explain_os_error(error))
    if is_out_of_memory(error):
        first_line = (str(error).splitlines() or [""])[0]
        return NothingUsableError(
            f"out of memory: {first_line}\nUse fewer rows, smaller batches or fewer draws."
        )
    return None


def _explain_os_error(error: OSError, place: str = "") -> str:
    where = f" ({error.filename or place})" if error.filename or place else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"disk full{where}: nothing more could be written; earlier files are intact. Free "
            "some space and give the same command again: it goes on from there."
        )
    return f"the system refused{where}: {error.strerror or error}."


def _options_page() -> str:
    """Groups and options as lines of the help page."""
    options: Mapping[str, Sequence[str]] = group_options()
    width = max(len(group) for group in options)
    return "\n".join(f"  {group:{width}}  {', '.join(names)}" for group, names in options.items())


def _is_verbose(arguments: Sequence[str]) -> bool:
    return any(argument.lower() == "hydra.verbose=true" for argument in arguments)


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        # Nobody reads it; the exit code still says what happened.
        _discard(sys.stderr)


@contextmanager
def _hydra_errors_raised() -> Iterator[None]:
    """Have Hydra raise its errors instead of printing them and leaving with 1."""
    name = "HYDRA_FULL_ERROR"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
