"""Programs whose ranks have not communicated: each of them has trained a network of its own.

A program without `init_process_group` makes no process group; Accelerate without `cpu=True`, and a loop without
DistributedDataParallel, make one and do not use it. All end with exit code 0. So rank 0 says it at the end, by what it
has done itself.
"""

from __future__ import annotations

from typing import Any

from unisono import initialize
from unisono.torch_backend.process_group import ProcessGroup
from unisono.torch_backend.pytorch import GroupBase


class CommunicationRecord:
    """Record of a program's process groups, until one of them has exchanged a tensor."""

    def __init__(self) -> None:
        self._groups: list[ProcessGroup] = []
        self._communicated = False  # ranks have communicated, or it is not known whether they have

    def watch_worlds(self) -> None:
        """Record the worlds that the program makes, too: their ranks communicate without a process group."""
        init = initialize.init

        def record(*arguments: Any, **named: Any) -> Any:
            self._communicated = True
            return init(*arguments, **named)

        vars(initialize)["init"] = record

    def record(self, group: Any) -> None:
        """Record a group that the program has made; those of other backends do not tell what they exchange."""
        if isinstance(group, ProcessGroup):
            self._groups.append(group)
        elif isinstance(group, GroupBase):
            self._communicated = True
        if self.any:
            self._communicated, self._groups = True, []

    @property
    def any(self) -> bool:
        """True if ranks have communicated, or it is not known whether they have."""
        return self._communicated or any(group.exchanged for group in self._groups)

    def describe(self, ranks: int) -> str:
        """Return a line for the end of a program on so many ranks; empty if they have communicated."""
        return "" if ranks == 1 or self.any else describe_isolation(ranks, bool(self._groups))


def describe_isolation(ranks: int, grouped: bool) -> str:
    """Return a line that says that the ranks ran alone, and the remedy; `grouped` if there was a process group."""
    fault, call = (
        ("made a process group, but rank 0 exchanged no tensor in it; wrap the model in", "DistributedDataParallel")
        if grouped
        else ("made no process group; call", "torch.distributed.init_process_group()")
    )
    libraries = f'Accelerate: Accelerator(cpu=True); Lightning: Trainer(strategy="ddp", devices={ranks})'
    return f"unisono: {ranks} ranks ran alone: the program {fault} {call} ({libraries})"
