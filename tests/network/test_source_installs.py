"""`make test-source-installs`: pip builds from this checkout and from the sdist, with and without build isolation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from tests.support.environments import ROOT, Environment, run

# Any torch would do to build with; this one needs no gigabytes of CUDA packages where it is a CPU build.
VERSION = torch.__version__.partition("+")[0]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """With this torch, to try what was built; a build in isolation does not see it."""
    environment = Environment(tmp_path / "venv")
    environment.borrow_torch()
    return environment


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-W", "ignore", "setup.py", "-q", "egg_info", "-e", folder, "sdist", "-d", folder, cwd=ROOT)
    (found,) = folder.glob("*.tar.gz")
    return found


@pytest.fixture
def constraint(tmp_path: Path) -> dict[str, str]:
    """The environment variables that keep the isolated build to this torch, for old pips and new ones."""
    (tmp_path / "constraint.txt").write_text(f"torch=={VERSION}\n")
    return {name: str(tmp_path / "constraint.txt") for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")}


def unpack(sdist: Path, folder: Path) -> Path:
    """A checkout with nothing built."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


def install(environment: Environment, *arguments: str | Path, **environ: str) -> float:
    """pip install; returns the seconds that it took."""
    start = time.perf_counter()
    environment.pip_install("--no-deps", *arguments, **environ)
    return time.perf_counter() - start


def test_pip_install_folder(environment: Environment, sdist: Path, constraint: dict[str, str], tmp_path: Path) -> None:
    """`pip install .`: the isolated build has a torch of its own."""
    seconds = install(environment, unpack(sdist, tmp_path / "source"), **constraint)
    print(f"\npip install .: {seconds:.1f} s")
    environment.check()


def test_pip_install_sdist(environment: Environment, sdist: Path, constraint: dict[str, str]) -> None:
    """`pip install accumkernels-*.tar.gz`."""
    seconds = install(environment, sdist, **constraint)
    print(f"\npip install <sdist>: {seconds:.1f} s")
    environment.check()


def test_editable_install_rebuilds_in_seconds(environment: Environment, sdist: Path, tmp_path: Path) -> None:
    """The second time ninja compiles what was touched and nothing else."""
    source = unpack(sdist, tmp_path / "source")
    borrowed = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path.endswith("-packages"))}
    first = install(environment, "--no-build-isolation", "-e", source, **borrowed)
    objects = {path: path.stat().st_mtime_ns for path in (source / "build" / "native").rglob("*.o")}
    (source / "csrc" / "cpu" / "norm.cpp").touch()
    again = install(environment, "--no-build-isolation", "-e", source, **borrowed)
    rebuilt = [path.name for path, time in objects.items() if path.stat().st_mtime_ns != time]
    print(f"\npip install -e .: {first:.1f} s, again: {again:.1f} s")
    assert rebuilt == ["norm.cpp.o"]
    said = run(environment.python, "-m", "accumkernels", cwd=tmp_path)
    assert str(source / "accumkernels" / "_native.so") in said


def test_the_sdists_tests_pass(sdist: Path, tmp_path: Path) -> None:
    """It has what its own gates need."""
    source = unpack(sdist, tmp_path / "source")
    shutil.copytree(ROOT / "build" / "native", source / "build" / "native")
    run(sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace", cwd=source)
    subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/packaging"], cwd=source, check=True)
