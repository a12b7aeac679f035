"""Fused gradient accumulation for PyTorch: fp32 sums of micro-batch gradients, unscaled and checked in one pass."""

from .accumulator import FusedAccumulator

__version__ = "0.1.0"
__all__ = ["FusedAccumulator"]
