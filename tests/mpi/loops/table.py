"""Table of the loops and their outcomes, as docs/rules.md has it: `python -m tests.mpi.loops.table`."""

from __future__ import annotations

from tests.mpi.loops.loops import LOOPS
from tests.mpi.loops.test_loops import ONE_RANK_ALONE, REFUSED, RULES

TITLES = {
    "bsp": "BSP",
    "sum": 'BSP("sum")',
    "sharded": "Sharded",
    "local_sgd": "LocalSGD",
    "diloco": "DiLoCo",
}


def table() -> str:
    lines = [["what the loop does", *(TITLES[rule] for rule in RULES)], ["---"] * (1 + len(RULES))]
    for name, loop in LOOPS.items():
        outcomes = ["error" if rule in REFUSED.get(name, {}) else "right" for rule in RULES]
        outcomes = ["-" if (name, rule) in ONE_RANK_ALONE else out for rule, out in zip(RULES, outcomes, strict=True)]
        lines.append([(loop.__doc__ or "").removesuffix("."), *outcomes])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
