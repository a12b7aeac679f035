"""The work that several processes share: choosing the ranks, reducing flat buffers, agreeing on scalars.

This room may issue collectives and read buffers/. Every kind of parallelism, and a process alone, implements
`base.Ranks`: values in, values out. It never decides on a window, and never writes the window's state.
"""
