"""Wall time of a whole MAMBA run over T, its seconds of sampling.

From the start of tuning (model and MAP in hand, nothing compiled) to its end:
compilation, sampling, full-data gradients and rewards.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

import jax
import numpy as np
from hydra import compose, initialize_config_module

from mamba_cli import gradients
from mamba_cli.config import MambaSettings, build, settings_from
from mamba_cli.map_estimate import find_map
from mamba_cli.tuners import mamba
from mamba_cli.tuners.halving import schedule, total_s
from mamba_cli.types import Hyperparameters
from mamba_cli.workbench import Workbench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="as for mamba-run")
    arguments = parser.parse_args()
    with initialize_config_module("mamba_cli.conf", version_base="1.3"):
        cfg = compose("config", overrides=arguments.overrides)
    settings = settings_from(cfg)
    tuner = settings.tuner
    assert isinstance(tuner, MambaSettings)
    model = build(cfg.model.posterior, "model.posterior")
    centre = find_map(model, rng_key=jax.random.key(0)).position
    began = time.perf_counter()
    if settings.sampler.control_variates:
        estimator = gradients.control_variates(model, centre)
    else:
        estimator = gradients.standard(model)
    bench = Workbench(
        model=model,
        start=np.asarray(centre),
        estimator=estimator,
        sampler=build(cfg.sampler.kernel, "sampler.kernel"),
        scheme=build(cfg.minibatch, "minibatch"),
        capacity=2 * max(tuner.max_draws, settings.evaluation.max_draws),
    )
    arms = [Hyperparameters(*point) for point in tuner.points(model.num_data)]
    tuning = mamba.tune(
        bench,
        build(cfg.tuner.reward, "tuner.reward"),
        arms,
        reduction_factor=tuner.reduction_factor,
        longest_arm_s=tuner.longest_arm_s,
        max_draws=tuner.max_draws,
        score_on=tuner.score_on,
        rng_key=jax.random.key(settings.seed),
    )
    wall_s = time.perf_counter() - began
    budget_s = total_s(schedule(len(arms), tuner.reduction_factor, tuner.longest_arm_s))
    print(f"{settings.sampler.name}, {tuner.name}: {len(arms)} arms")
    for name, value in asdict(bench.seconds).items():
        print(f"  {name:10} {value:8.2f} s")
    print(f"  {'wall':10} {wall_s:8.2f} s = {wall_s / budget_s:.2f} T with T = {budget_s:.2f} s")
    if tuning.winner is not None:
        print(f"  winner h={tuning.winner.step_size:.3g} n={tuning.winner.batch_size}")


if __name__ == "__main__":
    main()
