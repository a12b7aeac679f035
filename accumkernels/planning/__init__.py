"""Choosing the batch: what fits (fit/), what it takes (memory/), what it is worth (worth/).

It trains models on trial and restores them. It stands above the accumulator, which knows nothing of it.
"""
