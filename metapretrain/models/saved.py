"""A trained model on the disk: plain safetensors and JSON, and `load` to use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.data.normalise import normalisation, normalize
from metapretrain.devices import check_device
from metapretrain.errors import InputError
from metapretrain.maml import ProtoNet
from metapretrain.models.encoders import build_encoder
from metapretrain.models.heads import build_head
from metapretrain.models.inputs import as_uint8, check_tensor
from metapretrain.models.saved_learner import LEARNER, FewShotClassifier, SavedLearner, few_shot_classifier

ENCODER, HEAD, PROTOTYPES = "encoder.safetensors", "head.safetensors", "prototypes.safetensors"
TEXT = "encoder"  # the folder that a run of texts has in place of the first
OTHERS = {  # benchmark: what uses its runs
    "prompts": "is a run of prompts, not images; `metapretrain predict RUN --texts SET=FILE` uses its prompts",
    "schedule": "is a run of texts, not images; AutoModel.from_pretrained of transformers loads its folder `encoder`",
}


def save_model(folder: Path, encoder: nn.Module, head: nn.Module | None, prototypes: Tensor) -> None:
    """Write the weights: the encoder's plain state dict, the head's if there is one, and the class prototypes.

    Args:
        folder: of the run; its `config.json` holds what the model is built from.
        encoder: images (B, C, H, W), normalised, to features (B, D).
        head: features to logits, or None: classes are then those of the nearest prototype.
        prototypes: mean training features of each class, float (C, D).

    Raises:
        InputError: the folder cannot be written.
    """
    from metapretrain.training.checkpoint import save_tensors

    states = {ENCODER: encoder.state_dict(), PROTOTYPES: {"prototypes": prototypes}}
    if head is not None:
        states[HEAD] = head.state_dict()
    for name, state in states.items():
        save_tensors(folder / name, state)


class SavedModel(nn.Module):
    """An encoder with its head or its prototypes, as :func:`load` returns it.

    Images are uint8 `(N, C, H, W)`, or float in 0..1; any size (they are resized), grey or colour.
    """

    prototypes: Tensor

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        if not isinstance(model["classes"], list):
            raise InputError(f"classes must be a list of names, got {model['classes']!r}")
        self.classes: list[str] = list(model["classes"])
        self.channels, self.image_size = int(model["channels"]), int(model["image_size"])
        self.mean, self.std = tuple(model["mean"]), tuple(model["std"])
        normalisation(self.mean, self.std)
        if len(self.mean) != self.channels:
            raise InputError(f"mean and std must have {self.channels} values, one a channel, got {len(self.mean)}")
        self.encoder = build_encoder(
            model["encoder"], channels=self.channels, image_size=self.image_size, stem=model["stem"]
        )
        features = self.encoder.features
        self.head = build_head(model["head"], features, len(self.classes)) if model["head"] else None
        self.register_buffer("prototypes", torch.zeros(len(self.classes), features))

    def prepare(self, images: Tensor) -> Tensor:
        """Return normalised float images `(N, C, image_size, image_size)` on the model's device.

        Raises:
            InputError: not `(N, 1 or 3, H, W)`, neither uint8 nor float, or float outside 0..1.
        """
        images = as_uint8(images, self.channels, self.image_size).to(next(self.encoder.parameters()).device)
        return normalize(images, self.mean, self.std)

    @torch.no_grad()  # not inference_mode: features may be put into a training of the caller's
    def encode(self, images: Tensor, batch_size: int = 256) -> Tensor:
        """Return features float32 `(N, D)`.

        Raises:
            InputError: not a tensor of images (see :meth:`prepare`), or a batch size that is not at least 1.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
        return torch.cat([self.encoder(self.prepare(part)).float() for part in check_tensor(images).split(batch_size)])

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return logits `(N, classes)`: of the head, or minus the distance to each prototype."""
        z = self.encode(images)
        if self.head is not None:
            scores: Tensor = self.head(z)
            return scores
        return -torch.cdist(z, self.prototypes.to(z.device))

    def predict(self, images: Tensor) -> Tensor:
        """Return the predicted classes int64 `(N,)`, indices into `classes`."""
        return self.logits(images).argmax(1)

    def adapt(self, images: Tensor, labels: Tensor) -> FewShotClassifier:
        """Classify into new classes, by the prototypes of a few support images and their labels, integers `(S,)`.

        Raises:
            InputError: labels that do not fit the images.
        """
        return few_shot_classifier(ProtoNet(self.encoder), self.prepare, images, labels)


def _benchmark(config: Path) -> str:
    """Return the benchmark that a run's configuration names, or "" where it names none."""
    try:
        return str(json.loads(config.read_text(encoding="utf-8"))["config"]["benchmark"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""


def load(run: str | Path, device: str | torch.device = "cpu") -> SavedModel | SavedLearner:
    """Load the model of a finished run folder; no code from the folder is run (safetensors and JSON only).

    Args:
        run: the folder that a benchmark or `metapretrain demo` wrote.
        device: where the model is put.

    Returns:
        a model in evaluation mode with `.encode(images)`, `.predict(images)`, `.classes`, and for classes that it has
        not seen `.adapt(images, labels).predict(images)`. The learner of a few-shot run has no classes before that.

    Raises:
        InputError: no run there, a run that has not finished, or weights that are missing, damaged or another model's
            or run's.

    Example:
        >>> import tempfile
        >>> model = {"encoder": "mlp", "stem": "standard", "head": None, "classes": ["cat", "dog"]}
        >>> model |= {"channels": 1, "image_size": 8, "mean": [0.5], "std": [0.25]}
        >>> with tempfile.TemporaryDirectory() as run:  # as a benchmark leaves it
        ...     file = Path(run) / "config.json"
        ...     written = file.write_text(json.dumps({"config": {"model": model}}))
        ...     save_model(Path(run), build_encoder("mlp", channels=1, image_size=8), None, torch.zeros(2, 512))
        ...     loaded = load(run)
        >>> images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
        >>> loaded.encode(images).shape, loaded.predict(images).shape
        (torch.Size([3, 512]), torch.Size([3]))
    """
    from metapretrain.training.checkpoint import load_tensors
    from metapretrain.training.weight_sums import check_sums

    device = check_device(str(device))
    folder = Path(run)
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"{folder} is not a run folder: it has no config.json; name one below runs/")
    whole, learned = ((folder / name).is_file() for name in (ENCODER, LEARNER))
    if not whole and not learned and (said := OTHERS.get(_benchmark(config))):
        raise InputError(f"{folder} {said}")
    if (folder / TEXT / "config.json").is_file() and not whole and not learned:
        raise InputError(
            f"{folder} is a run of texts, not images; give tables (--sst FILE), or use metapretrain.load(folder)"
        )
    if not whole and not learned:
        raise InputError(f"{folder} has not finished: it has no {ENCODER}; continue it with --resume")
    try:
        described = json.loads(config.read_text(encoding="utf-8"))["config"]
        model = SavedModel(described["model"]) if whole else SavedLearner(described)
    except (ValueError, LookupError, TypeError, OverflowError, RuntimeError) as error:  # also what no memory can hold
        raise InputError(
            f"{config} does not describe a model ({' '.join(repr(error).split())}); is it of an older version?"
        ) from None
    check_sums(folder)
    if isinstance(model, SavedLearner):
        _fill(model.learner, load_tensors(folder / LEARNER), folder / LEARNER)
        return model.to(device).eval()  # the inner loop needs gradients
    parts: dict[str, nn.Module] = {ENCODER: model.encoder}
    if model.head is not None:
        parts[HEAD] = model.head
    for name, part in parts.items():
        _fill(part, load_tensors(folder / name), folder / name)
    centres = load_tensors(folder / PROTOTYPES)
    if {name: value.shape for name, value in centres.items()} != {"prototypes": model.prototypes.shape}:
        raise _other_model(folder / PROTOTYPES, f"it should hold {tuple(model.prototypes.shape)} prototypes")
    _refuse_bad(centres, folder / PROTOTYPES)
    model.prototypes = centres["prototypes"].float()
    return model.to(device).eval().requires_grad_(False)


def _refuse_bad(state: Mapping[str, Tensor], file: Path) -> None:
    """Refuse weights that would make every prediction the first class."""
    bad = [name for name, value in state.items() if not bool(value.isfinite().all())]
    if bad:
        raise InputError(f"{file} holds NaN or infinity in {bad[0]}; train again, with a lower learning rate")


def _fill(part: nn.Module, state: Mapping[str, Tensor], file: Path) -> None:
    _refuse_bad(state, file)
    try:
        part.load_state_dict(state)
    except RuntimeError as error:  # its text has a line for each tensor
        raise _other_model(file, " ".join(str(error).split())) from None


def _other_model(file: Path, reason: str) -> InputError:
    return InputError(f"{file} is not of the model in config.json: {reason}")
