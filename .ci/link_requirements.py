"""Links what metapretrain requires, and what that requires, into a folder where its wheel is: FOLDER."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

folder = Path(sys.argv[1])


def link(found: Distribution) -> None:
    """Link the folders and files of a package, its metadata included."""
    for name in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        if not (folder / name).exists():
            (folder / name).symlink_to(Path(str(found.locate_file(name))))


wheel = next(found for found in distributions(path=[str(folder)]) if found.name == "metapretrain")
waiting, linked = [(wheel, "")], set()
while waiting:
    required_by, extra = waiting.pop()
    for requirement in map(Requirement, required_by.requires or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        found = distribution(requirement.name)
        for asked in ("", *requirement.extras):
            if (found.name, asked) not in linked:
                linked.add((found.name, asked))
                waiting.append((found, asked))
                link(found)
