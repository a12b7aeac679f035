"""Which ops run."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Runs ops, and keeps their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run, and note."""
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
