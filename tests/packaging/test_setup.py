"""setup.py's knobs, tried on a copy of the build's inputs where nothing is compiled."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

import accumkernels
from tests.support.library_gates import pure_wheel_gate, wheel_gate
from tests.support.setup_project import Project

pytestmark = pytest.mark.starts


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project to build in."""
    return Project(tmp_path)


def gencodes(ninja: str) -> set[str]:
    """What nvcc is asked to build."""
    return set(re.findall(r"-gencode=(\S+\])", ninja))


def test_builds_default_architectures_that_nvcc_knows(project: Project) -> None:
    """Of ours those that this nvcc can build, and PTX of the newest; the toolkit is found behind a wrapper script."""
    project.nvcc()
    ninja = project.build()
    assert gencodes(ninja) == {
        "arch=compute_80,code=[sm_80]",
        "arch=compute_90,code=[sm_90]",
        "arch=compute_100,code=[sm_100,compute_100]",
    }
    assert "-DACCUMKERNELS_WITH_CUDA" in ninja
    assert f"-L{project.toolkit}/lib -lcudart_static" in ninja


def test_builds_exactly_the_architectures_asked_for(project: Project) -> None:
    """ACCUMKERNELS_CUDA_ARCHS replaces the default, PTX only where it says so."""
    project.nvcc()
    ninja = project.build(ACCUMKERNELS_CUDA_ARCHS="8.0;9.0+PTX")
    assert gencodes(ninja) == {"arch=compute_80,code=[sm_80]", "arch=compute_90,code=[sm_90,compute_90]"}


def test_an_architecture_given_twice_keeps_its_ptx(project: Project) -> None:
    """In either order."""
    project.nvcc()
    ninja = project.build(ACCUMKERNELS_CUDA_ARCHS="9.0+PTX 9.0")
    assert gencodes(ninja) == {"arch=compute_90,code=[sm_90,compute_90]"}


def test_only_the_bindings_name_torchs_folder(project: Project) -> None:
    """Under build isolation it is another one each time: the kernels need not be compiled again for that."""
    project.nvcc()
    folder = str(Path(torch.__file__).parent)
    commands = re.findall(r"^build \S+: compile (\S+)\n  line = (.*)$", project.build(), re.MULTILINE)
    assert {source.partition(".")[0].split("/")[1] for source, line in commands if folder in line} == {"bindings"}
    assert not any("bindings" in source for source, line in commands if folder not in line)


