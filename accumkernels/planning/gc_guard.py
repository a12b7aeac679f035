"""Quick collection of what trials leave in reference cycles."""

from __future__ import annotations

import gc


class GcGuard:
    """Collects often at little cost, inside a `with` block.

    A full collection looks at every object of the process, which takes 0.1 s and more with torch and a few libraries
    loaded. After the first one, whatever is alive is set aside (`gc.freeze`), so that later ones look at new objects
    only. If the program has frozen objects itself, nothing is set aside.
    """

    def __init__(self) -> None:
        self._frozen = False

    def collect(self) -> None:
        """Collect."""
        gc.collect()
        if not self._frozen and gc.get_freeze_count() == 0:
            gc.freeze()
            self._frozen = True

    def __enter__(self) -> GcGuard:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._frozen:
            gc.unfreeze()
