"""How fast the package is beside other libraries: every row measured with its peers in this process.

A row is a function that returns the contenders of one piece of work; @row(name, unit) registers it.
Contenders take turns, so that a change in the machine's load meets all of them. The clock is the CPU time of
this thread, which other processes disturb least; a row with work on a GPU or in other processes gives its
contenders another clock.

    python benchmarks/run_speed.py --rows planning-omniglot
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from metapretrain.episodes import EpisodeSampler, EpisodeSpec
from metapretrain.options import Parser, main_guard, names, positive_int


@dataclass(frozen=True)
class Settings:
    """`repeats` timings of each contender, each of at least `seconds`."""

    repeats: int
    seconds: float


class Missing(Exception):
    """A peer that is not installed; the message says how to install it."""


@dataclass(frozen=True)
class Contender:
    """Work to time: `make()` returns a function that does `n` units of it, or raises Missing."""

    name: str
    make: Callable[[], Callable[[int], None]]
    ours: bool = False
    clock: Callable[[], float] = time.thread_time


@dataclass(frozen=True)
class Result:
    """Units a second: median and range over the repeats; `ratio` to the fastest peer."""

    row: str
    name: str
    ours: bool
    median: float
    low: float
    high: float
    ratio: float | None = None
    missing: str | None = None


Row = Callable[[], list[Contender]]
ROWS: dict[str, tuple[str, Row]] = {}


def row(name: str, unit: str) -> Callable[[Row], Row]:
    """Register a row under its name; `unit` is what is counted."""

    def register(function: Row) -> Row:
        ROWS[name] = (unit, function)
        return function

    return register


def drain(iterable: Iterable[Any], n: int) -> None:
    for _ in islice(iterable, n):
        pass


def planning(classes: int, rows_a_class: int) -> list[Contender]:
    """5-way episodes of 1 shot and 15 queries: plans as iterated, and learn2learn's task descriptions."""
    labels = np.repeat(np.arange(classes), rows_a_class)

    def ours() -> Callable[[int], None]:
        plans = iter(EpisodeSampler(labels, EpisodeSpec(5, 1, 15), None, seed=0))
        return lambda n: drain(plans, n)

    def arrays_only() -> Callable[[int], None]:
        sampler = EpisodeSampler(labels, EpisodeSpec(5, 1, 15), None, seed=0)
        planner = sampler._planner

        def plan_blocks(n: int) -> None:
            for block in range(-(-n // planner.block_size)):
                planner.block(0, block)

        return plan_blocks

    def learn2learn(separate: bool) -> Callable[[], Callable[[int], None]]:
        def make() -> Callable[[int], None]:
            dataset, transforms = learn2learn_dataset(labels)
            ways_and_shots = (
                [transforms.NWays(dataset, n=5), transforms.KShots(dataset, k=16)]
                if separate
                else [transforms.FusedNWaysKShots(dataset, n=5, k=16)]
            )
            return learn2learn_planning(dataset, ways_and_shots)

        return make

    return [
        Contender("EpisodeSampler, plans iterated", ours, ours=True),
        Contender("EpisodeSampler, blocks of arrays only", arrays_only, ours=True),
        Contender("learn2learn NWays + KShots", learn2learn(separate=True)),
        Contender("learn2learn FusedNWaysKShots", learn2learn(separate=False)),
    ]


def learn2learn_dataset(labels: np.ndarray) -> tuple[Any, Any]:
    try:
        import learn2learn
    except ImportError:
        raise Missing("learn2learn (installed by `make`, see the README)") from None
    import torch

    data = torch.utils.data.TensorDataset(torch.zeros(len(labels), 1), torch.from_numpy(labels))
    by_index = dict(enumerate(labels.tolist()))
    return learn2learn.data.MetaDataset(data, indices_to_labels=by_index), learn2learn.data.transforms


def learn2learn_planning(dataset: Any, transforms: list[Any]) -> Callable[[int], None]:
    import learn2learn

    taskset = learn2learn.data.Taskset(dataset, transforms)

    def plan(n: int) -> None:
        for _ in range(n):
            taskset.sample_task_description()

    return plan


@row("planning-omniglot", "episodes")
def planning_omniglot() -> list[Contender]:
    """Planning on Omniglot's shape, 1,623 classes of 20."""
    return planning(1623, 20)


@row("planning-large-classes", "episodes")
def planning_large_classes() -> list[Contender]:
    """Planning on STL-10's shape, 10 classes of 500."""
    return planning(10, 500)


@row("loading-tensor", "episodes")
def loading_tensor() -> list[Contender]:
    """Planning and reading 5-way episodes of 16 each out of 28x28 images in memory, in this process."""
    import torch

    from metapretrain.episodes import EpisodeLoader

    labels = np.repeat(np.arange(1623), 20)
    images = torch.zeros(len(labels), 1, 28, 28)

    def ours() -> Callable[[int], None]:
        episodes = iter(EpisodeLoader(images, EpisodeSampler(labels, EpisodeSpec(5, 1, 15), None, seed=0)))
        return lambda n: drain(episodes, n)

    def ours_by_item() -> Callable[[int], None]:
        data = torch.utils.data.TensorDataset(images, torch.from_numpy(labels))
        episodes = iter(EpisodeLoader(data, EpisodeSampler(labels, EpisodeSpec(5, 1, 15), None, seed=0)))
        return lambda n: drain(episodes, n)

    def learn2learn() -> Callable[[int], None]:
        dataset, transforms = learn2learn_dataset(labels)
        dataset.dataset = torch.utils.data.TensorDataset(images, torch.from_numpy(labels))
        steps = [transforms.FusedNWaysKShots(dataset, n=5, k=16), transforms.LoadData(dataset)]
        import learn2learn as l2l

        taskset = l2l.data.Taskset(dataset, [*steps, transforms.RemapLabels(dataset)])
        return lambda n: drain(taskset, n)

    return [
        Contender("EpisodeLoader of a tensor", ours, ours=True),
        Contender("EpisodeLoader of a TensorDataset", ours_by_item, ours=True),
        Contender("learn2learn Taskset with LoadData", learn2learn),
    ]


@row("prototypical-loss", "steps")
def prototypical_loss() -> list[Contender]:
    """Loss and gradient of 128 embeddings of 512 numbers, 10 classes, standard mode."""
    import torch
    from torch.nn.functional import cross_entropy

    from metapretrain.protonet import ProtoLoss

    z = torch.randn(128, 512, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = torch.arange(128) % 10

    def steps(loss: Callable[[Any, Any], Any]) -> Callable[[int], None]:
        def run(n: int) -> None:
            for _ in range(n):
                z.grad = None
                loss(z, y).backward()

        return run

    def easyfsl() -> Callable[[int], None]:
        try:
            from easyfsl.methods import PrototypicalNetworks
        except ImportError:
            raise Missing("easyfsl (pip install easyfsl)") from None
        network = PrototypicalNetworks(torch.nn.Identity())

        def loss(z: Any, y: Any) -> Any:
            network.process_support_set(z, y)
            return cross_entropy(network(z), y)

        return steps(loss)

    def learn2learn() -> Callable[[int], None]:
        try:
            from learn2learn.nn import PrototypicalClassifier
        except ImportError:
            raise Missing("learn2learn (installed by `make`, see the README)") from None
        return steps(lambda z, y: cross_entropy(PrototypicalClassifier(z, y)(z), y))

    return [
        Contender("ProtoLoss", lambda: steps(ProtoLoss(num_classes=10)), ours=True),
        Contender("ProtoLoss, any labels", lambda: steps(ProtoLoss()), ours=True),
        Contender("ProtoLoss, query mode", lambda: steps(ProtoLoss("query", num_classes=10)), ours=True),
        Contender("easyfsl PrototypicalNetworks", easyfsl),
        Contender("learn2learn PrototypicalClassifier (squared)", learn2learn),
    ]


def measure(name: str, contenders: list[Contender], settings: Settings) -> list[Result]:
    """Time the contenders in turns; work is sized so that one timing lasts `seconds`."""
    running: list[tuple[Contender, Callable[[int], None], int]] = []
    missing = []
    for contender in contenders:
        try:
            work = contender.make()
        except Missing as error:
            missing.append(Result(name, contender.name, contender.ours, 0, 0, 0, missing=str(error)))
            continue
        running.append((contender, work, calibrate(contender, work, settings.seconds)))
    rates: dict[str, list[float]] = {contender.name: [] for contender, _, _ in running}
    for _ in range(settings.repeats):
        for contender, work, n in running:
            begin = contender.clock()
            work(n)
            rates[contender.name].append(n / (contender.clock() - begin))
    medians = {contender.name: statistics.median(rates[contender.name]) for contender, _, _ in running}
    best_peer = max((medians[c.name] for c, _, _ in running if not c.ours), default=None)
    results = []
    for contender, _, _ in running:
        values, median = rates[contender.name], medians[contender.name]
        ratio = median / best_peer if best_peer else None
        results.append(Result(name, contender.name, contender.ours, median, min(values), max(values), ratio))
    return results + missing


def calibrate(contender: Contender, work: Callable[[int], None], seconds: float) -> int:
    n = 64
    while True:
        begin = contender.clock()
        work(n)
        spent = contender.clock() - begin
        if spent > seconds / 4:
            return max(1, int(n * seconds / spent))
        n *= 4


def table(results: list[Result]) -> str:
    lines = ["| row | contender | median/s | range | to the best peer |", "|---|---|---|---|---|"]
    for r in results:
        if r.missing:
            lines.append(f"| {r.row} | {r.name} | skipped: needs {r.missing} | | |")
            continue
        ratio = f"{r.ratio:.2f}x" if r.ratio else ""
        unit = ROWS[r.row][0]
        lines.append(
            f"| {r.row} | {r.name} | {r.median:,.0f} {unit} | {r.low:,.0f} to {r.high:,.0f} | {ratio} |"
        )
    return "\n".join(lines)


def build_parser() -> Parser:
    parser = Parser(prog="run_speed.py", description="Speed beside other libraries, measured in one process.")
    parse = names("row", tuple(ROWS))
    parser.add_argument("--rows", type=parse, default=parse("all"), metavar="A,B|all", help=", ".join(ROWS))
    parser.add_argument(
        "--repeats", type=positive_int, default=9, help="timings of each contender (default: 9)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the results there, as JSON")
    parser.add_argument("--smoke", action="store_true", help="two short timings each, to see that all works")
    return parser


@main_guard
def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen rows and print their table."""
    options = build_parser().parse_args(argv)
    settings = Settings(2, 0.01) if options.smoke else Settings(options.repeats, 0.5)
    results = []
    for name in options.rows:
        results += measure(name, ROWS[name][1](), settings)
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}\n")
    print(table(results))
    if options.out:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
