"""How fast the package is beside other libraries: every row measured with its peers in this process.

A row is a function that returns the contenders of one piece of work; @row(name, unit) registers it.
Contenders take turns, so that a change in the machine's load meets all of them. The clock is the CPU time of
this thread, which other processes disturb least; a row with work on a GPU or in other processes gives its
contenders another clock.

    python benchmarks/run_speed.py --rows planning-omniglot
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from speed_contenders import Contender, Missing, count_kernels, device_clock

from metapretrain.episodes import EpisodeSampler, EpisodeSpec
from metapretrain.options import Parser, main_guard, names, positive_int
from metapretrain.training.files import write_file


@dataclass(frozen=True)
class Settings:
    """`repeats` timings of each contender, each of at least `seconds`."""

    repeats: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """Units a second: median and range over the repeats; `ratio` to the fastest peer.

    `kernels` that one call starts (operations, on a CPU) and how often it waits for the GPU, where counted.
    """

    row: str
    name: str
    ours: bool
    median: float
    low: float
    high: float
    ratio: float | None = None
    missing: str | None = None
    difference: float | None = None
    kernels: int | None = None
    waits: int | None = None


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


@row("augment-plain", "images")
def augment_plain() -> list[Contender]:
    """Random crop and mirror of 128 x 3 x 96 x 96."""
    from speed_images import augmentation

    return augmentation("plain")


@row("augment-strong", "images")
def augment_strong() -> list[Contender]:
    """With colour, grey and cutout."""
    from speed_images import augmentation

    return augmentation("strong")


@row("augment-simclr", "images")
def augment_simclr() -> list[Contender]:
    """With colour, grey and blur."""
    from speed_images import augmentation

    return augmentation("simclr")


@row("train", "images")
def train() -> list[Contender]:
    """Training ResNet-18 at 96 pixels."""
    from speed_images import training

    return training()


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


@dataclass(frozen=True)
class MamlWork:
    """A meta-step: the mean query loss of `tasks` tasks after `steps` inner steps, and its gradient."""

    tasks: int
    shots: int
    queries: int
    size: int
    channels: int
    width: int
    steps: int
    order: int
    pooled: bool
    ways: int = 5
    rate: float = 0.1

    def network(self) -> Any:
        """CNN4: four blocks of convolution, batch normalisation, ReLU, and stride 2 or max-pooling."""
        from torch import nn

        layers: list[Any] = []
        for inputs in (self.channels, *[self.width] * 3):
            stride = 1 if self.pooled else 2
            layers += [nn.Conv2d(inputs, self.width, 3, stride, 1), nn.BatchNorm2d(self.width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if self.pooled else []
        features = self.width * (25 if self.pooled else 4)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, self.ways))

    def data(self, device: str, dtype: Any) -> Any:
        import torch

        generator = torch.Generator().manual_seed(0)

        def part(each: int) -> tuple[Any, Any]:
            shape = self.tasks, self.ways * each, self.channels, self.size, self.size
            x = torch.randn(shape, generator=generator).to(device, dtype)
            return x, torch.arange(self.ways, device=device).repeat(self.tasks, each)

        return part(self.shots), part(self.queries)


def meta_step_of_engine(engine: str) -> Any:
    def make(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
        from metapretrain import MAML

        maml = MAML(net, work.rate, work.order == 1, steps=work.steps, engine=engine)
        return lambda: maml.backward(support, query)

    return make


def meta_step_of_learn2learn(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
    from torch.nn.functional import cross_entropy

    try:
        import learn2learn
    except ImportError:
        raise Missing("learn2learn (installed by `make`, see the README)") from None
    maml = learn2learn.algorithms.MAML(net, work.rate, first_order=work.order == 1)

    def step() -> None:
        for t in range(work.tasks):
            learner = maml.clone()
            for _ in range(work.steps):
                learner.adapt(cross_entropy(learner(support[0][t]), support[1][t]))
            (cross_entropy(learner(query[0][t]), query[1][t]) / work.tasks).backward()

    return step


def meta_step_of_higher(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
    import torch
    from torch.nn.functional import cross_entropy

    try:
        import higher
    except ImportError:
        raise Missing("higher (pip install higher)") from None
    optimizer = torch.optim.SGD(net.parameters(), lr=work.rate)

    def constant(gradients: Any) -> Any:
        return [g.detach() for g in gradients] if work.order == 1 else gradients

    def step() -> None:
        for t in range(work.tasks):
            with higher.innerloop_ctx(net, optimizer, copy_initial_weights=False) as (made, inner):
                for _ in range(work.steps):
                    inner.step(cross_entropy(made(support[0][t]), support[1][t]), grad_callback=constant)
                (cross_entropy(made(query[0][t]), query[1][t]) / work.tasks).backward()

    return step


def meta_step_of_torchopt(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
    from torch.nn.functional import cross_entropy

    try:
        import torchopt
    except ImportError:
        raise Missing("torchopt (pip install torchopt)") from None
    if work.order == 1:
        raise Missing("first order, which torchopt has not")
    optimizer = torchopt.MetaSGD(net, lr=work.rate)

    def step() -> None:
        weights = torchopt.extract_state_dict(net, by="reference", detach_buffers=True)
        state = torchopt.extract_state_dict(optimizer, by="reference")
        for t in range(work.tasks):
            for _ in range(work.steps):
                optimizer.step(cross_entropy(net(support[0][t]), support[1][t]))
            (cross_entropy(net(query[0][t]), query[1][t]) / work.tasks).backward()
            torchopt.recover_state_dict(net, weights)
            torchopt.recover_state_dict(optimizer, state)

    return step


def maml(work: MamlWork) -> list[Contender]:
    """Meta-steps on the GPU if there is one, else on the CPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def prepared(make: Any, dtype: Any) -> tuple[Any, Callable[[], Any]]:
        torch.manual_seed(0)
        net = work.network().to(device, dtype)
        return net, make(work, net, *work.data(device, dtype))

    def timed(make: Any) -> Callable[[int], None]:
        net, step = prepared(make, torch.float32)

        def steps(n: int) -> None:
            for _ in range(n):
                net.zero_grad()
                step()
            if device == "cuda":
                torch.cuda.synchronize()

        return steps

    def gradient(make: Any) -> Any:
        net, step = prepared(make, torch.float64)
        starts = list(net.parameters())
        step()
        return torch.cat([p.grad.flatten() for p in starts])

    reference = functools.cache(lambda: gradient(meta_step_of_engine("loop")))

    def difference(make: Any) -> float:
        return float((gradient(make) - reference()).norm() / reference().norm())

    def contender(name: str, make: Any, ours: bool = False) -> Contender:
        return Contender(name, lambda: timed(make), ours, device_clock(), lambda: difference(make))

    return [
        contender("engine loop", meta_step_of_engine("loop"), ours=True),
        contender("engine vmap", meta_step_of_engine("vmap"), ours=True),
        contender("engine mixed", meta_step_of_engine("mixed"), ours=True),
        contender(f"engine auto: {chosen(work, device)}", meta_step_of_engine("auto"), ours=True),
        contender("learn2learn", meta_step_of_learn2learn),
        contender("higher", meta_step_of_higher),
        contender("torchopt", meta_step_of_torchopt),
    ]


