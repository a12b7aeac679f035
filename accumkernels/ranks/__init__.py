"""What several processes do together: choosing the ranks, reducing flat buffers, agreeing on scalars.

May issue collectives and read buffers/. Every kind of parallelism, and a process alone, offers the interface of
`base.Ranks`: values in, values out. It never judges a window, and never writes the window's state.
"""
