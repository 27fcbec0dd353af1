"""An experiment on the disk: one run folder a row and seed, pretrainings shared, refused early, kept when done."""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from metapretrain.errors import InputError
from metapretrain.report.layout import Layout, save_layout
from metapretrain.training import RunFolder
from metapretrain.training.checkpoint import check_sums, write_sums
from metapretrain.training.devices import wait_for_all
from metapretrain.training.settings import check_neighbours


@dataclass(frozen=True)
class Machine:
    """Where and how fast an experiment runs; none of it is part of the method.

    Args:
        device: torch's name of one.
        precision: `fp32` or `bf16`.
        compile: compile the model.
        cuda_graph: record updates as CUDA graphs; None: wherever that is possible.
        local_batchnorm: over several processes, BatchNorm takes each one's own rows and not those of all.
        rank, world: of this process, and how many there are.
    """

    device: str = "cpu"
    precision: str = "fp32"
    compile: bool = False
    cuda_graph: bool | None = None
    local_batchnorm: bool = False
    rank: int = 0
    world: int = 1


log = logging.getLogger(__name__)
NO_COST: Mapping[str, Any] = {"encoder_passes": 0, "updates": 0, "wall_s": 0.0}
R = TypeVar("R")
D = TypeVar("D")
M = TypeVar("M")


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse seeds that NumPy's generators do not take.

    Raises:
        InputError: a seed below 0 or of more than 32 bits.
    """
    for seed in seeds:
        if not 0 <= seed < 2**32:
            raise InputError(f"a seed is a whole number from 0 to {2**32 - 1}, got {seed}")


class RunFolders(ABC):
    """The folders of a table's rows: named, opened under their configuration, kept when done, finished alike.

    A dataclass of a benchmark gives what is named here and says how one row is run.

    Attributes:
        data: has `counts` and `test`, which is empty while a recipe is chosen.
        machine: where it runs.
        out: parent of all runs.
        resume: go on with runs that were cut short and keep finished ones.
        layout: of the table, kept in its folder; None: a general one.
    """

    data: Any
    machine: Machine
    out: Path
    resume: bool
    layout: Layout | None

    @property
    @abstractmethod
    def names(self) -> dict[str, str]:
        """What all rows are of: `benchmark`, `dataset` and `recipe`."""

    @property
    @abstractmethod
    def files(self) -> dict[str, Any]:
        """The files that were read, with checksums."""

    @abstractmethod
    def config(self, method: Any) -> dict[str, Any]:
        """Return what a run of this row, or pretraining, may not differ in, but for its names and seed."""

    @abstractmethod
    def row(self, name: str, method: Any, seed: int) -> dict[str, Any]:
        """Run one row of the table for one seed; a finished one is kept if `resume` is set."""

    @property
    def table_layout(self) -> Layout | None:
        """The layout with the columns of these data."""
        return self.layout

    def save_layout(self) -> None:
        """Keep the layout of the table in its folder, for `metapretrain report`."""
        if self.table_layout is not None:
            save_layout(self.table_layout, self.root)

    @property
    def root(self) -> Path:
        """The folder of all rows."""
        return self.out / self.names["benchmark"] / f"{self.names['dataset']}-{self.names['recipe']}"

    def path(self, name: str, seed: int) -> Path:
        """The folder of one run."""
        return self.root / f"{name}-s{seed}"

    def rows(self, methods: Mapping[str, Any], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Run every row for every seed, one after the other, and yield their results."""
        for seed in seeds:
            for name, method in methods.items():
                yield self.row(name, method, seed)

    def finished(self, name: str, method: Any, seed: int) -> dict[str, Any] | None:
        """Return the result of a run that is done, or None.

        Raises:
            InputError: its configuration is another, it has test figures and this call has none or the other way
                round, or its `result.json` is damaged.
        """
        if not (self.path(name, seed) / "result.json").is_file():
            return None
        with self.open(name, method, seed, resume=True) as run:
            if run.main:  # a kill after the result was written leaves them
                shutil.rmtree(run.checkpoints, ignore_errors=True)
            result = run.result() or {}
        if lost := [key for key in ("metrics", "budget", "wall_s") if key not in result]:
            file = self.path(name, seed) / "result.json"
            raise InputError(f"{file} is damaged: it has no {lost[0]}; remove it, and --resume runs this row again")
        told = {"row": "without", "tuning": "with"}
        if result.get("kind", self._kind) in told.keys() - {self._kind}:
            raise InputError(
                f"{self.path(name, seed)} was run {told[result['kind']]} --validate, this call is {told[self._kind]}; "
                "choose another --out"
            )
        return result

    @property
    def _kind(self) -> str:
        """Of the results of rows."""
        return "row" if len(self.data.test) else "tuning"

    def written(self, name: str, seed: int) -> Path:
        """Return the folder of a finished pretraining, whose weights are those that it wrote.

        Raises:
            InputError: they are damaged or of another run.
        """
        folder = self.path(name, seed)
        check_sums(folder)
        return folder

    def kept(self, name: str, method: Any, seed: int) -> dict[str, Any] | None:
        """Return the result of a run that is done and may be kept, by `resume`, or None."""
        done = self.finished(name, method, seed) if self.resume else None
        if done is not None:
            log.info("%s seed %d: already done", name, seed)
        return done

    def open(self, name: str, method: Any, seed: int, resume: bool | None = None) -> RunFolder:
        """Open the folder of one run under its whole configuration.

        Raises:
            InputError: it holds a run of another configuration, or one that is not to be resumed, or is in use.
        """
        return RunFolder.open(
            self.path(name, seed),
            self.whole_config(name, method, seed),
            resume=self.resume if resume is None else resume,
            main=self.machine.rank == 0,
            device=self.machine.device,
        )

    def whole_config(self, name: str, method: Any, seed: int) -> dict[str, Any]:
        """Return what the folder of one run keeps of how it was made."""
        about = {"method": name, "seed": seed, "precision": self.machine.precision}
        return {**self.names, **about, **self.config(method)}

    def finish(
        self,
        run: RunFolder,
        name: str,
        seed: int,
        metrics: Mapping[str, float],
        budget: Mapping[str, int],
        extra: Mapping[str, Any],
        save: Callable[[], None],
    ) -> dict[str, Any]:
        """Write the result of a run, after `save` has written its model and predictions; return it.

        `extra` is added to the result; its `kind` is `row`, or `tuning` without test data, where it does not say so.
        """
        if self.machine.rank != 0:
            wait_for_all(self.machine.world)
            return {}
        save()
        write_sums(run.path)
        run.hparams({"method": name, "seed": seed, "recipe": self.names["recipe"]}, metrics)
        run.finish(
            {
                **self.names,
                "method": name,
                "seed": seed,
                "kind": self._kind,
                "metrics": dict(metrics),
                "counts": self.data.counts,
                "budget": dict(budget),
                "data": self.files,
                **extra,
                **({"processes": self.machine.world} if self.machine.world > 1 else {}),
            }
        )
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # the weights stand beside result.json
        if len(self.data.test):
            self.save_layout()
        wait_for_all(self.machine.world)  # the others may look for result.json now
        result = run.result() or {}
        log.info("%s seed %d: done in %.0f s", name, seed, result.get("wall_s", 0))
        return result


