"""Environments to install wheels in, and the wheels."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OURS = r"PYTHON|ACCUMKERNELS_|CUDA_HOME|TRITON_INTERPRET|VIRTUAL_ENV|MAKE"  # what must not reach into an environment


def clean_environ(**more: str) -> dict[str, str]:
    """The process's environment without what would change how an installed package behaves."""
    return {name: value for name, value in os.environ.items() if not re.match(OURS, name)} | more


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    """Run a command in a clean environment; returns what it printed on stdout, its failure shows both streams."""
    done = subprocess.run(command, cwd=cwd, env=clean_environ(**more), capture_output=True, text=True)
    assert done.returncode == 0, f"{command} in {cwd}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build a wheel from this checkout, everything but the objects (which `make build` left) under `folder`."""
    egg, build, wheel = folder / "egg", folder / "build", folder / "dist"
    egg.mkdir(parents=True)
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "egg_info", "--egg-base", egg, "build", "-b", build]
    done = subprocess.run([*command, "bdist_wheel", "-b", folder / "bdist", "-d", wheel], cwd=ROOT, text=True)
    assert done.returncode == 0
    (found,) = wheel.iterdir()
    return found


class Environment:
    """A virtual environment of its own; `pip` of the test's environment installs into it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / "bin" / "python"
        if not self.python.exists():
            venv.create(folder, symlinks=True, with_pip=False)

    def pip_install(self, *arguments: str | Path, **environ: str) -> None:
        """Install into it."""
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", self.python]
        run(*pip, "install", *arguments, cwd=self.folder, **environ)

    def borrow_torch(self) -> None:
        """Put the torch that runs the tests there, with what it requires and nothing else, without any index."""
        site = Path(
            run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=self.folder).strip()
        )
        wanted, done = ["torch"], set()
        while wanted:
            name = wanted.pop()
            try:
                distribution = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # an extra, or for another platform
            if name in done or name == "triton":  # optional on the CPU; a clean environment has none
                continue
            done.add(name)
            wanted += [re.split(r"[^\w.-]", line)[0] for line in distribution.requires or [] if "extra ==" not in line]
            for top in {
                file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")
            }:
                target = site / top
                if not target.exists():
                    target.symlink_to(Path(str(distribution.locate_file(top))).resolve())

    def check(self, backend: str = "native") -> dict[str, Any]:
        """Run installed_check.py there; returns what it found."""
        said = run(self.python, ROOT / "tests" / "support" / "installed_check.py", backend, cwd=self.folder)
        return json.loads(said.splitlines()[-1])
