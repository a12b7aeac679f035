"""The wheel that this checkout builds: its gates, and that it works in a clean environment."""

from __future__ import annotations

import email
import fnmatch
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from readme_renderer import markdown

import accumkernels
from tests.support.environments import ROOT, Environment, build_wheel, run
from tests.support.library_gates import wheel_gate
from tests.support.setup_project import Project

pytestmark = pytest.mark.starts

LEFT_BEHIND = (
    "accumkernels/_native.so",
    "accumkernels/__pycache__/layout.cpython-311.pyc",
    "tests/__pycache__/models.cpython-311.pyc",
    "build/native/build.ninja",
    "build/native/csrc/bindings/norm.cpp.o",
    "dist/accumkernels-0.0.1-py3-none-linux_x86_64.whl",
    ".venv/bin/python",
    ".venv-torch-2.10.0/bin/python",
    "demo/demo.png",
)


def ignored(folder: str, names: list[str]) -> set[str]:
    """What of a folder of the project is no source, by the patterns of .gitignore."""
    lines = (ROOT / ".gitignore").read_text().split()
    patterns = [line.strip("/") for line in lines if not line.startswith("/") or Path(folder) == ROOT]
    return {name for pattern in [*patterns, ".git"] for name in fnmatch.filter(names, pattern)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with what `make build` compiled."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel, this torch and what torch requires."""
    environment = Environment(tmp_path_factory.mktemp("installed") / "venv")
    environment.borrow_torch()
    environment.pip_install("--no-index", "--no-deps", wheel)
    return environment


def test_passes_its_gate(wheel: Path) -> None:
    """Tag, version, size, and the package with one library in it and nothing else."""
    assert wheel_gate(wheel, accumkernels.__version__) == []


def test_passes_the_doctor_and_trains_a_window(environment: Environment) -> None:
    """Installed where neither this checkout nor Triton nor numpy is, every op has its kernels and a window trains.

    With a CUDA toolkit the kernels for GPUs are among them: a wheel is never built without them by mistake.
    """
    found = environment.check()
    report = found["report"]
    assert found["torch"] == torch.__version__
    assert report["versions"]["triton"] is None
    assert report["library"]["path"].startswith(str(environment.folder))
    wanted = os.environ.get("ACCUMKERNELS_BUILD_CUDA") or "auto"
    has_toolkit = bool(os.environ.get("CUDA_HOME") or shutil.which("nvcc"))
    assert (report["library"]["cuda"] is not None) == (wanted == "1" or (wanted == "auto" and has_toolkit))


def test_without_a_library_it_trains_and_the_doctor_says_so(tmp_path: Path) -> None:
    """Built where there is no compiler: plain torch, one warning, and a note instead of a problem."""
    project = Project(tmp_path)
    done = project.setup("bdist_wheel", CXX="")
    assert done.returncode == 0, done.stderr
    environment = Environment(tmp_path / "venv")
    environment.borrow_torch()
    environment.pip_install("--no-index", "--no-deps", *(project.root / "dist").iterdir())
    (note,) = environment.check("reference")["report"]["problems"]
    assert not note["serious"]
    assert note["problem"].startswith("installed with no compiled kernels")
    assert "C++ compiler" in note["advice"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """(a copy of the sources with an sdist in dist/ and much that was left lying about before, what is source)."""
    project = shutil.copytree(ROOT, tmp_path_factory.mktemp("sdist") / "project", ignore=ignored)
    expected = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    for name in LEFT_BEHIND:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    run(sys.executable, "-W", "ignore", "setup.py", "-q", "sdist", cwd=project)
    return project, expected


def test_sdist_holds_everything_and_nothing_generated(project: tuple[Path, set[str]]) -> None:
    """What the sources consist of gets in, what builds and tests leave lying about does not."""
    folder, expected = project
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {"PKG-INFO", "setup.cfg"} <= names  # setuptools' own; where the tests run in an sdist, sources as well
    generated = {name for name in names | expected if re.match(r"PKG-INFO|setup\.cfg|accumkernels\.egg-info/", name)}
    assert names - generated == expected - generated


def test_metadata_is_complete(wheel: Path) -> None:
    """What an index and pip show of it: every extra, the Pythons, README; and no host, which only a publisher knows."""
    with zipfile.ZipFile(wheel) as archive:
        folder = f"accumkernels-{accumkernels.__version__}.dist-info"
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("accumkernels", accumkernels.__version__)
    assert (metadata["Requires-Python"], metadata["License-Expression"]) == (">=3.10", "Apache-2.0")
    assert metadata["Summary"]
    assert metadata["Author"]
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Project-URL") is None
    classifiers = metadata.get_all("Classifier", [])
    assert {"Operating System :: OS Independent", "Programming Language :: Python :: 3.10", "Typing :: Typed"} <= {
        *classifiers
    }
    assert not any(line.startswith("License") for line in classifiers)  # an index refuses them beside an expression
    needed = metadata.get_all("Requires-Dist", [])
    assert [line for line in needed if "extra ==" not in line] == ["torch>=2.10"]
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = {name.replace("_", "-") for name in re.findall(r"^(\w+) = \[", project, re.MULTILINE)}
    assert set(metadata.get_all("Provides-Extra", [])) == extras


def test_an_index_would_take_it(wheel: Path, project: tuple[Path, set[str]]) -> None:
    """Wheel and sdist have valid metadata, and README is shown as people see it elsewhere, without hidden comments."""
    (sdist,) = (project[0] / "dist").glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=wheel.parent)
    html = markdown.render((ROOT / "README.md").read_text())  # an index renders Markdown with it; twine does not
    assert html is not None
    assert html.count("<pre") == len(re.findall(r"^```\w", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert "!-- " not in html


def test_make_wheel_leaves_exactly_one(tmp_path: Path) -> None:
    """What lay in dist/ and where setuptools builds is gone, and knobs given to make arrive."""
    project = Project(tmp_path)
    shutil.copy(ROOT / "Makefile", project.root)
    built = f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for stale in ("dist/accumkernels-0.0.1-py3-none-linux_x86_64.whl", f"{built}/accumkernels/deleted.py"):
        (project.root / stale).parent.mkdir(parents=True)
        (project.root / stale).touch()
    ready = f"{sys.prefix}/.ready"
    command = [shutil.which("make") or "make", "-o", ready, "wheel", f"READY={ready}", f"VENV={sys.prefix}"]
    knobs = ["ACCUMKERNELS_VERSION_SUFFIX=+cu130", "ACCUMKERNELS_BUILD_CUDA=0"]
    project.bin.joinpath("rm").symlink_to(shutil.which("rm") or "/bin/rm")
    path = {"PATH": str(project.bin), "CXX": shutil.which(os.environ.get("CXX", "c++")) or "c++"}
    run(*command, *knobs, cwd=project.root, **path)
    (wheel,) = (project.root / "dist").iterdir()
    assert (project.root / built).is_dir()
    assert "accumkernels/deleted.py" not in zipfile.ZipFile(wheel).namelist()
    assert wheel_gate(wheel, f"{accumkernels.__version__}+cu130") == []
