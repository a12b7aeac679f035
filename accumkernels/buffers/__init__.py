"""Memory: which parameters there are, where their gradients are summed, and the fp32 masters.

This room may allocate, copy and call ops/. Views which users hold move only where frozen layers give their segments
back (store.py). The room knows nothing of windows beyond which segments hold a sum, and never communicates or runs
backward.
"""