def test_folders_may_have_any_name(tmp_path: Path) -> None:
    """Ninja gives compiler and shell the path as it is, though it reads a dollar as the start of a variable."""
    project = Project(tmp_path / "a $b 'ä'")
    project.build()
    ninja = shutil.which("ninja") or f"{importlib.import_module('ninja').BIN_DIR}/ninja"
    ask = [ninja, "-f", "build/native/build.ninja", "-t", "commands"]
    commands = subprocess.run(ask, cwd=project.root, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(commands) > 1
    for command in commands[:-1]:  # the last one links, and has no folder of ours
        assert f"-ffile-prefix-map={project.root}=." in shlex.split(command)


def test_cuda_home_goes_before_path(project: Project) -> None:
    """The nvcc of CUDA_HOME is taken, whatever lies on PATH."""
    project.nvcc()
    (project.toolkit / "bin").mkdir()
    shutil.move(project.bin / "nvcc", project.toolkit / "bin" / "nvcc")
    project.nvcc(release="12.6")
    assert f"{project.toolkit}/bin/nvcc" in project.build(CUDA_HOME=str(project.toolkit))


@pytest.mark.parametrize(("has_nvcc", "knobs"), [(False, {}), (True, {"ACCUMKERNELS_BUILD_CUDA": "0"})])
def test_builds_cpu_kernels_alone_and_says_so(project: Project, has_nvcc: bool, knobs: dict[str, str]) -> None:
    """Without nvcc, or when asked, no CUDA source and no CUDA library is named, and one line tells."""
    if has_nvcc:
        project.nvcc()
    done = project.setup("build_ext", "--inplace", **knobs)
    ninja = (project.root / "build" / "native" / "build.ninja").read_text()
    assert "CPU kernels alone" in done.stdout
    assert not re.search(r"\.cu\b|cudart|WITH_CUDA", ninja)


def test_says_what_it_compiles(project: Project) -> None:
    """One line before the minutes of compiling: for which GPUs, and how to leave those out."""
    project.nvcc()
    said = project.setup("build_ext", "--inplace").stdout
    assert re.search(r"compiling \d\d files: CPU kernels by \S+, CUDA kernels for 80, 90, 100 by nvcc 12.8.61; ", said)
    assert "ACCUMKERNELS_BUILD_CUDA=0" in said
    assert re.search(
        r"compiling \d\d files: CPU kernels by \S+$", project.setup("build_ext", "--inplace", **NO_CUDA).stdout
    )


NO_CUDA = {"ACCUMKERNELS_BUILD_CUDA": "0"}


@pytest.mark.parametrize(
    ("knobs", "cause"),
    [({"CXX": ""}, "no C++ compiler: c++ is not on PATH"), ({"ACCUMKERNELS_BUILD": "0"}, "as asked")],
)
def test_without_a_compiler_the_wheel_is_pure(project: Project, knobs: dict[str, str], cause: str) -> None:
    """It is for any platform, holds the package without a library, and one line says why; torch is not asked for."""
    done = project.setup("bdist_wheel", **knobs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(cause) == 1
    (wheel,) = (project.root / "dist").iterdir()
    assert pure_wheel_gate(wheel, accumkernels.__version__) == []
    assert required_to_build(project, **knobs) == []
    assert required_to_build(project, CXX=project.compiler) == ["ninja", "torch>=2.10"]


def required_to_build(project: Project, **knobs: str) -> list[str]:
    """What a build frontend installs beside setuptools, by the backend that pyproject.toml names."""
    pyproject = (project.root / "pyproject.toml").read_text()
    assert 'build-backend = "setup"\nbackend-path = ["."]\n' in pyproject
    ask = "import json, setup; print(json.dumps(setup.get_requires_for_build_wheel()))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ask],
        cwd=project.root,
        env={"PATH": str(project.bin), **knobs},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"ACCUMKERNELS_BUILD": "1", "CXX": ""}, "no C++ compiler: c++ is not on PATH; ACCUMKERNELS_BUILD=0 installs"),
        ({"ACCUMKERNELS_BUILD_CUDA": "1", "CXX": ""}, "no C++ compiler: c++ is not on PATH"),
        ({"CXX": "no-such-c++"}, "no C++ compiler: no-such-c++ is not on PATH"),
        ({"CXX": "no-such-cache c++"}, "no C++ compiler: no-such-cache is not on PATH"),
        ({"ACCUMKERNELS_BUILD": "1", "CXX": " "}, "no C++ compiler: c++ is not on PATH"),
        ({"ACCUMKERNELS_BUILD": "no"}, "ACCUMKERNELS_BUILD=no: expected auto, 0 or 1"),
    ],
)
def test_a_library_asked_for_is_never_left_out(project: Project, knobs: dict[str, str], words: str) -> None:
    """Whoever asks for the library, for CUDA kernels or for a compiler gets them or an error."""
    assert words in project.fail(**knobs)


def test_a_library_that_does_not_build_is_an_error(project: Project) -> None:
    """With a compiler a failure is not hidden by a wheel without kernels; how to get that one is said."""
    project.script("ninja", "exit 1")
    done = project.setup("bdist_wheel")
    assert done.returncode != 0
    assert "did not build" in done.stderr
    assert "ACCUMKERNELS_BUILD=0 installs without compiled kernels" in done.stderr


