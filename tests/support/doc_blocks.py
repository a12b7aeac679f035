"""The code in README and docs/, as tests want it: which blocks a page has, and what their commands name.

A block says its language. What it needs beforehand may stand in a comment that readers do not see, and one that cannot
run says why in the line before it (if that begins with "the old side", the new side of a diff runs all the same):

    <!-- setup
    model = torch.nn.Linear(4, 1)
    -->
    <!-- no-run: needs two ranks -->

A page whose blocks need a package that is not always installed says so anywhere: <!-- needs: accelerate -->
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*DOCS, ROOT / "benchmarks" / "README.md"]

_PIECE = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|(?:^[ ]*<!-- no-run: (?P<reason>[^\n]+) -->\n(?:[ ]*\n)?)?"
    r"^(?P<indent>[ ]*)(?P<fence>```+|~~~+)(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
# Not to be found on every machine that runs the tests.
_KNOWN = {"pip", "docker", "git", "cd", "export", "torchrun", "accelerate", "nvidia-smi"}


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block, or a hidden setup (language "python").

    Attributes:
        line: Of its first line of code in the page, from 1.
        reason: Why it is not run, or "the old side ..." of a diff; None where all is.
    """

    page: Path
    line: int
    language: str
    code: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether any of it is executed: of a diff with a reason, still the new side."""
        return self.language in ("python", "diff") and (self.reason is None or self.reason.startswith("the old side"))

    def run(self, namespace: dict) -> None:
        """Execute it; a traceback shows the page's own lines."""
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), namespace)

    def sides(self) -> list[Block]:
        """Of a diff, what it was and what it becomes, as two blocks of Python."""
        kept = []
        for drop, keep in ("+-", "-+"):
            lines = ["" if line[:1] == drop else re.sub(rf"^[ {keep}]", "", line) for line in self.code.split("\n")]
            kept.append(dataclasses.replace(self, language="python", code="\n".join(lines)))
        return kept


def blocks(page: Path) -> list[Block]:
    """A page's blocks in order."""
    text = page.read_text()
    found = []
    for match in _PIECE.finditer(text):
        group = "code" if match["setup"] is None else "setup"
        language = "python" if group == "setup" else match["language"]
        indent = len(match["indent"] or "")
        code = "\n".join(line[min(indent, len(line) - len(line.lstrip())) :] for line in match[group].split("\n"))
        line = text.count("\n", 0, match.start(group)) + 1
        found.append(Block(page, line, language, code, match["reason"]))
    return found


def run_page(page: Path) -> dict:
    """Run a page's blocks in order, in one namespace, which is returned; of a diff first the old side, then the new."""
    namespace: dict = {"__name__": "__docs__"}
    for block in blocks(page):
        parts = block.sides() if block.language == "diff" else [block]
        for part in parts:
            if part.language == "python" and block.runs and (block.reason is None or part is not parts[0]):
                part.run(namespace)
    return namespace


def missing_packages(page: Path) -> list[str]:
    """What the page's code needs and is not installed."""
    named = " ".join(re.findall(r"^<!-- needs: (.+) -->$", page.read_text(), re.MULTILINE)).split()
    return [name for name in named if importlib.util.find_spec(name) is None]


def commands(block: Block) -> list[list[str]]:
    """The words of each command line of a shell block, without comments, prompts and variables set in front."""
    lines = block.code.replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words:
            found.append(words)
    return found


def unknown(words: list[str]) -> str | None:
    """What a command names that is not there, in words; None when all is there."""
    program, rest = words[0], words[1:]
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((f"target {word}" for word in rest if "=" not in word and word not in targets), None)
    if program in ("python", "python3", "bash") and rest:
        if rest[0] == "-m":
            return _unknown_module(rest[1], rest[2:])
        if rest[0] == "setup.py" or not rest[0].startswith("-"):
            return None if (ROOT / rest[0]).is_file() else f"file {rest[0]}"
    if program == "pip":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        named = re.findall(r"(?:accumkernels|\.)\[([\w,]+)\]", " ".join(rest))
        return next((f"extra {e}" for name in named for e in name.split(",") if e not in extras), None)
    return None if program in _KNOWN or shutil.which(program) else f"program {program}"


def _unknown_module(name: str, arguments: list[str]) -> str | None:
    if name == "accumkernels":
        from accumkernels.__main__ import _parser

        try:
            _parser().parse_args(arguments)
        except SystemExit as error:
            return f"options {' '.join(arguments)}" if error.code else None
        return None
    return None if importlib.util.find_spec(name) else f"module {name}"
