"""SECURITY.md's promises that the source can be held to: what listens, and what is unpickled."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "unisono"
PICKLES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
SERVERS = {"socketserver", "http", "xmlrpc", "asyncio", "multiprocessing.connection", "multiprocessing.managers"}
LISTENERS = {
    "collectives/device_transports.py",
    "elastic/standby.py",
    "elastic/supervisor.py",
    "witness.py",
    "torch_backend/program.py",
    "torch_backend/rendezvous.py",
    "transports/node_memory.py",
    "transports/sockets.py",
}
"""The files that SECURITY.md tells of."""


UNPICKLE = {
    "data/sources/cifar.py",  # by an unpickler that knows arrays alone
    "horovod/collectives.py",  # what ranks send each other, as MPI's own object collectives do
}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def called(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_nothing_is_unpickled_and_nothing_listens_but_what_is_told() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        tree, name = ast.parse(path.read_text()), str(path.relative_to(SOURCE))
        modules = set(imported(tree))
        assert name in UNPICKLE or not {module.split(".")[0] for module in modules} & PICKLES, name
        assert not modules & SERVERS, name
        for function, call in called(tree):
            last = function.rpartition(".")[2]
            assert function not in ("torch.load", "eval", "exec"), f"{name}: {function}"
            assert last not in ("Unpickler", "read_pickle", "unsafe_load", "full_load"), f"{name}: {function}"
            assert not any(keyword.arg == "allow_pickle" for keyword in call.keywords), f"{name}: {function}"
            if (
                last in ("bind", "listen", "TCPStore", "create_server") and function != "bind"
            ) or last == "memfd_create":
                assert name in LISTENERS, f"{name}: {function}"


def test_cifar_goes_through_an_unpickler_that_knows_arrays_alone() -> None:
    text = (SOURCE / "data/sources/cifar.py").read_text()
    assert "class _Arrays(pickle.Unpickler)" in text
    assert not {"pickle.load", "pickle.loads"} & {function for function, _ in called(ast.parse(text))}


def test_security_md_tells_each_listener() -> None:
    text = (SOURCE.parents[1] / "SECURITY.md").read_text()
    for subject in ("witness", "TCPStore", "memfd", "model.folder", "CIFAR", "all interfaces", "sockets"):
        assert subject in text
