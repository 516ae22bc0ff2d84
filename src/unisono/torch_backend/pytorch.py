"""Parts of torch.distributed that this package builds on and whose stubs are missing or describe C++ overloads."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

distributed: Any = dist

c10d: Any = dist.distributed_c10d

GroupBase: Any = dist.ProcessGroup

ReducerBase: Any = distributed.Reducer

DispatchModeBase: Any = TorchDispatchMode

WorkBase: Any = dist._Work  # type: ignore[attr-defined]

PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]

TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]

ReduceOp: Any = dist.ReduceOp
