"""Watch for parameters that are read while their module does not run: layers that have them cannot be split.

    runs       words(numbers)    hidden(x)    F.linear(h, words.weight)
    reads      words.weight      hidden.*     words.weight: outside, so `words` stays whole

A layer that is split has a part of its weight, and exchanges only what goes through its own call. Reads are those of
PyTorch's functions and methods; a compiled or scripted function is not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SAME_OF_A_PART = tuple(
    getattr(Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "layout", "ndim", "requires_grad")
)
"""Reads that give the same of a part as of the whole."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value: a tensor, or tuples, lists and mappings of such."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)


class OutsideReads(TorchFunctionMode):
    """Context that finds the modules whose own parameters are read while they do not run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._owners = {
            id(one): name for name, module in model.named_modules() for one in module.parameters(recurse=False)
        }
        self.running: list[str] = []
        """Names of the modules that run, the outermost first; the caller keeps it."""
        self.found: set[str] = set()
        """Names of the modules whose parameters were read outside."""

    def look(self, value: Any) -> None:
        """Note the parameters in a value, also inside tuples, lists and mappings, whose module does not run."""
        owners = {self._owners.get(id(tensor)) for tensor in tensors_in(value)}
        self.found |= {name for name in owners if name is not None and name not in self.running}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch, and look at its arguments."""
        if func not in SAME_OF_A_PART:
            self.look((args, kwargs))
        return func(*args, **(kwargs or {}))
