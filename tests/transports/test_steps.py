"""Compiled programs beside the same rows played by NumPy and PyTorch; barriers of threads; what is left to Python."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.call import BARRIER as CALL
from unisono.transports.arithmetic import Float32Arithmetic, arithmetic_of, perform
from unisono.transports.barriers import BARRIER_ROWS, ENDED, SEQUENCE, STATE, VARIABLE
from unisono.transports.exact import ExactArithmetic
from unisono.transports.steps import (
    BARRIER,
    Row,
    RowKind,
    _table_of,
    copy,
    kind_of,
    longer_player_of,
    reduction,
    steps_of,
)
from unisono.wires import EXACT

make_player = pytest.importorskip("unisono.transports._steps").make_player

Player = Callable[[], None]

TOKENS = 16
"""Words of a token and what travels beside it."""

SPINS, YIELDS = 1000, 0


def state() -> memoryview:
    return memoryview(bytearray(8 * len(STATE))).cast("q")


def alone(programs: list[list[list[Row]]]) -> Player:
    """Return the player of a rank without others."""
    row = np.zeros(2 * TOKENS, np.int64)
    late = pytest.fail
    player = make_player(state(), row.ctypes.data, (), TOKENS, SPINS, YIELDS, 5, tuple(map(_table_of, programs)), late)
    KEPT.append(row)
    return player


KEPT: list[object] = []

COMPILED = [
    *((dtype, "sum") for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)),
    *((dtype, op) for op in ("sum", "maximum") for dtype in (torch.int32, torch.int64)),
    *((dtype, EXACT) for dtype in (torch.float32, torch.float64)),
]
"""Dtypes and ops of the reductions that are compiled."""


@given(
    st.sampled_from(COMPILED),
    st.integers(2, 6),
    st.integers(0, 2500),
    st.integers(-1, 5),
    st.integers(0, 3),
    st.booleans(),
)
def test_reductions_have_the_bits_of_numpy_and_pytorch(
    about: tuple[torch.dtype, str], ranks: int, length: int, replaced: int, offset: int, special: bool
) -> None:
    dtype, op = about
    arithmetic = ExactArithmetic(dtype) if op == EXACT else arithmetic_of(dtype, op)
    rows = torch.randn(ranks + 1, length, generator=torch.Generator().manual_seed(length)).mul(1000).to(dtype)
    if special and dtype.is_floating_point:
        rows[0, ::7], rows[1, 1::5], rows[0, 2::9] = float("inf"), float("-inf"), float("nan")
    nbytes = length * dtype.itemsize
    results = []
    for compiled in (True, False):
        memories = [bytearray(bytes(offset) + bytes(row.view(torch.uint8).numpy())) for row in rows]
        arrays = [np.frombuffer(memory, np.uint8) for memory in memories]
        places = [array.ctypes.data + offset for array in arrays]
        into = places[replaced] if 0 <= replaced < ranks else places[ranks]
        program = reduction(kind_of(*about), into, places[:ranks], length)
        if compiled:
            alone([[program]])()
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(VARIABLE, "off")
                perform(steps_of(program, arithmetic))
        index = places.index(into)
        results.append(torch.frombuffer(bytearray(memories[index][offset:]), dtype=dtype) if nbytes else rows[0])
    both = [torch.nan_to_num(result.float(), nan=12345.0) for result in results]
    assert torch.equal(*both)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits_is_added_as_pytorch_does(dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16).to(torch.int16).view(dtype)
    for second in (torch.zeros_like(every), every.roll(1), every.roll(12_345), every.flip(0)):
        added = torch.empty_like(every)
        sources = every.data_ptr(), second.data_ptr()
        alone([[reduction(kind_of(dtype, "sum"), added.data_ptr(), sources, len(every))]])()
        expected = (every.float() + second.float()).to(dtype)
        torch.testing.assert_close(added, expected, rtol=0, atol=0, equal_nan=True)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 20)), max_size=20))
def test_copies(moves: list[tuple[int, int, int]]) -> None:
    memory = np.arange(64, dtype=np.uint8)
    expected, start = memory.copy(), memory.ctypes.data
    moves = [(into, source, nbytes) for into, source, nbytes in moves if abs(into - source) >= nbytes]
    for into, source, nbytes in moves:
        expected[into : into + nbytes] = expected[source : source + nbytes].copy()
    alone([[[copy(start + into, start + source, nbytes) for into, source, nbytes in moves]]])()
    assert (memory == expected).all()


def test_the_next_barrier_chooses_the_program() -> None:
    output, numbers = np.zeros(1, np.int64), np.arange(3, dtype=np.int64)
    programs = [[[copy(output.ctypes.data, numbers.ctypes.data + 8 * index, 8)], []] for index in range(3)]
    player = alone(programs)
    chosen = []
    for _ in range(5):
        player()
        chosen.append(int(output[0]))
    assert chosen == [1, 2, 0, 1, 2]


def test_steps_in_python_of_several_pieces_are_not_kept() -> None:
    made = list[weakref.ref[torch.Tensor]]()

    class Watched(Float32Arithmetic):
        def view(self, buffer: Any) -> torch.Tensor:
            view = super().view(buffer)
            made.append(weakref.ref(view))
            return view

    signals: Any = SimpleNamespace(compiled=True, sequence=0, prepare_barrier=lambda _: lambda: None)
    numbers = np.ones(8, np.float16)
    into, first, second = (numbers.ctypes.data + 4 * index for index in range(3))
    rows = reduction(kind_of(torch.float16, "maximum"), into, [first, second], 2)
    play = longer_player_of(signals, CALL, lambda _: [rows, rows], 1, Watched(torch.float16, "maximum"))
    play()
    assert made
    assert all(view() is None for view in made)


def test_threads_meet_and_sum() -> None:
    ranks, turns = 3, 300
    rows, slots = np.zeros((ranks, 2 * TOKENS), np.int64), np.zeros((3, ranks), np.float32)
    values, wrong = np.zeros((ranks, 1), np.float32), []

    def run(rank: int) -> None:
        starts = [row.ctypes.data for row in rows]
        others = tuple(starts[:rank] + starts[rank + 1 :])
        mine, own_state = values[rank], state()

        def wait() -> None:
            index, before = (TOKENS if own_state[SEQUENCE] & 1 else 0), own_state[2]
            while any(rows[other][index] == before for other in range(ranks)):
                threading.Event().wait(1e-5)

        programs = [
            [
                [copy(slot.ctypes.data + 4 * rank, mine.ctypes.data, 4)],
                reduction(
                    RowKind.SUM_FLOAT32, mine.ctypes.data, [slot.ctypes.data + 4 * peer for peer in range(ranks)], 1
                ),
            ]
            for slot in slots
        ]
        player = make_player(
            own_state, starts[rank], others, TOKENS, 3, 3, 5, tuple(_table_of(rounds) for rounds in programs), wait
        )
        for turn in range(turns):
            mine[0] = rank + turn
            player()
            if mine[0] != sum(peer + turn for peer in range(ranks)):
                wrong.append((rank, turn, float(mine[0])))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_is_late_or_differs_is_left_to_python() -> None:
    rows, own_state = np.zeros((2, 2 * TOKENS), np.int64), state()
    calls: list[str] = []

    def late() -> None:
        calls.append("late")

    def barrier(call: int) -> Player:
        starts = rows[0].ctypes.data, (rows[1].ctypes.data,)
        return make_player(own_state, *starts, TOKENS, 2, 0, call, (BARRIER_ROWS,), late)

    barrier(5)()
    assert calls == ["late"]  # nobody came
    rows[1][0] = 5 + 2
    barrier(5)()
    assert calls == ["late"]
    rows[1][TOKENS] = 99
    barrier(5)()
    assert calls == ["late"] * 2  # another call
    own_state[ENDED] = 1
    barrier(5)()
    assert calls == ["late"] * 3
    assert own_state[SEQUENCE] == 3  # after the end, no barrier is entered

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_player(own_state, rows[0].ctypes.data, (), TOKENS, 2, 0, 5, (BARRIER_ROWS,), fail)()


def test_rows() -> None:
    assert _table_of([[copy(8, 16, 4)], [BARRIER], []]).tolist()[-2:] == [[5, 0, 0, 0, 0], [5, 0, 0, 0, 0]]
    assert ([list(BARRIER)] == BARRIER_ROWS).all()
    assert kind_of(torch.float16, "minimum") is RowKind.OTHER
    assert kind_of(torch.float32, "maximum") is RowKind.OTHER
    assert {kind_of(*about) for about in COMPILED} == {kind for kind in RowKind if "_" in kind.name}
