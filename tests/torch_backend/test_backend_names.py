"""Every place where PyTorch and the libraries over it compare a backend's name is known, and what becomes of it.

`backend_names.txt` lists them. A release that adds a place fails here: look at its branches, then list it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

TABLE = Path(__file__).parent / "backend_names.txt"
NAMES = ("gloo", "nccl", "mpi", "ucc", "xccl")
WANTED = re.compile(rf"\b({'|'.join([*NAMES, *map(str.upper, NAMES)])})\b|ProcessGroupGloo")
PACKAGES = ("torch", "accelerate", "ignite", "lightning", "transformers")
OTHERS_OWN = ("testing/_internal/", "/test_utils/", "torch/_vendor/")


class Place(NamedTuple):
    """Function of a file, and the names that it compares with."""

    file: str
    function: str
    names: str


class Comparisons(ast.NodeVisitor):
    """Collector of the names with which each function of a file compares."""

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {}
        self._within: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # noqa: N815 - names of ast

    def visit_Compare(self, node: ast.Compare) -> None:
        for operand in (node.left, *node.comparators):
            self._add(operand)
        self.generic_visit(node)

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        self._add(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) == "isinstance" and "ProcessGroupGloo" in ast.unparse(node.args[1]):
            self._add(ast.Constant("gloo"))
        self.generic_visit(node)

    def _add(self, operand: ast.expr) -> None:
        match operand:
            case ast.Tuple(elts=each) | ast.List(elts=each) | ast.Set(elts=each):
                for element in each:
                    self._add(element)
            case ast.Constant(value=str(name)) | ast.Attribute(attr=name) | ast.Name(id=name):
                if name.lower() in NAMES and (isinstance(operand, ast.Constant) or name.isupper()):
                    self.names.setdefault(".".join(self._within), set()).add(name.lower())
            case _:
                pass


def places_in(package: Path) -> Iterator[Place]:
    """The places of a package that is installed in this folder."""
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package.parent).as_posix()
        text = path.read_text(encoding="utf-8", errors="replace")
        if not WANTED.search(text) or any(part in file for part in OTHERS_OWN):
            continue
        comparisons = Comparisons()
        comparisons.visit(ast.parse(text))
        for function, names in comparisons.names.items():
            yield Place(file, function, ",".join(sorted(names)))


def listed() -> dict[Place, str]:
    """The places of the table, with the release that has them: "" for all, else "<2.14" or ">=2.14" of PyTorch."""
    rows = [line.split() for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("    ")]
    return {Place(*row[:3]): "".join(row[3:]) for row in rows}


def is_older(version: str) -> bool:
    """True for a PyTorch before 2.14."""
    return tuple(map(int, version.split(".")[:2])) < (2, 14)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_place_is_listed(package: str) -> None:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed; make examples installs it")
    places = set(places_in(Path(spec.submodule_search_locations[0])))
    table = {place: release for place, release in listed().items() if place.file.startswith(f"{package}/")}
    assert not places - table.keys(), "compare a backend's name, and are not listed"
    other = ">=2.14" if is_older(torch.__version__) else "<2.14"
    assert not {place for place, release in table.items() if release != other} - places, "listed, and gone"


FORMS = """
class A:
    def f(self):
        return get_backend() == "gloo" or b in (Backend.NCCL, XCCL)
def g(b):
    match b:
        case "mpi":
            return MPI.COMM_WORLD.size > 1
    return isinstance(b, ProcessGroupGloo)
"""


def test_the_forms_that_are_found() -> None:
    comparisons = Comparisons()
    comparisons.visit(ast.parse(FORMS))
    assert comparisons.names == {"A.f": {"gloo", "nccl", "xccl"}, "g": {"mpi", "gloo"}}
