"""Timing of a contender's collectives: payloads, results, and writes before every call."""

from typing import Any

import numpy as np
import pytest

from unisono.bench.peer_program import COLLECTIVES, TIMINGS, Case, TimedLibrary, make_case, time_calls, time_case


class Alone:
    """Communicator of one rank."""

    rank, size = 0, 1

    def Barrier(self) -> None:  # noqa: N802 - mpi4py's name
        """Wait for nobody."""

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return [value]


def numpy_memory(count: int) -> np.ndarray:
    return np.zeros(count, np.float32)


NOTHING = TimedLibrary(numpy_memory, lambda payload, result: dict.fromkeys(COLLECTIVES, lambda: None), lambda: None)


def test_payloads_and_results() -> None:
    def lengths(collective: str, nbytes: int) -> tuple[int, int]:
        case = make_case(NOTHING, collective, nbytes, rank=1, ranks=3)
        return len(case.payload), len(case.result)

    assert {name: lengths(name, 48) for name in COLLECTIVES} == {
        "allreduce": (12, 12), "reduce_scatter": (12, 4), "all_gather": (4, 12), "broadcast": (12, 12),
        "all_to_all": (12, 12), "reduce": (12, 0), "barrier": (12, 12),
    }  # fmt: skip
    assert lengths("allreduce", 4) == (1, 1)
    assert lengths("reduce_scatter", 4) == (3, 1), "no rank has less than a number"
    values = [make_case(NOTHING, "broadcast", 48, rank, 3).value for rank in range(3)]
    assert values == [1, 0, 0], "only the root's numbers arrive"
    assert make_case(NOTHING, "allreduce", 48, 1, 3).expected == 3
    assert len(make_case(NOTHING, "reduce", 48, 0, 3).result) == 12, "on the root all is known"
    assert [row["bytes"] for row in time_calls(Alone(), {"one": NOTHING}, ["barrier"], [4, 8])] == [0]


def test_the_payload_is_written_before_every_call() -> None:
    payload = numpy_memory(2048)
    seen = list[float]()

    def call() -> None:
        seen.append(float(payload[-1]))
        payload[:] = 7.0

    time_case(Alone(), Case(payload, 1.0, call, payload, 7.0, lambda: None), "a sum")
    assert len(seen) > 20
    assert set(seen) == {1.0}


def test_a_wrong_result_is_reported() -> None:
    payload = numpy_memory(4)
    with pytest.raises(ValueError, match="rank 0: a sum: the result has other numbers than 2"):
        time_case(Alone(), Case(payload, 1.0, lambda: None, payload, 2.0, lambda: None), "a sum")


def test_a_row_for_each_contender_collective_and_size() -> None:
    rows = time_calls(Alone(), {"one": NOTHING, "other": NOTHING}, ["allreduce", "broadcast"], [4, 8])
    assert [(row["collective"], row["bytes"], row["contender"]) for row in rows] == [
        (collective, nbytes, name)
        for collective in ("allreduce", "broadcast")
        for nbytes in (4, 8)
        for name in ("one", "other")
    ]
    assert all(row[timing] > 0 for row in rows for timing in TIMINGS)
