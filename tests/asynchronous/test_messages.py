"""Messages of workers and servers as numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.asynchronous.messages import (
    HEADER_LENGTH,
    KINDS_OF_TIME,
    Kind,
    Order,
    Reply,
    Request,
    WorkerHeader,
    WorkerProgress,
    decode_header,
    decode_reply,
    reply_length,
)
from unisono.training.trainer import KINDS

COUNT = st.integers(0, 1 << 50)
REAL = st.floats(allow_nan=False)
TIMES = st.tuples(*[REAL] * KINDS_OF_TIME)


def test_a_header_holds_every_kind_of_time() -> None:
    assert len(KINDS) == KINDS_OF_TIME


@given(st.builds(WorkerHeader, st.sampled_from(Kind), COUNT, COUNT, REAL, st.sampled_from(Request), TIMES))
def test_headers(header: WorkerHeader) -> None:
    assert len(header.encode()) == HEADER_LENGTH
    assert decode_header(header.encode()) == header


@given(
    st.builds(
        Reply,
        *(COUNT, COUNT, COUNT, st.integers(0, 63).map(Order), COUNT, COUNT, REAL, COUNT, COUNT, REAL, REAL, TIMES),
        st.lists(st.builds(WorkerProgress, COUNT, st.integers(-1, 1 << 40)), max_size=5).map(tuple),
    )
)
def test_replies(reply: Reply) -> None:
    assert len(reply.encode()) == reply_length(len(reply.workers))
    assert decode_reply(reply.encode()) == reply
