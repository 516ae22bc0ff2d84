"""Operations in the output of PyTorch's profiler: `unisono:all_reduce`, with the shapes of its inputs.

An event that ends on another thread than it began on counts as asynchronous, as these events do.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from unisono.torch_backend.completions import Completions


class Event:
    """Profiler event of an operation, from its creation until `end`."""

    def __init__(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        handle = torch.autograd._record_function_with_args_enter(f"unisono:{name}", *inputs)  # type: ignore[attr-defined]
        self._over: torch.futures.Future[None] = torch.futures.Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(handle, self._over)
        self._thread = threading.get_ident()

    def end(self, completions: Completions) -> None:
        """End the event; return once the profiler has recorded it."""
        if threading.get_ident() != self._thread:
            self._over.set_result(None)
            return
        known = threading.Event()

        def end_event() -> None:
            self._over.set_result(None)
            known.set()

        completions.submit(end_event)
        known.wait()


def profiled(name: str, inputs: Sequence[Any]) -> Event | None:
    """Return the profiler event of an operation that begins; None if no profiler is active.

    `inputs` are tensors, or lists of them.
    """
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return None
    flat = [tensor for value in inputs for tensor in (value if isinstance(value, list) else [value])]
    return Event(name, [tensor for tensor in flat if not tensor.is_sparse])
