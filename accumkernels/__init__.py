"""Fused gradient accumulation for PyTorch: fp32 sums of micro-batch gradients, unscaled and checked in one pass."""

from .accumulator import FusedAccumulator
from .errors import is_oom_error
from .planning.batch_size import BatchSize, find_batch_size
from .planning.batchnorm import batchnorm_modules, correct_batchnorm_momentum, replace_batchnorm
from .planning.costs import StepCosts, measure_step_costs
from .planning.memory import MemoryReport, draw_memory, memory_report
from .planning.schedule import Milestones, suggest_betas, suggest_learning_rate
from .planning.worth import AccumulationPlan, plan
from .splitting.run import BatchReport
from .window.noise_scale import NoiseScale

__version__ = "0.1.0"
__all__ = [
    "AccumulationPlan",
    "BatchReport",
    "BatchSize",
    "FusedAccumulator",
    "MemoryReport",
    "Milestones",
    "NoiseScale",
    "StepCosts",
    "batchnorm_modules",
    "correct_batchnorm_momentum",
    "draw_memory",
    "find_batch_size",
    "is_oom_error",
    "measure_step_costs",
    "memory_report",
    "plan",
    "replace_batchnorm",
    "suggest_betas",
    "suggest_learning_rate",
]
