import json
import socket

import pytest

from unisono.bench.collectives import bound_of, draw, interface_of, table
from unisono.torch_backend.rendezvous import address_towards


def entry(median: float, predicted: float | None = None) -> dict[str, float | None]:
    return {"median_us": median, "low_us": median * 0.9, "high_us": median * 1.1, "simulated_us": predicted}


FOUND = {
    "ranks": 8,
    "nodes": 8,
    "supernodes": 2,
    "library": "MPICH",
    "sizes": [
        {"bytes": 4, "bound_us": 0.1, "auto": "tree", "contenders": {"auto": entry(100), "MPI library": entry(90),
         "MPI library, tensor": entry(95), "gloo": entry(900), "ring": entry(300, 200)}},
        {"bytes": 1 << 20, "bound_us": 1000.0, "auto": "ring", "contenders": {"auto": entry(1100),
         "MPI library": entry(2200), "gloo": entry(1210), "ring": entry(1100, 1210)}},
    ],
}  # fmt: skip


def test_this_machine_is_reached_by_its_own_interface() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") in {name for _, name in socket.if_nameindex()}


def test_the_table_has_ratios_to_peers_and_to_the_bound() -> None:
    lines = table(FOUND).splitlines()
    assert lines[0].startswith("8 ranks on 8 nodes in 2 supernodes, MPICH")
    assert lines[-1].endswith("| 1.000 | 2.00 | 1.10 | 1.10 |")
    assert len({line.count("|") for line in lines[2:]}) == 1, "every row has as many cells as the head"


def test_on_one_node_the_bound_is_a_copy() -> None:
    assert bound_of({"bound_us": None, "contenders": {"copy": entry(7)}}) == 7
    assert bound_of({"bound_us": 3.0, "contenders": {}}) == 3


def test_the_plot_has_times_beside_multiples_of_the_bound() -> None:
    pytest.importorskip("matplotlib")
    drawn = draw(json.loads(json.dumps(FOUND))).decode()
    for text in (">ring<", ">bound<", ">time<", ">time over the bound<", ">1 MiB<", "µs<"):
        assert text in drawn
