"""torchvision beside a torch that it was not built for: timm and open_clip import it, and the recipes use none of it.

On the package index torchvision is built for torch with CUDA. Beside torch for CPUs its library cannot be loaded, and
`import torchvision` ends with `operator torchvision::nms does not exist`.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import torch


@functools.cache
def declare() -> torch.library.Library | None:
    """Declare the ops that `import torchvision` asks for, where it is installed and fails without them."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        text = Path(spec.origin).with_name("_meta_registrations.py").read_text()
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in re.findall(r'register_fake\("torchvision::(\w+)"\)', text):
            library.define(f"{name}(Tensor boxes) -> Tensor")
        return library
    return None
