"""The skeleton of every experiment: one run folder per row and seed, pretrainings shared, finished runs kept."""

import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from metapretrain.checks import lacking
from metapretrain.distributed import wait_for_all
from metapretrain.errors import InputError
from metapretrain.files import check_sums, write_sums
from metapretrain.report.layout import Layout, save_layout
from metapretrain.training import RunFolder, TrainSettings
from metapretrain.training.logs import PLACE
from metapretrain.training.settings import check_neighbours


@dataclass(frozen=True)
class Machine:
    """Where and how fast an experiment runs; none of it is part of the method.

    `compile` None: meta-steps alone, where that pays; the others are as in :class:`TrainSettings`, `rank` and `world`
    are of this process and how many there are, `log_to` names `wandb` or `mlflow`, beside TensorBoard.
    """

    device: str = "cpu"
    precision: str = "fp32"
    compile: bool | None = False
    cuda_graph: bool | None = None
    local_batchnorm: bool = False
    rank: int = 0
    world: int = 1
    log_to: tuple[str, ...] = ()

    def settings(self, steps: int, seed: int, evaluations: int = 10, **options: Any) -> dict[str, Any]:
        """Arguments of :class:`TrainSettings` for a training here, logged 20 times or more, evaluated 10 times."""
        how = {"precision": self.precision, "device": self.device, "seed": seed, "cuda_graph": self.cuda_graph}
        how |= {"log_every": max(1, min(50, steps // 20)), "evaluate_every": max(1, steps // evaluations)}
        return how | options


log = logging.getLogger(__name__)
# What every run imports after its training has begun, and with figures; `Experiment.imports` says what some rows do.
ALWAYS = ("accelerate", "scipy.special", "tensorboard.compat")
DRAWN = ("matplotlib.figure", "PIL.Image")
NO_COST: Mapping[str, Any] = {"encoder_passes": 0, "updates": 0, "wall_s": 0.0}
R = TypeVar("R")
D = TypeVar("D")
M = TypeVar("M")
T = TypeVar("T")
S = TypeVar("S")


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse, with an InputError, seeds that NumPy's generators do not take."""
    for seed in seeds:
        if not 0 <= seed < 2**32:
            raise InputError(f"a seed is a whole number from 0 to {2**32 - 1}, got {seed}")


@dataclass(frozen=True)
class Context(Generic[R, D, M]):
    """One row of an experiment for one seed: all that its training may depend on.

    Args:
        name: of the row, `method`, in the table and of its folder; seed: of weights and orders.
        run: the open folder of the run; None: nothing is written.
        start: the folder of the pretraining that the row starts from, if it has one.
        before: what that pretraining has cost, its budget and `wall_s`; shared: rows share it; place: "run 4 of 21".
    """

    name: str
    method: M
    seed: int
    recipe: R
    data: D
    machine: Machine = field(default_factory=Machine)
    run: RunFolder | None = None
    start: Path | None = None
    before: Mapping[str, Any] = field(default_factory=lambda: NO_COST)
    shared: bool = False
    place: str = ""

    @property
    def folder(self) -> RunFolder:
        if self.run is None:
            raise ValueError(f"{self.name} has no run folder")
        return self.run


@dataclass(frozen=True)
class Training:
    """What :func:`metapretrain.training.train` is called with; see there."""

    step: nn.Module
    stream: Any
    settings: TrainSettings
    evaluate: Callable[[int], Mapping[str, float]] | None
    title: str
    keep_best: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run adds to its `result.json`: metrics, its cost in passes and updates, and fields that replace others."""

    metrics: Mapping[str, float]
    budget: Mapping[str, int]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment(ABC, Generic[R, D, M, T, S]):
    """An experiment: what the methods of a table share, and how one of them is trained and scored.

    A subclass says how a row is trained, scored and saved; see the abstract methods.

    Args:
        benchmark: such as `stl10`; dataset and recipe name the folder below it, in `out`.
        data: has `counts` and `test`, which is empty while a recipe is chosen.
        figures: draw figures of the runs with this seed; None for none.
        resume: go on with runs that were cut short and keep finished ones.
        map_points: points in a panel of a map of embeddings; reducer: what maps are drawn by, `tsne` or `umap`.
        layout: of the table, kept in its folder; None: a column for each metric.
        draw: draws further figures of the table's folder and returns their files.
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
    draw: Callable[[Path], list[Path]] | None = None

    def check_row(self, name: str, method: M) -> None:
        """Refuse a row that cannot be run with this recipe and data; by default none."""

    def imports(self, method: Any) -> Iterable[str]:
        """Modules of other packages that this row, or pretraining, imports once it runs, besides those of every row."""
        return ()

    @abstractmethod
    def plan(self, methods: Mapping[str, M]) -> list[str]:
        """Return one line per row with its budget: what `--dry-run` prints."""

    @abstractmethod
    def model(self, method: Any) -> dict[str, Any]:
        """Return what a saved model of this row, or pretraining, needs to be built again."""

    @property
    @abstractmethod
    def files(self) -> dict[str, Any]:
        """The files that were read, with checksums."""

    def pretraining_run(self, method: M) -> tuple[str, Any] | None:
        """Return name and method of the pretraining that a row shares with others, or None."""
        return None

    def pretrain(self, context: Context[R, D, Any]) -> T:
        """Train a pretraining that rows share."""
        raise NotImplementedError(f"rows of {self.benchmark} share no pretraining")

    @abstractmethod
    def train(self, context: Context[R, D, M]) -> T:
        """Train a row, from the weights in `context.start` where it has a pretraining."""

    @abstractmethod
    def score(self, context: Context[R, D, Any], trained: T) -> S:
        """Score what was trained."""

    @abstractmethod
    def outcome(self, context: Context[R, D, Any], trained: T, scores: S) -> Outcome:
        """Return what the result says: metrics and budget."""

    @abstractmethod
    def save(self, context: Context[R, D, Any], trained: T, scores: S) -> None:
        """Write model and predictions into the run's folder."""

    def batches(self, methods: Mapping[str, M], seeds: Sequence[int]) -> Iterable[list[Context[R, D, Any]]]:
        """The rows, in batches that are trained together: one at a time, unless an experiment says otherwise."""
        return ([self.context(name, method, seed)] for seed in seeds for name, method in methods.items())

    def train_together(self, contexts: Sequence[Context[R, D, Any]]) -> Iterable[T]:
        """Train the rows of a batch, or pretrainings, one after the other unless an experiment says otherwise."""
        return map(self.pretrain if contexts[0].shared else self.train, contexts)

    @property
    def names(self) -> dict[str, str]:
        return {"benchmark": self.benchmark, "dataset": self.dataset, "recipe": self.recipe_name}

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
        return self.out / self.benchmark / f"{self.dataset}-{self.recipe_name}"

    def path(self, name: str, seed: int) -> Path:
        """The folder of one run."""
        return self.root / f"{name}-s{seed}"

    def config(self, method: Any) -> dict[str, Any]:
        """Return what a run of this row, or pretraining, may not differ in, but for its names and seed."""
        return {"choices": self._choices(), "model": self.model(method), "data": self._data()}

    def whole_config(self, name: str, method: Any, seed: int) -> dict[str, Any]:
        """Return what the folder of one run keeps of how it was made."""
        about = {"method": name, "seed": seed, "precision": self.machine.precision}
        return {**self.names, **about, **self.config(method)}

    def context(self, name: str, method: M, seed: int, shared: bool = False) -> Context[R, D, Any]:
        """The context of one row, or pretraining, before its folder is open."""
        return Context(name, method, seed, self.recipe, self.data, self.machine, shared=shared)

    def check(self, methods: Mapping[str, M], seeds: Sequence[int]) -> None:
        """Refuse now, before anything is trained, with an InputError, what a row would refuse when its turn comes."""
        check_seeds(seeds)
        if told := self.lacking(methods, seeds):
            raise InputError(told)
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

    def lacking(self, methods: Mapping[str, M], seeds: Sequence[int], load: bool = True) -> str:
        """What rows and pretrainings that are still to run cannot import here, in one line; empty: nothing.

        Without `load` nothing is imported, and packages that are there are taken to be whole.
        """

        def done(name: str) -> bool:
            return all((self.path(name, seed) / "result.json").is_file() for seed in seeds)

        told: dict[str, list[str]] = {}
        drawn = {} if self.figures is None else dict.fromkeys(DRAWN, "; or give --no-figures")
        for name, method in methods.items():
            plan = self.pretraining_run(method)
            parts = [method] if plan is None or done(plan[0]) else [method, plan[1]]
            later = dict.fromkeys((*ALWAYS, *(module for part in parts for module in self.imports(part))), "")
            for module, instead in ({} if self.resume and done(name) else drawn | later).items():
                if (why := lacking(module, load)) is not None and name not in told.setdefault(why + instead, []):
                    told[why + instead].append(name)
        kept = [name for name in methods if not any(name in rows for rows in told.values())]
        lines = []
        for why, rows in told.items():
            named = "all rows" if 1 < len(rows) == len(methods) else ", ".join(rows)
            lines.append(f"{named} need{'s' * (len(rows) == 1)} {why}")
        return "; ".join(lines) + f"; or run the other rows alone: --methods {','.join(kept)}" * bool(told and kept)

    def rows(self, methods: Mapping[str, M], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Run every row for every seed, after their pretrainings; yield the results of the rows."""
        for batch in self.work(methods, seeds):
            results = self.run(batch)
            if not batch[0].shared:
                yield from results

    def row(self, name: str, method: M, seed: int) -> dict[str, Any]:
        """Run one row of the table for one seed, after its pretraining; a finished one is kept if `resume` is set."""
        (result,) = self.rows({name: method}, [seed])
        return result

    def left(self, methods: Mapping[str, M], seeds: Sequence[int]) -> list[Path]:
        """The folders of the runs that :meth:`work` would do now, in order."""
        found = [one for batch in self.work(methods, seeds) for one in batch]
        done = [not one.shared and self.resume and bool(self.finished(one.name, one.method, one.seed)) for one in found]
        return [self.path(one.name, one.seed) for one, kept in zip(found, done, strict=True) if not kept]

    def work(self, methods: Mapping[str, M], seeds: Sequence[int]) -> Iterator[list[Context[R, D, Any]]]:
        """Yield what :meth:`run` is to be called with, one batch after the other: pretrainings before their rows."""
        for batch in self.batches(methods, seeds):
            due = [one for one in batch if not (self.resume and self.finished(one.name, one.method, one.seed))]
            plans = [(self.pretraining_run(one.method), one.seed) for one in due]
            wanted = [self.context(*plan, seed, shared=True) for plan, seed in plans if plan is not None]
            missing = [one for one in wanted if self.finished(one.name, one.method, one.seed) is None]
            if missing:
                yield missing
            yield batch

    def run(self, batch: Sequence[Context[R, D, Any]]) -> list[dict[str, Any]]:
        """Run rows that are trained together; return their results. Finished ones are kept if `resume` is set."""
        kept = [self.kept(one) for one in batch]
        results = [done for done in kept if done is not None]
        with ExitStack() as opened:
            opened.callback(PLACE.reset, PLACE.set(batch[0].place))
            todo = [self._opened(one, opened) for one, done in zip(batch, kept, strict=True) if done is None]
            for one, trained in zip(todo, self.train_together(todo) if todo else (), strict=True):
                scores = self.score(one, trained)
                outcome = self.outcome(one, trained, scores)
                if self.machine.rank == 0:
                    self.save(one, trained, scores)
                results.append(self.finish(one, outcome))
        return results

    def _opened(self, context: Context[R, D, Any], opened: ExitStack) -> Context[R, D, Any]:
        """The context with its folder open, and what it starts from."""
        name, method, seed = context.name, context.method, context.seed
        plan = None if context.shared else self.pretraining_run(method)
        if plan is not None and (done := self.finished(*plan, seed)) is not None:
            # Read even where it was just written, so that a run that goes on later starts from the very same weights.
            before = {**done["budget"], "wall_s": done["wall_s"]}
            context = replace(context, start=self.path(plan[0], seed), before=before)
            check_sums(self.path(plan[0], seed))
        run = opened.enter_context(self.open(name, method, seed))
        if self.resume and not run.checkpoints.is_dir():  # it begins anew, perhaps without a training that cuts back
            run.cut_back(-1)
        run.steps_before = context.before.get("updates", 0)
        return replace(context, run=run)

    def finished(self, name: str, method: Any, seed: int) -> dict[str, Any] | None:
        """Return the result of a run that is done, or None; one of another configuration or kind is an InputError."""
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
        return "row" if len(self._test) else "tuning"

    @property
    def _test(self) -> Any:
        data: Any = self.data
        return data.test

    def kept(self, context: Context[R, D, Any]) -> dict[str, Any] | None:
        """Return the result of a run that is done and may be kept, by `resume`, or None."""
        done = self.finished(context.name, context.method, context.seed) if self.resume else None
        if done is not None:
            log.info("%s seed %d: already done", context.name, context.seed)
        return done

    def open(self, name: str, method: Any, seed: int, resume: bool | None = None) -> RunFolder:
        """Open the folder of one run; one of another configuration, not to be resumed or in use is an InputError."""
        machine, again = self.machine, self.resume if resume is None else resume
        how: dict[str, Any] = {"main": machine.rank == 0, "device": machine.device, "log_to": machine.log_to}
        return RunFolder.open(self.path(name, seed), self.whole_config(name, method, seed), resume=again, **how)

    def finish(self, context: Context[R, D, Any], outcome: Outcome) -> dict[str, Any]:
        """Write the result of a run, after its model and predictions; return it."""
        run, name, seed = context.folder, context.name, context.seed
        data: Any = self.data
        if self.machine.rank != 0:
            wait_for_all(self.machine.world)
            return {}
        write_sums(run.path)
        run.hparams({"method": name, "seed": seed, "recipe": self.recipe_name}, outcome.metrics)
        kind = "pretraining" if context.shared else self._kind
        found: dict[str, Any] = {**self.names, "method": name, "seed": seed, "kind": kind}
        found |= {"metrics": dict(outcome.metrics), "counts": data.counts, "budget": dict(outcome.budget)}
        found |= {"data": self.files, **outcome.extra}
        run.finish(found | ({"processes": self.machine.world} if self.machine.world > 1 else {}))
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # the weights stand beside result.json
        if len(self._test):
            self.save_layout()
        wait_for_all(self.machine.world)  # the others may look for result.json now
        result = run.result() or {}
        log.info("%s seed %d: done in %.0f s", name, seed, result.get("wall_s", 0))
        return result

    def _choices(self) -> dict[str, Any]:
        recipe: Any = self.recipe
        found = asdict(recipe)
        # runs without may go on that began before there were any
        new = {"scheduler": ("", None), "updates": (None,), "joint_weight": (0.5,)}
        return {name: value for name, value in found.items() if name not in new or value not in new[name]}

    def _data(self) -> dict[str, Any]:
        data: Any = self.data
        return {"counts": data.counts, "files": self.files}
