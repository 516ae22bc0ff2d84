"""Parameters and buffers that are waited for when a module reads them. The next forward pass can begin before all are
up to date."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch


class Awaited(dict[str, Any]):
    """Parameters, or buffers, of one module. Looking one up or setting it waits for that one; `items` and `values` wait
    for all."""

    def __init__(self, parameters: dict[str, Any], need: Callable[[Any], None]) -> None:
        super().__init__(parameters)
        self.need = need
        """Called with each parameter before it is read or replaced."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.need(value)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self.need(super().get(name))
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the parameter of that name, up to date."""
        value = super().get(name, default)
        self.need(value)
        return value

    def items(self) -> Any:
        """Return all items, up to date."""
        self._need_all()
        return super().items()

    def values(self) -> Any:
        """Return all values, up to date."""
        self._need_all()
        return super().values()

    def _need_all(self) -> None:
        for value in super().values():
            self.need(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(dict(self.items()), memo)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self.items()),)


def await_parameters(model: torch.nn.Module, need: Callable[[Any], None], need_buffer: Callable[[Any], None]) -> bool:
    """Call `need` with each parameter before a module of the model reads it. Return False where that is not possible.

    `need_buffer` is called with each buffer before it is read or set.

    Modules that also keep their parameters in lists of their own (LSTM) wait when they are called. A compiled or
    scripted model reads parameters where no function can be called: it is left unchanged, and False is returned.
    """
    modules = list(model.modules())
    compiled = any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in modules)
    if compiled or any(isinstance(one, torch.jit.ScriptModule) for one in modules):
        return False
    for module in modules:
        if isinstance(module._parameters, Awaited):  # another one waited until now
            module._parameters.need = need
        elif module._parameters:
            module._parameters = Awaited(module._parameters, need)
            module.register_forward_pre_hook(_await_own)
        if isinstance(module._buffers, Awaited):
            module._buffers.need = need_buffer
        elif module._buffers:
            module._buffers = Awaited(module._buffers, need_buffer)
    return True


def _await_own(module: torch.nn.Module, _: object) -> None:
    module._parameters.values()
