"""A pytest plugin for test_trainers_own.py: whoever imports accelerate's Accelerator gets ours."""

import accelerate
import accelerate.accelerator

from accumkernels.integrations.accelerate import Accelerator

accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator
