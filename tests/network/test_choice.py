"""The cheapest schedule is found without an estimate of all, also on more ranks than are examined one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from unisono.errors import TableError
from unisono.network import DEFAULT as DEFAULT_NETWORK
from unisono.network import Amount, Network, choice, estimate, shaped, simulate
from unisono.network.choice import (
    COLLECTIVES,
    DEFAULT,
    LONG_BYTES_PER_RANK,
    MAX_LEADER_BYTES,
    Choice,
    ChoiceRow,
    ChoiceTables,
    SupernodeRow,
    choose_by_price,
    read_table,
)
from unisono.network.estimate import least_cost
from unisono.network.pace import pace_of
from unisono.placement import Placement, one_rank_per_node, place, regular
from unisono.schedules import candidates, find
from unisono.schedules.schedule import Algorithm

FAST = Network(1e-6, 1e-10, 1e-11, 1e-12)
SLOW = Network(1e-4, 1e-8)
PLACEMENTS = [one_rank_per_node(2), one_rank_per_node(13), regular(2, 4, 1), regular(2, 3, 2), regular(2, 16, 1)]


@pytest.mark.parametrize("network", [FAST, SLOW])
@pytest.mark.parametrize(
    "placement", PLACEMENTS, ids=lambda placement: f"{len(placement.nodes)} nodes, {placement.ranks} ranks"
)
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 19, 1 << 24])
def test_it_is_the_first_of_the_cheapest(placement: Placement, network: Network, nbytes: int) -> None:
    def seconds(name: str) -> float:
        return float(estimate(find(name, placement).allreduce, placement, network, nbytes))

    other = "leader" if nbytes > MAX_LEADER_BYTES * min(map(len, placement.nodes)) else "hierarchical"
    names = [name for name in candidates("allreduce", placement) if not name.startswith(other)]
    assert choose_by_price("allreduce", placement, network, nbytes).algorithm == min(names, key=seconds)


@pytest.mark.parametrize("name", ["ring", "halving", "tree", "multicolor", "pipeline", "direct", "hierarchical"])
@pytest.mark.parametrize("network", [FAST, SLOW])
@pytest.mark.parametrize("nbytes", [1024, 1 << 20, 1 << 26])
def test_no_estimate_is_below_the_least_cost(name: str, network: Network, nbytes: int) -> None:
    placement = regular(2, 4, 2 if name == "hierarchical" else 1)
    algorithm = find(name, placement).allreduce
    least = float(least_cost(algorithm, placement, network)(nbytes))
    assert 0 < least <= float(estimate(algorithm, placement, network, nbytes)) * (1 + 1e-12)


def test_a_long_ring_is_estimated_by_a_few_of_its_ranks() -> None:
    """On 2,048 nodes a ring has 4,094 rounds, but halving sends all it has through uplinks of a tenth of the rate."""
    placement, narrow = regular(16, 128, 1), Network(1e-7, 1e-10, uplink_beta=1e-11)
    assert choose_by_price("allreduce", placement, narrow, 1 << 28).algorithm == "ring"


def test_long_rounds_are_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 300 nodes a ring's 598 messages take 60 ms, and halving far less."""
    made = list[Algorithm]()

    def record(algorithm: Algorithm, placement: Placement, network: Network, nbytes: int) -> Amount:
        made.append(algorithm)
        return estimate(algorithm, placement, network, nbytes)

    monkeypatch.setattr(choice, "estimate", record)
    placement = one_rank_per_node(300)
    assert choose_by_price("allreduce", placement, SLOW, 1 << 12).algorithm != "ring"
    assert 0 < len(made) < len(candidates("allreduce", placement))


def test_a_chain_of_many_ranks_is_no_candidate() -> None:
    assert "pipeline" in candidates("allreduce", one_rank_per_node(256))
    assert "pipeline" not in candidates("allreduce", one_rank_per_node(257))
    assert "pipeline" in candidates("broadcast", one_rank_per_node(257))


TEXT = DEFAULT.read_text()


def test_the_default_table() -> None:
    table = read_table()
    here = regular(1, 1, 4)
    assert table.choose("allreduce", here, 4) == Choice("flat", "windows")
    assert table.choose("allreduce", here, 4096) == Choice("flat", "windows")
    assert table.choose("allreduce", here, 4097) == Choice("direct", "windows")
    assert {(collective, "one node") for collective in COLLECTIVES} == set(table.rows)


def test_short_payloads_go_by_the_library_where_nothing_was_measured() -> None:
    here, table = one_rank_per_node(8), read_table()
    for collective in COLLECTIVES:
        assert table.choose(collective, here, 64 << 10) == Choice("library", "library")
        assert table.choose(collective, here, (64 << 10) + 4).transport == "messages"
        assert table.choose(collective, here, 4, encoded=True).transport == "messages"
    assert replace(table, network=Network(1e-4, 4e-8, 1e-9)).choose("allreduce", here, 4).transport == "messages"


