"""Draws per second of the timed chain on logistic regression, per sampler and batch size.

Every figure is the best of three runs of a chain in its own compiled loop, gradients,
minibatches, noise and bookkeeping included, compilation excluded. Figures of one table
were made in one run on one machine; those of different machines do not compare.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp

from mamba_cli import gradients, minibatch
from mamba_cli.chain import Budget, ChainProgram, advance
from mamba_cli.map_estimate import find_map
from mamba_cli.models.logreg import logistic_regression
from mamba_cli.samplers.badodab import badodab
from mamba_cli.samplers.sghmc import sghmc
from mamba_cli.samplers.sgld import sgld
from mamba_cli.samplers.sgnht import sgnht
from mamba_cli.types import Hyperparameters

SAMPLERS = {"sgld": sgld, "sghmc": sghmc, "sgnht": sgnht, "badodab": badodab}
LENGTH = {"sghmc": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-train", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS))
    arguments = parser.parse_args()
    model = logistic_regression(num_train=arguments.num_train, num_test=1)
    centre = find_map(model, rng_key=jax.random.key(0)).position
    estimators = {
        "": gradients.standard(model),
        "_cv": gradients.control_variates(model, jnp.asarray(centre)),
    }
    print(f"{arguments.num_train:,} rows x {model.dim}; draws per second")
    print(f"{'sampler':12} {'n':>9} {'L':>3} {'draws/s':>10} {'steps/s':>10} {'compile s':>10}")
    for name in arguments.samplers:
        for suffix, estimator in estimators.items():
            for percent in (0.1, 1, 10, 100):
                batch_size = int(percent * arguments.num_train / 100)
                program = ChainProgram(
                    estimator,
                    SAMPLERS[name],
                    minibatch.without_replacement,
                    batch_size,
                    capacity=2000,
                )
                compile_s = program.compile(centre)
                length = LENGTH.get(name, 1)
                hyperparameters = Hyperparameters(1e-7, batch_size, length)
                steps_per_s = 0.0
                for repeat in range(3):
                    chain = program.start(jax.random.key(repeat), centre, hyperparameters)
                    chain = advance(program, chain, Budget(seconds=arguments.seconds))
                    steps_per_s = max(steps_per_s, chain.num_steps / chain.elapsed_s)
                print(
                    f"{name + suffix:12} {batch_size:9,} {length:3} {steps_per_s / length:10,.0f} "
                    f"{steps_per_s:10,.0f} {compile_s:10.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
