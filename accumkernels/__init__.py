"""Fused gradient accumulation for PyTorch: fp32 sums of micro-batch gradients, unscaled and checked in one pass."""

from .accumulator import FusedAccumulator
from .planning.batchnorm import batchnorm_modules, replace_batchnorm
from .planning.fit.batch_size import BatchSize, find_batch_size
from .planning.memory.report import MemoryReport, memory_report
from .planning.worth.learning_rate import suggest_betas, suggest_learning_rate
from .planning.worth.plan import AccumulationPlan, plan
from .splitting.oom import is_oom_error
from .window.noise_scale import NoiseScale

__version__ = "0.1.0"
__all__ = [
    "AccumulationPlan",
    "BatchSize",
    "FusedAccumulator",
    "MemoryReport",
    "NoiseScale",
    "batchnorm_modules",
    "find_batch_size",
    "is_oom_error",
    "memory_report",
    "plan",
    "replace_batchnorm",
    "suggest_betas",
    "suggest_learning_rate",
]
