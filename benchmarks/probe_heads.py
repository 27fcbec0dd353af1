"""Why a head over a frozen encoder fails: train it on features as they are, scaled, shifted and standardised.

The head is trained as recipe "strong" does, on features of the unaugmented training images, for 600 updates.

    python benchmarks/probe_heads.py runs/stl10/stl10-strong/pretrain-prl-standard-s0 --data-dir DIR
    python benchmarks/probe_heads.py   # features that are made: examples scattered in all directions, close class means
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import ctrl_c  # noqa: F401
import torch
import torch.nn.functional as F
from run_stl10 import STRONG
from torch import Tensor, nn

import metapretrain
from metapretrain.data.registry import load_images
from metapretrain.draws import seeded
from metapretrain.errors import InputError
from metapretrain.evaluation.representation import accuracy, knn_predict
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
    """A markdown row per change: mean norm, test accuracy of both heads, and hidden units that no training row uses.

    kNN is by cosine, the nearest prototype by distance; nan: the head diverged.
    """
    classes, lr = int(y.max()) + 1, STRONG.frozen.lr
    columns = ["features", "mean norm", "MLP head %", "hidden units dead %", "linear head %", "kNN %", "prototype %"]
    lines = [f"| {' | '.join(columns)} |", f"|---{'|---:' * (len(columns) - 1)}|"]
    rows = [(name, change, lr) for name, change in changes(z).items()]
    rows += [(f"shifted by 5 spreads, rate {lr / 16:g}", changes(z)["shifted by 5 spreads"], lr / 16)]
    for name, change, rate in rows:
        x, x_test = change(z), change(z_test)
        heads = {kind: trained_head(kind, x, y, classes, rate, updates) for kind in ("mlp", "linear")}
        with torch.no_grad():
            outputs = {kind: head(x_test) for kind, head in heads.items()}
            hidden = heads["mlp"].get_submodule("0")(x).amax(0)
        right = {
            kind: accuracy(out.argmax(1), y_test) if out.isfinite().all() else math.nan for kind, out in outputs.items()
        }
        dead = (hidden <= 0).float().mean().item()
        nearest = torch.cdist(x_test, torch.stack([x[y == label].mean(0) for label in range(classes)])).argmin(1)
        others = [accuracy(found, y_test) for found in (knn_predict(x, y, x_test), nearest)]
        shown = f"{100 * right['mlp']:.1f} | {100 * dead:.0f} | {100 * right['linear']:.1f}"
        shown += "".join(f" | {100 * one:.1f}" for one in others)
        lines.append(f"| {name} | {x.norm(dim=1).mean():.1f} | {shown} |")
    return "\n".join(lines)


def scattered(classes: int = 10, features: int = 512, signal: float = 1.45) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Made features and labels, 450 training and 400 test examples per class.

    Normal noise of deviation 1 in every direction around class means that lie `signal` from their centre.
    """
    with seeded(0):
        means = torch.randn(classes, features)
        means = signal * F.normalize(means - means.mean(0))
        parts = [torch.arange(classes).repeat(count) for count in (450, 400)]
        (z, z_test) = (means[labels] + torch.randn(len(labels), features) for labels in parts)
    return z, parts[0], z_test, parts[1]


def features_of(run: Path, data_dir: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features and labels of the training and the test part by a finished pretraining's encoder."""
    model = metapretrain.load(run, "auto")
    if not isinstance(model, SavedModel):
        raise InputError(f"{run} holds no encoder of images; name a run's folder of run_stl10.py")
    dataset = (read_json(run / "result.json") or {})["dataset"]
    train, test = (load_images(dataset, data_dir, split, model.image_size) for split in ("train", "test"))
    return model.encode(train.images).cpu(), train.labels, model.encode(test.images).cpu(), test.labels


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__)
    told = "the folder of a finished pretraining of run_stl10.py; none: features that are made"
    parser.add_argument("run", type=Path, nargs="?", help=told)
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="the folder of the data")
    parser.add_argument("--updates", type=positive_int, default=UPDATES, metavar="N", help=f"of each head ({UPDATES})")
    options: Namespace = parser.parse_args(argv)
    return options


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a pretraining's features."""
    options = options_of(argv)
    z, y, z_test, y_test = scattered() if options.run is None else features_of(options.run, options.data_dir)
    middle = z.mean(0).norm()
    apart = (z - z.mean(0)).norm(dim=1).mean()
    print(f"mean norm {z.norm(dim=1).mean():.1f}; norm of the mean {middle:.1f}, spread around it {apart:.1f}")
    print(table(z, y, z_test, y_test, options.updates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
