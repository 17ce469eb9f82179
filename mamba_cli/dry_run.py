"""What a run would do, without doing it: arms, rungs, seconds, the folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mamba_cli import adaptive_grid
from mamba_cli.artifacts import RunFolder
from mamba_cli.config import FixedSettings, Grid, GridSettings, RunSettings
from mamba_cli.tuners import halving

Line = tuple[str, str]


def plan(settings: RunSettings, num_train: Callable[[], int]) -> list[Line]:
    """A name and a value a line.

    Parameters
    ----------
    settings
        A checked configuration.
    num_train
        The training rows; called where arms are tuned for, since it may have to read the data.

    Raises
    ------
    ConfigError
        A batch is less than a row, or more than all of them.
    """
    lines: list[Line] = []
    if "tune" in settings.stages:
        lines += _tuning(settings, num_train())
    if "ground_truth" in settings.stages and settings.ground_truth is not None:
        truth = settings.ground_truth
        warmup = f"{truth.num_chains} chains, {truth.num_warmup:,} draws of warm-up each"
        limit = "" if truth.max_s is None else f", if expected to take at most {truth.max_s:g} s"
        lines.append(("ground truth", f"NUTS, {truth.num_draws:,} draws in {warmup}{limit}"))
    if "evaluate" in settings.stages:
        chains = settings.evaluation
        lines.append(("evaluation", f"{chains.num_repeats} x {chains.budget_s:g} s"))
    lines.append(("clock", settings.clock))
    found = _found_in(settings)
    lines.append(("folder", f"{settings.run_dir} ({found})"))
    return lines


def _tuning(settings: RunSettings, num_train: int) -> list[Line]:
    tuner = settings.tuner
    if isinstance(tuner, FixedSettings):
        step_size, batch_size, length = tuner.points(num_train)[0]
        steps = f", L={length}" if length > 1 else ""
        return [("arm", f"h={step_size:.4g}, n={batch_size:,}{steps}: nothing is searched")]
    grid, is_open = _closed(tuner.grid, num_train)
    arms = replace(tuner, grid=grid).points(num_train)
    sizes, batches, lengths = (sorted({point[axis] for point in arms}) for axis in range(3))
    where = (
        f"{len(sizes)}, laid around the curvature at the MAP"
        if is_open
        else f"{len(sizes)}, {sizes[0]:.3g} to {sizes[-1]:.3g}"
    )
    lines = [
        ("arms", f"{len(arms)}"),
        ("step sizes h", where),
        ("batch sizes n", f"{', '.join(f'{n:,}' for n in batches)} of {num_train:,} rows"),
    ]
    if lengths != [1]:
        lines.append(("integration steps L", ", ".join(map(str, lengths))))
    if isinstance(tuner, GridSettings):
        return [*lines, ("iterations", f"{tuner.num_iterations:,} draws for each arm")]
    rungs = halving.schedule(len(arms), tuner.reduction_factor, tuner.longest_arm_s)
    lines += [
        (
            f"rung {number}/{len(rungs)}",
            f"{rung.num_arms} arms x {rung.seconds:.3g} s = {rung.num_arms * rung.seconds:.3g} s, "
            f"the best {rung.num_promoted} go on",
        )
        for number, rung in enumerate(rungs, start=1)
    ]
    longest = f"the longest arm R = {tuner.longest_arm_s:g} s"
    total = f"T = {halving.total_s(rungs):.3g} s of sampling, {longest}"
    if tuner.check_s > 0:
        lines.append(("check run", f"{tuner.check_s:.3g} s more of the winner, on top of T"))
    return [*lines, ("tuning", f"{total}; compilation and rewards come on top")]


def _closed(grid: Grid, num_train: int) -> tuple[Grid, bool]:
    """The grid with stand-ins for step sizes that the curvature will give; whether it has some."""
    is_open = grid.step_sizes is None
    sizes = grid.step_sizes or adaptive_grid.step_sizes(1.0)
    percents = grid.batch_percents or adaptive_grid.batch_percents(num_train)
    return replace(grid, step_sizes=sizes, batch_percents=percents), is_open


def _found_in(settings: RunSettings) -> str:
    folder = RunFolder(settings.run_dir, {}, -1)
    for path, said in (
        (folder.metrics_path, "evaluated before"),
        (folder.best_path, "tuned before"),
        (folder.tuning_path, "tuning begun before"),
    ):
        if path.exists():
            return said
    return "new"
