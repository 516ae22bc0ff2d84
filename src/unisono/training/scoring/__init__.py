"""Scoring of a run's newest checkpoint: evaluation of a test set on all ranks, and predictions of files.

recipe.toml, checkpoints/ ─▶ network ┬ test set ─▶ confusion, loss, accuracy ─▶ evaluation.json, confusion.svg
                                     ├ zeros    ─▶ samples a second of forward passes, by batch size
                                     └ a file   ─▶ probability of each class; of a text its loss and next tokens
"""
