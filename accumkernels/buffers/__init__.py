"""Memory: which parameters there are, where their gradients are summed, and the fp32 masters.

May allocate, copy and call ops/. A layout only grows, so that views which were handed out never move. It knows nothing
of windows beyond which segments hold a sum, and never communicates or runs backward.
"""
