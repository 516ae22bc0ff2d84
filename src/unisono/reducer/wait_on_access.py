"""Parameters and buffers that are waited for when a module reads them. So the next forward pass can begin before all
are up to date."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch


class WaitOnAccess(dict[str, Any]):
    """Parameters, or buffers, of one module. Looking one up or setting it waits for that one; `items` and `values` wait
    for all."""

    def __init__(self, parameters: dict[str, Any], wait_for: Callable[[Any], None]) -> None:
        super().__init__(parameters)
        self.wait_for = wait_for
        """Called with each parameter before it is read or replaced."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.wait_for(value)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self.wait_for(super().get(name))
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the parameter of that name, up to date."""
        value = super().get(name, default)
        self.wait_for(value)
        return value

    def items(self) -> Any:
        """Return all items, up to date."""
        self._wait_for_all()
        return super().items()

    def values(self) -> Any:
        """Return all values, up to date."""
        self._wait_for_all()
        return super().values()

    def _wait_for_all(self) -> None:
        for value in super().values():
            self.wait_for(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(dict(self.items()), memo)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self.items()),)


def wait_on_access(
    model: torch.nn.Module, wait_for: Callable[[Any], None], wait_for_buffer: Callable[[Any], None]
) -> bool:
    """Call `wait_for` with each parameter before a module of the model reads it. Return False if that is not possible.

    `wait_for_buffer` is called with each buffer before it is read or set.

    Modules that also keep their parameters in lists of their own (LSTM) wait when they are called. A compiled or
    scripted model reads parameters where no function can be called: it is left unchanged, and False is returned.
    """
    modules = list(model.modules())
    compiled = any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in modules)
    if compiled or any(isinstance(one, torch.jit.ScriptModule) for one in modules):
        return False
    for module in modules:
        if isinstance(module._parameters, WaitOnAccess):  # of an earlier reducer
            module._parameters.wait_for = wait_for
        elif module._parameters:
            module._parameters = WaitOnAccess(module._parameters, wait_for)
            module.register_forward_pre_hook(_wait_for_own)
        if isinstance(module._buffers, WaitOnAccess):
            module._buffers.wait_for = wait_for_buffer
        elif module._buffers:
            module._buffers = WaitOnAccess(module._buffers, wait_for_buffer)
    return True


def _wait_for_own(module: torch.nn.Module, _: object) -> None:
    module._parameters.values()
