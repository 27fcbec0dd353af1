"""The tasks of a scheduling experiment by their part in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from metapretrain.errors import InputError, one_of
from metapretrain.experiments.schedule.tasks.base import PretrainingTask

ORDER = {"probe": ("validation", "train"), "report": ("test", "validation")}


@dataclass(frozen=True)
class ScheduleData:
    """Tasks by their part in an experiment; each has one part, and each part a task.

    Args:
        sources: names of the pretraining tasks.
        targets: names of the tasks that downstream-aware utilities look at; their training parts are sources too.
        downstream: names of the tasks that pretrained encoders are fine-tuned on.
        tuning: leave the test parts alone; what is reported are the validation parts.
    """

    tasks: Mapping[str, PretrainingTask]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    downstream: tuple[str, ...]
    tuning: bool = False
    files: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for what in ("sources", "targets", "downstream"):
            names: tuple[str, ...] = getattr(self, what)
            if not names:
                raise InputError(f"{what} names no task; there are: {', '.join(self.tasks)}")
            for name in names:
                one_of("task", name, self.tasks)
                if name in seen:
                    raise InputError(f"{name} is among {seen[name]} and {what}; give every task one part")
                seen[name] = what
        for name in seen:
            self.part(name, "report")

    def part(self, name: str, use: str) -> str:
        """The split of a task for a use, `report` or `probe` (target batches of utilities), which is never the same."""
        sizes = self.tasks[name].sizes
        wanted = ("validation",) if use == "report" and self.tuning else ORDER[use]
        found = next((split for split in wanted if split in sizes), None)
        if found is None:
            raise InputError(f"{name} has no rows held out of training; every task of an experiment needs some")
        if use == "probe" and found == self.part(name, "report"):
            return "train"
        return found

    def chosen(self, setting: str) -> tuple[str, ...]:
        return self.sources + self.targets if setting == "aware" else self.sources

    def watched(self, setting: str) -> tuple[str, ...]:
        return self.targets if setting == "aware" else self.sources

    @property
    def test(self) -> tuple[str, ...]:
        """The downstream tasks, or nothing while a recipe is chosen."""
        return () if self.tuning else self.downstream

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each part of each task."""
        used = (*self.sources, *self.targets, *self.downstream)
        found = {f"{name}_{split}": size for name in used for split, size in self.tasks[name].sizes.items()}
        return {key: size for key, size in found.items() if not (self.tuning and key.endswith("_test"))}
