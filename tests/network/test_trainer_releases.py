"""`make test-trainers-own`: tests/integrations beside the oldest trainers that pyproject.toml takes, and the newest.

The environments (.venv-trainers-*) are kept for the next run. TORCH names another torch than that of CI.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.support.environments import ROOT, Environment, clean_environ

TORCH = os.environ.get("TORCH", "torch==2.13.0")
TRAINERS = r'^(?:accelerate|lightning|transformers) = .*"(\w+)>=([\d.]+)"\]'  # extras of the adapters
OLDEST = dict(re.findall(TRAINERS, (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
KNOWN = {  # of accelerate's own, and by which release it was mended
    "oldest": [
        "not test_the_notebook_launcher",  # 1.12: it asks for the kind of a GPU where there is none
        # 1.13: load_state leaves out the state of an optimizer that has not stepped yet (FSDP2)
        "not (test_sharded_runs_are_resumed and (accelerate or transformers))",
    ],
    "newest": [],
}


@pytest.mark.parametrize("age", ["oldest", "newest"])
def test_the_adapters(age: str) -> None:
    """All that tests/integrations says holds for both, but for what accelerate itself gets wrong."""
    environment = Environment(ROOT / f".venv-trainers-{age}")
    wanted = [f"{name}=={version}.*" if age == "oldest" else name for name, version in OLDEST.items()]
    upgrade = ["--upgrade", "--upgrade-strategy", "only-if-needed"]
    environment.pip_install(TORCH, "numpy", "pytest", "hypothesis", "pytest-xdist")
    environment.pip_install(*upgrade, TORCH, *wanted)
    command = [environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "tests/integrations"]
    chosen = ["-k", " and ".join(KNOWN[age])] if KNOWN[age] else []
    done = subprocess.run([*command, *chosen], cwd=ROOT, env=clean_environ(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0
