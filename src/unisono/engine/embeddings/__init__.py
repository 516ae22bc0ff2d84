"""Where communication sits in the step: three ways, by their names, and none at all."""

from collections.abc import Mapping

from unisono.engine.embeddings.chain import chain
from unisono.engine.embeddings.concurrent import concurrent
from unisono.engine.embeddings.funnel import funnel
from unisono.engine.embeddings.none import none
from unisono.engine.embeddings.task import MAIN, OUTSTANDING, Embedding, Tag, Task, buffer, communicator, gradient
from unisono.errors import UsageError

__all__ = [
    "EMBEDDINGS",
    "MAIN",
    "OUTSTANDING",
    "Embedding",
    "Tag",
    "Task",
    "buffer",
    "communicator",
    "find_embedding",
    "gradient",
]

EMBEDDINGS: Mapping[str, Embedding] = {"funnel": funnel, "concurrent": concurrent, "chain": chain, "none": none}


def find_embedding(name: str) -> Embedding:
    """The embedding of that name. Raises UsageError, listing the names, for an unknown one."""
    if name not in EMBEDDINGS:
        raise UsageError(f"there is no embedding {name!r}; there are {', '.join(EMBEDDINGS)}")
    return EMBEDDINGS[name]
