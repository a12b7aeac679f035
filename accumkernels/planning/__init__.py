"""Chooses the batch: what fits (fit/), how much memory it takes (memory/), what it is worth (worth/).

This house trains models on trial and restores them. It uses the accumulator, which knows nothing of it.
"""
