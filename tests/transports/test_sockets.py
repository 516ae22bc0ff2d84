"""Programs of messages through sockets: all ranks in one process, a thread each, joined by pairs of sockets."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, permutations, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.call import call_of
from unisono.collectives import socket_calls
from unisono.collectives.payload import MOVE_DTYPES
from unisono.collectives.socket_calls import placed_rows
from unisono.placement import one_rank_per_node
from unisono.schedules import find
from unisono.schedules.numbering import renumber
from unisono.schedules.pieces import bounds
from unisono.schedules.pipeline import broadcast
from unisono.transports import sockets
from unisono.transports.arithmetic import arithmetic_of, perform
from unisono.transports.compiled import compiled
from unisono.transports.exact import ExactArithmetic
from unisono.transports.plan import Plan
from unisono.transports.sockets import Sockets
from unisono.transports.steps import Row, RowKind
from unisono.wires import EXACT

CHUNKED = ("allreduce", "reduce_scatter", "all_gather")

needs_compiler = pytest.mark.skipif(compiled is None, reason="this installation has no compiled code")


def mesh(ranks: int, buffer_bytes: int = 0) -> list[Sockets]:
    """Return the connections of so many ranks in this process; those of `buffer_bytes` take a message in parts."""
    ends: list[list[socket.socket | None]] = [[None] * ranks for _ in range(ranks)]
    for rank, peer in combinations(range(ranks), 2):
        ends[rank][peer], ends[peer][rank] = socket.socketpair()
        for end in (ends[rank][peer], ends[peer][rank]):
            end.setblocking(False)
            if buffer_bytes:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return [Sockets(connected) for connected in ends]


def never(*_: int) -> None:
    raise AssertionError("no rank is late, or in another call")


def plan_of(collective: str, algorithm: str, length: int, dtype: torch.dtype, op: str | None, root: int) -> Plan:
    carried = MOVE_DTYPES[dtype.itemsize] if op is None else dtype
    return Plan(collective, algorithm, "sockets", length, carried, None, op, root, call_of("a collective"))


def carry_out(plan: Plan, inputs: list[torch.Tensor], lengths: list[int], buffer_bytes: int = 0) -> list[torch.Tensor]:
    """Carry a plan out three times on as many ranks as there are inputs; return the outputs of the last time."""
    ranks, outputs = len(inputs), [torch.zeros(length, dtype=inputs[0].dtype) for length in lengths]
    family = find(plan.algorithm, one_rank_per_node(ranks))
    algorithm = renumber(getattr(family, plan.collective), [(rank + plan.root) % ranks for rank in range(ranks)])
    connected = mesh(ranks, buffer_bytes)

    def play(rank: int) -> None:
        memory, rows = placed_rows(plan, algorithm(rank, ranks), rank, ranks)
        scratch = torch.empty(plan.length, dtype=inputs[0].dtype)
        in_scratch = plan.collective == "reduce_scatter" and plan.nbytes > socket_calls.MAX_SHORT_BYTES
        player = connected[rank].player_of(rows, plan.arithmetic, lambda: None, never)
        start, stop = bounds(plan.length, ranks, rank)
        for token in range(3):
            memory[:] = 255  # what is left there does not matter
            source, target = inputs[rank], outputs[rank]
            if plan.collective == "all_gather":
                target[start:stop] = source
            elif plan.collective in ("allreduce", "broadcast") or (plan.collective == "reduce" and rank == plan.root):
                source = target.copy_(source)  # in place
            player(token, source.data_ptr(), (scratch if in_scratch else target).data_ptr())
            if in_scratch:
                target.copy_(scratch[start:stop])

    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(play, range(ranks)))
    for endpoint in connected:
        endpoint.close()
    return outputs


@needs_compiler
@given(st.data())
def test_every_collective_equals_the_serial_one(data: st.DataObject) -> None:
    ranks, length = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 40))
    root = data.draw(st.integers(0, ranks - 1))
    schedule = data.draw(st.sampled_from(["tree", "tree/binary", "tree/star", "split_tree", "circulant"]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]))
    payloads = [torch.randint(-8, 9, (length,)).to(dtype) for _ in range(ranks)]
    total, together = torch.stack(payloads).double().sum(0).to(dtype), [length] * ranks
    spans = [slice(*bounds(length, ranks, rank)) for rank in range(ranks)]
    parts = [span.stop - span.start for span in spans]

    plan = plan_of("allreduce", schedule, length, dtype, "sum", 0)
    assert all(torch.equal(out, total) for out in carry_out(plan, payloads, together))
    largest = plan_of("allreduce", schedule, length, dtype, "maximum", 0)
    expected = torch.stack(payloads).amax(0) if length else total
    assert all(torch.equal(out, expected) for out in carry_out(largest, payloads, together))

    plan = plan_of("broadcast", schedule, length, dtype, None, root)
    outputs = carry_out(plan, payloads, together)
    assert all(torch.equal(out, payloads[root]) for rank, out in enumerate(outputs) if rank != root)

    plan = plan_of("reduce", schedule, length, dtype, "sum", root)
    assert torch.equal(carry_out(plan, payloads, together)[root], total)

    plan = plan_of("reduce_scatter", "circulant", length, dtype, "sum", 0)
    outputs = carry_out(plan, payloads, parts)
    assert all(torch.equal(out, total[span]) for out, span in zip(outputs, spans, strict=True))

    plan = plan_of("all_gather", "circulant", length, dtype, None, 0)
    chunks = [total[span].clone() for span in spans]
    assert all(torch.equal(out, total) for out in carry_out(plan, chunks, together))

    rows = [torch.arange(length * ranks, dtype=torch.int64) + 1000 * rank for rank in range(ranks)]
    plan = plan_of("all_to_all", "direct", length * ranks, torch.int64, None, 0)
    for rank, out in enumerate(carry_out(plan, rows, [length * ranks] * ranks)):
        assert torch.equal(out, torch.cat([row[rank * length :][:length] for row in rows]))


@needs_compiler
@given(st.data())
def test_exact_sums_have_the_bits_of_whole_payloads(data: st.DataObject) -> None:
    ranks, length = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 3000))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    made = torch.Generator().manual_seed(length)
    payloads = [torch.randn(length, generator=made).exp().to(dtype) for _ in range(ranks)]
    expected = torch.empty_like(payloads[0])
    perform(ExactArithmetic(dtype).reduce([payload.numpy() for payload in payloads], expected.numpy()))
    flat, plan = (
        plan_of("allreduce", schedule, length, dtype, "sum", 0)._replace(wire=EXACT) for schedule in ("flat", "direct")
    )
    for each in (flat, plan):
        assert all(torch.equal(out, expected) for out in carry_out(each, payloads, [length] * ranks))
    with pytest.MonkeyPatch.context() as patch:  # as a long one: two pieces, and segments of a block
        patch.setattr(sockets, "SEGMENT_BYTES", 24)
        for name in ("MAX_SHORT_BYTES", "MIN_CHUNK_BYTES"):
            patch.setattr(socket_calls, name, 0)
        assert all(torch.equal(out, expected) for out in carry_out(plan, payloads, [length] * ranks, buffer_bytes=4096))


@needs_compiler
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_long_broadcast_and_a_reduction_along_a_chain_of_pieces(ranks: int) -> None:
    payloads = [torch.arange(100_003, dtype=torch.float32) % (7 + rank) for rank in range(ranks)]
    chain = plan_of("broadcast", "pipeline", 100_003, torch.float32, None, 1)
    _, rows = placed_rows(chain, broadcast(1, ranks), 1, ranks)
    assert len(rows) > 40
    outputs = carry_out(chain, payloads, [100_003] * ranks)
    assert all(torch.equal(out, payloads[1]) for out in outputs)
    reduced = carry_out(plan_of("reduce", "pipeline", 100_003, torch.float32, "sum", 1), payloads, [100_003] * ranks)
    assert torch.equal(reduced[1], torch.stack(payloads).sum(0))


@needs_compiler
@pytest.mark.parametrize("schedule", ["tree", "circulant", "ring", "direct", "halving"])
def test_messages_that_sockets_take_in_parts(schedule: str) -> None:
    payloads = [torch.arange(200_003, dtype=torch.float64) * rank for rank in range(5)]
    plan = plan_of("allreduce", schedule, 200_003, torch.float64, "sum", 0)
    for out in carry_out(plan, payloads, [200_003] * 5, buffer_bytes=4096):
        assert torch.equal(out, torch.arange(200_003, dtype=torch.float64) * 10)


LONG = {"ring": CHUNKED, "direct": CHUNKED, "circulant": CHUNKED, "halving": ("allreduce",)}
"""Schedules of long payloads, and their collectives."""


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 24 bytes, so that short payloads are cut as long ones are."""
    monkeypatch.setattr(sockets, "SEGMENT_BYTES", 24)
    for name in ("MAX_SHORT_BYTES", "MIN_CHUNK_BYTES"):
        monkeypatch.setattr(socket_calls, name, 0)


