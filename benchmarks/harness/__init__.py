"""How anything is measured here: gradients to work on, timers, live bytes, the machine's description, result files.

Of accumkernels it may use what is public. Never knows what is compared, or which command asks.
"""
