"""Nothing holds Python's lock while it waits for other ranks (`mpi.py` says which calls of mpi4py do)."""

import re
from pathlib import Path

import unisono

OBJECT_REDUCTION = re.compile(r"comm\.(allreduce|reduce|scan|exscan)\(")


def test_objects_are_not_reduced() -> None:
    places = []
    for path in sorted(Path(unisono.__file__).parent.rglob("*.py")):
        for line_number, line in enumerate(path.read_text().splitlines(), 1):
            if OBJECT_REDUCTION.search(line) and not line.strip().startswith("`"):
                places.append(f"{path.name}:{line_number}: {line.strip()}")
    assert not places, places
