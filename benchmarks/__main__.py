"""`python -m benchmarks`: the commands, and what each of them answers."""

from __future__ import annotations

import ast
from pathlib import Path


def commands() -> dict[str, str]:
    """The first line of each command's docstring, by name; nothing is imported."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


if __name__ == "__main__":
    for name, answers in commands().items():
        print(f"python -m benchmarks.{name:<18}{answers}")
