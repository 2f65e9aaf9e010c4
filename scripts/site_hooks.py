"""Hooks of mkdocs: the site also has the pages and files of the repository that stand outside of docs/.

The pages link to each other by their paths in the repository, so that links work there. On the site, a link between
docs/ and another folder gets the path that its target has on the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?P<path>[\w./-]+)(?P<anchor>#[\w-]*)?(?=\))")
# Path in the repository: path on the site.
OUTSIDE = {
    "ARCHITECTURE.md": "project/ARCHITECTURE.md",
    "CONTRIBUTING.md": "project/CONTRIBUTING.md",
    "CHANGELOG.md": "project/CHANGELOG.md",
    "benchmarks/LOG.md": "project/LOG.md",
    "tests/README.md": "project/tests.md",
    **{f"deploy/{path.name}": f"deploy/{path.name}" for path in sorted((ROOT / "deploy").iterdir())},
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that stand outside of docs/."""
    from mkdocs.structure.files import File

    for path, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace paths of the repository by paths of the site."""
    return rewrite_links(markdown, page.file.src_uri)


def rewrite_links(markdown: str, uri: str) -> str:
    """Return the text of a page with links that are relative to its path on the site.

    >>> rewrite_links("[log](../benchmarks/LOG.md) [cache](cache.md#pins)", "speed.md")
    '[log](project/LOG.md) [cache](cache.md#pins)'
    """
    source = next((path for path, site_uri in OUTSIDE.items() if site_uri == uri), f"docs/{uri}")

    def rewrite(link: re.Match[str]) -> str:
        path = os.path.normpath(PurePosixPath(source).parent / link["path"])
        target = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if target is None:
            return link[0]
        return os.path.relpath(target, PurePosixPath(uri).parent) + (link["anchor"] or "")

    return LINK.sub(rewrite, markdown)
