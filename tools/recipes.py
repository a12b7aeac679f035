"""Tests recipes, each in an environment of its own: `python -m tools.recipes timm`, all of them without a name.

A recipe NAME has an extra NAME in pyproject.toml, a page docs/recipes/NAME.md and tests in tests/recipes/test_NAME.py.
The environment is build/recipes/NAME/venv. It borrows torch, and what else fits, from the environment that runs this,
and keeps that torch. What cannot be installed there is skipped with a message.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS_RAN = 5  # pytest's exit status


def names() -> list[str]:
    """Return all recipes."""
    files = sorted((ROOT / "tests" / "recipes").glob("test_*.py"))
    return [file.stem.removeprefix("test_") for file in files]


def tests_of(name: str) -> list[str]:
    """Return what pytest is told to run: the tests, and the page's code."""
    return [f"tests/recipes/test_{name}.py", f"tests/docs/test_pages.py::test_blocks_run[docs/recipes/{name}.md]"]


def install(name: str) -> Path | None:
    """Make or complete a recipe's environment; returns its Python, None where something could not be installed."""
    folder = ROOT / "build" / "recipes" / name / "venv"
    stamp = folder / ".ready"
    stamp.unlink(missing_ok=True)
    command = [sys.executable, "tools/bootstrap.py", "--venv", folder, "--torch", "torch", "--stamp", stamp]
    subprocess.run([*command, "test", name], cwd=ROOT, check=False)
    return folder / "bin" / "python" if stamp.exists() else None


def main() -> None:
    """Test the recipes that are named, or all."""
    unknown = [name for name in sys.argv[1:] if name not in names()]
    if unknown:
        raise SystemExit(f"recipes: there is no {unknown[0]!r}, only {', '.join(names())}")
    failed = []
    for name in sys.argv[1:] or names():
        python = install(name)
        if python is None:
            print(f"recipes: {name} is skipped, because not everything that it needs could be installed", flush=True)
            continue
        print(f"recipes: {name}", flush=True)
        command = [python, "-m", "pytest", "-q", "-rsP", "-p", "no:cacheprovider", *tests_of(name)]
        if subprocess.run(command, cwd=ROOT).returncode not in (0, NO_TESTS_RAN):
            failed.append(name)
    if failed:
        raise SystemExit(f"recipes: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
