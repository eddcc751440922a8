"""MkDocs hook: put the repository files that pages link to (`../examples/...`) into the built site."""

import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r"\]\(((?:\.\./)+)([^)#]+)(?:#[^)]*)?\)")


def site_path(path: str) -> str:
    """Return where the site keeps a copy of a repository file; text files are shown as plain text."""
    return f"repository/{path}" + ("" if path.endswith((".png", ".svg")) else ".txt")


def repository_paths(page: File) -> set[str]:
    """Return the files outside docs/ that a page links to, relative to the root of the repository."""
    depth = page.src_uri.count("/") + 1
    links = LINK.findall(page.content_string)
    return {path for ups, path in links if ups.count("../") == depth and (ROOT / path).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked repository files to the site."""
    for path in sorted({path for page in files.documentation_pages() for path in repository_paths(page)}):
        files.append(File.generated(config, site_path(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to repository files at their copies in the site."""
    paths = repository_paths(page.file)

    def rewrite(match: re.Match[str]) -> str:
        ups, path = match.groups()
        return f"]({ups.removeprefix('../')}{site_path(path)})" if path in paths else match[0]

    return LINK.sub(rewrite, markdown)
