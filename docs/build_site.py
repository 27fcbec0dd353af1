"""What the documentation site has beside docs/*.md: README.md as its home page, and the API pages.

A hook of MkDocs and an extension of Griffe, which reads docstrings without importing anything; see mkdocs.yml.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import api_pages
from griffe import Class, Extension, Module, NameResolutionError, Object, get_logger
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
ROLE = re.compile(r":(?:func|class|meth|data|attr|mod|obj|exc):`~?([\w.]+)`")
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*)$", re.MULTILINE)  # arguments that share a description

log = get_logger("metapretrain.docs")


def home_page() -> str:
    """README.md, with links that start from docs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\(docs/", "](", text).replace("[CITATION.cff](CITATION.cff)", "`CITATION.cff`")


def page_name(folder: str) -> str:
    """Where a folder's page is, below docs."""
    return f"api/{folder.removeprefix('metapretrain.')}.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the API's pages into the navigation: the list of names, then a page per folder."""
    pages: list[Any] = ["api/index.md", *({folder: page_name(folder)} for folder in api_pages.pages())]
    assert config.nav is not None
    config.nav.append({"API": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page and the API's pages, which no file of docs holds."""
    files.append(File.generated(config, "index.md", content=home_page()))
    files.append(File.generated(config, "api/index.md", content=api_pages.overview()))
    for folder in api_pages.pages():
        files.append(File.generated(config, page_name(folder), content=api_pages.page(folder)))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Leave out links to folders: a site has no page for them."""
    return re.sub(r"\[([^]]+)\]\(results/?\)", r"\1", markdown)


class Docstrings(Extension):
    """Make docstrings fit the site: links for roles such as ``:func:`train```, a name for each argument.

    A role that leads nowhere is a warning, and an argument that the signature lacks as well (by Griffe).
    """

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Rewrite every docstring once the whole package is known."""
        objects = list(members(pkg))
        self.paths = {member.path: member for member in objects}
        for member in objects:
            if member.docstring is not None:
                text = SEVERAL.sub(one_each, EXAMPLE.sub("Examples:", member.docstring.value))
                member.docstring.value = ROLE.sub(lambda role, of=member: self.link(of, role[1]), text)
        for member in filter(plain_attribute, objects):
            member.parent.del_member(member.name)  # type: ignore[union-attr]

    def link(self, of: Object, name: str) -> str:
        """Markdown for a role with this name in the docstring of `of`."""
        first, _, rest = name.lstrip(".").partition(".")
        if hasattr(builtins, first) or first in sys.stdlib_module_names:
            return f"`{name}`"
        path = self.find(of, first, rest)
        if path is None:
            log.warning(f"{of.path}: the role of `{name}` leads nowhere")
        if path is not None and plain_attribute(self.paths[path]):
            path = self.paths[path].parent.path  # type: ignore[union-attr]
        if path is None or not api_pages.documented(path):  # internal, or a module, which has no anchor
            return f"`{name}`"
        return f"[`{name.rpartition('.')[2]}`][{path}]"

    def find(self, of: Object, first: str, rest: str) -> str | None:
        """The full path of a name that is a member, is in scope, or is the end of one path only."""
        name = f"{first}.{rest}".rstrip(".")
        for scope in (of, of.parent):
            if isinstance(scope, Class) and f"{scope.path}.{name}" in self.paths:
                return f"{scope.path}.{name}"
        try:
            path = f"{of.resolve(first)}.{rest}".rstrip(".")
        except NameResolutionError:
            path = ""
        # What a folder's __init__ offers is in one of the folder's modules.
        folder, _, last = name.rpartition(".") if first == "metapretrain" else ("", "", name)
        if folder == "metapretrain":
            folder = next((home for home in api_pages.top_level() if home.endswith(f".{last}")), "metapretrain.")
        ends = [known for known in self.paths if known.startswith(folder) and f".{known}".endswith(f".{last}")]
        ends = [known for known in ends if self.in_module(known)] or ends
        return path if path in self.paths else ends[0] if len(ends) == 1 else None

    def in_module(self, path: str) -> bool:
        """Whether a path is of a class, a function or a constant, and not of a class's member."""
        parent = self.paths[path].parent
        return not self.paths[path].is_module and parent is not None and parent.is_module


def members(of: Object) -> Iterator[Object]:
    """An object with all below it, without what is only imported."""
    yield of
    for member in of.members.values():
        if isinstance(member, Object):
            yield from members(member)


def plain_attribute(of: Object) -> bool:
    """Whether it is an attribute that only the docstring of its class describes; fields make the signature."""
    if not of.is_attribute or of.docstring is not None or of.parent is None:
        return False
    return of.parent.is_class and "dataclass" not in of.parent.labels


def one_each(several: re.Match[str]) -> str:
    """Split the description of arguments that share one."""
    indent, names, text = several.groups()
    *first, last = names.split(", ")
    return "".join(f"{indent}{name}: see `{last}`.\n" for name in first) + f"{indent}{last}: {text}"