def test_a_compiler_may_have_a_launcher_and_flags(project: Project) -> None:
    """CXX is a command, as make and setuptools take it."""
    project.script("ccache", 'exec "$@"')
    for cxx in (f"ccache {project.compiler} -m64", project.compiler):
        ninja = project.build(CXX=cxx, **NO_CUDA)
        assert ninja.count(f"line = {cxx} -O3") == ninja.count(" compile csrc/") > 10
        assert f"line = {cxx} -shared" in ninja


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_get_the_pure_wheel(system: str, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their linkers know nothing of what setup.py tells the linker, so that a compiler is not even looked for."""
    spec = importlib.util.spec_from_file_location("setup_of_project", project.root / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "system", lambda: system)
    for name in ("ACCUMKERNELS_BUILD", "ACCUMKERNELS_BUILD_CUDA", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert setup.why_pure() == f"the library is for Linux, and this is {system}"


def test_names_an_unknown_architecture_and_the_valid_ones(project: Project) -> None:
    """An entry that nvcc does not know is never dropped silently."""
    project.nvcc()
    said = project.fail(ACCUMKERNELS_CUDA_ARCHS="8.0;7.0+PTX")
    assert "'7.0+PTX'" in said
    assert "8.0 9.0 10.0" in said


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"ACCUMKERNELS_BUILD_CUDA": "1"}, "no nvcc in PATH"),
        ({"CUDA_HOME": "/no/such/cuda"}, "no nvcc in CUDA_HOME=/no/such/cuda"),
        ({"ACCUMKERNELS_BUILD_CUDA": "yes"}, "ACCUMKERNELS_BUILD_CUDA=yes: expected auto, 0 or 1"),
        ({"MAX_JOBS": "x"}, "MAX_JOBS=x: expected a number"),
        ({"ACCUMKERNELS_VERSION_SUFFIX": "cpu-"}, "ACCUMKERNELS_VERSION_SUFFIX=cpu-: expected the end of a version"),
    ],
)
def test_wrong_knobs_are_named(project: Project, knobs: dict[str, str], words: str) -> None:
    """A wheel without CUDA kernels is never built by mistake, and no other program's message has to be read."""
    assert words in project.fail(**knobs)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("setuptools.py", "__version__ = '65.5.0'", "setuptools 65.5.0 is too old to build with"),
        ("sitecustomize.py", "import sys; sys.modules['ninja'] = None", "ninja must be installed to build"),
    ],
)
def test_what_only_build_isolation_brings_is_named(
    file: str, text: str, words: str, project: Project, tmp_path: Path
) -> None:
    """Without it, as in a new environment of Python 3.11, setuptools may be too old and ninja not there."""
    (project.bin / "ninja").unlink()
    (tmp_path / file).write_text(text)
    said = project.fail(PYTHONPATH=str(tmp_path))
    assert words in said
    assert "pip install" in said


def test_an_nvcc_that_cannot_serve_is_an_error(project: Project) -> None:
    """Too old, or broken: the build names it and does not fall back to the CPU."""
    project.nvcc(release="11.8")
    assert "release 11.8; needed is 12.1" in project.fail()
    project.script("nvcc", "echo 'cannot find libnvvm' >&2; exit 1")
    assert "cannot find libnvvm" in project.fail()


def test_simd_flags_go_to_their_files_alone(project: Project) -> None:
    """The library must load on any x86-64: only files chosen at run time may use what some processors lack."""
    flags = {}
    for source, line in re.findall(r"^build \S+: compile (\S+)\n  line = (.*)$", project.build(), re.MULTILINE):
        flags[Path(source).stem.rpartition("_")[2]] = set(re.findall(r"\s(-m\S+)", line))
    x86 = platform.machine() == "x86_64"
    assert flags.pop("avx2") == ({"-mavx2", "-mf16c", "-mfma"} if x86 else set())
    assert ("-mavx512f" in flags.pop("avx512")) == x86
    assert ("-mavx512bf16" in flags.pop("avx512bf16")) == x86
    assert set().union(*flags.values()) == set()


