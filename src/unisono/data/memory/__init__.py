"""A pack in the memory of the ranks: a share each, or a copy in each node; and the shuffle (DIMD 4.1)."""
