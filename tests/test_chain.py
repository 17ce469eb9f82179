"""Timed chains: exact continuation, bounded draws, moments of all, budgets on a fake clock."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_time import FakeClock, TimedProgram, counting, counting_without_refresh
from gaussian_model import gaussian_mean

from mamba_cli import chain as chain_module
from mamba_cli import gradients, minibatch
from mamba_cli.chain import Budget, Carry, Chain, ChainProgram, LayoutError, advance
from mamba_cli.samplers.sghmc import sghmc
from mamba_cli.samplers.sgld import sgld
from mamba_cli.samplers.sgnht import sgnht
from mamba_cli.types import Array, GradientFn, Hyperparameters, Kernel, PyTree, Sampler

MODEL = gaussian_mean(num_data=64, dim=3)
ORIGIN = np.zeros(3, np.float32)
KEY = jax.random.key(5)


@cache
def program_of(
    sampler: Sampler, capacity: int, keep_gradients: bool = True, batch_size: int = 5
) -> ChainProgram:
    program = ChainProgram(
        gradients.standard(MODEL),
        sampler,
        minibatch.without_replacement,
        batch_size,
        capacity=capacity,
        keep_gradients=keep_gradients,
    )
    program.compile(ORIGIN)
    return program


def run(
    program: ChainProgram,
    hyperparameters: Hyperparameters,
    *pieces: int,
    start: np.ndarray = ORIGIN,
    between: Callable[[Chain], Chain] = lambda chain: chain,
) -> Chain:
    chain = program.start(KEY, start, hyperparameters)
    for steps in pieces:
        chain = between(advance(program, chain, Budget(steps=steps)))
    return chain.compact()


def leaves_without_time(chain: Chain) -> list[np.ndarray]:
    """Everything of a chain but the seconds and the sums, which are rounded per dispatch."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(chain.carry)]


