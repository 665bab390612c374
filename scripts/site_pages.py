"""Hook of mkdocs: generated pages of the documentation site (algorithms, options, programs, API, changelog)."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("collectives", "quant", "parallel")
PROGRAMS = ("lessons", "examples")
"""Folders of docs/ with programs, each of which has a page."""
INTERNAL = ("cli", "benchmark")
"""Folders of programs, which the API reference leaves out."""


def folders() -> Iterator[Path]:
    """Every package folder with a page in the API reference."""
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            if not set(INTERNAL) & set(init.relative_to(ROOT).parts):
                yield init.parent


def api_page(folder: Path) -> str:
    """Markdown of a package's API page: directives for its docstring, then for its modules."""
    package = ".".join(folder.relative_to(ROOT).parts)
    modules = [path.stem for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")]
    names = [package, *(f"{package}.{name}" for name in modules)]
    return f"# {package}\n\n" + "\n".join(f"::: {name}\n" for name in names)


def programs(folder: str) -> list[Path]:
    """Programs of a folder of docs/."""
    return sorted((ROOT / "docs" / folder).glob("*.py"))


def program_page(path: Path) -> str:
    """Markdown of a program's page: its source; the title is the beginning of its docstring, up to the colon."""
    source = path.read_text(encoding="utf-8")
    title = source.removeprefix('"""').partition(":")[0]
    return f"# {title}\n\n```python\n{source}```\n"


def options_page() -> str:
    """Markdown tables of all options of a training, one for each group, from their declarations."""
    from parallel.engine.option import options_in
    from parallel.engine.settings import GROUPS

    lines = ["# Options of trainings", "", "Options of `Engine` and `Settings`, and their arguments of `chorus train`."]
    for group in GROUPS:
        lines += ["", f"## {group.__doc__.rstrip('.')}", "", "| option | argument | default | meaning | layouts |"]
        lines += ["|---|---|---|---|---|"]
        for one in options_in(group):
            argument = "" if one.flag == "" else f"`{one.argument}`"
            layouts = ", ".join(one.layouts) or "all"
            lines += [f"| `{one.name}` | {argument} | `{one.default!r}` | {one.help} | {layouts} |"]
    return "\n".join(lines) + "\n"


def on_config(config: MkDocsConfig) -> None:
    """Add lessons, examples and the API reference to the navigation."""
    assert config.nav is not None
    for folder in PROGRAMS:
        sources = [f"{folder}/{path.stem}.md" for path in programs(folder)]
        config.nav.append({folder.capitalize(): [f"{folder}/index.md", *sources]})
    pages = ["reference/api/" + ".".join(folder.relative_to(ROOT).parts) + ".md" for folder in folders()]
    config.nav.append({"API": pages})


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to programs to their pages; replace those to files outside docs/, which the site has not, by text."""

    def inside(found: re.Match[str]) -> str:
        text, target = found.groups()
        if "://" in target or target.startswith("#"):
            return found[0]
        uri = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), target.partition("#")[0]))
        source = ROOT / "docs" / uri
        if source.suffix == ".py" and source.parent.name in PROGRAMS and source.is_file():
            return f"[{text}]({target.removesuffix('.py')}.md)"
        return found[0] if files.get_file_from_path(uri) else text

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", inside, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the files of the site."""
    from mkdocs.structure.files import File

    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    from site_algorithms import page

    def add(uri: str, content: str) -> None:
        files.append(File.generated(config, uri, content=content))

    add("reference/algorithms.md", page())
    add("reference/options.md", options_page())
    add("changelog.md", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("(docs/", "("))
    for path in (path for folder in PROGRAMS for path in programs(folder)):
        add(f"{path.parent.name}/{path.stem}.md", program_page(path))
    for folder in folders():
        name = ".".join(folder.relative_to(ROOT).parts)
        add(f"reference/api/{name}.md", api_page(folder))
    return files