@needs_compiler
@pytest.mark.parametrize("schedule", LONG)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 9), st.integers(1, 300), st.sampled_from([torch.float32, torch.float64, torch.int64]))
def test_long_messages_in_segments(
    short_segments: None, schedule: str, ranks: int, length: int, dtype: torch.dtype
) -> None:
    payloads = [torch.randint(-8, 9, (length,)).to(dtype) for _ in range(ranks)]
    total, spans = torch.stack(payloads).sum(0), [slice(*bounds(length, ranks, rank)) for rank in range(ranks)]
    expected = {
        "allreduce": [total] * ranks,
        "all_gather": [total] * ranks,
        "reduce_scatter": [total[i] for i in spans],
    }
    for collective in LONG[schedule]:
        plan = plan_of(collective, schedule, length, dtype, None if collective == "all_gather" else "sum", 0)
        given_ones = [total[span].clone() for span in spans] if collective == "all_gather" else payloads
        outputs = carry_out(plan, given_ones, [len(each) for each in expected[collective]], buffer_bytes=4096)
        assert all(torch.equal(out, each) for out, each in zip(outputs, expected[collective], strict=True))


@pytest.mark.parametrize("schedule", LONG)
def test_a_part_is_summed_while_the_next_is_on_its_way(short_segments: None, schedule: str) -> None:
    program = find(schedule, one_rank_per_node(8)).allreduce(3, 8)
    _, rows = placed_rows(plan_of("allreduce", schedule, 300, torch.float32, "sum", 0), program, 3, 8)
    kinds = [row.kind for row in rows]
    assert max(row.amount for row in rows if row.kind in sockets.MESSAGES) <= 24, "a segment"
    assert kinds.count(RowKind.PART) > 3 * kinds.count(RowKind.ROUND), "it waits for what it sends only where it must"
    assert kinds[-1] is RowKind.ROUND, "all have gone when the call ends"


