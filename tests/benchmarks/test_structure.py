"""The rooms of benchmarks/: which may import which, and that no two modules import each other."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Upwards: each room may import from itself and from those before it.
FLOORS = ("harness", "methods", "commands")  # commands are the modules of benchmarks/ itself


def name(path: Path) -> str:
    """As it is imported, for instance "benchmarks.methods.peers"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name(path): path for path in sorted(ROOT.glob("benchmarks/**/*.py"))}


def imported(module: str, path: Path) -> set[str]:
    """What a module imports anywhere in it, with a dot for each level that is left."""
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            # A name is a module of the package, or something that the package itself holds.
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return found


def floor(module: str) -> int:
    """How far up it is."""
    part = [*module.split("."), ""][1]
    return FLOORS.index(part if part in FLOORS else "commands")


def wrong_imports(imports: dict[str, set[str]]) -> list[str]:
    """What imports from a room above its own."""
    found = []
    for module, others in imports.items():
        for other in others & MODULES.keys():
            if floor(other) > floor(module):
                found.append(f"{module} imports {other}")
    return found


IMPORTS = {module: imported(module, path) for module, path in MODULES.items()}


def test_imports_go_down():
    """The harness knows neither methods nor commands, and methods know no commands."""
    assert len(MODULES) > 30 and any("benchmarks.harness.case" in others for others in IMPORTS.values())
    assert wrong_imports(IMPORTS) == []


def test_no_circle():
    """Modules can be read in an order in which each needs only what came before."""
    graph = {module: others & MODULES.keys() for module, others in IMPORTS.items()}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_planted_faults_are_seen():
    """An arrow up, and a circle."""
    up = {**IMPORTS, "benchmarks.harness.case": {"benchmarks.methods.peers"}}
    assert wrong_imports(up) == ["benchmarks.harness.case imports benchmarks.methods.peers"]
    with pytest.raises(graphlib.CycleError):
        tuple(graphlib.TopologicalSorter({m: others & MODULES.keys() for m, others in up.items()}).static_order())


def test_only_what_is_public():
    """Of accumkernels: what users call, and what is measured or set to the scale of a measurement."""
    public = (
        *("accumkernels.ops", "accumkernels.demo", "accumkernels.integrations", "accumkernels.planning.costs"),
        "accumkernels.ranks",  # chunks, as small as an emulated model
        "accumkernels.ops.products",  # the GEMMs, whose choice benchmarks.weight_gradients is there to make
    )
    for module, others in IMPORTS.items():
        for other in others:
            if other.startswith("accumkernels."):
                assert other.startswith(public), f"{module} imports {other}"


COMMANDS = [m for m, path in MODULES.items() if "\ndef main(" in path.read_text()]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command):
    """`python -m benchmarks.NAME` runs the command of that name; each says how it is called."""
    text = MODULES[command].read_text()
    assert text.endswith('\n\n\nif __name__ == "__main__":\n    sys.exit(main())\n')
    assert f"python -m {command}" in (ast.get_docstring(ast.parse(text)) or "")


@pytest.mark.starts
def test_commands_are_listed():
    """`python -m benchmarks` has a line for each; modules beside them are parts of one."""
    done = subprocess.run([sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[2] for line in done.stdout.splitlines()] == COMMANDS
    beside = {m for m in MODULES if m.count(".") == 1 and m not in COMMANDS} - {"benchmarks.__main__"}
    for part in {m for m in beside if MODULES[m].stem != "__init__"}:
        assert any(part in others for m, others in IMPORTS.items() if m in COMMANDS), part
