"""Packs in the memory of the ranks, as a share in each rank or a copy in each node; and the shuffle (DIMD 4.1)."""
