"""The collectives, one per file. Each chooses a schedule and plays it on tensors of any shape and stride;
`prepare.py` lists the transports.

Collectives with parts of different sizes (all_to_all_v, all_gather_v, gather, scatter) have one implementation within
a node and one between nodes. float16 and bfloat16 are reduced in float32; shared memory rounds once, messages between
nodes at every hop.
"""
