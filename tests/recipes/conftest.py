"""What must happen before recipes' packages are imported."""

from tests.support import torchvision_ops

torchvision_ops.declare()
