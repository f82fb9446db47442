"""What the site has beside docs/: the pages of the repository's root, and the API by its docstrings."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
#: Pages of the root, and what they are called in the site.
ROOT_PAGES = {name: name for name in ("BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md")} | {"README.md": "index.md"}


def public_names() -> list[str]:
    """``kvcanary_fx.__all__``, without an import: the site's environment has no torch."""
    for node in ast.parse((ROOT / "kvcanary_fx" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise PluginError("kvcanary_fx/__init__.py has no __all__")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, called in ROOT_PAGES.items():
        files.append(File.generated(config, called, content=(ROOT / name).read_text()))
    api = "# API\n\n" + "\n\n".join(f"::: kvcanary_fx.{name}" for name in public_names())
    files.append(File.generated(config, "api.md", content=api))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are in the repository, to places in the site.  What is not in the site stays as text."""
    root_page = next((n for n, called in ROOT_PAGES.items() if called == page.file.src_uri), None)
    folder = ROOT if root_page else Path(config.docs_dir)

    def translated(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        if re.match(r"[a-z]+:", target):
            return link.group()
        place = Path(os.path.normpath(folder / target))
        if not place.exists():
            raise PluginError(f"{root_page or page.file.src_uri} links to {target}, which is not there")
        path = str(place.relative_to(ROOT))
        inside = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside is None:
            return text if text == target or path in text else f"{text} (`{path}`)"
        return f"[{text}]({inside}{anchor or ''})"

    return re.sub(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)", translated, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Docstrings have Sphinx's roles and ``::``; Markdown shows them as text."""
    if page.file.src_uri != "api.md":
        return html
    return re.sub(r":(?:meth|class|func|attr|data|mod|exc):(?=<code)", "", html).replace("::</p>", ":</p>")
