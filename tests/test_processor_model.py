"""Properties of the processor."""

from unisono.processor_model import Processor, parse, processor

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R)
flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: another
flags\t\t: fpu
"""


def test_a_processor_with_tiles() -> None:
    assert parse(XEON) == Processor("Intel(R) Xeon(R)", tiles=True, vectors=True)
    assert parse(XEON).bfloat16


def test_a_processor_without_bfloat16() -> None:
    found = parse("model name : AMD EPYC\nflags : avx2 avx512f\n")
    assert found == Processor("AMD EPYC")
    assert not found.bfloat16


def test_arm() -> None:
    assert parse("Features : fp asimd bf16\n").vectors


def test_this_one_has_a_name() -> None:
    assert processor().name
