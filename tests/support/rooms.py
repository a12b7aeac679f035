"""The walls between the rooms of the package: the direction of imports, and what other rooms and readers may see.

A rule takes the package's folder and returns its violations, so an empty list is a pass; tests/test_rooms.py plants
each fault and checks that the rule finds it. A room is a folder of the package, or a module in its root.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

from torch import nn

# The rooms that each room may import, from the bottom up. These import no room but each other, so every room may import
# them.
FREE = {"devices", "errors", "hooks", "snapshots"}
MAY_IMPORT: dict[str, set[str]] = {
    "devices": set(),
    "errors": set(),
    "hooks": set(),
    "snapshots": {"devices", "hooks"},
    "ops": FREE,
    "buffers": FREE | {"ops"},
    "arguments": FREE | {"buffers"},
    "splitting": FREE,
    "batch_statistics": FREE | {"buffers"},
    "capture": FREE | {"ops", "buffers", "arguments"},
    "ranks": FREE | {"ops", "buffers", "arguments"},
    "offload": FREE | {"ops", "buffers", "capture"},
    "window": FREE | {"ops", "buffers", "capture", "offload", "ranks", "arguments"},
}
MAY_IMPORT["engine"] = set(MAY_IMPORT)
MAY_IMPORT["accumulator"] = set(MAY_IMPORT)
MAY_IMPORT |= {room: set(MAY_IMPORT) for room in ("planning", "integrations", "doctor")}  # not each other
MAY_IMPORT["__init__"] = set(MAY_IMPORT)
MAY_IMPORT["demo"] = set(MAY_IMPORT)  # also what users import: accumkernels itself
MAY_IMPORT["__main__"] = set(MAY_IMPORT)
# The same for the modules of a folder that runs in layers.
SHARED = {"training", "trial"}
MAY_IMPORT_INSIDE: dict[str, dict[str, set[str]]] = {
    "planning": {
        "batchnorm": {"training"},
        "schedule": {"training"},
        "training": set(),
        "memory": {"training"},  # how much memory a step takes
        "trial": {"training"},
        "batch_size": SHARED,  # what fits
        "costs": SHARED,
        "worth": SHARED | {"batch_size", "costs", "schedule"},  # what it is worth
        "commands": SHARED | {"batch_size", "costs", "worth"},
    }
}
MODULES_IN_ROOT = 11
# Attributes that torch defines, on any object, and the names of objects that torch defines.
TORCHS = {*dir(nn.Linear(1, 1)), "grad", "data"}
TORCHS_OBJECTS = {"ctx", "func", "optimizer", "scaler"}
CORE = {"ops", "buffers", "arguments", "capture", "ranks", "window", "engine", "accumulator"}
DOCSTRING_LINES = 4  # a summary and three more


class Module(NamedTuple):
    """A module of the package. `name` is relative: `("window", "end")`, or `("window",)` for window/__init__.py."""

    name: tuple[str, ...]
    nodes: tuple[ast.AST, ...]
    is_package: bool

    @property
    def tree(self) -> ast.Module:
        return cast(ast.Module, self.nodes[0])

    @property
    def room(self) -> str:
        return self.name[0] if self.name else "__init__"

    @property
    def room_inside(self) -> str | None:
        """Its room in a house; None for modules outside of houses, and for the house's own `__init__`."""
        return self.name[1] if self.room in MAY_IMPORT_INSIDE and len(self.name) > 1 else None

    @property
    def path(self) -> str:
        return "/".join(self.name + (("__init__",) if self.is_package else ())) + ".py"


class Import(NamedTuple):
    """One imported name: `from ..window.end import Ending as E` is `("window", "end")`, "Ending" and "E"."""

    line: int
    module: tuple[str, ...]
    name: str | None  # None if the module itself is imported
    bound: str

    @property
    def room(self) -> str:
        return self.module[0] if self.module else "__init__"


