"""Runs examples/getting_started.ipynb and writes what its cells print and draw into it: `python -m tools.notebook`.

Run it after a change of the notebook's cells; the tests hold the committed outputs to what the cells give.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "getting_started.ipynb"


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run all cells in a kernel that imports this checkout; a cell that raises ends it with its traceback."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False)
    return client.execute(env=environment)


def main() -> None:
    """Execute it in place, without what differs from machine to machine."""
    notebook = execute(nbformat.read(NOTEBOOK, as_version=4))
    notebook.metadata = {key: notebook.metadata[key] for key in ("kernelspec",)}
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK.relative_to(ROOT)}: {NOTEBOOK.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