def is_played(programs: list[list[Row]]) -> bool:
    """Return True if all ranks reach the end where no message goes before its receiver waits for it, whole."""
    at, under_way = [0] * len(programs), [list[Row]() for _ in programs]

    def first(rank: int, kind: RowKind, peer: int) -> Row | None:
        return next((row for row in under_way[rank] if (row.kind, row.second) == (kind, peer)), None)

    moved = True
    while moved:
        moved = False
        for rank, rows in enumerate(programs):
            while at[rank] < len(rows):
                row = rows[at[rank]]
                waits_for = {RowKind.PART: (RowKind.RECEIVE,), RowKind.ROUND: sockets.MESSAGES}.get(row.kind, ())
                if any(message.kind in waits_for for message in under_way[rank]):
                    break
                under_way[rank] += [row] if row.kind in sockets.MESSAGES else []
                at[rank], moved = at[rank] + 1, True
        for rank, peer in permutations(range(len(programs)), 2):
            sent, received = first(rank, RowKind.SEND, peer), first(peer, RowKind.RECEIVE, rank)
            if sent and received:
                assert sent.amount == received.amount, f"{rank} -> {peer}"
                under_way[rank].remove(sent)
                under_way[peer].remove(received)
                moved = True
    return at == [*map(len, programs)]


