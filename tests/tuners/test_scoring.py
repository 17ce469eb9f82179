"""From a chain to a reward: what is scored, what is refused, where the seconds go."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import cache

import jax
import numpy as np
import pytest
from benches import MODEL, FakeReward, arms_of, fake_bench
from fake_time import FakeClock, counting_without_refresh

from mamba_cli import gradients, minibatch
from mamba_cli.chain import Budget, Chain, ChainProgram, advance
from mamba_cli.errors import NothingUsableError
from mamba_cli.rewards import FiniteSetSteinDiscrepancy, KernelSteinDiscrepancy
from mamba_cli.tuners.scoring import Scorer, failure, is_constant
from mamba_cli.types import Reward, ScoredDraws
from mamba_cli.workbench import Workbench

KEY = jax.random.key(0)


@pytest.fixture
def compilations(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield lambda: [text for text in caplog.messages if "ompil" in text and not moves(text)]


def moves(text: str) -> bool:
    """Whether a program of a few milliseconds only copies draws, of any number, or cuts them."""
    return "jit(dynamic_slice)" in text or "jit(stage)" in text


@cache
def roomy_program() -> ChainProgram:
    """Of ``fake_bench``, with room for more draws than there are in a chunk of gradients."""
    return ChainProgram(
        gradients.standard(MODEL),
        counting_without_refresh,
        minibatch.without_replacement,
        5,
        capacity=256,
        keep_gradients=True,
    )


def chain_of(bench: Workbench, step_size: float, steps: int) -> Chain:
    program, _ = bench.program(5)
    chain = program.start(KEY, bench.start, arms_of(step_size)[0])
    return advance(program, chain, Budget(steps=steps), bench.clock).compact()


@pytest.mark.parametrize("steps", [0, 1])
def test_fewer_than_two_draws_are_no_draws(steps: int) -> None:
    status, reason = failure(chain_of(fake_bench(), 1.0, steps), 0.25) or ("", "")
    assert status == "no_draws"
    assert reason == f"{steps} draws from {steps} gradient steps in 0.25 s, 2 are needed"
    assert failure(chain_of(fake_bench(), 1.0, 2)) is None


def test_a_chain_not_finite_is_diverged_however_many_draws() -> None:
    for last in (1, 2, 30):
        chain = chain_of(fake_bench(), -float(last), 100)
        assert failure(chain) == ("diverged", f"position not finite at step {last}")


def test_constant_draws() -> None:
    assert is_constant(np.ones((5, 3)))
    assert not is_constant(np.eye(3))
    moved = np.ones((5, 3), np.float32)
    moved[3, 1] = np.nextafter(np.float32(1), np.float32(2))
    assert not is_constant(moved)


def test_a_score_says_how_many_draws_it_saw() -> None:
    bench = fake_bench()
    reward = FakeReward(lambda h: 5.0 * h)
    score = Scorer(bench, reward).score(chain_of(bench, 2.0, 40), 7, KEY)
    assert (score.reward, score.num_scored, score.status) == (10.0, 7, "ok")
    score = Scorer(bench, reward).score(chain_of(bench, 2.0, 4), 7, KEY)
    assert score.num_scored == 4
    assert Scorer(bench, reward).sign == 1.0
    assert Scorer(bench, FakeReward(abs, higher_is_better=True)).sign == -1.0


def test_seconds_go_to_their_own_accounts() -> None:
    bench = fake_bench()
    assert isinstance(bench.clock, FakeClock)
    reward = FakeReward(lambda h: h, clock=bench.clock, cost_s=4.0)
    scorer = Scorer(bench, reward)
    assert scorer.warm_up(5) == 4.0
    assert bench.seconds.compile == 4.0
    score = scorer.score(chain_of(bench, 1.0, 8), 5, KEY)
    assert score.reward_s == bench.seconds.reward == 4.0
    assert bench.seconds.gradients == 0.0


@pytest.mark.parametrize("gradients", ["full", "stochastic"])
def test_the_reward_reads_the_gradients_it_asks_for(gradients: str) -> None:
    bench = fake_bench()
    reward = FakeReward(lambda h: h, gradients=gradients)
    Scorer(bench, reward).score(chain_of(bench, 1.0, 8), 8, KEY)
    (draws,) = reward.seen
    positions = np.asarray(draws.positions, np.float64)
    expected = (
        MODEL.precision * (MODEL.posterior_mean - positions) if gradients == "full" else -positions
    )
    np.testing.assert_allclose(draws.scores, expected, rtol=1e-4, atol=1e-2)


def test_draws_beyond_float32_have_no_reward_and_a_reason() -> None:
    # A step size of 1e17: far, finite, and its KSD is no number to rank by.
    bench = fake_bench()
    score = Scorer(bench, FakeReward(lambda h: math.inf)).score(chain_of(bench, 1e17, 9), 8, KEY)
    assert score.status == "diverged"
    assert math.isnan(score.reward)
    assert "fake is inf" in score.reason
    assert "9e+17 from the start" in score.reason


@pytest.mark.parametrize("num_draws", [8, 33, 100])
@pytest.mark.parametrize(
    "reward", [KernelSteinDiscrepancy(), FiniteSetSteinDiscrepancy()], ids=["ksd", "fssd"]
)
def test_nothing_is_compiled_after_warming_up(
    compilations: Callable[[], list[str]], reward: Reward, num_draws: int
) -> None:
    bench = fake_bench()
    bench._programs[5] = roomy_program()
    scorer = Scorer(bench, reward)
    chains = [chain_of(bench, 1e-3, steps) for steps in (num_draws, num_draws + 1)]
    jax.clear_caches()  # what earlier tests compiled must not be found again
    before = len(compilations())
    scorer.warm_up(num_draws)
    compiled = len(compilations())
    assert compiled > before
    for chain in chains:
        score = scorer.score(chain, num_draws, KEY)
        assert (score.status, score.num_scored) == ("ok", num_draws)
    assert compilations()[compiled:] == []


def test_a_slow_arm_with_fewer_draws_compiles_nothing(
    compilations: Callable[[], list[str]],
) -> None:
    bench = fake_bench()
    scorer = Scorer(bench, KernelSteinDiscrepancy())
    chain = chain_of(bench, 1e-3, 5)
    jax.clear_caches()
    scorer.warm_up(64)
    compiled = len(compilations())
    assert scorer.score(chain, 64, KEY).num_scored == 5
    assert compilations()[compiled:] == []


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9 GB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Unable to allocate 9 GB\nmore"),
    ],
)
def test_warming_up_without_memory_says_what_to_lower(error: Exception) -> None:
    class Refusing(FakeReward):
        def __call__(self, draws: ScoredDraws) -> float:
            raise error

    with pytest.raises(NothingUsableError, match=r"scoring 9 draws.*9 GB\); lower tuner.max_draws"):
        Scorer(fake_bench(), Refusing(abs)).warm_up(9)


def test_another_error_of_a_reward_is_not_swallowed() -> None:
    class Mistaken(FakeReward):
        def __call__(self, draws: ScoredDraws) -> float:
            raise jax.errors.JaxRuntimeError("INTERNAL: a mistake of ours")

    with pytest.raises(jax.errors.JaxRuntimeError, match="a mistake of ours"):
        Scorer(fake_bench(), Mistaken(abs)).warm_up(9)
