"""Memory: which parameters there are, where their gradients are summed, and the fp32 masters.

This room may allocate, copy and call ops/. A layout only grows, so that views which users hold never move. The room
knows nothing of windows beyond which segments hold a sum, and never communicates or runs backward.
"""