@dataclass(frozen=True)
class Runs(RunFolders, Generic[R, D, M]):
    """What all rows of a pretraining table share; a benchmark says how one row is run.

    Args:
        benchmark: such as `stl10`; dataset and recipe name the folder below it.
        recipe: a dataclass of all choices.
        data: has `counts` and `test`, which is empty while a recipe is chosen.
        out: parent of all runs.
        figures: draw figures of the runs with this seed; None for none.
        resume: go on with runs that were cut short and keep finished ones.
        map_points: points in a panel of a map of embeddings.
        reducer: what maps are drawn by, `tsne` or `umap`.
        layout: of the table; None: a column for each metric.
    """

    benchmark: str
    dataset: str
    recipe_name: str
    recipe: R
    data: D
    machine: Machine
    out: Path
    figures: int | None = 0
    resume: bool = False
    map_points: int = 1000
    reducer: str = "tsne"
    layout: Layout | None = None

    @abstractmethod
    def pretraining_run(self, method: M) -> tuple[str, Any] | None:
        """Return name and method of the pretraining that a row shares with others, or None."""

    @abstractmethod
    def check_row(self, name: str, method: M) -> None:
        """Refuse a row that cannot be run with this recipe and data."""

    @abstractmethod
    def model(self, method: Any) -> dict[str, Any]:
        """Return what a saved model of this row, or pretraining, needs to be built again."""

    @property
    def names(self) -> dict[str, str]:
        """What all rows are of."""
        return {"benchmark": self.benchmark, "dataset": self.dataset, "recipe": self.recipe_name}

    def config(self, method: Any) -> dict[str, Any]:
        """Return the choices, the model and the data of a row."""
        return {"choices": self._choices(), "model": self.model(method), "data": self._data()}

    def check(self, methods: Mapping[str, M], seeds: Sequence[int]) -> None:
        """Refuse now, before anything is trained, what a row would refuse when its turn comes.

        Raises:
            InputError: a run that is there and `resume` is off, or that is in use, or that has another configuration;
                a budget that is too small; a seed of more than 32 bits.
        """
        check_seeds(seeds)
        shared: dict[str, Any] = {}
        for name, method in methods.items():
            self.check_row(name, method)
            if (pretraining := self.pretraining_run(method)) is not None:
                shared[pretraining[0]] = pretraining[1]
        for seed in seeds:
            for name, method in {**methods, **shared}.items():
                if (self.path(name, seed) / "config.json").is_file():
                    done = name in shared and (self.path(name, seed) / "result.json").is_file()
                    self.open(name, method, seed, resume=self.resume or done).close()
                    if self.resume:
                        self.finished(name, method, seed)
        check_neighbours(self.root, {"choices": self._choices(), "data": self._data()})

    def _choices(self) -> dict[str, Any]:
        recipe: Any = self.recipe
        found = asdict(recipe)
        if not found.get("scheduler"):
            found.pop("scheduler", None)  # runs without one may go on that began before there were any
        return found

    def _data(self) -> dict[str, Any]:
        data: Any = self.data
        return {"counts": data.counts, "files": self.files}
