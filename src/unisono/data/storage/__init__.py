"""Storages: places of a pack's samples, in the memory of the ranks or in its stripes. Each has one file, and one row.

The other files are the parts of partitioned storage: its shuffle (DIMD 4.1), and the memory that it works in; and those
of streamed storage: its order, and the reading ahead.
"""

from unisono.registry import Registry

STREAMED = "streamed"
"""Name of the storage that holds no pack in memory."""

STORAGES = Registry(
    "storage",
    {
        "partitioned": "unisono.data.storage.partitioned:read",
        "replicated": "unisono.data.storage.replicated:read",
        STREAMED: "unisono.data.storage.streamed:read",
    },
)
"""Storages by name. Each is a function (index, options, world) that returns a `Storage` (`storage.py`)."""

AUTO = "auto"
"""Name in recipes for the storage that is chosen from the memory there is (`choose.py`)."""