def chosen(work: MamlWork, device: str) -> str:
    """The engine that `auto` takes."""
    import torch
    from torch.nn.functional import cross_entropy

    from metapretrain.maml import engine_for, functional

    apply, params, buffers = functional(work.network().to(device))

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(apply(params, buffers, batch[0]), batch[1])

    data = work.data(device, torch.float32)
    return engine_for(loss, params, *data, lr=work.rate, tasks=work.tasks).engine


def omniglot(steps: int, order: int) -> list[Contender]:
    import torch

    tasks = 32 if torch.cuda.is_available() else 8
    return maml(MamlWork(tasks, 1, 15, 28, 1, 64, steps, order, pooled=False))


@row("maml-omniglot-1-step", "meta-steps")
def maml_omniglot_1() -> list[Contender]:
    """CNN4-64, 28x28, 5-way 1-shot, 15 queries a class, 1 inner step, 32 tasks (8 on a CPU)."""
    return omniglot(1, 2)


@row("maml-omniglot-5-steps", "meta-steps")
def maml_omniglot_5() -> list[Contender]:
    """The same with 5 inner steps."""
    return omniglot(5, 2)


@row("maml-84-5-steps", "meta-steps")
def maml_84() -> list[Contender]:
    """CNN4-32 with max-pooling, 84x84 in colour, 5-way 1-shot, 15 queries a class, 5 inner steps, 4 tasks."""
    return maml(MamlWork(4, 1, 15, 84, 3, 32, 5, 2, pooled=True))


@row("fomaml-omniglot-1-step", "meta-steps")
def fomaml_omniglot_1() -> list[Contender]:
    """First order, 1 inner step."""
    return omniglot(1, 1)


@row("fomaml-omniglot-5-steps", "meta-steps")
def fomaml_omniglot_5() -> list[Contender]:
    """First order, 5 inner steps."""
    return omniglot(5, 1)


