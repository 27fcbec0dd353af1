"""Why a head over a frozen encoder fails: train it on features as they are, scaled, shifted and standardised.

The head is trained as recipe "strong" does, on features of the unaugmented training images, for 600 updates.

    python benchmarks/probe_heads.py runs/stl10/stl10-strong/pretrain-prl-standard-s0 --data-dir DIR
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from run_stl10 import STRONG
from torch import Tensor, nn

import metapretrain
from metapretrain.checks import decisive
from metapretrain.data.registry import load_images
from metapretrain.draws import seeded
from metapretrain.errors import InputError
from metapretrain.evaluation.representation import accuracy
from metapretrain.files import read_json
from metapretrain.models import build_head
from metapretrain.models.saved import SavedModel
from metapretrain.options import Parser, main_guard, positive_int
from metapretrain.training.settings import learning_rate

UPDATES, BATCH = 600, 128


def trained_head(kind: str, z: Tensor, y: Tensor, classes: int, lr: float, updates: int) -> nn.Module:
    """Train a head on features (N, D) with labels (N,): the recipe's optimiser and schedule."""
    phase = STRONG.frozen
    with seeded(0):
        head = build_head(kind, z.shape[1], classes)
        batches = [torch.randint(len(z), (min(BATCH, len(z)),)) for _ in range(updates)]
    optimizer = torch.optim.SGD(head.parameters(), lr, 0.9, weight_decay=phase.weight_decay, nesterov=True)
    warmup = round(phase.warmup * updates)
    for step, rows in enumerate(batches):
        optimizer.param_groups[0]["lr"] = learning_rate(step, updates, peak=lr, schedule=phase.schedule, warmup=warmup)
        optimizer.zero_grad()
        F.cross_entropy(head(z[rows]), y[rows], label_smoothing=phase.label_smoothing).backward()
        optimizer.step()
    return head


def changes(z: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is done to features: named changes, made from those of training (N, D)."""
    mean, deviation = z.mean(0), z.std(0).clamp_min(1e-6)
    spread = (z - mean).norm(dim=1).mean()
    along = mean / mean.norm().clamp_min(1e-6)

    def scaled(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: factor * x

    def shifted(spreads: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x + spreads * spread * along

    return {
        "as they are": scaled(1),
        **{f"times {factor:g}": scaled(factor) for factor in (0.01, 0.1, 4, 10, 40)},
        **{f"shifted by {spreads:g} spreads": shifted(spreads) for spreads in (2, 5, 10)},
        "standardised": lambda x: (x - mean) / deviation,
    }


def table(z: Tensor, y: Tensor, z_test: Tensor, y_test: Tensor, updates: int = UPDATES) -> str:
    """A markdown row per change: mean norm, test accuracy of both heads, and hidden units that no training row uses."""
    classes, lr = int(y.max()) + 1, STRONG.frozen.lr
    lines = ["| features | mean norm | MLP head % | hidden units dead % | linear head % |", "|---|---:|---:|---:|---:|"]
    rows = [(name, change, lr) for name, change in changes(z).items()]
    rows += [(f"shifted by 5 spreads, rate {lr / 16:g}", changes(z)["shifted by 5 spreads"], lr / 16)]
    for name, change, rate in rows:
        x, x_test = change(z), change(z_test)
        heads = {kind: trained_head(kind, x, y, classes, rate, updates) for kind in ("mlp", "linear")}
        with torch.no_grad():
            right = {kind: accuracy(decisive(head(x_test)).argmax(1), y_test) for kind, head in heads.items()}
            hidden = heads["mlp"].get_submodule("0")(x).amax(0)
        dead = (hidden <= 0).float().mean().item()
        shown = f"{100 * right['mlp']:.1f} | {100 * dead:.0f} | {100 * right['linear']:.1f}"
        lines.append(f"| {name} | {x.norm(dim=1).mean():.1f} | {shown} |")
    return "\n".join(lines)


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished pretraining of run_stl10.py")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="the folder of the data")
    parser.add_argument("--updates", type=positive_int, default=UPDATES, metavar="N", help=f"of each head ({UPDATES})")
    options: Namespace = parser.parse_args(argv)
    return options


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a pretraining's features."""
    options = options_of(argv)
    model = metapretrain.load(options.run)
    if not isinstance(model, SavedModel):
        raise InputError(f"{options.run} holds no encoder of images; name a run's folder of run_stl10.py")
    dataset = (read_json(options.run / "result.json") or {})["dataset"]
    parts = [load_images(dataset, options.data_dir, split, model.image_size) for split in ("train", "test")]
    (z, y), (z_test, y_test) = [(model.encode(part.images).cpu(), part.labels) for part in parts]
    middle = z.mean(0).norm()
    apart = (z - z.mean(0)).norm(dim=1).mean()
    print(f"mean norm {z.norm(dim=1).mean():.1f}; norm of the mean {middle:.1f}, spread around it {apart:.1f}")
    print(table(z, y, z_test, y_test, options.updates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
