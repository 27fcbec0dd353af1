"""Rows of run_speed.py about several processes: updates of one global batch, shared by 1, 2 or 4 of them.

On a GPU their updates are recorded as CUDA graphs; one process is measured without as well. One process with half the
batch does what each of two does, but for the communication: twice its speed is the most that two processes reach.

Each group of processes stays where it is while the others are timed, and does as many updates as it is told on stdin.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from speed_contenders import Contender, Missing, engine_of, here, wait

WORLDS = (1, 2, 4)
HALF_BATCH = "1 process, half the batch"
BOUND = "2 processes reach at most twice this"


def images(rank: int, world: int) -> tuple[Any, Any, int]:
    """PRL in query mode, prototypes gathered: ResNet-18 at 96 pixels, augmentation "strong"."""
    from metapretrain.data.augment import make_augmentation
    from metapretrain.data.images import ImageSet
    from metapretrain.episodes import ShuffledBatches
    from metapretrain.experiments.images.data import Images
    from metapretrain.experiments.images.objectives import PRL, ImageStep
    from metapretrain.models import build_encoder
    from metapretrain.protonet import ProtoLoss

    batch = here(32, 512)
    data = ImageSet(
        torch.randint(0, 256, (2 * batch, 3, 96, 96), dtype=torch.uint8),
        torch.arange(2 * batch) % 10,
        list("abcdefghij"),
    )
    source = Images(data, make_augmentation("strong", 96, 3, (0.45, 0.44, 0.40), (0.26, 0.26, 0.27)))
    proto = ProtoLoss("query", num_classes=10, gather=world > 1)
    encoder = build_encoder("resnet18", channels=3, image_size=96)
    rows = next(iter(ShuffledBatches(2 * batch, batch // world, seed=0, rank=rank, world_size=world)))
    return ImageStep(encoder, {"prl": PRL(source, proto)}), {"prl": rows}, batch


def tasks(rank: int, world: int) -> tuple[Any, Any, int]:
    """Second-order MAML: conv4 on 28 x 28, 5-way 1-shot, one inner step."""
    from fewshot_learning import EPISODES, EpisodeStacks, FewShotMethod, MetaStep, build_learner

    from metapretrain.data.registry import load_few_shot
    from metapretrain.episodes import EpisodeSpec

    data, spec, number = load_few_shot("made", None, 28), EpisodeSpec(5, 1, 5), here(8, 64)
    learner = build_learner(FewShotMethod("maml", updates=1, tasks=number), "conv4", data, 5, 0)
    batches = EpisodeStacks(data.train.labels, spec, number, seed=0, rank=rank, world_size=world)
    return MetaStep(learner, data.train.images), {EPISODES: next(iter(batches))}, number


def tokens(rank: int, world: int) -> tuple[Any, Any, int]:
    """Three text tasks with a head each, as of the row text-train."""
    from speed_text import LENGTHS, MULTIPLE, new_encoder, random_rows, size

    from metapretrain.data.made import made_tasks
    from metapretrain.data.tokens import Tokens
    from metapretrain.experiments.text.objectives import TextLabels, TextRows, TextStep, build_heads
    from metapretrain.experiments.text.recipe import TextMethod
    from metapretrain.experiments.text.streams import TextStream

    rows = {name: Tokens.from_rows(random_rows(name, size().rows)) for name in LENGTHS}
    made, encoder = made_tasks(rows=size().rows), new_encoder()
    heads = build_heads(made, TextMethod(joined=True), "mlp", encoder.features)
    step = TextStep(
        encoder, {task.name: TextLabels(TextRows(task, rows[task.name]), heads[task.name]) for task in made}
    )
    stream = TextStream(rows, size().batch, "longest", seed=0, steps=1, multiple=MULTIPLE, rank=rank, world_size=world)
    batch = next(iter(stream))
    return step, batch, stream.tokens_given


WORK = {"images": images, "tasks": tasks, "tokens": tokens}


def scaling(kind: str) -> list[Contender]:
    """Updates by groups of processes; the peer is one process. Wall time: the work is in other processes."""
    _, _, each = WORK[kind](0, 1)

    def contender(name: str, world: int, *how: str, share: int = 1, **more: Any) -> Contender:
        make, clock = (lambda: group(kind, world, *how)), time.perf_counter
        return Contender(name, make, world > 1 or share > 1, clock, each=each // share, **more)

    found = [contender("1 process, no CUDA graph", 1, "eager")] * torch.cuda.is_available()
    found += [contender(f"{world} processes" if world > 1 else "1 process", world) for world in WORLDS]
    return [*found, contender(HALF_BATCH, 1, "half", share=2, note=lambda: BOUND)]


def group(kind: str, world: int, *how: str) -> Callable[[int], None]:
    """Start the processes, with `how` as of :func:`serve`; they end with this one, whose end closes their stdin."""
    places = here(os.cpu_count(), torch.cuda.device_count())
    if world > places:
        raise Missing(f"{world} {here('cores', 'GPUs')}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    running = []
    for rank in map(str, range(world)):
        env = {
            **os.environ,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": str(world),
            "MASTER_PORT": port,
            "MASTER_ADDR": "127.0.0.1",
            **here({"OMP_NUM_THREADS": "1"}, {}),
        }
        command = [sys.executable, __file__, kind, *how]
        running.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def calls(n: int) -> None:
        for process in running:
            print(n, file=process.stdin, flush=True)
        for process in running:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "done":
                raise RuntimeError(f"a process of {world} for {kind} ended; its own error stands above")

    calls(5)  # lazy set-up, autotuning and recording are not timed
    return calls


def serve(kind: str, *how: str) -> None:
    """One process of a group. `how`: "eager", without CUDA graphs; "half", with the batch of the first of two.

    Raises:
        RuntimeError: updates that were to be recorded as CUDA graphs were not.
    """
    from metapretrain.training.engine import records
    from metapretrain.training.environment import make_accelerator
    from metapretrain.training.settings import TrainSettings

    precision = here("fp32", "bf16") if kind != "tasks" else "fp32"
    accelerator = make_accelerator("auto", precision)
    torch.manual_seed(0)
    rank, world = (0, 2) if "half" in how else (accelerator.process_index, accelerator.num_processes)
    step, batch, _ = WORK[kind](rank, world)
    settings = TrainSettings(steps=1, lr=1e-5, precision=precision, cuda_graph=False if "eager" in how else None)
    engine = engine_of(step, accelerator, settings)
    for line in sys.stdin:
        for _ in range(int(line)):
            engine.update([batch])
        wait()
        if records(accelerator, settings) and not engine.recorder.graphs:
            raise RuntimeError(f"updates of {kind} are not recorded as a CUDA graph")
        print("done", flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