@row("fomaml-84-5-steps", "meta-steps")
def fomaml_84() -> list[Contender]:
    """First order at 84x84."""
    return maml(MamlWork(4, 1, 15, 84, 3, 32, 5, 1, pooled=True))


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
            rates[contender.name].append(n * contender.each / (contender.clock() - begin))
    medians = {contender.name: statistics.median(rates[contender.name]) for contender, _, _ in running}
    best_peer = max((medians[c.name] for c, _, _ in running if not c.ours), default=None)
    results = []
    for contender, work, _ in running:
        values, median = rates[contender.name], medians[contender.name]
        ratio = median / best_peer if best_peer else None
        difference = contender.difference() if contender.difference else None
        spread = min(values), max(values)
        kernels, waits = counted(work) if contender.count else (None, None)
        results.append(Result(name, contender.name, contender.ours, median, *spread, ratio,
                              difference=difference, kernels=kernels, waits=waits))  # fmt: skip
    return results + missing


def counted(work: Callable[[int], None]) -> tuple[int, int | None]:
    """Kernels and waits of one call: two calls less one, so that the wait after the last one drops out."""
    (two, waited_twice), (one, waited) = count_kernels(lambda: work(2)), count_kernels(lambda: work(1))
    return two - one, None if waited is None or waited_twice is None else waited_twice - waited


def calibrate(contender: Contender, work: Callable[[int], None], seconds: float) -> int:
    work(1)
    n = 1
    while True:
        begin = contender.clock()
        work(n)
        spent = contender.clock() - begin
        if spent > seconds / 4:
            return max(1, int(n * seconds / spent))
        n *= 4


def table(results: list[Result]) -> str:
    lines = [
        "| row | contender | median/s | range | to the best peer | gradient differs by | kernels / waits |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if r.missing:
            lines.append(f"| {r.row} | {r.name} | skipped: needs {r.missing} | | | | |")
            continue
        ratio = f"{r.ratio:.2f}x" if r.ratio else ""
        unit = ROWS[r.row][0]
        differs = "" if r.difference is None else f"{r.difference:.0e}"
        low, median, high = (f"{value:,.{0 if value >= 100 else 3}f}" for value in (r.low, r.median, r.high))
        started = " / ".join(f"{count:,}" for count in (r.kernels, r.waits) if count is not None)
        lines.append(f"| {r.row} | {r.name} | {median} {unit} | {low} to {high} | {ratio} | {differs} | {started} |")
    return "\n".join(lines)


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(prog="run_speed.py", description="Speed beside other libraries, measured in one process.")
    groups = [name.partition("-")[0] for name in ROWS]
    groups = [name for name in dict.fromkeys(groups) if groups.count(name) > 1]
    parse = names("row", (*ROWS, *groups))
    about = f"{', '.join(ROWS)}; or all rows of {', '.join(groups)}"
    parser.add_argument("--rows", type=parse, default=list(ROWS), metavar="A,B|all", help=about)
    parser.add_argument("--repeats", type=positive_int, default=9, help="timings of each contender (default: 9)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the results there, as JSON")
    parser.add_argument("--smoke", action="store_true", help="two short timings each, to see that all works")
    options: Namespace = parser.parse_args(argv)
    return options


@main_guard
def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen rows and print their table."""
    options = options_of(argv)
    settings = Settings(2, 0.01) if options.smoke else Settings(options.repeats, 0.5)
    where = surroundings()
    rows = [name for name in ROWS if {name, name.partition("-")[0]} & set(options.rows)]
    results = []
    for name in rows:
        results += measure(name, ROWS[name][1](), settings)
    print("; ".join(f"{key} {value}" for key, value in where.items()) + "\n")
    print(table(results))
    if options.out:
        content = {**where, "rows": [{"unit": ROWS[result.row][0], **asdict(result)} for result in results]}
        write_file(options.out, json.dumps(content, indent=1) + "\n")


def surroundings() -> dict[str, str]:
    """Hardware and versions, in words."""
    import torch

    from metapretrain.training.environment import commit, versions

    kinds = [line.partition(":")[2] for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    processor = (kinds[0].strip() if kinds else platform.processor()) or platform.machine()
    hardware = f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)"
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.get_device_name()}; {hardware}"
    peers = ("learn2learn", "higher", "torchopt", "easyfsl", "kornia", "torchvision")
    found = {**versions(), **{name: version_of(name) for name in peers}}
    listed = ("python", "torch", "numpy", *peers)
    return {
        "hardware": hardware,
        "versions": ", ".join(f"{name} {found[name]}" for name in listed if found.get(name)),
        "commit": commit() or "unknown",
        "load": f"{os.getloadavg()[0]:.1f} at the start",
    }


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.is_file() else []


if __name__ == "__main__":
    sys.exit(main())
