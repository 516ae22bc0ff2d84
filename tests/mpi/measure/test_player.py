"""A probe on real ranks: all have the same machine, which rank 0 writes and `find_machine` reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from unisono.errors import UsageError
from unisono.measure import probes as plans
from unisono.measure.facts import file_of
from unisono.measure.player import measure, play, probe
from unisono.measure.probes import (
    MeasuredCall,
    Probe,
    ProbePart,
    ProbePlan,
    collective_probe,
    memory_probe,
    product_probe,
)
from unisono.measure.timing import MAX_TRIALS
from unisono.plan.collective_costs import exchange_cost
from unisono.plan.machines import find_machine
from unisono.world import World

PARTS = {
    "products": (product_probe("linear", 2, 8, 8),),
    "collectives": (collective_probe("allreduce", "float32", 64),),
}


@pytest.fixture
def few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small probes of every part, which take a second in all."""
    monkeypatch.setattr(plans, "LINEAR_SIZES", ((2, 8, 8),))
    monkeypatch.setattr(plans, "CONVOLUTION_SIZES", ((2, 3, 4, 8, 3),))
    monkeypatch.setattr(plans, "COLLECTIVE_BYTES", (1 << 10, 1 << 12))
    monkeypatch.setattr(plans, "DISK_BYTES", (4 << 20,))
    monkeypatch.setattr(plans, "SUM_BYTES", 1 << 20)
    monkeypatch.setattr(plans, "MAX_TRIALS", 3)


@pytest.mark.usefixtures("few_probes")
@pytest.mark.parametrize("device", [0], indirect=True)  # rates have no order
def test_a_device_has_rates_of_its_own(world: World, device: torch.device) -> None:
    place = torch.device(device.type, world.rank % torch.accelerator.device_count())
    machine = probe(world, 600, None, "", lambda _: None, place)
    assert world.all_gather_object(machine) == [machine] * world.size
    assert machine.node.accelerators == min(world.size, torch.accelerator.device_count())
    assert machine.node.device_memory_bytes > 0
    assert (
        min(machine.node.to_host, machine.node.to_device, machine.node.device_bandwidth, machine.node.memory_bandwidth)
        > 0
    )
    assert {row.dtype for row in machine.products} == {"float32", "bfloat16"}


@pytest.mark.usefixtures("few_probes")
@pytest.mark.parametrize("where", ["world", "spread"])
def test_all_ranks_have_the_machine_that_is_written(request: pytest.FixtureRequest, where: str, tmp_path: Path) -> None:
    these: World = request.getfixturevalue(where)
    said: list[str] = []
    folder = these.call_on_root(lambda: tmp_path)
    machine = probe(these, 600, folder, "", said.append)
    assert these.all_gather_object(machine) == [machine] * these.size
    file = tmp_path / "machine.toml"
    file.write_text(file_of(machine), encoding="utf-8")
    assert find_machine(str(file)) == machine
    assert list(folder.iterdir()) == [file] if these.rank == 0 else folder.exists()
    assert {row.kind for row in machine.products} == {"linear", "convolution"}
    assert machine.node.flops > 0 < machine.node.memory_bandwidth
    assert machine.disk.bandwidth > 0 < machine.decoding.pixels
    assert (machine.probe.ranks, machine.probe.nodes, len(machine.probe.hosts)) == (
        these.size,
        these.nodes,
        these.nodes,
    )
    assert (machine.link.bandwidth > 0) == (these.nodes > 1)
    even = len(set(map(len, these.placement.nodes))) == 1
    assert even or not machine.collectives
    if these.size > 1 and even:
        assert {row.collective for row in machine.collectives} == {"allreduce", "reduce_scatter", "all_gather"}
        assert {row.wire for row in machine.collectives} == (
            {"float32", "bfloat16"} if these.nodes > 1 else {"float32"}
        )
        assert exchange_cost(machine, these.nodes, these.size // these.nodes).basis == "measured"


def test_a_part_without_time_is_left_out_on_all_ranks(world: World) -> None:
    parts = tuple(ProbePart(name, 0.0, probes) for name, probes in PARTS.items())
    played = play(world, ProbePlan(parts, ()), None, lambda _: None)
    assert played.readings == ()
    assert [line.partition(":")[0] for line in played.left_out] == ["products", "collectives"]


def given_probe(call: MeasuredCall = lambda: (1.0,), error: OSError | None = None) -> Probe:
    """Probe with a call that is given, or an error before it."""

    @contextmanager
    def prepare(*_: object) -> Iterator[MeasuredCall]:
        if error is not None:
            raise error
        yield call

    return memory_probe(4)._replace(prepare=prepare, schedule=lambda _: "ring")


def test_an_error_of_one_rank_is_that_of_all_and_leaves_out_the_probe(world: World) -> None:
    last = world.size - 1
    error = OSError(28, "No space left on device") if world.rank == last else None
    with pytest.raises(UsageError, match=rf"rank {last}: .*No space left"):
        measure(world, given_probe(error=error), None, 1.0)


def test_a_call_that_fails_on_one_rank_fails_on_all(world: World) -> None:
    def call() -> tuple[float]:
        if world.rank == 0:
            raise OSError(5, "Input/output error")
        return (1.0,)

    with pytest.raises(UsageError, match=r"rank 0: .*Input/output error"):
        measure(world, given_probe(call), None, 1.0)


def test_all_ranks_make_as_many_trials_whatever_their_clocks(world: World) -> None:
    """Each rank says another time; the slowest counts."""
    reading = measure(world, given_probe(lambda: (1e-9 * (1 + world.rank),)), None, 100.0)
    assert reading.trials == (tuple((1e-9 * (1 + rank),) for rank in range(world.size)),) * MAX_TRIALS
    assert reading.schedule == "ring"
    long = measure(world, given_probe(), None, 0.0)  # a call takes longer than the share
    assert len(long.trials) == 1
