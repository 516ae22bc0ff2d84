import gc
import warnings
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.memory.segment import Segment
from unisono.data.pack.batches import Samples

SAMPLES = st.one_of(
    st.lists(st.binary(max_size=40), max_size=30),
    st.integers(0, 20).flatmap(lambda length: st.lists(st.binary(min_size=length, max_size=length), max_size=30)),
)
"""Of any lengths, 0 among them, or all of one."""


def stretch_of(samples: list[bytes]) -> Samples:
    ends = np.cumsum([0, *(len(sample) for sample in samples)])
    return Samples(np.frombuffer(b"".join(samples), np.uint8), ends.astype(np.int64))


def samples_of(segment: Segment) -> list[bytes]:
    return [segment.sample(row).tobytes() for row in range(len(segment))]


@given(st.data(), SAMPLES, st.integers(0, 1000))
def test_what_is_taken_is_what_a_list_gives(data: st.DataObject, samples: list[bytes], first: int) -> None:
    rows = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=40)) if samples else []
    segment = Segment.of(first, [stretch_of(samples)])
    taken = segment.take(np.array(rows, np.int64))
    assert samples_of(taken) == [samples[row] for row in rows]
    assert taken.numbers.tolist() == [first + row for row in rows]
    assert taken.numbers.dtype == np.int32
    assert taken.nbytes == len(taken.data) == sum(len(samples[row]) for row in rows)


@given(st.data(), SAMPLES, st.integers(0, 9))
def test_what_is_taken_into_a_room_lies_at_its_beginning(data: st.DataObject, samples: list[bytes], more: int) -> None:
    rows = data.draw(st.permutations(range(len(samples))))
    nbytes = sum(map(len, samples))
    room = np.full(nbytes + more, 7, np.uint8)
    segment = Segment.of(0, [stretch_of(samples)])
    segment.data = np.append(segment.data, np.uint8(9))  # a segment may have room after its last sample
    taken = segment.take(np.array(rows, np.int64), room)
    assert samples_of(taken) == [samples[row] for row in rows]
    assert room[:nbytes].tobytes() == b"".join(samples[row] for row in rows)
    assert (room[nbytes:] == 7).all()


@given(SAMPLES, st.lists(st.integers(0, 30)))
def test_stretches_lie_side_by_side(samples: list[bytes], cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(samples)]
    stretches = [stretch_of(samples[begin:end]) for begin, end in pairwise(ends)]
    segment = Segment.of(7, stretches)
    assert samples_of(segment) == samples
    assert segment.numbers.tolist() == list(range(7, 7 + len(samples)))
    assert segment.nbytes == sum(map(len, samples))


def test_of_nothing() -> None:
    segment = Segment.of(3, [])
    assert (len(segment), segment.nbytes, len(segment.take(np.empty(0, np.int64)))) == (0, 0, 0)


def test_what_is_taken_lives_by_itself_and_may_be_written() -> None:
    for samples in ([b"abc", b"de", b"", b"fghi"] * 500, [b"abcd"] * 2000):
        segment = Segment.of(0, [stretch_of(samples)])
        taken = segment.take(np.arange(len(samples))[::-1].copy())
        assert not np.shares_memory(taken.data, segment.data)
        del segment
        gc.collect()
        junk = [np.full(taken.nbytes, 255, np.uint8) for _ in range(20)]  # would take freed memory
        assert samples_of(taken) == samples[::-1]
        assert len(junk) == 20
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.from_numpy(taken.data).fill_(1)
        assert taken.data.sum() == taken.nbytes
