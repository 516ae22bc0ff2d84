"""Parts of torch.distributed that this package builds on and whose stubs are missing or describe C++ overloads."""

from __future__ import annotations

from inspect import isfunction
from typing import Any

import torch
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
bindings: Any = torch._C._distributed_c10d


def leave_untraced(*kinds: type) -> None:
    """Have torch.compile run the methods of these classes as they are, with all that they call, as those of C++.

    `torch.compiler.disable` would wrap each method, and import the compiler, which takes seconds.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for method in filter(isfunction, [method for kind in kinds for method in vars(kind).values()]):
        frames.set_code_exec_strategy(method.__code__, skip)  # of a call out of a graph
        vars(method)["_torchdynamo_disable"] = True  # of a call in a function that is being traced
