"""README and docs/: every block of code runs, every command exists, every figure and message is really there."""

from __future__ import annotations

import ast
import csv
import re

import pytest
import torch

import accumkernels as ak
from tests.support import torchvision_ops
from tests.support.doc_blocks import PAGES, ROOT, Block, blocks, commands, missing_packages, run_page, unknown

PACKAGE = ROOT / "accumkernels"
BLOCKS = {page: blocks(page) for page in PAGES}
LANGUAGES = {"python", "diff", "bash", "text", "yaml", "json", "toml"}
ELLIPSIS = "…"  # in a quoted message: what differs from case to case


def name_of(page):
    """For test ids."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.runs for b in BLOCKS[p])], ids=name_of)
def test_blocks_run(page, tmp_path, monkeypatch, one_thread):
    """A page's blocks run in order, in one namespace; of a diff first the old side, then the new one."""
    if missing := missing_packages(page):
        pytest.skip(f"needs {', '.join(missing)}")
    torchvision_ops.declare()
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_page(page)


@pytest.mark.parametrize("block", [b for page in PAGES for b in BLOCKS[page] if b.reason is not None], ids=str)
def test_blocks_that_cannot_run(block):
    """They are Python all the same. Of a diff only the old side is left out."""
    for part in block.sides() if block.language == "diff" else [block]:
        if part.language == "python":
            compile(part.code, str(block), "exec")
    pytest.skip(block.reason)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_languages(page):
    """A block without a language would be checked by nobody."""
    fences = re.findall(r"^[ ]*(?:```|~~~)", page.read_text(), re.MULTILINE)
    visible = [block for block in BLOCKS[page] if page.read_text().splitlines()[block.line - 2].lstrip()[:1] in "`~"]
    assert len(fences) == 2 * len(visible)
    assert [f"{block}: {block.language!r}" for block in visible if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("block", [b for page in PAGES for b in BLOCKS[page] if b.language == "bash"], ids=str)
def test_commands_exist(block):
    """Make targets, modules, options of ours, files and extras that a page names are there."""
    found = commands(block)
    assert found
    assert [problem for words in found if (problem := unknown(words))] == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make nonsense", "target nonsense"),
        ("FLAG=1 python -m accumkernels.nonsense", "module accumkernels.nonsense"),
        ("python -m accumkernels plan --nonsense", "options plan --nonsense"),
        ("python examples/nonsense.py --flag", "file examples/nonsense.py"),
        ("pip install accumkernels[nonsense]", "extra nonsense"),
        ("nonsense --help", "program nonsense"),
        ("make test ARGS=-x", None),
        ("python -m accumkernels fit train:fit --device cpu", None),
        ("pip install -e .[test,check]", None),
    ],
)
def test_unknown_commands_are_found(command, problem):
    """The check of commands sees what is not there."""
    assert unknown(commands(Block(PAGES[0], 1, "bash", command))[0]) == problem


def test_links_of_readme():
    """They lead to files; mkdocs looks after those of docs/."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[0].read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_reference_is_complete():
    """Every public name has an entry in the reference."""
    text = "\n".join(page.read_text() for page in PAGES)
    entries = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert [name for name in ak.__all__ if f"accumkernels.{name}" not in entries] == []


# ---- figures

TABLE = re.compile(r"^<!-- figures: (\S+) -->\n\n?((?:^\|.*\n)+)", re.MULTILINE)
FIGURES = [(page, *match.groups()) for page in PAGES for match in TABLE.finditer(page.read_text())]


@pytest.mark.parametrize(("page", "file", "table"), FIGURES, ids=lambda value: "")
def test_figures(page, file, table):
    """The numbers of a table that names its file are in that file, as precisely as they are written."""
    with (ROOT / file).open() as lines:
        values = [float(v) for row in csv.reader(lines) for v in row if re.fullmatch(r"-?\d+(\.\d+)?", v)]
    cells = [cell.strip() for row in table.splitlines()[2:] for cell in row.strip("|").split("|")[1:]]
    numbers = [cell for cell in cells if re.fullmatch(r"\d+(\.\d+)?", cell)]
    assert numbers
    half_a_digit = {n: 0.5001 * 10.0 ** -len(n.partition(".")[2]) for n in numbers}
    assert [n for n in numbers if not any(abs(v - float(n)) < half_a_digit[n] for v in values)] == []


# ---- messages


def literals(node):
    """A string expression as text, with an ellipsis for what is computed; None when it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[drs]", ELLIPSIS, node.value)
    if isinstance(node, ast.JoinedStr):
        text = "".join(part.value if isinstance(part, ast.Constant) else ELLIPSIS for part in node.values)
        return re.sub(f"{ELLIPSIS}+", ELLIPSIS, text)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (literals(node.left) or ELLIPSIS) + (literals(node.right) or ELLIPSIS)
    return None