def assert_same_chain(first: Chain, second: Chain) -> None:
    for a, b in zip(leaves_without_time(first), leaves_without_time(second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.num_draws == second.num_draws
    for name in ("first", "second"):
        np.testing.assert_allclose(first.sums[name], second.sums[name], rtol=1e-5, atol=1e-5)


SAMPLERS: dict[str, tuple[Sampler, Hyperparameters]] = {
    "sgld": (sgld, Hyperparameters(1e-2, 5)),
    "sghmc": (sghmc, Hyperparameters(1e-4, 5, 4)),
    "sgnht": (sgnht, Hyperparameters(1e-4, 5)),
}


# Continuation


@pytest.mark.parametrize("name", SAMPLERS)
def test_two_pieces_are_one_chain(name: str) -> None:
    # 10 is no multiple of L = 4: the pieces meet in the middle of a draw.
    sampler, hyperparameters = SAMPLERS[name]
    program = program_of(sampler, 8)
    whole = run(program, hyperparameters, 30)
    assert whole.num_steps == 30
    assert whole.num_draws == 30 // hyperparameters.num_integration_steps
    assert_same_chain(run(program, hyperparameters, 10, 20), whole)


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_dispatches_cut_anywhere_give_the_same_chain(
    monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    sampler, hyperparameters = SAMPLERS["sghmc"]
    program = program_of(sampler, 8)
    whole = run(program, hyperparameters, 101)
    monkeypatch.setattr(chain_module, "MAX_STEPS_PER_DISPATCH", cut)
    assert_same_chain(run(program, hyperparameters, 101), whole)


def saved_and_read_again(program: ChainProgram) -> Callable[[Chain], Chain]:
    def between(chain: Chain) -> Chain:
        arrays = {k: np.array(v) for k, v in program.to_arrays(chain.compact()).items()}
        return program.from_arrays(arrays, chain.hyperparameters, ORIGIN)

    return between


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_saved_chain_goes_on_bit_for_bit(name: str) -> None:
    sampler, hyperparameters = SAMPLERS[name]
    program = program_of(sampler, 8)
    pieces = (1, 10, 30, 6)
    uninterrupted = run(program, hyperparameters, *pieces)
    for between in (saved_and_read_again(program), lambda c: c.compact()):
        resumed = run(program, hyperparameters, *pieces, between=between)
        assert_same_chain(resumed, uninterrupted)
        for name in ("first", "second"):
            np.testing.assert_array_equal(resumed.sums[name], uninterrupted.sums[name])


def test_a_chain_not_compact_is_saved_too() -> None:
    sampler, hyperparameters = SAMPLERS["sgld"]
    program = program_of(sampler, 8)
    chain = advance(program, program.start(KEY, ORIGIN, hyperparameters), Budget(steps=13))
    arrays = {name: np.array(array) for name, array in program.to_arrays(chain).items()}
    again = program.from_arrays(arrays, hyperparameters, ORIGIN)
    assert again.elapsed_s == chain.elapsed_s
    again = advance(program, again, Budget(steps=10)).compact()
    assert_same_chain(again, run(program, hyperparameters, 13, 10))


@pytest.mark.parametrize(
    "damage", ["layout", "leaf", "shape", "version", "sampler", "features", "gradients"]
)
def test_a_chain_of_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    sampler, hyperparameters = SAMPLERS["sgld"]
    program = program_of(sampler, 8)
    chain = run(program, hyperparameters, 13)
    arrays = program.to_arrays(chain)
    if damage == "layout":
        del arrays["layout"]
    elif damage == "leaf":
        longer = chain.carry._replace(minibatch=(np.zeros(2, np.float32),))
        arrays = program.to_arrays(replace(chain, carry=longer))
    elif damage == "shape":
        wider = chain.carry._replace(origin=np.zeros(4, np.float32))
        arrays = program.to_arrays(replace(chain, carry=wider))
    elif damage == "version":
        monkeypatch.setattr(chain_module, "LAYOUT_VERSION", chain_module.LAYOUT_VERSION + 1)
    elif damage == "sampler":
        program, hyperparameters = program_of(sgnht, 8), Hyperparameters(1e-4, 5)
    elif damage == "features":
        renamed = {"first": chain.sums["first"], "third": chain.sums["second"]}
        arrays = program.to_arrays(replace(chain, sums=renamed))
    else:
        program = program_of(sampler, 8, False)
    with pytest.raises(LayoutError):
        program.from_arrays(arrays, hyperparameters, ORIGIN)


def test_a_compact_chain_is_a_value() -> None:
    # Going on from it must not write into it, however the buffers are donated.
    sampler, hyperparameters = SAMPLERS["sgnht"]
    program = program_of(sampler, 8)
    chain = run(program, hyperparameters, 11)
    before = [leaf.copy() for leaf in leaves_without_time(chain)]
    first = advance(program, chain, Budget(steps=40)).compact()
    second = advance(program, chain, Budget(steps=40)).compact()
    for leaf, copy in zip(leaves_without_time(chain), before, strict=True):
        np.testing.assert_array_equal(leaf, copy)
    assert_same_chain(first, second)


def test_the_key_and_the_number_of_steps_decide() -> None:
    sampler, hyperparameters = SAMPLERS["sgld"]
    program = program_of(sampler, 8)
    other = program.start(jax.random.key(6), ORIGIN, hyperparameters)
    other = advance(program, other, Budget(steps=30)).compact()
    assert not np.any(other.position == run(program, hyperparameters, 30).position)


def test_no_step_changes_nothing() -> None:
    sampler, hyperparameters = SAMPLERS["sgld"]
    program = program_of(sampler, 8)
    assert_same_chain(run(program, hyperparameters, 5, 0, 0), run(program, hyperparameters, 5))
    fresh = run(program, hyperparameters, 0)
    assert (fresh.num_steps, fresh.num_draws, fresh.num_kept) == (0, 0, 0)
    assert np.all(np.isnan(fresh.mean))
    assert np.all(np.isnan(fresh.std))
    assert fresh.thinned(10)[0].shape == (0, 3)


# What a chain keeps


@pytest.mark.parametrize("num_steps", [1, 7, 8, 9, 15, 16, 17, 33, 100, 257])
@pytest.mark.parametrize("length", [1, 3])
def test_kept_draws_are_the_multiples_of_the_stride(num_steps: int, length: int) -> None:
    # A draw of the counting sampler knows its number: h times steps, refreshes, steps since.
    capacity = 8
    sampler = counting if length > 1 else counting_without_refresh
    program = program_of(sampler, capacity)
    chain = run(program, Hyperparameters(1.0, 5, length), num_steps * length)
    stride = int(chain.carry.stride)
    assert chain.num_draws == num_steps
    assert stride == 2 ** max(0, math.ceil(math.log2(num_steps / capacity)))
    draws = stride * np.arange(1, num_steps // stride + 1)
    assert capacity / 2 <= len(draws) <= capacity or num_steps < capacity
    positions, own_gradients = chain.thinned(capacity)
    np.testing.assert_array_equal(positions[:, 0], draws * length)
    if length > 1:
        np.testing.assert_array_equal(positions[:, 1], draws)  # one refresh a draw
        np.testing.assert_array_equal(positions[:, 2], length)  # made before its first step
    np.testing.assert_array_equal(own_gradients, -positions)


@pytest.mark.parametrize("name", SAMPLERS)
def test_kept_draws_are_those_of_an_unbounded_buffer(name: str) -> None:
    sampler, hyperparameters = SAMPLERS[name]
    num_steps = 150 * hyperparameters.num_integration_steps
    everything = run(program_of(sampler, 512), hyperparameters, num_steps)
    all_positions, all_gradients = everything.thinned(512)
    assert len(all_positions) == 150
    bounded = run(program_of(sampler, 8), hyperparameters, num_steps)
    positions, own_gradients = bounded.thinned(8)
    assert int(bounded.carry.stride) == 32
    np.testing.assert_array_equal(positions, all_positions[31::32])
    np.testing.assert_array_equal(own_gradients, all_gradients[31::32])


def test_memory_does_not_grow() -> None:
    program = program_of(counting_without_refresh, 8)
    chain = program.start(KEY, ORIGIN, Hyperparameters(1.0, 5))
    shapes = [leaf.shape for leaf in jax.tree.leaves(chain.carry)]
    chain = advance(program, chain, Budget(steps=10_000))
    assert [leaf.shape for leaf in jax.tree.leaves(chain.carry)] == shapes
    assert chain.carry.positions.shape == (8, 3)
    assert program_of(counting_without_refresh, 8, False)._start is not None
    without = run(program_of(counting_without_refresh, 8, False), Hyperparameters(1.0, 5), 20)
    assert without.carry.gradients.shape == (0, 3)
    assert without.thinned(4)[1].shape == (0, 3)


@pytest.mark.parametrize(("max_kept", "kept"), [(8, 6), (6, 6), (5, 3), (3, 3), (2, 1), (1, 1)])
def test_compact_thins_by_doubling_the_stride(max_kept: int, kept: int) -> None:
    program = program_of(counting_without_refresh, 8)
    hyperparameters = Hyperparameters(1.0, 5)
    chain = run(program, hyperparameters, 13)
    assert chain.num_kept == 6
    thin = chain.compact(max_kept)
    stride = 2 * 6 // kept if kept in (6, 3) else 8
    assert thin.num_kept == len(thin.carry.positions) == kept
    np.testing.assert_array_equal(
        thin.thinned(8)[0][:, 0], stride * np.arange(1, kept + 1, dtype=np.float32)
    )
    assert thin.num_draws == 13
    # Going on keeps the rule.
    more = advance(program, thin, Budget(steps=27)).compact()
    positions = more.thinned(8)[0][:, 0]
    stride = int(more.carry.stride)
    np.testing.assert_array_equal(positions, np.arange(stride, 41, stride))


@pytest.mark.parametrize("max_draws", [1, 2, 3, 5, 6, 7])
def test_thinned_draws_are_distinct_and_evenly_spaced(max_draws: int) -> None:
    chain = run(program_of(counting_without_refresh, 8), Hyperparameters(1.0, 5), 6)
    numbers = chain.thinned(max_draws)[0][:, 0]
    assert len(numbers) == min(max_draws, 6)
    assert numbers[-1] == 6  # the newest draw, farthest from the start, is one of them
    gaps = np.diff(np.concatenate([[0], numbers]))
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("capacity", [7, 8])
def test_capacity_is_rounded_up_to_an_even_number(capacity: int) -> None:
    program = ChainProgram(
        gradients.standard(MODEL), sgld, minibatch.without_replacement, 5, capacity=capacity
    )
    assert program.capacity == 8


# Moments of all draws


@pytest.mark.parametrize("name", SAMPLERS)
def test_without_its_draws_a_chain_goes_on_from_where_it_is(name: str) -> None:
    sampler, hyperparameters = SAMPLERS[name]
    program = program_of(sampler, 8)
    before = advance(program, program.start(KEY, ORIGIN, hyperparameters), Budget(steps=20))
    place, seconds = np.array(before.position), before.elapsed_s
    emptied = before.without_draws()
    assert (emptied.num_steps, emptied.num_draws, emptied.num_kept) == (0, 0, 0)
    assert emptied.elapsed_s == seconds
    np.testing.assert_array_equal(emptied.position, place)
    length = hyperparameters.num_integration_steps
    after = advance(program, emptied, Budget(steps=3 * length)).compact()
    assert after.num_draws == after.num_kept == 3
    draws = after.carry.positions
    np.testing.assert_array_equal(draws[-1], after.position)
    np.testing.assert_allclose(after.mean, draws.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(after.std, draws.std(axis=0), rtol=1e-3)
    # Other keys than those of its first steps: noise is not used twice.
    assert not np.array_equal(emptied.carry.key_data, jax.random.key_data(KEY))


@pytest.mark.parametrize("name", ["sgld", "sghmc"])
def test_moments_are_those_of_all_draws(name: str) -> None:
    sampler, hyperparameters = SAMPLERS[name]
    num_draws, length = 500, hyperparameters.num_integration_steps
    draws = run(program_of(sampler, 512), hyperparameters, num_draws * length).thinned(512)[0]
    assert len(draws) == num_draws
    chain = run(program_of(sampler, 8), hyperparameters, 7 * length, 3, (num_draws - 7) * length)
    assert chain.num_draws == num_draws + 3 // length
    chain = run(program_of(sampler, 8), hyperparameters, 7 * length, (num_draws - 7) * length)
    draws = draws.astype(np.float64)
    # The start is eight standard deviations away: squares about it cost two digits of float32.
    np.testing.assert_allclose(chain.mean, draws.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(chain.std, draws.std(axis=0), rtol=1e-4)


def test_moments_far_from_the_origin_and_many() -> None:
    # sd 0.03 around 100, where squares in float32 would leave no digit; several dispatches.
    model = gaussian_mean(num_data=1000, offset=100.0)
    program = ChainProgram(
        gradients.control_variates(model, jnp.asarray(model.posterior_mean, jnp.float32)),
        sgld,
        minibatch.without_replacement,
        10,
        capacity=1 << 16,
    )
    start = model.posterior_mean.astype(np.float32)
    chain = program.start(KEY, start, Hyperparameters(1e-3, 10))
    chain = advance(program, chain, Budget(steps=1 << 16)).compact()
    draws = chain.thinned(1 << 16)[0].astype(np.float64)
    assert len(draws) == 1 << 16
    np.testing.assert_allclose(chain.mean, draws.mean(axis=0), atol=1e-3 * draws.std())
    np.testing.assert_allclose(chain.std, draws.std(axis=0), rtol=1e-4)


def test_features_of_every_draw_are_summed() -> None:
    def features(delta: Array, gradient: Array) -> PyTree:
        return {"first": delta, "second": delta**2, "product": jnp.outer(delta, gradient)}

    program = ChainProgram(
        gradients.standard(MODEL),
        counting,
        minibatch.without_replacement,
        5,
        capacity=4,
        features=features,
    )
    start = np.array([0, 100, 0], np.float32)
    chain = run(program, Hyperparameters(1.0, 5, 2), 3, 18, start=start)
    draws = np.array([[2 * j, 100 + j, 2] for j in range(1, 11)], np.float64)
    delta = draws - start
    np.testing.assert_allclose(chain.sums["first"], delta.sum(axis=0))
    np.testing.assert_allclose(chain.sums["product"], delta.T @ -draws)
    np.testing.assert_allclose(chain.mean, draws.mean(axis=0))
    np.testing.assert_allclose(chain.std, draws.std(axis=0))
    assert chain.sums["product"].dtype == np.float64


# Several steps a draw


def test_momentum_is_refreshed_before_the_first_step_of_a_draw() -> None:
    program = program_of(counting, 8)
    hyperparameters = Hyperparameters(1.0, 5, 5)
    # (steps, refreshes, steps since the last): a stop in mid-draw refreshes nothing new.
    for pieces, expected in {
        (5,): (5, 1, 5),
        (6,): (6, 2, 1),
        (3,): (3, 1, 3),
        (3, 4): (7, 2, 2),
        (5, 5): (10, 2, 5),
        (1,) * 11: (11, 3, 1),
    }.items():
        chain = run(program, hyperparameters, *pieces)
        np.testing.assert_array_equal(chain.position, expected)
        assert chain.num_draws == expected[0] // 5


def test_sghmc_follows_the_equations_with_a_refresh_every_draw() -> None:
    # The documented keys: fold_in(key, i) for step i, split for minibatch, step and refresh.
    length, hyperparameters = 3, Hyperparameters(1e-3, 64, 3)
    program = program_of(sghmc, 8, True, 64)
    kernel = sghmc(lambda position, rows: gradients.scaled_gradient(MODEL, position, rows))
    state = program.start(KEY, ORIGIN, hyperparameters).carry.sampler
    step_size = jnp.float32(hyperparameters.step_size)
    assert kernel.refresh is not None
    for number in range(1, 8):
        _, key_step, key_refresh = jax.random.split(jax.random.fold_in(KEY, number), 3)
        if number % length == 1:
            state = kernel.refresh(key_refresh, state, step_size)
        state = kernel.step(key_step, state, MODEL.data, step_size)
        chain = run(program, hyperparameters, number)
        np.testing.assert_allclose(chain.position, state.position, rtol=1e-5, atol=1e-6)


def test_several_steps_a_draw_are_for_samplers_that_refresh() -> None:
    with pytest.raises(AssertionError, match="redraws its momentum"):
        program_of(counting_without_refresh, 8).start(KEY, ORIGIN, Hyperparameters(1.0, 5, 2))


# Chains that turn non-finite


@pytest.mark.parametrize("sampler", [counting, counting_without_refresh])
@pytest.mark.parametrize(("last", "length"), [(1, 1), (9, 1), (10, 3), (12, 3), (13, 4), (40, 2)])
def test_a_chain_stops_at_its_first_step_that_is_not_finite(
    sampler: Sampler, last: int, length: int
) -> None:
    program = program_of(sampler, 8)
    length = length if sampler is counting else 1
    chain = run(program, Hyperparameters(-float(last), 5, length), last - 1)
    assert chain.nonfinite_step is None
    chain = advance(program, chain, Budget(steps=1000))
    assert chain.nonfinite_step == last
    assert chain.num_steps == last - 1
    assert chain.num_draws == (last - 1) // length
    chain = chain.compact()
    positions, own_gradients = chain.thinned(8)
    assert len(positions) == chain.num_draws // int(chain.carry.stride)
    assert np.all(np.isfinite(positions))
    assert np.all(np.isfinite(own_gradients))
    draws = length * np.arange(1, chain.num_draws + 1)
    assert chain.sums["first"][0] == draws.sum()
    # It stays stopped.
    again = advance(program, chain, Budget(steps=5))
    assert (again.num_steps, again.nonfinite_step) == (last - 1, last)
    again = advance(program, again, Budget(seconds=5.0))
    assert (again.num_steps, again.nonfinite_step) == (last - 1, last)


def test_sgld_beyond_its_stability_limit_diverges() -> None:
    chain = run(program_of(sgld, 8), Hyperparameters(10.0, 5), 1000)
    assert chain.nonfinite_step is not None
    assert 5 < chain.nonfinite_step < 40  # |1 - h lambda / 2| = 321 per step, up to 1e38
    assert np.all(np.isfinite(chain.thinned(8)[0]))


def test_squares_that_overflow_do_not_enter_the_moments() -> None:
    # A position of 1e25 is finite in float32, its square is not.
    chain = run(program_of(sgld, 8), Hyperparameters(10.0, 5), 1000)
    assert np.all(np.isfinite(chain.sums["first"]))
    assert np.all(np.isfinite(chain.sums["second"]))


# Seconds, on a fake clock


def timed(
    cost_s: float, overhead_s: float = 0.0, *, sampler: Sampler = counting_without_refresh
) -> tuple[TimedProgram, FakeClock]:
    """The one compiled program of a sampler, as if fresh from its compilation at this cost."""
    program = timed_program(sampler)
    program.clock = FakeClock()
    program.cost_s, program.overhead_s = cost_s, overhead_s
    program.cost_per_step_s = cost_s + overhead_s
    program.dispatched = ()
    return program, program.clock


@cache
def timed_program(sampler: Sampler) -> TimedProgram:
    program = TimedProgram(
        gradients.standard(MODEL), sampler, minibatch.without_replacement, 5, capacity=8
    )
    program.clock = FakeClock()
    program.compile(ORIGIN)
    return program


def sample(program: TimedProgram, clock: FakeClock, *budgets_s: float, length: int = 1) -> Chain:
    chain = program.start(KEY, ORIGIN, Hyperparameters(1.0, 5, length))
    for budget_s in budgets_s:
        chain = advance(program, chain, Budget(seconds=budget_s), clock)
    return chain


def test_compilation_is_outside_the_budget() -> None:
    program = TimedProgram(
        gradients.standard(MODEL), counting, minibatch.without_replacement, 5, capacity=8
    )
    program.clock = clock = FakeClock()
    program.compiling_s, program.cost_s = 50.0, 0.25
    chain = program.start(KEY, ORIGIN, Hyperparameters(1.0, 5))
    began = clock()
    assert began - 1000 >= 50
    chain = advance(program, chain, Budget(seconds=10.0), clock)
    assert chain.elapsed_s == clock() - began == 10.0
    assert chain.num_steps == 40
    assert program.compile(ORIGIN) == 0.0


def test_compile_reports_its_seconds_and_the_cost_of_a_step() -> None:
    program = TimedProgram(
        gradients.standard(MODEL), counting, minibatch.without_replacement, 5, capacity=8
    )
    program.clock = FakeClock()
    program.compiling_s, program.cost_s, program.overhead_s = 50.0, 0.25, 0.5
    assert program.compile(ORIGIN) == program.clock() - 1000 >= 50
    assert program.cost_per_step_s == 0.75


BUDGETS = [
    # cost_s, overhead_s, budget_s
    (1e-3, 0.0, 1.0),
    (1e-3, 1e-4, 1.0),
    (1e-5, 1e-4, 0.5),
    (1e-5, 1e-4, 0.01),
    (1e-4, 1e-5, 0.0123),
    (0.2, 0.01, 1.0),
    (0.3, 0.0, 1.0),
    (0.7, 0.0, 1.0),
    (1.0, 0.0, 1.0),
    (1.9, 0.0, 1.0),
    (0.011, 0.001, 1.0),
]


@pytest.mark.parametrize(("cost_s", "overhead_s", "budget_s"), BUDGETS)
def test_a_budget_of_seconds_is_kept(cost_s: float, overhead_s: float, budget_s: float) -> None:
    program, clock = timed(cost_s, overhead_s)
    chain = sample(program, clock, budget_s)
    assert chain.elapsed_s == pytest.approx(clock() - 1000, rel=1e-9)
    one_step_s = cost_s + overhead_s
    assert chain.elapsed_s <= budget_s + max(0.02 * budget_s, one_step_s)
    assert chain.elapsed_s >= budget_s - max(0.006 * budget_s, 0.5 * one_step_s) - 1e-9
    spent_on_steps = chain.elapsed_s - overhead_s * len(program.dispatched)
    assert chain.num_steps == round(spent_on_steps / cost_s)


@pytest.mark.parametrize(("cost_s", "budget_s"), [(1e-3, 1.0), (2e-5, 0.3), (1e-4, 0.02)])
def test_a_budget_is_spent_in_few_dispatches(cost_s: float, budget_s: float) -> None:
    # A buffer of 8 draws asks for one more at every doubling.
    program, clock = timed(cost_s)
    chain = sample(program, clock, budget_s)
    doublings = math.log2(chain.num_steps / 8)
    assert len(program.dispatched) <= 10 + doublings
    assert max(program.dispatched) >= chain.num_steps / 4


@pytest.mark.parametrize("budget_s", [0.0, 1e-9, 0.3, 0.49])
def test_less_than_half_a_step_is_no_step(budget_s: float) -> None:
    program, clock = timed(1.0)
    chain = sample(program, clock, budget_s)
    assert chain.num_steps == 0
    assert program.dispatched == ()
    assert chain.elapsed_s == 0.0


@pytest.mark.parametrize("budget_s", [0.51, 1.0, 1.49])
def test_a_step_is_made_when_more_than_half_of_it_fits(budget_s: float) -> None:
    program, clock = timed(1.0)
    chain = sample(program, clock, budget_s)
    assert chain.num_steps == 1


def test_seconds_of_several_budgets_add_up() -> None:
    program, clock = timed(1 / 128, sampler=counting)
    chain = sample(program, clock, 0.5, 1.0, 2.5, length=5)
    assert chain.elapsed_s == clock() - 1000
    assert chain.num_steps == pytest.approx(4.0 * 128, rel=0.01)
    assert chain.num_steps == chain.elapsed_s * 128
    assert chain.num_draws == chain.num_steps // 5
    whole = run(program, Hyperparameters(1.0, 5, 5), chain.num_steps)
    np.testing.assert_array_equal(chain.position, whole.position)


def test_a_chain_that_diverges_leaves_its_seconds() -> None:
    program, clock = timed(0.01)
    chain = program.start(KEY, ORIGIN, Hyperparameters(-25.0, 5))
    chain = advance(program, chain, Budget(seconds=100.0), clock)
    assert chain.nonfinite_step == 25
    assert chain.elapsed_s == pytest.approx(0.25)


def test_taking_up_a_chain_is_outside_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    program, clock = timed(0.25)
    chain = sample(program, clock, 1.0).compact()
    restore = program.restore

    def slowly(carry: Carry) -> Carry:
        clock.now += 100.0
        return restore(carry)

    monkeypatch.setattr(program, "restore", slowly)
    chain = advance(program, chain, Budget(seconds=10.0), clock)
    assert (chain.num_steps, chain.elapsed_s) == (44, 11.0)


@pytest.mark.parametrize("budget", [Budget(steps=100), Budget(seconds=1e9)])
@pytest.mark.parametrize("left", [0, 1, 10])
def test_a_chain_ends_where_its_steps_cannot_be_counted(
    caplog: pytest.LogCaptureFixture, left: int, budget: Budget
) -> None:
    program, clock = timed(0.25)
    chain = sample(program, clock).compact()
    most = np.int32(2**31 - 1)
    chain = replace(chain, carry=chain.carry._replace(step=most - np.int32(left)))
    chain = advance(program, chain, budget, clock)
    assert chain.num_steps == most
    assert chain.nonfinite_step is None
    assert chain.elapsed_s == left * 0.25
    assert chain.position[2] == left
    assert caplog.messages == ["a chain ends at 2147483647 steps, the most it can count"]


# One program


@pytest.fixture
def compilations(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield lambda: [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()]


def test_the_watch_sees_a_compilation(compilations: Callable[[], list[str]]) -> None:
    jax.jit(lambda x: x + 41)(1.0)
    assert compilations()


def test_nothing_is_compiled_for_another_arm(compilations: Callable[[], list[str]]) -> None:
    program = program_of(counting, 8)
    first = advance(program, program.start(KEY, ORIGIN, Hyperparameters(1.0, 5)), Budget(steps=40))
    first.compact()
    compiled = len(compilations())
    for step_size, length, steps in [(2.0, 1, 3), (1.0, 7, 99), (0.7, 5, 1), (0.1, 2, 50)]:
        chain = program.start(jax.random.key(9), ORIGIN + 1, Hyperparameters(step_size, 5, length))
        chain = advance(program, chain, Budget(steps=steps))
        chain = advance(program, chain, Budget(seconds=0.01)).compact(4)
        chain = program.from_arrays(program.to_arrays(chain), chain.hyperparameters, ORIGIN)
        advance(program, chain, Budget(steps=steps)).thinned(3)
    assert compilations()[compiled:] == []


def constants_of(text: str) -> list[int]:
    """Number of elements of each constant in a compiled program's text."""
    shapes = re.findall(r"\w+\[([\d,]*)\]\S* constant\(", text)
    return [math.prod(int(size) for size in shape.split(",") if size) for shape in shapes]


def test_data_are_arguments_of_the_programs() -> None:
    model = gaussian_mean(num_data=5000, dim=3)
    centre = jnp.asarray(model.posterior_mean, jnp.float32)

    def sampler(gradient: GradientFn) -> Kernel:
        return sgld(gradient)

    program = ChainProgram(
        gradients.control_variates(model, centre),
        sampler,
        minibatch.without_replacement,
        100,
        capacity=16,
    )
    program.compile(np.asarray(centre))
    for executable in (program._start, program._run):
        text = executable.as_text()
        assert "f32[5000,3]" in text
        assert max(constants_of(text)) <= 512
    captured: Any = jnp.arange(15_000.0).reshape(5000, 3)
    text = jax.jit(lambda i: captured[i]).lower(3).compile().as_text()
    assert max(constants_of(text)) == 15_000
