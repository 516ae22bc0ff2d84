from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from unisono.training.recipe import POLICIES, OptimizerRecipe, Recipe, parse_recipe, rate_at, rate_of_step


def options(**keys: Any) -> OptimizerRecipe:
    return parse_recipe(Recipe, {"optimizer": keys}, "a test").optimizer


anything = st.builds(
    OptimizerRecipe,
    learning_rate=st.floats(1e-3, 10),
    for_batch=st.sampled_from((0, 32, 256)),
    warm_epochs=st.sampled_from((0.0, 0.5, 3.0)),
    policy=st.sampled_from(sorted(POLICIES)),
    every=st.sampled_from((0.0, 1.0, 2.5)),
    decay=st.floats(0.1, 1),
    power=st.sampled_from((0.5, 1.0, 2.0)),
)


def goal_of(wanted: OptimizerRecipe, batch: int) -> float:
    return wanted.learning_rate * (batch / wanted.for_batch if wanted.for_batch else 1)


def test_the_schedule_of_dimd() -> None:
    """0.1 to 0.1 k n / 256 over 5 epochs, by 10 after every 30: the example in the file."""
    dimd = options(learning_rate=0.1, for_batch=256, warm_epochs=5, policy="steps", every=30)
    expected = {0: 0.1, 2.5: 1.65, 5: 3.2, 29.9: 3.2, 30: 0.32, 60: 0.032, 89.9: 0.032}
    assert {epoch: rate_at(dimd, epoch, 90, 8192) for epoch in expected} == pytest.approx(expected)


def test_those_of_theano_mpi() -> None:
    googlenet = options(learning_rate=0.007, policy="polynomial", power=0.5)
    for epoch in range(70):
        assert rate_at(googlenet, epoch, 70, 64) == pytest.approx(0.007 * (1 - epoch / 70) ** 0.5)
    alexnet = options(learning_rate=0.01, policy="steps", every=20)
    assert [rate_at(alexnet, epoch, 62, 128) for epoch in (0, 19, 20, 40, 60)] == pytest.approx(
        [0.01, 0.01, 1e-3, 1e-4, 1e-5]
    )


def test_cosine_is_half_a_wave_after_the_warm_start() -> None:
    wave = options(learning_rate=0.4, policy="cosine", warm_epochs=2)
    expected = {0: 0, 1: 0.2, 2: 0.4, 2 + 10 / 3: 0.3, 7: 0.2, 2 + 20 / 3: 0.1, 11.999: 0}
    assert {epoch: rate_at(wave, epoch, 12, 128) for epoch in expected} == pytest.approx(expected, abs=1e-6)


def test_steps_are_thirds_of_the_run_unless_it_is_said() -> None:
    assert [rate_at(options(learning_rate=1, policy="steps"), epoch, 9, 1) for epoch in range(9)] == pytest.approx(
        [1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01]
    )


@given(wanted=anything, share=st.floats(0, 1), epochs=st.integers(1, 20), batch=st.integers(1, 1024))
def test_the_warm_start_is_a_straight_line_to_the_goal(
    wanted: OptimizerRecipe, share: float, epochs: int, batch: int
) -> None:
    epoch = share * wanted.warm_epochs
    assume(epoch < wanted.warm_epochs and epoch < epochs)
    goal = goal_of(wanted, batch)
    begin = min(goal, wanted.learning_rate) if wanted.for_batch else 0
    assert rate_at(wanted, epoch, epochs, batch) == pytest.approx((1 - share) * begin + share * goal)


@given(
    wanted=anything,
    epochs=st.integers(1, 20),
    batch=st.integers(1, 1024),
    pair=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
)
def test_after_it_no_policy_rises_above_the_goal_or_rises_again(
    wanted: OptimizerRecipe, epochs: int, batch: int, pair: tuple[float, float]
) -> None:
    assume(wanted.warm_epochs < epochs)
    early, late = sorted(wanted.warm_epochs + share * (epochs - wanted.warm_epochs) for share in pair)
    goal = goal_of(wanted, batch)
    first, second = (rate_at(wanted, epoch, epochs, batch) for epoch in (early, late))
    assert goal * (1 + 1e-9) >= first >= second * (1 - 1e-9) > 0


@given(wanted=anything, epochs=st.integers(1, 20), steps=st.integers(1, 50))
def test_every_step_of_a_run_has_a_rate(wanted: OptimizerRecipe, epochs: int, steps: int) -> None:
    """Also where the warm start is longer than the run; the first one does not stand still."""
    for epoch in {0, epochs // 2, epochs - 1}:
        for step in {0, steps // 2, steps - 1}:
            rate = rate_of_step(wanted, epoch, step, steps, epochs, 64)
            assert 0 < rate <= max(goal_of(wanted, 64), wanted.learning_rate) * (1 + 1e-9)
            assert rate == rate_at(wanted, epoch + (step + 0.5) / steps, epochs, 64)


def test_small_batches_do_not_begin_above_their_goal() -> None:
    small = options(learning_rate=0.4, for_batch=256, warm_epochs=5)
    assert {rate_at(small, epoch, 10, 64) for epoch in range(10)} == {0.1}


def test_every_policy_can_be_named_in_a_recipe() -> None:
    for name in POLICIES:
        assert options(policy=name).policy == name
    limits = OptimizerRecipe.__dataclass_fields__["policy"].metadata["one_of"]
    assert set(limits) == set(POLICIES)
