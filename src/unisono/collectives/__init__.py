"""The collectives, one per file. Each chooses a schedule and plays it on tensors of any shape and stride.

    tensor ── contiguous? ── choose ──┬── library     MPI's own
                                      ├── windows     flat, direct: through memory that the node's ranks share
                                      └── messages    any schedule: pieces of it as MPI messages

Collectives with parts of different sizes (all_to_all_v, all_gather_v, gather, scatter) have one implementation within
a node and one between nodes. float16 and bfloat16 are reduced in float32; shared memory rounds once, messages between
nodes at every hop.
"""
