"""Lower floors never import upper ones, and no room grows."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "unisono"

CODE = {".py", ".c", ".h"}

DATA = {".toml", ".json", ".gz", ".LICENSE", ".typed", ".so"}

FLOORS = [
    ("errors",),
    ("files", "formats", "registry", "tables"),
    ("call", "launch", "placement", "user_function", "witness"),
    ("processor", "startup", "uncaught"),
    ("device", "lab"),
    ("mpi",),
    ("schedules",),
    ("binding", "network", "optimizers", "wires"),
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
    ("elastic",),
    ("measure",),
    ("papers",),
    ("bench",),
    ("cli",),
    ("__init__", "__main__"),
]

MAX_LINES = {
    ".": 3_369,
    "asynchronous": 1_097,
    "bench": 1_543,
    "cli": 2_445,
    "collectives": 4_050,
    "compute": 1_240,
    "data": 6_440,
    "elastic": 1_370,
    "engine": 581,
    "foresight": 801,
    "horovod": 1_001,
    "lab": 464,
    "measure": 1_482,
    "models": 765,
    "network": 1_709,
    "optimizers": 563,
    "papers": 648,
    "plan": 3_585,
    "reducer": 4_397,
    "rules": 1_162,
    "schedules": 1_777,
    "step": 2_836,
    "tensor_parallel": 1_058,
    "testing": 1_628,
    "torch_backend": 2_088,
    "training": 7_391,
    "transports": 4_430,
    "view": 979,
    "wires": 279,
}
"""Lines that each room may have, with docstrings; "." has the modules that are in none. What needs more makes something
else simpler; what has become smaller is entered here. The goal is 40,000 in 330 files."""

MAX_FILES = 329

FILES_OF_SPLIT_LAYERS = (
    *(SOURCE / "tensor_parallel").glob("*.py"),
    SOURCE / "plan/layer_plan.py",
    SOURCE / "plan/split.py",
)

SPLIT_LAYERS = {
    "plan/run_plan.py": {"WITH_SPLITS", "_with_split_layers", "split_inputs"},
    "plan/planned_run.py": {"memory_with"},
    "training/run.py": {"choose_layers"},
    "data_parallel.py": {"SPLIT_LOOP", "_plan_by_prediction"},
}
"""Definitions that only split layers use, beside FILES_OF_SPLIT_LAYERS: their planning."""

MAX_LINES_OF_SPLIT_LAYERS = 1_500
"""Lines of split layers with their planning."""

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


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


def test_the_package_has_code_and_data_alone() -> None:
    folders = {"__pycache__"}
    paths = [path for path in SOURCE.rglob("*") if path.is_file() and not folders & set(path.parts)]
    assert [path for path in paths if path.suffix not in {*CODE, *DATA}] == []


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in SOURCE.rglob("*.py")} == set(FLOOR)


def test_no_room_grows() -> None:
    paths, lines = [path for path in SOURCE.rglob("*") if path.suffix in CODE], Counter[str]()
    for path in paths:
        lines["." if path.parent == SOURCE else room_of(path)] += len(path.read_text().splitlines())
    assert {room: count for room, count in lines.items() if count > MAX_LINES.get(room, 0)} == {}
    assert len(paths) <= MAX_FILES


def lines_of(path: Path, names: set[str]) -> int:
    """Lines of definitions, with their decorators and the string below a constant."""
    body, lines = ast.parse(path.read_text()).body, 0
    for node, behind in zip(body, [*body[1:], None], strict=True):
        own = {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
        own |= {target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)}
        if own & names:
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
            described = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
            lines += ((behind if described else node).end_lineno or 0) - first + 1
            names = names - own
    assert not names, f"{path} has no {names}"
    return lines


def test_split_layers_and_their_planning_do_not_grow() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in FILES_OF_SPLIT_LAYERS)
    lines += sum(lines_of(SOURCE / name, names) for name, names in SPLIT_LAYERS.items())
    assert lines <= MAX_LINES_OF_SPLIT_LAYERS
