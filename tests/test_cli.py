"""The command line: exit codes, one message, no traceback, nothing heavy for a wrong key."""

from __future__ import annotations

import errno
import logging
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import DictConfig

from mamba_cli.cli import main
from mamba_cli.config import group_options
from mamba_cli.errors import ConfigError, DataError, NothingUsableError, StorageError


@dataclass
class Outcome:
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]
Task = Callable[[DictConfig], None]


@pytest.fixture(autouse=True)
def _root_logger_restored() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """``command("seed=1", run=task)``: ``mamba-run seed=1`` with ``task`` in place of the run."""
    monkeypatch.chdir(tmp_path)

    def give(*arguments: str, run: Task = lambda cfg: None) -> Outcome:
        stub = ModuleType("mamba_cli.run")
        stub.__dict__["run"] = lambda cfg, wait_s=0.0: run(cfg)
        monkeypatch.setitem(sys.modules, "mamba_cli.run", stub)
        monkeypatch.setattr(sys, "argv", ["mamba-run", *arguments])
        with pytest.raises(SystemExit) as leaving:
            main()
        code = leaving.value.code
        assert isinstance(code, int)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return give


def raising(error: BaseException) -> Task:
    def run(cfg: DictConfig) -> None:
        raise error

    return run


def test_a_run_gets_its_configuration_and_ends_with_0(command: Command, tmp_path: Path) -> None:
    seen: list[DictConfig] = []
    outcome = command("sampler=sgld_cv", "seed=7", run=seen.append)
    assert (outcome.code, outcome.err) == (0, "")
    (cfg,) = seen
    assert (cfg.sampler.name, cfg.seed) == ("sgld_cv", 7)
    assert "hydra" not in cfg
    # Hydra leaves nothing behind: the run's folder is the run's own affair.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a key, its value, what is allowed"), 2),
        (DataError("a path, what was expected, what to do"), 3),
        (NothingUsableError("every arm failed"), 4),
        (StorageError("no permission"), 4),
    ],
)
def test_an_error_of_the_run_is_one_message_and_its_code(
    command: Command, error: Exception, code: int
) -> None:
    outcome = command(run=raising(error))
    assert (outcome.code, outcome.err) == (code, f"{error}\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_plainly(command: Command, number: int) -> None:
    outcome = command(run=raising(OSError(number, "No space left", "results/tuning.csv")))
    assert outcome.code == 4
    assert outcome.err.startswith("disk full (results/tuning.csv)")
    assert outcome.err.count("\n") == 1


def test_other_errors_of_the_system_name_the_file(command: Command) -> None:
    outcome = command(run=raising(PermissionError(errno.EACCES, "Permission denied", "results")))
    assert (outcome.code, outcome.err) == (4, "the system refused (results): Permission denied.\n")


def test_out_of_memory_is_not_a_fault_of_the_program(command: Command) -> None:
    from_jax = type("JaxRuntimeError", (RuntimeError,), {})
    for error in (MemoryError(), from_jax("RESOURCE_EXHAUSTED: 3 GB wanted")):
        outcome = command(run=raising(error))
        assert outcome.code == 4
        assert outcome.err.startswith("out of memory")
    assert command(run=raising(from_jax("INTERNAL: broken"))).code == 1


def test_a_fault_of_the_program_shows_its_traceback(command: Command) -> None:
    outcome = command(run=raising(ZeroDivisionError("of ours")))
    assert outcome.code == 1
    assert "Traceback" in outcome.err
    assert outcome.err.endswith("a fault of mamba-run itself: ZeroDivisionError: of ours\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sampler=sgdl"], ["sampler=sgdl", "Did you mean sgld?", "Options of sampler: badodab,"]),
        (["budget=fast"], ["budget=fast", "Options of budget: paper, quick."]),
        (["reward@tuner.reward=ksdd"], ["Did you mean ksd?"]),
        (["samplr=sgld"], ["samplr", "Did you mean sampler?"]),
        (["reward=ksd"], ["Did you mean reward@tuner.reward?"]),
        (["tuner.longest_arm=3"], ["tuner.longest_arm ", "Did you mean tuner.longest_arm_s?"]),
        (["longest_arm_s=3"], ["Did you mean tuner.longest_arm_s?"]),
        (["tuner=fixed", "tuner.step=3"], ["tuner.step ", "Did you mean tuner.step_size?"]),
        (["sampler.kernel.integrator=x"], ["but of sampler=sghmc, sampler=sghmc_cv."]),
        (
            ["tuner=fixed", "tuner.longest_arm_s=3"],
            ["but of tuner=mamba, tuner=mamba_fssd, tuner=mamba_ksd."],
        ),
        (["tuner.foo=1"], ["tuner.foo", "Known: ", "tuner.score_on"]),
        (["~tuner.foo"], ["tuner.foo"]),
        (["tuner.foo.bar=1"], ["tuner.foo.bar"]),
        (["+tuner.stepsize=1"], ["tuner.stepsize"]),
        (["+foo=1"], ["foo is not a key"]),
        (["+model.foo=1"], ["model.foo is not a key", "Known: ", "model.num_train"]),
        (["+sampler.frction=1"], ["sampler.frction is not a key", "Known: ", "sampler.kernel"]),
        (["+budget.foo=1"], ["budget.foo is not a key"]),
        (["model.correlation=1.5"], ["model.correlation=1.5", "above -1 and below 1"]),
        (["model.prior_variance=0"], ["model.prior_variance=0", "above 0"]),
        (["tuner=grid", "tuner.metric=rmse"], ["tuner.metric='rmse'", "log_loss, accuracy, ece"]),
        (["hydra.foo=1"], ["hydra.foo"]),
        (["hydra/launcher=foo"], ["hydra/launcher/foo"]),
        (["tuner.grid.step_size=[1"], ["tuner.grid.step_size=[1", "KEY=VALUE"]),
        (["sampler"], ["sampler", "KEY=VALUE"]),
        (["seed=0,1"], ["add -m", "'seed=[0,1]'"]),
        (["results_dir=${nowhere}"], ["results_dir", "nowhere"]),
        (["tuner=fixed"], ["tuner.step_size"]),
        (["tuner=fixed", "tuner.step_size=-1"], ["tuner.step_size=-1", "above 0"]),
        (["tuner.reduction_factor=1"], ["tuner.reduction_factor=1", "at least 2"]),
        (["--cfg", "job", "--run"], ["Only one of"]),
        (["-m", "sampler=sgld,foo"], ["sampler=foo"]),
        (["-m", "seed=0,1", "tuner.foo=1"], ["tuner.foo"]),
    ],
)
def test_a_bad_command_is_one_line_and_2(
    command: Command, arguments: list[str], expected: list[str]
) -> None:
    def never(cfg: DictConfig) -> None:
        pytest.fail("the run was started")

    outcome = command(*arguments, run=never)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    for words in expected:
        assert words in outcome.err


