"""`make test-trainers-own`: accelerate's own tests, once as they are and once with our Accelerator in place of its own.

They come with accelerate's source distribution, from the package index. Lightning's has no tests, and transformers' has
only those that models share, not the Trainer's: what those two serve is in tests/integrations. What passes as it is and
fails with ours is listed in `KNOWN`, with the reason that the guide gives; anything else is an error.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.support.environments import ROOT

# Accumulation, clipping, precision, scheduling and resuming.
FILES = [
    f"tests/test_{name}.py"
    for name in (
        "accelerator", "optimizer", "scheduler", "grad_sync", "state_checkpointing", "memory_utils", "kwargs_handlers",
        "cpu", "metrics",
    )
]  # fmt: skip
KNOWN = {
    "test_gradient_sync_cpu_multi": "it looks at `.grad` inside a window of `accumulate()`, where it is None",
}


def pip(*arguments: str | Path) -> None:
    """Of this environment."""
    subprocess.run([sys.executable, "-m", "pip", *map(str, arguments)], check=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """accelerate's source distribution, of the version that is installed, and what its tests import."""
    folder = tmp_path_factory.mktemp("accelerate")
    version = importlib.metadata.version("accelerate")
    sdist = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", folder]
    pip("download", "-q", *sdist, f"accelerate=={version}")
    with tarfile.open(folder / f"accelerate-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    pip("install", "-q", "--no-deps", "--target", folder / "imported", "parameterized")
    return folder


def run(source: Path, name: str, *options: str) -> dict[str, bool]:
    """Which tests passed; skipped ones are left out."""
    (checkout,) = source.glob("accelerate-*/")
    report = source / f"{name}.xml"
    path = os.pathsep.join([str(ROOT), str(source / "imported")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options, *FILES]
    subprocess.run(command, cwd=checkout, env=environment, check=False)
    cases = list(ElementTree.parse(report).iter("testcase"))
    kinds = {f"{case.get('classname')}.{case.get('name')}": {child.tag for child in case} for case in cases}
    return {name: not kind & {"failure", "error"} for name, kind in kinds.items() if "skipped" not in kind}


def test_accelerates_own_tests(source: Path) -> None:
    """Each difference has its reason."""
    stock = run(source, "stock")
    ours = run(source, "ours", "-p", "tests.network.accelerator_of_ours")
    differences = sorted(name for name, passed in stock.items() if passed and not ours.get(name, False))
    print(f"\n{sum(stock.values())} tests pass as they are, {sum(ours.values())} with ours")
    for name in differences:
        print(f"  {name}: {KNOWN.get(name.rpartition('.')[2], 'not known')}")
    assert sum(stock.values()) > 50
    assert {name.rpartition(".")[2] for name in differences} == set(KNOWN)
