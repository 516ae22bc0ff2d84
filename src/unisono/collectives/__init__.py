"""The collectives, one a file: each looks its schedule up and has it played on tensors of any shape and stride.

    tensor ── contiguous? ── choose ──┬── library     MPI's own
                                      ├── windows     flat, direct: through memory that the node's ranks share
                                      └── messages    any schedule: pieces of it as MPI messages

Parts of sizes that differ (exchange, all_gather, gather, scatter) have one way on a node and one between nodes.
float16 and bfloat16 are reduced in float32, and rounded once on shared memory, at every hop between nodes.
"""
