"""`python -m accumkernels`: what works on this machine, and why something does not.

May look at the machine, the library and torch, and run the ops on small tensors. It is read by people and, with
`--json`, by programs; nothing in the package depends on it, and it never changes a setting.
"""
