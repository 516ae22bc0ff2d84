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
WorkBase: Any = distributed._Work
PrefixStore: Any = distributed.PrefixStore
TCPStore: Any = distributed.TCPStore
ReduceOp: Any = dist.ReduceOp
