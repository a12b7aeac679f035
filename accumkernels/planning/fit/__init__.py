"""What fits: the largest micro-batch, found by training on trial, on one rank or on all of them together.

Nothing is left of a trial: model, optimizer and random state are as before, also after an error.
"""
