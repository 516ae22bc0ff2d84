"""However PyTorch trains over unisono, it learns what it learns over gloo, step by step."""

from __future__ import annotations

import re

ALLOWED = {"float64": 1e-9, "float32": 1e-3}
VARIANTS = {"ddp", "fsdp2", "tensor_parallel", "zero1", "powersgd"}

LINE = re.compile(r"^(\w+) (\w+): difference (\S+), loss (\S+) to (\S+)$", re.MULTILINE)


def test_losses_are_those_of_gloo(four_ranks: dict[str, str]) -> None:
    print(four_ranks["parity.py"])
    found = LINE.findall(four_ranks["parity.py"])
    assert {(way, dtype) for way, dtype, *_ in found} == {(way, dtype) for way in VARIANTS for dtype in ALLOWED}
    for way, dtype, difference, first, last in found:
        assert float(difference) <= ALLOWED[dtype], f"{way} in {dtype} differs by {difference}"
        assert float(last) < 0.8 * float(first), f"{way} in {dtype} learned nothing: {first} to {last}"