SHORT = {
    **dict.fromkeys(("tree", "split_tree"), ("allreduce", "broadcast", "reduce")),
    **dict.fromkeys(("tree/binary", "pipeline"), ("broadcast", "reduce")),
    "tree/star": ("reduce",),
    "flat": ("allreduce",),
}


def test_ranks_of_an_exact_sum_do_not_wait_for_each_other_in_a_circle(short_segments: None) -> None:
    """Chunks differ by whole blocks, and so in their segments."""
    for ranks, length in product((2, 3, 5, 8), (200, 5000)):
        plan = plan_of("allreduce", "direct", length, torch.float64, "sum", 0)._replace(wire=EXACT)
        algorithm = find("direct", one_rank_per_node(ranks)).allreduce
        programs = [placed_rows(plan, algorithm(rank, ranks), rank, ranks)[1] for rank in range(ranks)]
        assert is_played(programs), ranks
        assert length < 5000 or any(row.kind is RowKind.PART for row in programs[0])


@pytest.mark.parametrize(
    ("schedule", "collective"), [(name, each) for name, all_of in {**SHORT, **LONG}.items() for each in all_of]
)
def test_ranks_do_not_wait_for_each_other_in_a_circle_without_any_buffers(
    short_segments: None, schedule: str, collective: str
) -> None:
    rooted = collective in ("broadcast", "reduce")
    for ranks, length, root in product((2, 3, 5, 6, 8), (3, 200), (0, 1) if rooted else (0,)):
        op = None if collective in ("all_gather", "broadcast") else "sum"
        plan = plan_of(collective, schedule, length, torch.float64, op, root)
        family = find(schedule, one_rank_per_node(ranks))
        algorithm = renumber(getattr(family, collective), [(rank + root) % ranks for rank in range(ranks)])
        assert is_played([placed_rows(plan, algorithm(rank, ranks), rank, ranks)[1] for rank in range(ranks)]), ranks


def test_a_circle_is_found() -> None:
    rows = rows_to(1), rows_to(0)
    assert is_played([*rows])
    assert not is_played([[each[0], each[2], each[1]] for each in rows]), "both wait for the other to receive"


def rows_to(peer: int) -> list[Row]:
    return [Row(RowKind.SEND, second=peer), Row(RowKind.RECEIVE, second=peer), Row(RowKind.ROUND)]


def messages_to(peer: int, kind: RowKind, payloads: list[torch.Tensor]) -> list[Row]:
    """Return the rows of messages, sent or received."""
    places = [payload.data_ptr() for payload in payloads]
    return [
        *(Row(kind, payload.nbytes, place, place, peer) for payload, place in zip(payloads, places, strict=True)),
        Row(RowKind.ROUND),
    ]


@needs_compiler
@given(st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=4), min_size=1, max_size=12))
def test_what_is_read_ahead_is_that_of_later_calls_and_of_other_programs(calls: list[list[int]]) -> None:
    """All is sent before any is received: a rank that sleeps for what it has read already would call `never`."""
    sender, receiver = mesh(2)
    for token, lengths in enumerate(calls):
        sent = [(torch.arange(length) * (token + 1) % 251).byte() for length in lengths]
        rows = messages_to(1, RowKind.SEND, sent)
        sender.player_of(rows, arithmetic_of(torch.uint8), never, never)(token, 0, 0)
    for token, lengths in enumerate(calls):
        received = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
        rows = messages_to(0, RowKind.RECEIVE, received)
        receiver.player_of(rows, arithmetic_of(torch.uint8), never, never)(token, 0, 0)
        for payload, length in zip(received, lengths, strict=True):
            assert payload.tolist() == (torch.arange(length) * (token + 1) % 251).tolist()
    sender.close()
    receiver.close()


