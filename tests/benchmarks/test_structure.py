"""The rooms of benchmarks/: which may import which, and that no two modules import each other."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Upwards: each room may import from itself and from those before it.
FLOORS = ("harness", "methods", "commands")


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


def room(module: str) -> str | None:
    """Its floor; None for the entry modules and the package itself."""
    part = [*module.split("."), ""][1]
    return part if part in FLOORS else None


def wrong_imports(imports: dict[str, set[str]]) -> list[str]:
    """What imports from a room above its own."""
    found = []
    for module, others in imports.items():
        for other in others & MODULES.keys():
            own, their = room(module), room(other)
            if own and (their is None or FLOORS.index(their) > FLOORS.index(own)):
                found.append(f"{module} imports {other}")
    return found


IMPORTS = {module: imported(module, path) for module, path in MODULES.items()}


def test_imports_go_down():
    """The harness knows neither methods nor commands, methods no commands, and nobody the entry modules."""
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
        *("accumkernels.ops", "accumkernels.demo.model", "accumkernels.integrations", "accumkernels.planning.costs"),
        "accumkernels.ranks",  # chunks, as small as an emulated model
        "accumkernels.capture.fused",  # the GEMMs, whose choice benchmarks.weight_gradients is there to make
    )
    for module, others in IMPORTS.items():
        for other in others:
            if other.startswith("accumkernels."):
                assert other.startswith(public), f"{module} imports {other}"


@pytest.mark.parametrize("entry", [m for m in MODULES if m.count(".") == 1 and room(m) is None])
def test_entries_are_commands(entry):
    """`python -m benchmarks.NAME` runs the command of that name."""
    stem = entry.rpartition(".")[2]
    assert IMPORTS[entry] & MODULES.keys() == {f"benchmarks.commands.{stem}"}
