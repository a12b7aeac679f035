"""Sums, masters and optimizer state in host memory: gradients go there while backward runs, weights come back.

What must wait for what, and why, is at each step of `sink` and `slots`; see also docs/cpu_offload.md.
"""
