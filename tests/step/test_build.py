"""The place of the backward pass's last reading of weights: behind all parts of a gradient, before their update."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.rules import BSP, LocalSGD
from unisono.step import build
from unisono.step import operations as op
from unisono.step.layout import Bucket, Layout, even_layout
from unisono.step.program import MAIN, UPDATE, Step, Task, weights


def test_an_update_follows_the_grad_input_of_its_bucket() -> None:
    program = [str(task) for task in BSP(overlap="chain")(Step(0), 0, even_layout(2, 2))]
    begin = program.index("backward 1")
    tasks = "backward 1, pack 1, allreduce 1, set_grads 1, grad_input 1, update 1, backward 2"
    assert program[begin : begin + 7] == tasks.split(", ")


def test_all_parts_of_a_gradient_are_sent_before_its_grad_input() -> None:
    parts = tuple(Bucket(64, numbers) for numbers in ((2, 1), (1,), (1, 0)))
    program = [str(task) for task in BSP(overlap="chain")(Step(0), 0, Layout(2, 3, parts))]
    assert program.index("grad_input 1") < program.index("backward 2")
    assert program.index("allreduce 2") < program.index("backward 3") < program.index("allreduce 3")
    assert program.index("allreduce 3") < program.index("grad_input 3")
    assert "grad_input 2" not in program
    assert program.index("update 1") < program.index("backward 2"), "parameter 2 has no part in another bucket"


@given(st.integers(1, 5), st.permutations(range(1, 6)), st.sampled_from([BSP(), LocalSGD(every=2)]))
def test_no_program_writes_weights_that_are_still_to_be_read(
    ranks: int, filled: list[int], rule: BSP | LocalSGD
) -> None:
    layout = Layout(ranks, 5, even_layout(ranks, 5).buckets, tuple(filled))
    unread: set[object] = set()
    for task in rule(Step(1), 0, layout):
        unread |= {weights(task.key)} if task.operation is op.FORWARD else set()
        assert unread.isdisjoint(task.writes), task
        unread -= set(task.reads) if task.operation is op.GRAD_INPUT else set()
    assert not unread


def test_tasks_that_write_no_weights_do_not_wait() -> None:
    layout = even_layout(2, 2)
    follow = [(1, [Task(op.PACK, 1, UPDATE), Task(op.UPDATE, 1, UPDATE, (), (weights(1),))])]
    merged = ", ".join(str(task) for task in build.merge(build.backward(layout, MAIN), follow))
    assert merged == "backward 0, backward 1, pack 1, grad_input 1, update 1, backward 2, grad_input 2, end 0"
