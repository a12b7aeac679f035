"""`python -m accumkernels`: what works on this machine, and why something does not.

The doctor may look at the machine, the library and torch, and run the ops on small tensors. People read its report and,
with `--json`, programs do. Nothing in the package depends on it, and it never changes a setting.
"""
