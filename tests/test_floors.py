"""Lower floors never import upper ones."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "unisono"

FLOORS = [
    ("errors", "weak"),
    ("files", "registry", "tables"),
    ("addresses", "call", "launch", "placement", "user_function", "witness"),
    ("startup", "uncaught"),
    ("lab",),
    ("mpi",),
    ("schedules",),
    ("binding", "network", "optimizers", "processor", "wires"),
    ("transports",),
    ("collectives",),
    ("world",),
    ("initialize",),
    ("torch_backend",),
    ("engine",),
    ("step",),
    ("rules",),
    ("asynchronous",),
    ("testing",),
    ("plan",),
    ("foresight", "reducer"),
    ("view",),
    ("tensor_parallel",),
    ("data_parallel",),
    ("horovod",),
    ("compute", "data", "models"),
    ("training",),
    ("measure",),
    ("bench",),
    ("cli",),
    ("__init__", "__main__"),
]

FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        modules = [f"unisono.{name.name}" for name in node.names] if node.module == "unisono" else [node.module]
        yield from (module.split(".")[1] for module in modules if module.startswith("unisono."))


def test_imports_go_down() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        room = room_of(path)
        for other in imported_rooms(path):
            assert other == room or FLOOR[other] < FLOOR[room], f"{path}: {room} imports {other}"


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in SOURCE.rglob("*.py")} == set(FLOOR)
