"""A copy of the build's inputs to try setup.py's knobs on, with an nvcc and a ninja that only pretend."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
        self.compiler = shutil.which(os.environ.get("CXX", "c++")) or "c++"

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
        environment = {key: value for key, value in os.environ.items() if not re.match("ACCUMKERNELS_|CUDA_", key)}
        return subprocess.run(
            [sys.executable, "-W", "ignore", "setup.py", "-q", *command],
            cwd=self.root,
            env={**environment, "PATH": str(self.bin), "CXX": self.compiler, **knobs},
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
