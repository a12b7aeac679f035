"""For mkdocs: what pages have as GitHub shows them, and the site otherwise.

They may link to files of the repository outside docs/. Each becomes a page of the site with its text, under source/; a
notebook with what its cells show. Sections of the third level between `<!-- tabs -->` and `<!-- /tabs -->` become tabs.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"(\[[^]\[]*(?:\[[^]]*\][^]\[]*)?\])\((?!\w+:|#|/)([^)#\s]+)((?:#[^)\s]*)?)\)")  # text, path, anchor
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- /tabs -->\n", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".md": "markdown", ".yml": "yaml", ".sh": "bash", ".h": "cpp", ".cu": "cpp"}


def _file_of(page_uri: str) -> str:
    """The file that a page of the site shows, as a path from the root of the repository."""
    return (
        page_uri.removeprefix("source/").removesuffix(".md") if page_uri.startswith("source/") else f"docs/{page_uri}"
    )


def _target(link: str, page_uri: str) -> str:
    """What a link on a page names, as a path from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_file_of(page_uri)), link))


def _page_of(path: str) -> str:
    return f"source/{path}.md"


def _notebook(text: str) -> str:
    """A notebook as a page: its texts, its code, and the outputs that it is committed with."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text'])}```")
            elif picture := output.get("data", {}).get("image/png"):
                parts.append(
                    f'<img alt="{output["data"]["text/plain"][0]}" src="data:image/png;base64,{picture.strip()}">'
                )
    return "\n\n".join(parts)


def _listing(path: str, text: str) -> str:
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n``````{language}\n{text}\n``````"


def _tabs(sections: re.Match[str]) -> str:
    """Headings as the labels of tabs, and all that follows each of them inside."""
    parts = re.split(r"^### (.+)\n", sections[1], flags=re.MULTILINE)[1:]
    tabs = []
    for label, text in zip(parts[::2], parts[1::2], strict=True):
        inside = "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))
        tabs.append(f'=== "{label}"\n{inside}')
    return "\n".join(tabs)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for every file that is linked, also by pages that this adds."""
    root, pages = Path(config.config_file_path).parent, list(files.documentation_pages())
    for page in pages:  # which grows
        for _, link, _ in _LINK.findall(page.content_string):
            path = _target(link, page.src_uri)
            if (
                path.startswith(("docs/", "../"))
                or not (root / path).is_file()
                or files.get_file_from_path(_page_of(path))
            ):
                continue
            text = (root / path).read_text()
            shown = {".ipynb": _notebook, ".md": str}.get(posixpath.splitext(path)[1])
            body = _listing(path, text) if shown is None else shown(text)
            content = f"---\nsearch: {{exclude: true}}\n---\n{body}\n"
            new = File.generated(config, _page_of(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(new)
            if shown is not None:
                pages.append(new)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links there, and make the tabs. A folder has no page: what links to it becomes plain text."""
    root, uri = Path(config.config_file_path).parent, page.file.src_uri

    def point(match: re.Match[str]) -> str:
        text, link, anchor = match.groups()
        path = _target(link, uri)
        if path.startswith("docs/"):
            page_uri = path.removeprefix("docs/")
        elif files.get_file_from_path(_page_of(path)):
            page_uri, anchor = _page_of(path), anchor if path.endswith(".md") else ""
        else:
            return text[1:-1] if (root / path).is_dir() else match[0]
        return f"{text}({posixpath.relpath(page_uri, posixpath.dirname(uri) or '.')}{anchor})"

    if uri.startswith("source/") and not _file_of(uri).endswith((".md", ".ipynb")):
        return markdown
    return _TABS.sub(_tabs, _LINK.sub(point, markdown))
