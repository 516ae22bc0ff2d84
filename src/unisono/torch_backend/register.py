"""Registration of the name "unisono" with torch.distributed. Neither MPI nor the collectives are loaded before use.

PyTorch from 2.14 on calls `register` through the entry point `torch.distributed.backends` when the name is requested.
`import unisono` registers it too: at once where PyTorch has been imported, else as soon as it is.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

NAME = "unisono"

DEVICES = ["cpu", "cuda"]

NAME_VARIABLE = "UNISONO_BACKEND_NAME"
"""Variable that, set to our name, has groups answer it under `unisono run`, whatever the program has asked for."""


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

    found = dist.group.WORLD if group is None else group
    return NAME if hasattr(found, "stands_in") else str(dist.get_backend(found))


def register_with_torch() -> None:
    """Register now if PyTorch has been imported, else as soon as it is."""
    if hasattr(sys.modules.get("torch"), "distributed"):
        register()
    elif not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())


def _create(options: Any, group_options: Any) -> Any:
    """Return a new process group; called by PyTorch."""
    from unisono.torch_backend.process_group import create  # noqa: PLC0415

    return create(options, group_options)


class _AfterTorch(MetaPathFinder):
    """Import hook that sees PyTorch being imported, leaves that to the usual finders, and registers afterwards."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of PyTorch with a loader that registers; None for everything else."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    """Loader that loads as `loader` does, then registers."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Return the module that the loader creates."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, then register."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        register()
