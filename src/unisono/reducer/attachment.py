"""Attachment of a model to its reducer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from unisono.reducer.reducer import Reducer

ATTRIBUTE = "_unisono"
"""Attribute of a model that holds its Attachment."""


class Attachment:
    """Link from a model to its Reducer. Copies of the model are not linked."""

    handle: RemovableHandle

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
            self.reducer.on_forward(_first_tensor((*inputs, *named.values())))

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        return Attachment(None)

    def __reduce__(self) -> tuple[type[Attachment], tuple[None]]:
        return Attachment, (None,)


def attach(model: torch.nn.Module, reducer: Reducer) -> None:
    """Attach a reducer to its model."""
    attachment = Attachment(reducer)
    attachment.handle = model.register_forward_pre_hook(attachment, with_kwargs=True)
    setattr(model, ATTRIBUTE, attachment)


def detach(model: torch.nn.Module) -> None:
    """Detach a model from its reducer."""
    attachment: Attachment = getattr(model, ATTRIBUTE)
    attachment.handle.remove()
    delattr(model, ATTRIBUTE)


def reducer_of(model: torch.nn.Module) -> Reducer | None:
    """Return the Reducer of a model that was made parallel; None for any other model."""
    attachment: Attachment | None = getattr(model, ATTRIBUTE, None)
    return None if attachment is None else attachment.reducer


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """Return the first tensor among a model's inputs, also inside dicts, lists and tuples; None where there is none."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        if (found := _first_tensor(inside)) is not None:
            return found
    return None