class _EndedError(Exception):
    """The wait, or the call, is ended by a test."""


@needs_compiler
def test_a_message_of_another_call_names_its_rank() -> None:
    connected, mismatches = mesh(2), list[tuple[int, int]]()

    def play(rank: int) -> None:
        def mismatch(other: int) -> None:
            mismatches.append((rank, other))
            raise _EndedError

        player = connected[rank].player_of(rows_to(1 - rank), arithmetic_of(torch.uint8), never, mismatch)
        with pytest.raises(_EndedError):
            player(7 + rank, 0, 0)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(play, range(2)))
    assert sorted(mismatches) == [(0, 1), (1, 0)]


@needs_compiler
def test_a_message_of_another_call_that_was_read_ahead_names_its_rank() -> None:
    sender, receiver = mesh(2)
    sends, receives = rows_to(1)[0], rows_to(0)[1]
    send = sender.player_of([sends, Row(RowKind.ROUND)], arithmetic_of(torch.uint8), never, never)
    mismatches = list[int]()

    def mismatch(rank: int) -> None:
        mismatches.append(rank)
        raise _EndedError

    receive = receiver.player_of([receives, Row(RowKind.ROUND)], arithmetic_of(torch.uint8), never, mismatch)
    send(7, 0, 0)
    send(9, 0, 0)
    receive(7, 0, 0)
    with pytest.raises(_EndedError):
        receive(8, 0, 0)
    assert mismatches == [0]


@needs_compiler
@pytest.mark.parametrize("ended", [False, True])
def test_a_wait_for_a_late_rank_or_an_ended_one_calls_python(ended: bool) -> None:
    endpoint, peer = mesh(2)
    calls = 0

    def late() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise _EndedError

    if ended:
        peer.close()
    player = endpoint.player_of(rows_to(1), arithmetic_of(torch.uint8), late, never)
    with pytest.raises(_EndedError):
        player(1, 0, 0)
    assert calls == 3


def connect_all(
    places: list[tuple[list[str], int]], listeners: list[socket.socket], secrets: list[bytes]
) -> list[list[bool]]:
    """Return, for each rank, which others it is connected with."""

    def connect(rank: int) -> list[bool]:
        connected = sockets._connect(rank, listeners[rank], places, secrets[rank])
        reached = [connection is not None for connection in connected]
        for connection in filter(None, connected):
            connection.close()
        return reached

    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(connect, range(len(places))))


def listen(ranks: int) -> list[socket.socket]:
    return [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]


def test_ranks_find_each_other_past_strangers_and_wrong_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "ADDRESS_SECONDS", 0.2)
    listeners, secret = listen(4), os.urandom(sockets.SECRET_BYTES)
    stranger = socket.create_server(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in listeners]
    visitors = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    visitors[3].sendall(b"x" * 1000)
    # 127.0.0.2 leads to another rank's process as a host's private network would: the same port, nobody there
    places = [(["127.0.0.2", "127.0.0.1"] if rank == 2 else ["127.0.0.1"], port) for rank, port in enumerate(ports)]
    reached = connect_all(places, listeners, [secret] * 4)
    assert reached == [[other != rank for other in range(4)] for rank in range(4)]
    for end in (*listeners, *visitors, stranger):
        end.close()


def test_another_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(sockets, "ADDRESS_SECONDS", 0.2)
    listeners = listen(2)
    places = [(["127.0.0.1"], listener.getsockname()[1]) for listener in listeners]
    assert connect_all(places, listeners, [b"a" * 16, b"b" * 16]) == [[False, False]] * 2
    for listener in listeners:
        listener.close()
    assert threading.active_count() < 20


def test_this_host_has_an_address_that_is_no_loopback_or_the_loopback_alone() -> None:
    addresses = sockets._addresses("")
    assert addresses == ["127.0.0.1"] or not any(address.startswith("127.") for address in addresses)
    assert sockets._addresses("no such interface") == []
