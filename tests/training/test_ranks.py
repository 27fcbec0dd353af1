"""Two processes give the one-process result: gradients, prototypes, contrastive negatives and BatchNorm."""

import json

import pytest

from tests.conftest import environments
from tests.forks import ended

SCRIPT = """
import json, sys
import torch
from torch import nn
from metapretrain.data.images import ImageSet
from metapretrain.experiments.images.training import ImageData
from metapretrain.experiments.base import Machine
from metapretrain.experiments.images.objectives import PRL, Images, SimCLR, ImageStep, Supervised
from metapretrain.data.augment import make_augmentation
from metapretrain.episodes import ShuffledBatches, TaskStream
from metapretrain.models.encoders import mlp, small_conv
from metapretrain.protonet import ProtoLoss
from metapretrain.training import TrainSettings, engine, train
from metapretrain.experiments.command import machine_of
from argparse import Namespace

machine = machine_of(Namespace(device="cpu", precision="fp32"))
alone = engine.records
encoders = {
    "mlp": lambda: mlp(channels=1, image_size=4, hidden=16),
    "batchnorm": lambda: small_conv(channels=1, width=4),
    "local": lambda: small_conv(channels=1, width=4),
    "unwrapped": lambda: small_conv(channels=1, width=4),
}

def end_of(kind, encoder_kind):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(64) % 4
    images = torch.randint(0, 256, (64, 1, 4, 4), generator=generator, dtype=torch.uint8)
    data = ImageSet(images, labels, list("abcd"))
    torch.manual_seed(0)
    encoder = encoders[encoder_kind]()
    source = Images(data, make_augmentation("none", 4, 1, (0.5,), (0.25,)))
    task = {
        "supervised": lambda: Supervised(source, nn.Linear(16, 4)),
        "prl": lambda: PRL(source, ProtoLoss("query", num_classes=4, gather=True)),
        "simclr": lambda: SimCLR(source, nn.Linear(16, 8)),
    }[kind]()
    rows = ShuffledBatches(64, 32 // machine.world, seed=1, rank=machine.rank, world_size=machine.world)
    step = ImageStep(encoder, {kind: task})
    # as a recorded update runs, whose messages gloo carries as well
    engine.records = (lambda *_: True) if encoder_kind == "unwrapped" else alone
    settings = TrainSettings(steps=6, lr=0.05, device="cpu", local_batchnorm=encoder_kind == "local")
    train(step, TaskStream({kind: rows}, "longest", seed=1, steps=6), settings)
    return {k: v.double().sum().item() for k, v in step.state_dict().items()} | {
        k + ".norm": v.double().norm().item() for k, v in step.state_dict().items()
    }

ends = {case: end_of(*case.split()) for case in sys.argv[2:]}
if machine.rank == 0:
    json.dump(ends, open(sys.argv[1], "w"))
from metapretrain.checks import leave_ranks
leave_ranks()
from pathlib import Path
names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]  # none but on Linux
assert not [name for name in names if "gloo" in name], names  # what still ran might abort Python's end
"""


KINDS, ENCODERS = ("supervised", "prl", "simclr"), ("mlp", "batchnorm", "unwrapped")
CASES = [f"{kind} {encoder}" for kind in KINDS for encoder in ENCODERS]


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Sums of the weights that every case ends with, by one process and by two, each started once."""
    folder = tmp_path_factory.mktemp("ranks")
    for world in (1, 2):
        words = [str(folder / f"{world}.json"), *CASES, "supervised local"]
        ended(SCRIPT, [words] * world, environments(world), folder)
    return [json.loads((folder / f"{world}.json").read_text()) for world in (1, 2)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process_does(ends, case):
    one, two = (found[case] for found in ends)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert two[name] == pytest.approx(value, rel=2e-5, abs=2e-5), name


def test_batchnorm_of_own_rows_is_another_result(ends):
    local, shared = (ends[1][f"supervised {encoder}"] for encoder in ("local", "batchnorm"))
    assert any(value != pytest.approx(local[name], rel=1e-3) for name, value in shared.items())


LEAVING = """
import os, sys
from argparse import Namespace
from metapretrain.checks import leave_ranks
from metapretrain.experiments.command import machine_of

machine = machine_of(Namespace(device="cpu", precision="fp32"))
import torch.distributed as dist
dist.barrier()
if machine.rank == 1:
    os._exit(0)
leave_ranks()
assert not dist.is_initialized()
"""


def test_a_rank_leaves_though_the_other_has_gone(tmp_path):
    ended(LEAVING, [[], []], environments(2), tmp_path)
