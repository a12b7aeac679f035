"""A pytest plugin: whoever imports accelerate's Accelerator gets ours."""

import accelerate
import accelerate.accelerator

from accumkernels.integrations.accelerate import Accelerator

accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator
