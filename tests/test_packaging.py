"""What is built and how: the gates that let one library serve every Python and torch, and setup.py's knobs.

The knobs are tried on a copy of the build's inputs with an nvcc and a ninja that only pretend, so nothing is compiled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import accumkernels

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path(accumkernels.__file__).with_name("_native.so")

NEEDED = r"libtorch\.so|libstdc\+\+\.so\.6|libgcc_s\.so\.1|lib(m|c|dl|pthread|rt)\.so\.\d|ld-linux.*\.so\.\d"
CUDA_SHIMS = r"aoti_torch_get_current_cuda_stream|torch_c10_cuda_\w+"  # in CUDA builds of torch alone
STABLE_HEADERS = r"torch/csrc/stable/.*|torch/headeronly/.*|torch/csrc/inductor/aoti_torch/c/.*"
TORCH_HEADERS = r"(torch|ATen|c10)/.*"


def output(*command: str | Path) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(which: str) -> list[tuple[str, str]]:
    """(type, name) of the library's dynamic symbols, without their versions."""
    lines = output("nm", "-D", which, LIBRARY).splitlines()
    return [(line.split()[-2], line.split()[-1].partition("@")[0]) for line in lines]


def torch_includes() -> dict[str, list[str]]:
    """The torch headers that each file under csrc includes, files without any left out."""
    found = {}
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in {".h", ".cpp", ".cu"}:
            headers = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.MULTILINE)
            found[path.relative_to(ROOT / "csrc").as_posix()] = [h for h in headers if re.fullmatch(TORCH_HEADERS, h)]
    return {name: headers for name, headers in found.items() if headers}


def test_needs_only_torch_and_the_cxx_runtime() -> None:
    """NEEDED names libtorch.so, not what one build of torch consists of, no CUDA library and no libpython."""
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-dW", LIBRARY))
    assert "libtorch.so" in needed
    assert [name for name in needed if not re.fullmatch(NEEDED, name)] == []


def test_exports_only_its_own_c_functions() -> None:
    """Neither the static CUDA runtime nor C++ templates are visible to other libraries of the process."""
    assert [name for _, name in symbols("--defined-only") if not name.startswith("accumkernels_")] == []


def test_imports_no_python_and_cuda_shims_only_weakly() -> None:
    """No symbol of one Python version is wanted, and what a CPU torch lacks may be absent."""
    wanted = symbols("--undefined-only")
    assert any(name.startswith("aoti_torch_") for _, name in wanted)
    assert [name for _, name in wanted if re.match("_?Py", name)] == []
    assert [name for kind, name in wanted if re.fullmatch(CUDA_SHIMS, name) and kind != "w"] == []


@pytest.mark.parametrize(
    "folder",
    [ROOT, Path(torch.__file__).parent, Path(sys.prefix), Path.home()],
    ids=["project", "torch", "environment", "home"],
)
def test_holds_no_path_of_the_build_machine(folder: Path) -> None:
    """No string in the library begins with a folder that the build knew."""
    assert f"{folder}/".encode() not in LIBRARY.read_bytes()


def test_is_small_and_stripped() -> None:
    """Under 2 MiB with seven architectures, without a symbol table for debuggers."""
    assert LIBRARY.stat().st_size < 2 * 2**20
    assert ".symtab" not in output("readelf", "-SW", LIBRARY)


def test_only_stable_headers_of_torch_are_included() -> None:
    """Everything else of torch changes from release to release."""
    found = {header for headers in torch_includes().values() for header in headers}
    assert found
    assert {header for header in found if not re.fullmatch(STABLE_HEADERS, header)} == set()


def test_only_the_bindings_include_torch() -> None:
    """Kernels and what they share compile without torch, on the host as well."""
    assert {name for name in torch_includes() if not re.match(r"bindings(\.cpp$|/)", name)} == set()


