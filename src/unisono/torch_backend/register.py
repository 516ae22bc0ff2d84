"""Registration of the name "unisono" with torch.distributed. Neither MPI nor the collectives are loaded before use.

PyTorch from 2.14 on calls `register` through the entry point `torch.distributed.backends` when the name is requested.
`import unisono` registers it too: at once where PyTorch has been imported, else as soon as it is.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from unisono.errors import UsageError
from unisono.wires import WIRES

NAME = "unisono"

DEVICES = ["cpu", "cuda"]

NAME_VARIABLE = "UNISONO_BACKEND_NAME"
"""Variable that, set to our name, has groups answer it under `unisono run`, whatever the program has asked for."""


@dataclass(frozen=True)
class Options:
    """Options of a process group: `pg_options` of `init_process_group` and `new_group`.

    `wire` is the number format in which float32 and float64 tensors are sent between nodes when they are summed
    (all_reduce, reduce_scatter, with SUM, AVG or PREMUL_SUM); sums are computed in float32. It applies to tensors of
    `wire_from` bytes or more: shorter ones gain nothing, and counts and losses keep all their digits. "exact" gives all
    dense sums, of any length and of `reduce` too, the bits of `World.allreduce(wire="exact")`. Raises UsageError for an
    unknown `wire` and a negative `wire_from`.
    """

    wire: str | None = None
    wire_from: int = 64 << 10

    def __post_init__(self) -> None:
        if self.wire is not None and self.wire not in WIRES:
            raise UsageError(f"wire = {self.wire!r}; it is one of None, {', '.join(WIRES)}")
        if self.wire_from < 0:
            raise UsageError(f"wire_from = {self.wire_from}; it is a number of bytes, 0 or more")


def register() -> None:
    """Register the backend, and the rendezvous that sets the variables which an MPI launcher leaves out.

    Further calls do nothing.
    """
    import torch.distributed as dist  # noqa: PLC0415 - not before PyTorch is there

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    from unisono.torch_backend.rendezvous import install  # noqa: PLC0415

    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
    install()


def name(group: Any = None) -> str:
    """Return the backend that carries out a process group, the default one for None: "unisono" for ours.

    Under `unisono run`, `torch.distributed.get_backend()` answers the name that the program has asked for instead.
    """
    import torch.distributed as dist  # noqa: PLC0415

    process_group = dist.group.WORLD if group is None else group
    return NAME if hasattr(process_group, "stands_in") else str(dist.get_backend(process_group))


def register_with_torch() -> None:
    """Register now if PyTorch has been imported, else as soon as it is."""
    if hasattr(sys.modules.get("torch"), "distributed"):
        register()
    elif not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())


def _create(options: Any, group_options: Any) -> Any:
    """Return a new process group; called by PyTorch."""
    from unisono.torch_backend.process_group import ProcessGroup  # noqa: PLC0415

    return ProcessGroup(options, group_options)


class _AfterTorch(MetaPathFinder):
    """Import hook that sees PyTorch being imported, leaves that to the usual finders, and registers afterwards."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of PyTorch, whose loader registers once it has loaded; None for everything else."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                register()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