def test_building_again_touches_nothing(project: Project) -> None:
    """What ninja reads keeps its time stamp, so that a second build is instant."""
    project.build()
    written = {path: path.stat().st_mtime_ns for path in (project.root / "build" / "native").glob("[be]*")}
    project.build()
    assert {path.name for path in written} == {"build.ninja", "build_info.h", "exports.map"}
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_building_again_mends_a_damaged_library(project: Project) -> None:
    """A file cut short, which is newer than what was built, is replaced: it is what building again is advised for."""
    project.script("ninja", "echo whole > build/native/_native.so")
    project.build()
    library = project.root / "accumkernels" / "_native.so"
    library.write_text("who")
    later = time.time() + 3600
    os.utime(library, (later, later))
    project.build()
    assert library.read_text() == "whole\n"


def test_wheel_serves_any_python_and_carries_the_version_suffix(project: Project) -> None:
    """The tag is py3-none-<platform>, the version ends in the suffix, and the package is in it and nothing else."""
    done = project.setup("bdist_wheel", ACCUMKERNELS_VERSION_SUFFIX="+cu130")
    assert done.returncode == 0, done.stderr
    (wheel,) = (project.root / "dist").iterdir()
    version = f"{accumkernels.__version__}+cu130"
    assert wheel_gate(wheel, version) == []
    assert platform.machine() in wheel.name
    header = (project.root / "build" / "native" / "build_info.h").read_text()
    info = json.loads(json.loads(header.partition("ACCUMKERNELS_BUILD_INFO ")[2]))
    assert info["version"] == version
    assert (info["cuda"], info["archs"], info["commit"]) == (None, [], None)


def test_in_place_the_clone_is_on_the_path(project: Project, tmp_path: Path) -> None:
    """Beside a clone named accumkernels a finder comes too late: the folder itself would be imported as a namespace."""
    done = project.setup("editable_wheel", "--dist-dir", str(tmp_path), ACCUMKERNELS_BUILD="0")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(*tmp_path.glob("*.whl")) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        assert wheel.read(path).decode().strip() == str(project.root)


def test_a_copy_without_history_takes_the_commit_it_is_given(project: Project) -> None:
    """Which else nobody could tell from the library."""
    project.build(ACCUMKERNELS_COMMIT="abc1234")
    header = (project.root / "build" / "native" / "build_info.h").read_text()
    assert json.loads(json.loads(header.partition("ACCUMKERNELS_BUILD_INFO ")[2]))["commit"] == "abc1234"


def test_a_release_says_where_its_sources_are(project: Project) -> None:
    """README's relative links, which an index cannot follow, lead to the address given; so do the project's."""
    url = "https://host.example/owner/accumkernels/blob/v1.0"
    (project.root / "docs").mkdir()
    for name in ("index.md", "picture.png"):
        (project.root / "docs" / name).touch()
    links = (
        "[docs](docs/index.md#part) ![drawn](docs/picture.png) [![alt](docs/picture.png)](docs/index.md) "
        '<img alt="" src="docs/picture.png"> [elsewhere](https://other.example/a) [below](#below) `fns[0](x)`'
    )
    (project.root / "README.md").write_text(f"{links}\n")
    (project.root / "CHANGELOG.md").touch()
    done = project.setup("egg_info", ACCUMKERNELS_SOURCE_URL=f"{url}/")
    assert done.returncode == 0, done.stderr
    said = (project.root / "accumkernels.egg-info" / "PKG-INFO").read_text()
    raw = url.replace("blob", "raw") + "/docs/picture.png"
    assert (
        f"[docs]({url}/docs/index.md#part) ![drawn]({raw}) [![alt]({raw})]({url}/docs/index.md) "
        f'<img alt="" src="{raw}"> [elsewhere](https://other.example/a) [below](#below) `fns[0](x)`'
    ) in said
    addresses = dict(line.split(", ") for line in re.findall(r"^Project-URL: (.+)$", said, re.MULTILINE))
    assert addresses == {
        "Source": f"{url}/README.md",
        "Documentation": f"{url}/docs/index.md",
        "Changelog": f"{url}/CHANGELOG.md",
    }
    assert project.setup("egg_info").returncode == 0
    said = (project.root / "accumkernels.egg-info" / "PKG-INFO").read_text()
    assert links in said
    assert "Project-URL" not in said
