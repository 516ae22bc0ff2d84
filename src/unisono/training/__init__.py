"""A run: from a recipe to weights, metrics and checkpoints."""