def test_across_nodes_the_cheapest_is_chosen_without_measurements(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(
        '[[allreduce]]\nwhere = "across nodes"\nup_to = 100\nalgorithm = "library"\n'
        '[[allreduce]]\nwhere = "across nodes"\nalgorithm = "pipeline"\nmedian_us = 3.0\ninterval_us = [1.0, 4.0]\n'
        "[network]\nalpha = 1e-4\nbeta = 4e-8\nuplink_beta = 4e-8\n"
        '[[supernode]]\nhosts = ["a", "b"]\n[[supernode]]\nhosts = ["c"]\n'
    )
    table = read_table(path)
    assert table.choose("allreduce", one_rank_per_node(8), 100) == Choice("library", "library")
    assert table.choose("allreduce", one_rank_per_node(8), 101) == Choice("pipeline", "messages")
    assert table.choose("allreduce", regular(1, 1, 4), 4) == Choice("flat", "windows")
    assert table.choose("reduce_scatter", one_rank_per_node(8), 1 << 20).transport == "messages"
    assert table.network.uplink_beta == 4e-8
    assert table.supernodes == {"a": 0, "b": 0, "c": 1}


def test_a_table_of_an_older_release_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    rows = ("[[part_reduce]]", 'algorithm = "ring"'), ("[[part_broadcast]]", 'algorithm = "direct"')
    path.write_text("".join(f'{head}\nwhere = "across nodes"\n{algorithm}\n' for head, algorithm in rows))
    table = read_table(path)
    assert table.choose("reduce_scatter", one_rank_per_node(8), 100).algorithm == "ring"
    assert table.choose("all_gather", one_rank_per_node(8), 100).algorithm == "direct"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"flat"', '"flut"', "row 0: unknown algorithm 'flut'; there are library, tree, tree/binary, tree/star, "),
        (
            'algorithm = "flat"',
            'algorithm = "library"',
            "the library has a transport of its own, not 'windows'; leave it out",
        ),
        ("up_to = 4096", "up_to = -1", "allreduce row 0.up_to = -1, but it has to be at least 0"),
        ("up_to = 4096", "limit = 65536", "unknown key allreduce row 0.limit"),
        ("up_to = 4096\n", "", "up_to is none, none; it must rise from row to row"),
        (
            'where = "one node"\nalgorithm = "direct"\n',
            'where = "one node"\nup_to = 9\nalgorithm = "direct"\n',
            "up_to is 4096, 9; it must rise",
        ),
        ('where = "one node"\nalgorithm', 'where = "one node"\nup_to = 99999\nalgorithm', "and the last row has none"),
        (
            'transport = "windows"',
            'transport = "pigeons"',
            "transport = 'pigeons'; it is one of windows, cma, messages",
        ),
        (
            'algorithm = "flat"\ntransport = "windows"',
            'algorithm = "tree"\ntransport = "cma"',
            "cma carries direct, and the tree of a broadcast",
        ),
        ('where = "one node"', 'where = "here"', "where = 'here'; it is one of one node, across nodes"),
        ("[[allreduce]]", "[[allredude]]", "unknown key allredude; did you mean allreduce?"),
        ('where = "one node"', 'where = "across nodes"', "cannot use windows across nodes"),
        ("[[allreduce]]", "[network]\nalpha = 1\n[[allreduce]]", "network.beta is missing"),
        (
            "[[allreduce]]",
            "[network]\nalpha = -1\nbeta = 1\n[[allreduce]]",
            "network: alpha is -1.0; it must be 0 or more",
        ),
        ("[[allreduce]]", "[network]\nalpha = 1\nbeta = 0\n[[allreduce]]", "network: beta is 0"),
        (
            "[[allreduce]]",
            "[[supernode]]\nhosts = 3\n[[allreduce]]",
            "supernode row 0.hosts = 3 is not a list of strings",
        ),
        (
            "[[allreduce]]",
            '[[supernode]]\nhosts = ["a"]\n[[supernode]]\nhosts = ["a"]\n[[allreduce]]',
            "supernode 1: host 'a' is in supernode 0 too",
        ),
        ("[[reduce_scatter]]", "[[reduce_scatter]", "Expected"),
    ],
)
def test_errors_of_an_edited_table(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "table.toml"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(TableError) as caught:
        read_table(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_schedule_is_chosen_only_for_what_it_offers(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(
        TEXT.replace(
            '[[reduce_scatter]]\nwhere = "one node"\nalgorithm = "direct"',
            '[[reduce_scatter]]\nwhere = "one node"\nalgorithm = "halving"',
        )
    )
    with pytest.raises(TableError, match="unknown algorithm 'halving'; there are library, ring, direct"):
        read_table(path)


def test_choices_of_one_location_keep_those_of_the_other() -> None:
    there, across = ChoiceRow("one node", "direct"), ChoiceRow("across nodes", "ring")
    network, hosts = shaped(1e8, 2, 1.0, 1e-4), (SupernodeRow(("a", "b")), SupernodeRow(("c", "d")))
    known = ChoiceTables(allreduce=(ChoiceRow("one node", "flat"), across), network=network, supernode=hosts)
    tuned = ChoiceTables(allreduce=(there,), broadcast=(there,))
    assert known.updated(tuned, "one node") == replace(known, allreduce=(across, there), broadcast=(there,))
    again = ChoiceTables(allreduce=(ChoiceRow("across nodes", "direct"),), network=shaped(1e9, 4, 1.0, 1e-5))
    assert tuned.updated(again, "across nodes") == replace(
        again, allreduce=(there, *again.allreduce), broadcast=(there,)
    )


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="No such file"):
        read_table(tmp_path / "none.toml")


def test_rows_are_a_list(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text("allreduce = 3\n")
    with pytest.raises(TableError, match="allreduce = 3 is not a list of rows"):
        read_table(path)


def simulated(name: str, placement: Placement, nbytes: int, oversubscription: float, rate: float = 200e6) -> float:
    """Simulated seconds over the bound of the links, on hosts of the lab, in the pieces of an unknown network."""
    supernodes = len(set(placement.supernodes)) or 1
    nodes = len(placement.nodes)
    network = shaped(rate, nodes // supernodes, oversubscription)
    algorithm = find(name, placement).allreduce
    pace = pace_of(algorithm(0, placement.ranks), placement.ranks, nbytes // 4, 4, DEFAULT_NETWORK)
    seconds = simulate(algorithm, placement, network, nbytes, 4 * pace.chunk_length, pace.in_flight).seconds
    return float(seconds) / (2 * (nodes - 1) / nodes * nbytes * float(network.beta))


@pytest.mark.parametrize("megabytes", [1, 8, 32])
@pytest.mark.parametrize(("supernodes", "hosts"), [(2, 4), (1, 8), (3, 5)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_table_long_payloads_take_little_more_than_the_bound_on_any_network(
    supernodes: int, hosts: int, ranks: int, megabytes: int
) -> None:
    """Nobody has said which hosts share a switch, nor that its uplink is over-subscribed."""
    unknown, real = regular(1, supernodes * hosts, ranks), regular(supernodes, hosts, ranks)
    chosen = read_table().choose("allreduce", unknown, megabytes << 20)
    assert chosen == Choice("hierarchical" if ranks > 1 else "ring", "messages")
    assert simulated(chosen.algorithm, real, megabytes << 20, 4) <= 1.15


@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("ranks", [5, 8, 100])
def test_without_a_table_payloads_between_short_and_long_go_by_estimated_cost(collective: str, ranks: int) -> None:
    def seconds(name: str) -> float:
        algorithm = getattr(find(name, one_rank_per_node(ranks)), collective)
        return float(estimate(algorithm, one_rank_per_node(ranks), DEFAULT_NETWORK, 128 << 10))

    algorithm = read_table().choose(collective, one_rank_per_node(ranks), 128 << 10).algorithm
    assert algorithm == min(candidates(collective, one_rank_per_node(ranks)), key=seconds)
    assert read_table().choose(collective, one_rank_per_node(ranks), LONG_BYTES_PER_RANK * ranks).algorithm == "ring"


UNEVEN = [(2, 6), (3, 4), (3, 5), (5, 4)]


@pytest.mark.parametrize(("supernodes", "hosts"), UNEVEN)
@pytest.mark.parametrize("ranks", [1, 2])
def test_round_robin_is_never_chosen_where_numbers_are_no_powers_of_two(
    supernodes: int, hosts: int, ranks: int
) -> None:
    real = regular(supernodes, hosts, ranks)
    assert not any("round-robin" in name for name in candidates("allreduce", real))
    single = regular(supernodes, hosts, 1)
    assert simulated("halving/round-robin", single, 8 << 20, 4) > 3
    assert simulated("ring", single, 8 << 20, 4) < 1.2


@pytest.mark.parametrize(("supernodes", "hosts"), [(2, 4), (4, 4), (2, 8)])
def test_round_robin_is_a_candidate_for_powers_of_two(supernodes: int, hosts: int) -> None:
    real = regular(supernodes, hosts, 1)
    assert "halving/round-robin" in candidates("allreduce", real)
    assert "hierarchical/halving/round-robin" in candidates("allreduce", regular(supernodes, hosts, 3))
    in_order, dealt = (simulated(name, real, 8 << 20, 4) for name in ("halving", "halving/round-robin"))
    assert 1.5 * dealt < in_order


@pytest.mark.parametrize("algorithm", ["halving/round-robin", "hierarchical/halving/round-robin"])
def test_table_tuned_on_other_hosts_does_not_choose_it(tmp_path: Path, algorithm: str) -> None:
    path = tmp_path / "table.toml"
    path.write_text(
        f'[[allreduce]]\nwhere = "across nodes"\nalgorithm = "{algorithm}"\n'
        "[network]\nalpha = 1e-4\nbeta = 4e-8\nuplink_beta = 4e-8\n"
    )
    table = read_table(path)
    assert table.choose("allreduce", regular(2, 4, 1), 1 << 24).algorithm == algorithm
    for placement in (regular(2, 6, 1), regular(3, 4, 1), place(range(8), [0] * 5 + [1] * 3)):
        assert "round-robin" not in table.choose("allreduce", placement, 1 << 24).algorithm
