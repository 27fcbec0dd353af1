"""Command lines drawn from a script's own parser and from the fields of its recipe, so that new ones are drawn too."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints
from unittest import mock

from hypothesis import strategies as st

from metapretrain.errors import InputError
from metapretrain.experiments.recipe import override
from metapretrain.options import Parser

LEFT_OUT = {"--help", "--out", "--smoke", "--dry-run", "--download", "--resume"}  # given by the test, or need a network
SLOW = {"--jobs-per-device", "--compile", "--corrupt", "--reducer"}  # processes, compilers and minutes: dry runs only
ODD = ("", " ", "0", "-1", "1.5", "x", "None", "nan", "inf", "1e400", "=", ",", "..", "a/b", "é\u200b", "9" * 25)
BIG = (10**9, 2**31, 2**63, 10**18)
REALS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-12, 1e9, 1e30, 1e300, float("inf"), float("nan"))


def parser_of(options_of: Callable[[Any], Any]) -> argparse.ArgumentParser:
    """The parser that a script reads its command line with."""
    caught = []

    def catch(self: argparse.ArgumentParser, *_: Any) -> None:
        caught.append(self)
        raise InterruptedError

    with mock.patch.object(Parser, "parse_args", catch):
        try:
            options_of([])
        except InterruptedError:
            return caught[0]
    raise AssertionError("the script has no metapretrain.options.Parser")


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, type and value of every field of nested dataclasses."""
    kinds = get_type_hints(type(node))
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, kinds[field.name], value


def allowed(recipe: Any, name: str) -> list[str]:
    """The names that a setting takes, as its error tells them."""
    try:
        override(recipe, [f"{name}=?"])
    except InputError as error:
        found = re.search(r"allowed: (.*)", str(error))
        return found[1].split(", ") if found else []
    return []


def numbers(small: bool) -> st.SearchStrategy[str]:
    """Whole numbers: a few in the usual range, and (not where a run would take them at their word) very big ones."""
    usual = st.integers(-1, 4) if small else st.integers(-2, 200) | st.sampled_from(BIG)
    return usual.map(str)


def short(text: str) -> bool:
    """Whether a run that takes the text at its word is no longer than it need be (20,000 updates are)."""
    return not text.isdigit() or int(text) <= 100


def values(kind: Any, value: Any, known: list[str], small: bool) -> st.SearchStrategy[str]:
    """Texts for a field: mostly of its type, some of none."""
    kinds = set(getattr(kind, "__args__", (kind,)))
    named = [text for text in (str(value), *known) if not small or short(text)]
    found: list[st.SearchStrategy[str]] = [st.sampled_from(named)] if named else []
    if bool in kinds:
        found.append(st.sampled_from(["true", "false", "True", "1"]))
    if int in kinds:
        found += [numbers(small)] * 3
    if float in kinds:
        found += [st.floats(0, 1).map(repr), st.sampled_from(REALS).map(repr)]
    return st.one_of(*found, st.sampled_from(ODD))


def changes(recipe: Any, small: bool) -> st.SearchStrategy[str]:
    """`NAME=VALUE` for any field of the recipe, or one that there is not."""
    fields = [
        values(kind, value, allowed(recipe, name), small).map(f"{name}={{}}".format)
        for name, kind, value in leaves(recipe)
    ]
    return st.one_of(*fields, st.sampled_from(["no.such=1", "lr", "=1", "epochs.x=2"]))


def words(action: argparse.Action, small: bool, paths: list[str]) -> st.SearchStrategy[list[str]]:
    """An option with a value: its choices, what its help names, numbers, folders, and what is no value at all."""
    name = action.option_strings[-1]
    if action.nargs == 0:
        return st.just([name])
    if action.choices is not None:
        one = st.sampled_from([str(choice) for choice in action.choices] * 3 + list(ODD))
    elif name == "--device":
        one = st.sampled_from(["cpu"] * 6 + ["auto", "cuda:99", "mps", "gpu", ""])
    else:
        default = action.default if isinstance(action.default, list) else [action.default]
        told = re.findall(r"[\w:.=-]+", f"{action.help} {' '.join(map(str, default))}")
        told = [text for text in told if not small or short(text)]
        one = numbers(small) | st.sampled_from(told + paths) | st.sampled_from(ODD)
    many = st.lists(one, min_size=1, max_size=3)
    return (many if action.nargs == "+" else many.map(lambda found: [",".join(found)]) | one.map(lambda x: [x])).map(
        lambda found: [name, *found]
    )


def command_lines(
    options_of: Callable[[Any], Any], recipe: Any, paths: list[str], *, small: bool
) -> st.SearchStrategy[list[str]]:
    """Words for a script: up to three options and up to three changes of the recipe."""
    left_out = LEFT_OUT | SLOW if small else LEFT_OUT
    actions = [a for a in parser_of(options_of)._actions if not left_out & {*a.option_strings} and a.dest != "changes"]
    options = st.lists(st.one_of(*(words(action, small, paths) for action in actions)), max_size=2 if small else 3)
    changed = st.lists(changes(recipe, small), max_size=2 if small else 3)
    return st.tuples(options, changed).map(
        lambda found: [*(word for option in found[0] for word in option), *(["--set", *found[1]] if found[1] else [])]
    )