def messages():
    """Every text in the package's sources."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "accumkernels").rglob("*.py"))]
    return [text for tree in trees for node in ast.walk(tree) if (text := literals(node))]


def test_messages_of_troubleshooting():
    """Every message that the page is a heading for begins a text of the sources."""
    headings = re.findall(r"^#{3,} `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert headings
    sources = messages()
    missing = [heading for heading in headings if not any(text.startswith(heading) for text in sources)]
    assert not missing, "\n".join(missing)


# An argument that is wrong is named by its error; forms of such messages are listed. All others have an entry each. The
# demo's are about its own options, and what the doctor finds it explains.
OF_ARGUMENTS = {"ValueError", "TypeError", "ArgumentTypeError", "FitError", "DemoError"}
SPOKEN = {"warn", "warning", "_warn"}
ROOMS = sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")} - {"demo", "doctor"})


def said(node):
    """Texts of an expression that is a message, one for each way that it can turn out; none where it is a variable."""
    if isinstance(node, ast.IfExp):
        return [*said(node.body), *said(node.orelse)]
    text = literals(node)
    return [] if text is None else [text]


def raised(room):
    """Errors and warnings of a room, also those that functions return: (where, text, whether of an argument)."""
    folder = PACKAGE / room
    for path in [folder] if folder.suffix else sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            found, name = [], None
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", "")) or ""
                if name in SPOKEN:  # by its words, or by a key and its words
                    found = max(map(said, node.args[:2]), key=lambda texts: len("".join(texts)), default=[])
                elif name.endswith("Error") and node.args:
                    found = said(node.args[0])
            elif isinstance(node, ast.FunctionDef) and room in ("buffers", "ranks"):
                if node.returns is not None and ast.unparse(node.returns) == "str | None":
                    returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
                    found = [text for value in returned for text in said(value) if " " in text]
            for text in found:
                if text[:2] != f"{ELLIPSIS};":  # what begins with another message is found by that one
                    yield f"{path.name}:{node.lineno}", text, name in OF_ARGUMENTS or room == "ops"


def explained(pattern):
    """What the page says of messages, as regular expressions."""
    lines = re.findall(pattern, (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert lines
    return {line: re.compile(re.escape(line).replace(ELLIPSIS, ".*"), re.DOTALL) for line in lines}


ENTRIES = explained(r"^#{3,} `(.+)`$")
FORMS = explained(r"^\* `(.+?)`(?:;|:|,|$)")


@pytest.mark.parametrize("room", ROOMS)
def test_every_message_is_explained(room):
    """An entry in troubleshooting, where ellipses stand for what differs; or, for arguments, a form."""
    missing = []
    for where, text, of_argument in raised(room):
        known = [*ENTRIES.values(), *(FORMS.values() if of_argument else ())]
        if not any(pattern.match(text) for pattern in known):
            missing.append(f"{where} {text}")
    assert not missing, "\n".join(missing)


def test_every_form_is_raised():
    """None is left of a message that is gone."""
    texts = [text for room in ROOMS for _, text, _ in raised(room)]
    assert [form for form, pattern in FORMS.items() if not any(map(pattern.match, texts))] == []
