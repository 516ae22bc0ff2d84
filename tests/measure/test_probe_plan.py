"""The plan of a probe: what is measured on so many nodes, and how the time is shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.measure.probes import SHARES, fits, plan_probe, share_of, trials
from unisono.measure.timing import MAX_TRIALS
from unisono.placement import one_rank_per_node, place, regular
from unisono.plan.choose import MEASURED_BUCKET_BYTES


def test_the_shares_are_the_whole_time_and_parts_end_in_order() -> None:
    parts, left_out = plan_probe(60, one_rank_per_node(4), disk=True)
    assert [part.name for part in parts] == list(SHARES)
    assert parts[-1].ends == pytest.approx(60)
    assert [part.ends for part in parts] == sorted(part.ends for part in parts)
    assert left_out == ()


def test_probes_of_a_part_are_in_order_of_their_work_and_have_names_of_their_own() -> None:
    for part in plan_probe(60, one_rank_per_node(4), disk=True).parts:
        works = [probe.work for probe in part.probes]
        assert works == sorted(works)
        assert len({probe.label for probe in part.probes}) == len(part.probes)


@pytest.mark.parametrize(
    ("nodes", "ranks", "disk", "missing"),
    [
        (1, 1, False, {"links", "collectives", "disk"}),
        (1, 2, True, {"links"}),
        (2, 2, False, {"disk"}),
    ],
)
def test_a_part_that_cannot_be_measured_has_a_reason(nodes: int, ranks: int, disk: bool, missing: set[str]) -> None:
    parts, left_out = plan_probe(60, regular(1, nodes, ranks // nodes), disk)
    assert {line.partition(":")[0] for line in left_out} == missing == SHARES.keys() - {part.name for part in parts}


def test_collectives_are_those_of_both_rules_in_both_wires() -> None:
    def calls(nodes: int) -> set[tuple[str, str]]:
        probes = next(
            part.probes
            for part in plan_probe(60, regular(1, nodes, 2 // nodes), False).parts
            if part.name == "collectives"
        )
        assert {probe.work for probe in probes} > set(MEASURED_BUCKET_BYTES)
        return {probe.row[:2] for probe in probes}

    narrow = {("allreduce", "bfloat16"), ("reduce_scatter", "bfloat16")}
    assert calls(2) == calls(1) | narrow
    assert calls(1) == {(name, "float32") for name in ("allreduce", "reduce_scatter", "all_gather")}


def test_a_device_has_products_in_two_formats_and_copies() -> None:
    """On the host, copies are not measured, and bfloat16 where a run of it computes in it."""
    device = torch.device("cuda:0")

    def found(*of: Any) -> tuple[set[str], set[str]]:
        parts = {part.name: part.probes for part in plan_probe(60, regular(1, 1, 2), False, *of).parts}
        return {probe.row[-1] for probe in parts["products"]}, {probe.kind for probe in parts["memory"]}

    copies = {"device_memory", "to_host", "to_device"}
    assert found() == ({"float32"}, {"memory"})
    assert found(torch.device("cpu"), True) == ({"float32", "bfloat16"}, {"memory"})
    assert found(device, True) == ({"float32", "bfloat16"}, {"memory", *copies})
    assert found(device, False) == ({"float32"}, {"memory", *copies})


def test_nodes_with_unequal_numbers_of_ranks_have_no_collectives() -> None:
    for nodes in ([0, 0, 0, 1], [0, 0, 1]):
        parts, left_out = plan_probe(60, place(nodes), disk=True)
        assert "collectives" not in {part.name for part in parts}
        assert left_out == ("collectives: no plan has nodes with unequal numbers of ranks",)


def test_a_device_has_products_of_more_samples() -> None:
    def rows(*of: Any) -> set[int]:
        parts = {part.name: part.probes for part in plan_probe(60, regular(1, 1, 2), False, *of).parts}
        return {probe.row[1] for probe in parts["products"]}

    assert rows(torch.device("cuda:0")) == rows() | {16 * samples for samples in rows()}


def test_the_worked_example() -> None:
    works = [1 << 20, 16 << 20]
    assert share_of(24, works) == pytest.approx(4.8)
    assert trials(0.25, 4.8 - 0.25) == 18
    assert share_of(24 - 4.8, works[1:]) == pytest.approx(19.2)
    assert fits(0.25 * 16, 19.2)


@given(st.floats(0, 100), st.lists(st.floats(1, 1e12), min_size=1))
def test_shares_are_never_more_than_what_is_left(remaining: float, works: list[float]) -> None:
    spent = 0.0
    for index in range(len(works)):
        spent += share_of(remaining - spent, works[index:])
    assert spent == pytest.approx(remaining)
    assert share_of(-1.0, works) == 0


def test_there_is_a_trial_besides_a_short_first_call_and_never_too_many() -> None:
    assert trials(1e-6, 100) == MAX_TRIALS
    assert trials(0.1, -5) == 1
    assert trials(1.0, -5) == 0
    assert not fits(1.0, 1.9)
