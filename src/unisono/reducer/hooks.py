"""Hooks of a model: calls before its forward pass, when a gradient is complete, and when a module reads a parameter.

They keep nothing alive: Python's collector does not see what holds hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from unisono.errors import UsageError
from unisono.plan.trace import tensors_in

if TYPE_CHECKING:
    from unisono.reducer.reducer import Reducer

LIVING = weakref.WeakSet["Reducer"]()
"""Reducers of all parallel models: an optimizer may have parameters of several."""


def check_kept(trained: torch.Tensor | torch.optim.Optimizer) -> None:
    """Raise UsageError for a parameter whose Reducer is gone with its model, and for an optimizer of such alone."""
    groups = [{"params": [trained]}] if isinstance(trained, torch.Tensor) else trained.param_groups
    held = {id(parameter) for reducer in LIVING for parameter in reducer.parameters}
    if held.isdisjoint(id(parameter) for group in groups for parameter in group["params"]):
        raise UsageError(
            "the parallel model is gone, but parameters of it are trained: keep what unisono.parallel returns, also a "
            "torch.nn.ModuleDict of models; of a model that was deleted, train on a copy (copy.deepcopy)"
        )


class BackwardEndCallback:
    """Callback for autograd at the end of a backward pass. Autograd drops it when the pass fails; `failed` is then
    called, before the program sees the failure."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended, self._failed, self._called = ended, failed, False

    def __call__(self) -> None:
        self._ended()
        self._called = True

    def __del__(self) -> None:
        if not self._called:
            self._failed()


def register_hooks(
    parameters: Sequence[torch.Tensor], mark_ready: Callable[[int, bool], None]
) -> list[RemovableHandle]:
    """Call a bound method for each gradient that is complete, as long as its object lives: with the parameter's index,
    and True where no hooks of the program's own follow, which may change it. Later they raise UsageError, unless the
    parameter is in another parallel model. Return the handles."""
    reference = weakref.WeakMethod(mark_ready)

    def hook_of(index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if (living := reference()) is None:
                check_kept(parameter)
            else:
                living(index, next(reversed(parameter._post_accumulate_grad_hooks.values())) is hook)

        return hook

    return [
        parameter.register_post_accumulate_grad_hook(hook_of(index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]


ATTRIBUTE = "_unisono"
"""Attribute of a model that holds its Attachment."""


class Attachment:
    """Link from a model to its Reducer. Copies of the model are not linked."""

    def __init__(self, reducer: Reducer | None) -> None:
        self.reducer = reducer

    def __call__(self, model: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Look for new parameters, and pass the first input to the reducer, which uses it for a warning only.

        Nothing is done in compiled code, in a recomputation, or where gradients are disabled.
        """
        if torch.compiler.is_compiling() or self.reducer is None or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1:
            self.reducer.structure.check(model)
            self.reducer.on_forward(next(tensors_in((*inputs, *named.values())), None))

    def __reduce__(self) -> tuple[type[Attachment], tuple[None]]:
        return Attachment, (None,)


def attach(model: torch.nn.Module, reducer: Reducer) -> RemovableHandle:
    """Link a model to its Reducer. Return the handle of the hook that looks at each forward pass."""
    attachment = Attachment(reducer)
    handle = model.register_forward_pre_hook(attachment, with_kwargs=True)
    setattr(model, ATTRIBUTE, attachment)
    return handle


def reducer_of(model: torch.nn.Module) -> Reducer | None:
    """Return the Reducer of a model that was made parallel; None for any other model."""
    attachment: Attachment | None = getattr(model, ATTRIBUTE, None)
    return None if attachment is None else attachment.reducer


class WaitOnAccess(dict[str, Any]):
    """Parameters, or buffers, of one module, each of which `wait_for` is called with before it is read or replaced."""

    def __init__(self, parameters: dict[str, Any], wait_for: Callable[[Any], None]) -> None:
        super().__init__(parameters)
        self.wait_for = wait_for

    def __getitem__(self, name: str) -> Any:
        self.wait_for(super().__getitem__(name))
        return super().__getitem__(name)  # a wait may put another buffer in its place

    def __setitem__(self, name: str, value: Any) -> None:
        self.get(name)
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of that name, up to date."""
        self.wait_for(super().get(name, default))
        return super().get(name, default)

    def items(self) -> Any:
        """Return all items, up to date."""
        self.values()
        return super().items()

    def values(self) -> Any:
        """Return all values, up to date."""
        for value in super().values():
            self.wait_for(value)
        return super().values()

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self.items()),)


def wait_on_access(
    model: torch.nn.Module, wait_for: Callable[[Any], None], wait_for_buffer: Callable[[Any], None]
) -> bool:
    """Call `wait_for` with each parameter, and `wait_for_buffer` with each buffer, before a module reads it.

    Modules that also keep their parameters in lists of their own (LSTM) wait when they are called. Return False for a
    compiled or scripted model, which stays as it is: it reads parameters where no function can be called.
    """
    modules = list(model.modules())
    compiled = any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules)
    if compiled or any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        return False
    for module in modules:
        if module._parameters and not isinstance(module._parameters, WaitOnAccess):
            module.register_forward_pre_hook(_wait_for_own)
        module._parameters = _waiting(module._parameters, wait_for)
        module._buffers = _waiting(module._buffers, wait_for_buffer)
    return True


def _waiting(values: dict[str, Any], wait_for: Callable[[Any], None]) -> dict[str, Any]:
    """Return a module's parameters or buffers so that each is waited for; those of an earlier reducer wait so too."""
    if isinstance(values, WaitOnAccess):
        values.wait_for = wait_for
        return values
    return WaitOnAccess(values, wait_for) if values else values


def _wait_for_own(module: torch.nn.Module, _: object) -> None:
    module._parameters.values()
