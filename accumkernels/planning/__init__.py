"""Chooses the batch: what fits (`batch_size`), how much memory it takes (`memory`), what it is worth (`worth`).

These modules train models on trial and restore them. They use the accumulator, which knows nothing of them.
"""