@functools.cache  # copies of the package differ in only a module or two
def _nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def modules(package: Path) -> dict[tuple[str, ...], Module]:
    """Read all modules of the package, by name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        is_package = path.stem == "__init__"
        name = path.relative_to(package).with_suffix("").parts[: -1 if is_package else None]
        found[name] = Module(name, _nodes(path.read_text()), is_package)
    return found


def imports(module: Module, known: dict[tuple[str, ...], Module]) -> Iterator[Import]:
    """Yield a module's imports from its own package, including those in functions and under TYPE_CHECKING."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top, *rest = alias.name.split(".")
                if top == "accumkernels":
                    yield Import(node.lineno, tuple(rest), None, alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                up = node.level - module.is_package  # a package is its own first level
                base = module.name[: len(module.name) - up] + base
            elif base[:1] == ("accumkernels",):
                base = base[1:]
            else:
                continue
            for alias in node.names:
                name = alias.asname or alias.name
                if (*base, alias.name) in known:
                    yield Import(node.lineno, (*base, alias.name), None, name)
                else:
                    yield Import(node.lineno, base, alias.name, name)


def arrows(package: Path) -> list[str]:
    """Find imports that run up, or sideways to a room that the importer must not know."""
    known, broken = modules(package), []
    for module in known.values():
        if module.room not in MAY_IMPORT:
            broken.append(f"{module.path}: {module.room} is not in MAY_IMPORT")
            continue
        for found in imports(module, known):
            allowed = MAY_IMPORT[module.room] | {module.room}
            if found.room not in allowed and found.name != "__version__":
                other = ".".join(("accumkernels", *found.module))
                broken.append(f"{module.path}:{found.line}: {module.room} must not import {other}")
        inside = module.room_inside
        if inside is None:
            continue
        table = MAY_IMPORT_INSIDE[module.room]
        if inside not in table:
            broken.append(f"{module.path}: {module.room}/{inside} is not in MAY_IMPORT_INSIDE")
            continue
        for found in imports(module, known):
            room = found.module[1] if len(found.module) > 1 else "__init__"
            if found.room == module.room and room not in table[inside] | {inside}:
                other = ".".join(("accumkernels", *found.module))
                broken.append(f"{module.path}:{found.line}: {module.room}/{inside} must not import {other}")
    return list(dict.fromkeys(broken))  # several names of one import are one fault


def _is_private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.endswith("__")


def _dotted(node: ast.expr) -> str:
    """Return "a.b" for the expression a.b, and "" for anything but a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _private_names(module: Module) -> set[str]:
    """Return the functions, classes, variables and attributes with an underscore that a module defines."""
    names = set()
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _dotted(node.value) == "self":
            names.add(node.attr)
    return set(filter(_is_private, names))


def _is_torchs(of: str, attribute: str) -> bool:
    """Whether `of.attribute` is torch's: a module has `_modules`, a GradScaler a `_device`."""
    return attribute in TORCHS or of.rpartition(".")[2].lstrip("_") in TORCHS_OBJECTS


def _is_self(node: ast.expr) -> bool:
    return _dotted(node) in ("self", "cls") or (isinstance(node, ast.Call) and _dotted(node.func) == "super")


def _kinds(module: Module) -> dict[str, set[str]]:
    """Map argument names to the module's own classes, if annotations name no others."""
    classes = {node.name for node in module.nodes if isinstance(node, ast.ClassDef)}
    found: dict[str, set[str]] = {}
    for node in module.nodes:
        if isinstance(node, ast.arg) and node.annotation is not None:
            found.setdefault(node.arg, set()).add(ast.unparse(node.annotation).strip("'\""))
    return {name: kinds for name, kinds in found.items() if kinds <= classes}


def privates(package: Path) -> list[str]:
    """Find uses of names with an underscore that belong to another room.

    Such a name is imported, or an attribute of something imported, or an attribute that another room defines. If both
    rooms define it, it is this module's only in an argument annotated with one of its classes.
    """
    known, broken = modules(package), []
    defined: dict[str, set[str]] = {}
    for module in known.values():
        defined.setdefault(module.room, set()).update(_private_names(module))
    for module in known.values():
        kinds, own = _kinds(module), _private_names(module)
        foreign = [found for found in imports(module, known) if found.room != module.room]
        broken += [
            f"{module.path}:{found.line}: {found.name} is private to {found.room}"
            for found in foreign
            if _is_private(found.name)
        ]
        owner = {found.bound: found.room for found in foreign}
        others = {name: room for room, names in defined.items() if room != module.room for name in names}
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                of = _dotted(node.value)
                room = owner.get(of)
                ours = _is_self(node.value) or (of in kinds and node.attr in own)
                if room is None and not ours and not _is_torchs(of, node.attr):
                    room = others.get(node.attr)
                if room is not None:
                    broken.append(f"{module.path}:{node.lineno}: {node.attr} is private to {room}")
    return broken


def _fields(module: Module) -> set[str]:
    """Return the attributes of a module's classes: assigned to self, or declared in the class."""
    names = set()
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _dotted(node.value) == "self":
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            declared = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
            declared += [target for n in node.body if isinstance(n, ast.Assign) for target in n.targets]
            names |= {target.id for target in declared if isinstance(target, ast.Name)}
    return names


def _written(node: ast.AST) -> ast.Attribute | None:
    """Return a.b if a statement assigns to a.b or a.b[i], or deletes it."""
    if not isinstance(node, ast.Attribute | ast.Subscript) or isinstance(node.ctx, ast.Load):
        return None
    target: ast.expr = node
    while isinstance(target, ast.Subscript):
        target = target.value
    return target if isinstance(target, ast.Attribute) else None


def writes(package: Path) -> list[str]:
    """Find assignments to attributes of other objects, whose class this code does not define.

    Only their own module may write objects of the core, and only their room those of other rooms. An attribute reached
    through another object, such as `self.store.layout.device`, does not count as the module's own because of its name.
    """
    known, broken = modules(package), []
    fields = {module.path: _fields(module) for module in known.values()}
    for module in known.values():
        for node in module.nodes:
            target = _written(node)
            if target is None or _is_self(target.value) or _is_torchs(_dotted(target.value), target.attr):
                continue
            defining = [other for other in known.values() if target.attr in fields[other.path]]
            if module.room in CORE:
                own = module in defining and (len(defining) == 1 or isinstance(target.value, ast.Name))
            else:
                own = module.room in {other.room for other in defining}
            if defining and not own:
                broken.append(
                    f"{module.path}:{node.lineno}: {target.attr} is assigned, which {defining[0].path} defines"
                )
    return broken


def circles(package: Path) -> list[str]:
    """Find a circle of imports; returns one of them if there are several."""
    known = modules(package)
    graph = {
        module.path: {known[found.module].path for found in imports(module, known) if found.module in known}
        for module in known.values()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def front_doors(package: Path) -> list[str]:
    """Find `__init__`s of rooms with code, or with too long a docstring or none, and too many modules in the root."""
    broken = []
    for module in modules(package).values():
        if not module.is_package or not module.name:
            continue
        lines = [line for line in (ast.get_docstring(module.tree) or "").splitlines() if line]
        if not 1 <= len(lines) <= DOCSTRING_LINES:
            broken.append(f"{module.path}: a docstring of {len(lines)} lines, 1 to {DOCSTRING_LINES} are right")
        functions = {node.name for node in module.tree.body if isinstance(node, ast.FunctionDef)}
        if module.name == ("ops",):
            if "select" not in functions:
                broken.append(f"{module.path}: has no select()")
        elif len(module.tree.body) > 1:
            broken.append(f"{module.path}: has code")
    count = len(list(package.glob("*.py")))
    if count > MODULES_IN_ROOT:
        broken.append(f"{count} modules in the root, at most {MODULES_IN_ROOT} are right")
    return broken


def unmapped(package: Path, contributing: Path) -> list[str]:
    """Find modules missing from their room's entry in CONTRIBUTING's map, and names there that no module has."""
    (tree,) = re.findall(r"^accumkernels/.*\n((?:[ ].*\n)*)", contributing.read_text(), re.MULTILINE)
    # Entries begin in one column; their continuation lines are indented further.
    indent = len(tree) - len(tree.lstrip())
    entries = re.split(rf"^ {{{indent}}}(?=\S)", tree, flags=re.MULTILINE)
    broken, real = [], {"__init__"}
    for module in modules(package).values():
        if module.is_package:
            continue
        *folder, stem = module.name
        real.add(stem)
        where = "".join(entry for entry in entries if entry.startswith("/".join([*folder, ""]))) if folder else tree
        if not re.search(rf"(?<!\w){stem}{'' if folder else '[.]py'}(?!\w)", where):
            broken.append(f"{module.path} is not in the map")
    named = re.findall(r"(\w+)\.py\b", tree)
    return broken + [f"{stem}.py is in the map, not in the package" for stem in named if stem not in real]
