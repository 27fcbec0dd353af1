"""The API pages: what is public, read from the source without importing it.

Public is what `metapretrain` and its folders list in `__all__`, and what a guide imports from a module.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "metapretrain"
TOP = "metapretrain"  # the page of the modules that are in no folder
GUIDE_IMPORT = re.compile(r"^ *from (metapretrain\.[\w.]+) import ([\w, ]+)", re.MULTILINE)
Groups = dict[str, dict[str, str]]  # title to {path: one line}


@cache
def source(module: str) -> tuple[str, ast.Module]:
    """A module's name (`.__init__` added for a folder) and its syntax tree."""
    path = ROOT.joinpath(*module.split("."))
    name = f"{module}.__init__" if path.is_dir() else module
    return name, ast.parse(ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8"))


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring on one line, without roles, whose links would repeat those of the list."""
    flat = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", " ".join((text or "").split("\n\n")[0].split()))
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", flat)[0].rstrip(".")


def about(module: str) -> str:
    """The first paragraph of a module's docstring."""
    return (ast.get_docstring(source(module)[1]) or "").split("\n\n")[0]


def listed(folder: str) -> list[str]:
    """The names in `__all__` of a folder."""
    nodes = (node for node in source(folder)[1].body if isinstance(node, (ast.Assign, ast.AugAssign)))
    return [
        name
        for node in nodes
        if ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) == "__all__"
        for name in ast.literal_eval(node.value)
    ]


def home(module: str, name: str) -> str:
    """The path of a name where it is defined, through the modules that only import it."""
    for node in ast.walk(source(module)[1]):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return home(node.module or "", name)
    return f"{module}.{name}"


def one_line(path: str) -> str:
    """What a class, a function or a constant is: its docstring's first sentence, or a constant's values."""
    module, _, name = path.rpartition(".")
    for node in source(module)[1].body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return first_sentence(ast.get_docstring(node))
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if ast.unparse(target) == name:
                mapping = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("dict")
                if mapping:
                    return f"The registry, by name: `{ast.unparse(node.annotation)}`"  # type: ignore[union-attr]
                return f"`{ast.unparse(node.value)}`" if node.value else ""
    raise LookupError(f"{path} is not defined in its module")


def offered() -> Groups:
    """What ``from metapretrain import ...`` offers, in the groups of `metapretrain/__init__.py`."""
    groups: Groups = {}
    title = ""
    for line in (PACKAGE / "__init__.py").read_text(encoding="utf-8").splitlines():
        if found := re.fullmatch(r"    (?:from ([\w.]+) import (\w+) as \w+  )?# (.+)", line):
            module, name, text = found.groups()
            if name:
                groups[title][home(module, name)] = text
            else:
                title = text
                groups[title] = {}
    return groups


def top_level() -> list[str]:
    """The paths of what ``from metapretrain import ...`` offers."""
    return [path for group in offered().values() for path in group]


def guide_imports() -> list[tuple[str, str]]:
    """Each module and name that the Python of a guide imports."""
    texts = [page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]]
    found = [
        (module, name.strip())
        for text in texts
        for module, names in GUIDE_IMPORT.findall(text)
        for name in names.split(",")
    ]
    return sorted(set(found))


@cache
def groups() -> Groups:
    """Every public name once: those of `metapretrain` first, then what else a folder offers."""
    result = offered()
    seen = set(top_level())
    folders = [".".join(path.parent.relative_to(ROOT).parts) for path in sorted(PACKAGE.rglob("*/__init__.py"))]
    public = [(folder, name) for folder in folders for name in listed(folder)] + guide_imports()
    for path in dict.fromkeys(home(module, name) for module, name in public):
        if path not in seen:
            result.setdefault(f"More in {page_of(path)}", {})[path] = one_line(path)
    return result


def page_of(path: str) -> str:
    """The folder on whose page a path is described; `metapretrain` for the modules in no folder."""
    parts = path.split(".")
    return ".".join(parts[:2]) if len(parts) > 3 else TOP


def pages() -> dict[str, list[str]]:
    """Each page of the API, by its folder, with the paths that it describes."""
    found: dict[str, list[str]] = {}
    for path in sorted(path for group in groups().values() for path in group):
        found.setdefault(page_of(path), []).append(path)
    return dict(sorted(found.items()))


@cache
def public() -> frozenset[str]:
    """Every public path."""
    return frozenset(path for group in groups().values() for path in group)


def documented(path: str) -> bool:
    """Whether a page describes a path: a public name, or a member of one."""
    parts = path.split(".")
    return any(".".join(parts[:end]) in public() for end in range(1, len(parts) + 1))


def overview() -> str:
    """Markdown of the list: every public name, a line each, linked to its description."""
    lines = ["# API", "", "What is public, one line each. Names of the first groups are imported from `metapretrain`;"]
    lines += ["those under *More in ...* from the module that their description names.", ""]
    for title, group in groups().items():
        lines += [f"## {title}", ""]
        lines += [f"- [`{path.rpartition('.')[2]}`][{path}]: {text}" for path, text in group.items()] + [""]
    return "\n".join(lines)


def page(folder: str) -> str:
    """Markdown of one page: what the folder is, and the description of each of its public names."""
    blocks = [f"::: {path}\n" for path in pages()[folder]]
    intro = "The names whose modules are in no folder." if folder == TOP else about(folder)
    return "\n".join([f"# {folder}", "", intro, "", *blocks])
