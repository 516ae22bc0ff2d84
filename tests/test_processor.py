"""Properties of the processor; use of cores by others, from counters that are made up, and those of this process."""

from __future__ import annotations

import pytest

from unisono.processor import (
    ALONE,
    Counters,
    Processor,
    ProcessorUse,
    compare_use,
    describe,
    parse,
    processor,
    processor_use,
    read_counters,
    use_since,
)


def rank(
    *cores: int, cpu: float, busy: float, stolen: float = 0.0, machine: str = "a", delayed: float | None = None
) -> Counters:
    """Return the use of cores over 10 s; each has an equal share of `busy` and `stolen`."""
    share = busy / max(1, len(cores)), stolen / max(1, len(cores))
    return Counters(machine, 10.0, cpu, delayed, 100, dict.fromkeys(cores, share))


@pytest.mark.parametrize(
    ("ranks", "others", "stolen"),
    [
        ([rank(0, cpu=9.9, busy=9.9), rank(1, cpu=9.9, busy=9.9)], 0.0, 0.0),
        ([rank(0, cpu=5.0, busy=10.0), rank(1, cpu=9.9, busy=9.9)], 0.5, 0.0),
        ([rank(0, 1, cpu=6.0, busy=20.0), rank(0, 1, cpu=6.0, busy=20.0)], 0.4, 0.0),
        ([rank(0, 1, cpu=6.0, busy=20.0, machine=name) for name in ("a", "b")], 0.7, 0.0),
        ([rank(0, cpu=7.0, busy=7.0, stolen=3.0)], 0.0, 0.3),
        ([rank(0, cpu=7.0, busy=6.0)], 0.0, 0.0),
        ([rank(0, 1, 2, 3, cpu=10.0, busy=30.0, delayed=0.1)], 0.01, 0.0),
        ([rank(cpu=5.0, busy=0.0)], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
    ids=[
        "alone",
        "one core",
        "shared cores",
        "two nodes",
        "stolen",
        "rounded",
        "idle cores are left",
        "unknown",
        "none",
    ],
)
def test_what_others_took_of_the_rank_with_the_least(ranks: list[Counters], others: float, stolen: float) -> None:
    use = processor_use(ranks)
    assert (use.others, use.stolen) == (pytest.approx(others, abs=0.002), pytest.approx(stolen))
    assert use.taken == pytest.approx(others + stolen, abs=0.002)


def test_a_tick_of_a_core_does_not_count() -> None:
    short = Counters("a", 0.1, 0.09, None, 0, {0: (0.1, 0.0)})
    assert processor_use([short]).others == pytest.approx(0.0)


def test_the_difference_of_two_readings() -> None:
    before = Counters("a", 1.0, 0.5, 0.25, 10, {0: (1.0, 0.0), 1: (5.0, 1.0)})
    after = Counters("a", 3.0, 1.5, 0.75, 30, {1: (7.0, 1.5)})
    use = use_since(before, after)
    assert use == Counters("a", 2.0, 1.0, 0.5, 20, {1: (2.0, 0.5)}), "of the core that the rank was bound to meanwhile"
    assert use_since(before._replace(delayed=None), after).delayed is None


def test_a_reading_of_this_process() -> None:
    before = read_counters()
    assert sum(range(100_000)) > 0
    use = use_since(before)
    assert use.wall > 0
    assert use.cpu >= 0
    assert all(busy >= 0 for busy, _ in use.cores.values())
    assert use.delayed is None or use.delayed >= 0
    assert 0 <= processor_use([use]).taken <= 1


@pytest.mark.parametrize(
    ("first", "later", "sentence"),
    [
        (ALONE, ALONE, ""),
        (None, ProcessorUse(others=0.05), ""),
        (None, ProcessorUse(others=0.5), "other processes took 50% of the ranks' cores"),
        (ProcessorUse(others=0.5), ALONE, "other processes took 0% of the ranks' cores; in the first steps 50%"),
        (ProcessorUse(switches=100), ProcessorUse(switches=150), ""),
        (
            ProcessorUse(switches=100),
            ProcessorUse(switches=1500),
            "ranks lost their cores 1,500 times a second, 100 in the first steps",
        ),
    ],
)
def test_what_changed_since_the_first_steps(first: ProcessorUse | None, later: ProcessorUse, sentence: str) -> None:
    assert compare_use(first, later) == sentence


def test_words() -> None:
    assert describe(ProcessorUse(0.25, 0.125)) == "other processes took 25% of the ranks' cores, the hypervisor 12%"


XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R)
flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: another
flags\t\t: fpu
"""


def test_a_processor_with_tiles() -> None:
    assert parse(XEON) == Processor("Intel(R) Xeon(R)", bfloat16=True)


def test_a_processor_without_bfloat16() -> None:
    assert parse("model name : AMD EPYC\nflags : avx2 avx512f\n") == Processor("AMD EPYC", bfloat16=False)


def test_arm() -> None:
    assert parse("Features : fp asimd bf16\n").bfloat16


def test_this_one_has_a_name() -> None:
    assert processor().name
