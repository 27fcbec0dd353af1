"""What the documentation site has beside docs/*.md: README.md as its home page, and a page of API for each folder.

A hook of MkDocs and an extension of Griffe, which reads docstrings without importing anything; see mkdocs.yml.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Class, Extension, Module, NameResolutionError, Object, get_logger
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "metapretrain"
ROLE = re.compile(r":(?:func|class|meth|data|attr|mod|obj|exc):`~?([\w.]+)`")
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*)$", re.MULTILINE)  # arguments that share a description
TOP = "metapretrain"  # the page of the modules that are in no folder

log = get_logger("metapretrain.docs")


def api_folders() -> dict[str, list[str]]:
    """Each folder of the package, as a dotted name, with its public modules."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.name.startswith("_"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.setdefault(".".join(parts[:-1]), []).append(".".join(parts))
    return found


def first_sentence(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0]


def api_page(folder: str, modules: list[str]) -> str:
    """Markdown for one folder: what it is, then every module's API."""
    about = first_sentence(ROOT.joinpath(*folder.split("."), "__init__.py"))
    contents = [
        f"- [{name.removeprefix(folder + '.')}](#{name}): {first_sentence(module_file(name))}" for name in modules
    ]
    offered = ["## from metapretrain import ...", "", top_level_names(), ""] if folder == TOP else []
    lines = [f"# {folder}", "", about, "", *contents, "", *offered, *(f"::: {name}" for name in modules), ""]
    return "\n".join(lines)


def module_file(name: str) -> Path:
    """The file of a module, by its dotted name."""
    return ROOT.joinpath(*name.split(".")).with_suffix(".py")


def top_level_imports() -> Iterator[tuple[str, str, str]]:
    """What ``from metapretrain import ...`` offers: module, name, explanation; a group's title stands alone."""
    for line in (PACKAGE / "__init__.py").read_text(encoding="utf-8").splitlines():
        if found := re.fullmatch(r"    (?:from ([\w.]+) import (\w+) as \w+  )?# (.+)", line):
            yield found[1] or "", found[2] or "", found[3]


def top_level_names() -> str:
    """The same as a list, a line each, each name linked to its description."""
    lines = (
        f"- [`{name}`][{home}.{name}]: {about}" if name else f"\n**{about}**\n"
        for home, name, about in top_level_imports()
    )
    return "\n".join(lines)


def page_name(folder: str) -> str:
    """Where a folder's page is, below docs."""
    return f"api/{folder.removeprefix('metapretrain.').replace('.', '-')}.md"


def home_page() -> str:
    """README.md, with links that start from docs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\(docs/", "](", text).replace("[CITATION.cff](CITATION.cff)", "`CITATION.cff`")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the API's pages into the navigation, one a folder."""
    pages: list[Any] = [{folder: page_name(folder)} for folder in api_folders()]
    assert config.nav is not None
    config.nav.append({"API": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page and the API's pages, which no file of docs holds."""
    files.append(File.generated(config, "index.md", content=home_page()))
    for folder, modules in api_folders().items():
        files.append(File.generated(config, page_name(folder), content=api_page(folder, modules)))
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
        if path is None or self.paths[path].is_init_module:  # folders have a page, and no anchor on it
            return f"`{name}`"
        if plain_attribute(self.paths[path]):
            path = self.paths[path].parent.path  # type: ignore[union-attr]
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
            folder = next((home for home, found, _ in top_level_imports() if found == last), "metapretrain.")
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