class Project:
    """A copy of the build's inputs, with a PATH that holds what the test puts there and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.toolkit = folder / "project", folder / "bin", folder / "toolkit"
        for path in (self.root, self.bin, self.toolkit / "lib"):
            path.mkdir(parents=True)
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        for name in ("csrc", "accumkernels"):
            shutil.copytree(ROOT / name, self.root / name, ignore=ignore)
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.root)
        (self.toolkit / "lib" / "libcudart_static.a").touch()
        self.script("ninja", ": > build/native/_native.so")

    def script(self, name: str, body: str) -> None:
        """Put a shell script on PATH."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def nvcc(self, release: str = "12.8") -> None:
        """Put a wrapper of an nvcc on PATH that lies in another folder and knows three architectures."""
        self.script(
            "nvcc",
            f"""case "$*" in
            --version) echo "Cuda compilation tools, release {release}, V{release}.61" ;;
            --list-gpu-code) printf 'sm_80\\nsm_90\\nsm_100\\n' ;;
            --dryrun*) printf '#$ TOP={self.toolkit}/bin/..\\n#$ LIBRARIES= "-L{self.toolkit}/lib"\\n' >&2 ;;
            *) exit 1 ;;
            esac""",
        )

    def setup(self, *command: str, **knobs: str) -> subprocess.CompletedProcess[str]:
        """Run setup.py with this PATH and these knobs and no others."""
        compiler = shutil.which(os.environ.get("CXX", "c++")) or "c++"
        environment = {key: value for key, value in os.environ.items() if not re.match("ACCUMKERNELS_|CUDA_", key)}
        return subprocess.run(
            [sys.executable, "-W", "ignore", "setup.py", "-q", *command],
            cwd=self.root,
            env={**environment, "PATH": str(self.bin), "CXX": compiler, **knobs},
            capture_output=True,
            text=True,
        )

    def build(self, **knobs: str) -> str:
        """Run build_ext and return the build.ninja that it wrote."""
        done = self.setup("build_ext", "--inplace", **knobs)
        assert done.returncode == 0, done.stderr
        return (self.root / "build" / "native" / "build.ninja").read_text()

    def fail(self, **knobs: str) -> str:
        """Run build_ext, which must fail before it compiles, and return the one line that it says."""
        done = self.setup("build_ext", "--inplace", **knobs)
        assert done.returncode != 0
        assert not (self.root / "build").exists()
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        return done.stderr


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
    ],
)
def test_cuda_asked_for_but_not_there_is_an_error(project: Project, knobs: dict[str, str], words: str) -> None:
    """A wheel without CUDA kernels is never built by mistake."""
    assert words in project.fail(**knobs)


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
    assert set().union(*flags.values()) == set()


def test_building_again_touches_nothing(project: Project) -> None:
    """What ninja reads keeps its time stamp, so that a second build is instant."""
    project.build()
    written = {path: path.stat().st_mtime_ns for path in (project.root / "build" / "native").glob("[be]*")}
    project.build()
    assert {path.name for path in written} == {"build.ninja", "build_info.h", "exports.map"}
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_wheel_serves_any_python_and_carries_the_version_suffix(project: Project) -> None:
    """The tag is py3-none-<platform>, the version ends in the suffix, and the package is in it and nothing else."""
    done = project.setup("bdist_wheel", ACCUMKERNELS_VERSION_SUFFIX="+cu130")
    assert done.returncode == 0, done.stderr
    (wheel,) = (project.root / "dist").iterdir()
    version, platform_tag = re.fullmatch(r"accumkernels-(.+)-py3-none-(linux_\w+)\.whl", wheel.name).groups()  # type: ignore[union-attr]
    assert version.endswith("+cu130")
    assert platform.machine() in platform_tag
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "accumkernels").rglob("*.py")}
    assert sources | {"accumkernels/_native.so", "accumkernels/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} == {"accumkernels", f"accumkernels-{version}.dist-info"}
    header = (project.root / "build" / "native" / "build_info.h").read_text()
    info = json.loads(json.loads(header.partition("ACCUMKERNELS_BUILD_INFO ")[2]))
    assert info["version"] == version
    assert (info["cuda"], info["archs"], info["commit"]) == (None, [], None)


def test_bootstrap_picks_the_newest_pip_of_an_index() -> None:
    """The highest number wins, not the last line or the longest name; yanked and source releases are left out."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "tools" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    page = """
    <a href="../../files/pip-9.0-py3-none-any.whl#sha256=aa11">pip-9.0-py3-none-any.whl</a>
    <a href="../../files/pip-23.10-py3-none-any.whl#sha256=bb22" data-requires-python="&gt;=3.7">pip</a>
    <a href="../../files/pip-23.9.1-py3-none-any.whl#sha256=cc33">pip</a>
    <a href="../../files/pip-24.0-py3-none-any.whl#sha256=dd44" data-yanked="broken">pip</a>
    <a href="../../files/pip-25.0.tar.gz#sha256=ee55">pip</a>
    """
    assert bootstrap.newest_wheel(page, "http://index.example/simple/pip/") == (
        "http://index.example/files/pip-23.10-py3-none-any.whl",
        "bb22",
    )
    with pytest.raises(ValueError, match="no wheel of pip"):
        bootstrap.newest_wheel("<html></html>", "http://index.example/simple/pip/")