def test_verbose_shows_the_traceback_too(command: Command) -> None:
    for arguments in (["seed=-1"], ["sampler=sgdl"]):
        outcome = command(*arguments, "hydra.verbose=true")
        assert outcome.code == 2
        assert "Traceback" in outcome.err


def test_one_failing_job_does_not_stop_the_others(command: Command, tmp_path: Path) -> None:
    seeds = []

    def run(cfg: DictConfig) -> None:
        seeds.append(cfg.seed)
        if cfg.seed == 1:
            raise NothingUsableError("every arm failed")

    outcome = command("-m", "seed=0,1,2", run=run)
    assert seeds == [0, 1, 2]
    assert outcome.code == 4
    assert outcome.err.splitlines() == [
        "job 0: seed=0",
        "job 1: seed=1",
        "job 1: every arm failed",
        "job 2: seed=2",
        "1 of 3 jobs failed:",
        "  job 1 (exit 4): seed=1",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_a_job_whose_configuration_is_bad_does_not_stop_the_others(command: Command) -> None:
    seen: list[DictConfig] = []
    outcome = command("-m", "seed=-1,0", run=seen.append)
    assert outcome.code == 2
    assert [cfg.seed for cfg in seen] == [0]
    assert "  job 0 (exit 2): seed=-1" in outcome.err


def test_a_multirun_that_goes_well_ends_with_0(command: Command) -> None:
    seen: list[DictConfig] = []
    assert command("-m", "sampler=sgld,sgld_cv", run=seen.append).code == 0
    assert [cfg.sampler.name for cfg in seen] == ["sgld", "sgld_cv"]


def test_help_names_every_option_and_no_base_file(command: Command) -> None:
    outcome = command("--help")
    assert outcome.code == 0
    for group, options in group_options().items():
        assert f"  {group:12}  {', '.join(options)}\n" in outcome.out
    assert "_mamba" not in outcome.out
    examples = outcome.out.partition("Examples\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) == 5


def test_the_examples_of_the_help_page_are_sound(command: Command) -> None:
    page = command("--help").out
    for line in page.partition("Examples\n")[2].partition("\n\n")[0].splitlines():
        name, *arguments = shlex.split(line)
        assert name == "mamba-run"
        assert command(*arguments).code == 0


def test_cfg_prints_the_configuration(command: Command) -> None:
    outcome = command("--cfg", "job", "seed=5")
    assert outcome.code == 0
    assert "seed: 5\n" in outcome.out
    assert "hydra:" not in outcome.out


def test_nothing_heavy_is_imported_for_help_or_a_bad_key() -> None:
    program = (
        "import sys\n"
        "from mamba_cli.cli import main\n"
        "for arguments in (['--help'], ['--cfg', 'job'], ['seed=-1'], ['tuner.foo=1']):\n"
        "    sys.argv = ['mamba-run', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "heavy = {'jax', 'numpyro', 'pandas', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "print('imported:', *sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("imported:\n")


def test_ctrl_c_is_130_and_says_what_is_kept(tmp_path: Path) -> None:
    program = (
        "import sys, time, types\n"
        "from mamba_cli.cli import main\n"
        "def run(cfg, wait_s=0.0):\n"
        "    print('started', flush=True)\n"
        "    time.sleep(60)\n"
        "stub = types.ModuleType('mamba_cli.run')\n"
        "stub.run = run\n"
        "sys.modules['mamba_cli.run'] = stub\n"
        "sys.argv = ['mamba-run', '-m', 'seed=0,1']\n"
        "main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    kept = "results/runs/logreg/sgld/mamba_ksd/seed-0"
    assert err == f"job 0: seed=0\ninterrupted: what is finished is kept in {kept}\n"


BANNER = "*** budget=quick: NOT the paper's size ***\n"
STUBBED = (
    "import sys, types\n"
    "from mamba_cli.cli import main\n"
    "stub = types.ModuleType('mamba_cli.run')\n"
    "def run(cfg, wait_s=0.0):\n"
    "    from mamba_cli.console import Console\n"
    "    with Console() as console:\n"
    "        console.banner('quick', False)\n"
    "        console.summary([('metric', '1')], 'a table')\n"
    "stub.run = run\n"
    "sys.modules['mamba_cli.run'] = stub\n"
    "sys.argv = ['mamba-run']\n"
    "main()\n"
)


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">&-", 0, BANNER),
        ("2>&-", 0, ""),
        (">&- 2>&-", 0, ""),
        pytest.param(
            "2>/dev/full",
            0,
            "",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full"),
        ),
        pytest.param(
            ">/dev/full",
            4,
            f"{BANNER}disk full (standard output)",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full"),
        ),
    ],
)
def test_a_run_outlives_its_output(tmp_path: Path, redirection: str, code: int, said: str) -> None:
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(STUBBED)} {redirection}"
    done = subprocess.run(
        line, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr


def test_the_version_is_our_own(command: Command) -> None:
    outcome = command("--version")
    assert (outcome.code, outcome.out) == (0, f"mamba-cli {version('mamba-cli')}\n")


@pytest.mark.parametrize("key", ["_target_", "tuner.paper", "evaluation_s", "tuner.reward.target"])
def test_what_is_suggested_is_for_people(command: Command, key: str) -> None:
    suggestion = command(f"{key}=1").err.partition("Did you mean ")[2]
    assert not re.search(r"\b_|model\.budgets\.", suggestion)


def test_the_help_page_lists_every_exit_code(command: Command) -> None:
    codes = command("--help").out.partition("Exit codes")[2]
    assert re.findall(r"^ +(\d+) ", codes, re.MULTILINE) == ["0", "1", "2", "3", "4", "130"]
