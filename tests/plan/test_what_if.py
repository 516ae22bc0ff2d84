from dataclasses import replace

import pytest

from unisono.errors import UsageError
from unisono.plan.machines import DecodingFacts, DiskFacts, find_machine
from unisono.plan.measured_rows import CollectiveRow, MessageRow, ProductRow
from unisono.plan.what_if import CHANGES, changed_machine

MACHINE = replace(find_machine("taihulight"), disk=DiskFacts(1e9), decoding=DecodingFacts(3e7))


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_is_multiplied_and_all_others_stay(name: str) -> None:
    table, key = CHANGES[name]
    found = changed_machine(MACHINE, f"{name}=2x")
    assert getattr(getattr(found, table), key) == 2 * getattr(getattr(MACHINE, table), key)
    assert found.name.endswith(f", {name}=2x")
    back = changed_machine(found, f"{name}=0.5x")
    assert replace(back, name=MACHINE.name) == MACHINE


@pytest.mark.parametrize(
    "words", ["bandwidth", "bandwidth=2", "bandwidth=0x", "bandwidth=-1x", "bandwidth=infx", "speed=2x"]
)
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(UsageError, match="give a factor above 0 for bandwidth, "):
        changed_machine(MACHINE, words)


def test_a_value_that_is_not_there_is_not_multiplied() -> None:
    with pytest.raises(UsageError, match=r"has no node.memory_bandwidth, so it cannot be multiplied"):
        changed_machine(find_machine("cori_aries"), "memory_bandwidth=2x")


def test_rows_of_another_machine_are_left_out() -> None:
    product = ProductRow("linear", 1, 1, 1, 1, 1e9, 2e9, 0.0)
    collective = CollectiveRow("allreduce", "ring", "float32", 2, 2, 4, 1.0, 0.0)
    measured = replace(MACHINE, products=(product,), messages=(MessageRow(4, 1.0, 0.0),), collectives=(collective,))
    faster = changed_machine(measured, "flops=2x")
    assert faster.products == (replace(product, forward=2e9, backward=4e9),)
    assert faster.collectives == measured.collectives
    wider = changed_machine(measured, "bandwidth=2x")
    assert (wider.products, wider.messages, wider.collectives) == ((product,), (), ())
