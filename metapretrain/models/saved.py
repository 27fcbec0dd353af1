"""Trained image models on the disk, few-shot learners included, and what they are used for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from metapretrain.checks import check_device, whole
from metapretrain.data.images import LIGHT_ON_DARK, light_on_dark, normalisation, normalize, resize
from metapretrain.errors import InputError, one_of
from metapretrain.files import check_sums, load_tensors, save_tensors
from metapretrain.maml import ANIL, FOMAML, MAML, MetaSGD, functional
from metapretrain.models.encoders import Backbone, build_backbone, build_encoder, build_head
from metapretrain.protonet.learner import ProtoNet


def as_uint8(images: Tensor, channels: int, image_size: int, polarity: str | None = None) -> Tensor:
    """Images (N, 1 or 3, H, W), uint8 or float in 0..1, as uint8 (N, channels, image_size, image_size).

    They are cut to a square about the centre, and for a model of drawings have its polarity (:func:`light_on_dark`).
    """
    if check_tensor(images).ndim != 4 or images.shape[1] not in (1, 3) or not min(images.shape[2:]):
        raise InputError(f"images must be (N, 1 or 3, H, W), got {tuple(images.shape)}")
    if images.is_floating_point():
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise InputError("float images must lie in 0..1, without NaN; give 0..255 as uint8")
        images = (images * 255).round().clamp(0, 255).to(torch.uint8)
    if images.dtype != torch.uint8:
        raise InputError(f"images must be uint8 in 0..255 or float in 0..1, got {images.dtype}")
    if images.shape[1] != channels:
        images = images.expand(-1, 3, -1, -1) if channels == 3 else _grey(images)
    images = resize(images, image_size)
    return images if polarity is None else light_on_dark(images)


def _polarity(model: Mapping[str, Any], dataset: Any = None) -> str | None:
    """How a model sees drawings; runs on Omniglot of older versions do not say so."""
    older = str(dataset).startswith("omniglot") and model["channels"] == 1
    found = model.get("polarity", LIGHT_ON_DARK if older else None)
    return None if found is None else one_of("polarity", found, [LIGHT_ON_DARK])


def check_tensor(images: Tensor) -> Tensor:
    """Return `images`, which must be a tensor."""
    if not isinstance(images, Tensor):
        raise InputError(f"images must be a torch tensor (N, 1 or 3, H, W), got {type(images).__name__}")
    return images


def _grey(images: Tensor) -> Tensor:
    weights = torch.tensor([0.299, 0.587, 0.114], device=images.device).view(1, 3, 1, 1)
    return (images.float() * weights).sum(1, keepdim=True).round().to(torch.uint8)


LEARNER = "learner.safetensors"
KINDS: dict[str, Callable[..., MAML]] = {"maml": MAML, "fomaml": FOMAML, "anil": ANIL, "metasgd": MetaSGD}


def make_learner(choices: Mapping[str, Any], net: nn.Module, ways: int) -> MAML | ProtoNet:
    """The learner that a run's choices name, over a backbone; `ways` are the classes of a training episode."""
    kind = KINDS.get(choices["learner"])
    if kind is None:
        return ProtoNet(net, ways=ways)
    adapted = {} if choices.get("adapt_norms", True) or kind is ANIL else {"only": without_norms(net)}
    return kind(
        net,
        choices["inner_lr"],
        steps=choices["inner_steps"],
        test_steps=choices["test_steps"],
        batchnorm=choices["batchnorm"],
        chunk=choices["chunk"],
        **adapted,
    )


def without_norms(net: nn.Module) -> list[str]:
    """Names of the parameters but for the scales and shifts of normalisation layers."""
    norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    left_out = {id(p) for part in net.modules() if isinstance(part, norms) for p in part.parameters()}
    return [name for name, p in net.named_parameters() if id(p) not in left_out]


def is_transductive(learner: nn.Module) -> bool:
    """Whether the prediction for a query depends on the other queries of its episode, through BatchNorm."""
    normalised = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in learner.modules())
    return normalised and isinstance(learner, MAML) and learner.batchnorm == "batch"


@dataclass(frozen=True)
class FewShotClassifier:
    """A learner with the support examples that it goes by: what `load(run).adapt(images, labels)` returns.

    `classes` (W,) are the labels that were given, in sorted order. The inner loop of MAML runs in every call.
    """

    learner: Any
    prepare: Callable[[Tensor], Tensor]
    support: Tensor
    codes: Tensor
    classes: Tensor

    def logits(self, images: Tensor) -> Tensor:
        """Return logits (N, W), in the order of `classes`."""
        x = self.prepare(images)
        query = x[None], torch.zeros(1, len(x), dtype=torch.int64, device=x.device)
        logits: Tensor = self.learner.logits((self.support[None], self.codes[None]), query)[0]
        return logits[:, : len(self.classes)]

    def predict(self, images: Tensor) -> Tensor:
        """Return the label of each image, (N,)."""
        return self.classes[self.logits(images).argmax(1)]


def few_shot_classifier(
    learner: Any, prepare: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor
) -> FewShotClassifier:
    """Note the support examples: images (S, C, H, W) and their labels, integers (S,)."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim != 1 or not len(labels):
        raise InputError("labels must be a tensor of integers (S,), one for each support image")
    x = prepare(images)
    if len(x) != len(labels):
        raise InputError(f"got {len(x)} support images and {len(labels)} labels; give one label for each image")
    classes, codes = labels.to(x.device).unique(return_inverse=True)
    return FewShotClassifier(learner, prepare, x, codes, classes)


class SavedLearner(nn.Module):
    """A few-shot learner with its weights, as :func:`metapretrain.load` returns it; for images see :func:`as_uint8`.

    `classes` are those that it was trained on: new ones come by :meth:`adapt`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        model, tested = config["model"], config["tested"]["ways"]
        self.classes: list[str] = list(model["classes"])
        self.channels, self.image_size = int(model["channels"]), int(model["image_size"])
        self.polarity = _polarity(model, config.get("dataset"))
        self.mean, self.std = tuple(model["mean"]), tuple(model["std"])
        self.ways = min(tested if isinstance(tested, int) else tested[-1], len(self.classes))
        headless = config["choices"]["learner"] not in KINDS
        net = build_backbone(
            config["backbone"],
            ways=None if headless else self.ways,
            channels=self.channels,
            image_size=self.image_size,
            mean=self.mean,
            std=self.std,
        )
        self.learner = make_learner(config["choices"], net, self.ways)
        if isinstance(self.learner, ProtoNet):
            self.learner.ways = None  # of any number of classes

    def prepare(self, images: Tensor) -> Tensor:
        """Images as :func:`as_uint8` makes them, on the model's device."""
        images = as_uint8(images, self.channels, self.image_size, self.polarity)
        return images.to(next(self.learner.parameters()).device)

    @torch.no_grad()
    def encode(self, images: Tensor, *, progress: bool = False) -> Tensor:
        """Return features float32 (N, D) by the weights that adaptation starts from; `progress` shows a bar.

        Where :func:`is_transductive`, batch normalisation takes the statistics of the images given.
        """
        net: Any = self.learner.module
        if isinstance(self.learner, ProtoNet):
            parts = tqdm(check_tensor(images).split(256), "encode", disable=not progress, leave=False)
            return torch.cat([net(self.prepare(part)).flatten(1).float() for part in parts])
        body = Backbone(net.encoder, None, self.mean, self.std).to(net.scale.device)
        apply, params, buffers = functional(body, self.learner.batchnorm, steps=self.learner.steps)
        if self.learner.batchnorm == "per-step":
            buffers = {**buffers, **self.learner.records.named()}
        z: Tensor = apply(params, buffers, self.prepare(images))
        return z.flatten(1).float()

    def adapt(self, images: Tensor, labels: Tensor) -> FewShotClassifier:
        """Learn new classes from support images (S, C, H, W) and their labels, any integers (S,)."""
        found = few_shot_classifier(self.learner, self.prepare, images, labels)
        if isinstance(self.learner, MAML) and len(found.classes) > self.ways:
            raise InputError(f"labels have {len(found.classes)} classes; this run has learned {self.ways}-way tasks")
        return found

    def logits(self, images: Tensor) -> Tensor:
        """Refuse: there are no classes before :meth:`adapt`."""
        raise InputError("a few-shot learner has no classes yet: load(run).adapt(images, labels).predict(images)")

    predict = logits


ENCODER, HEAD, PROTOTYPES = "encoder.safetensors", "head.safetensors", "prototypes.safetensors"
TEXT = "encoder"  # the folder that a run of texts has in place of the first
OTHERS = {  # benchmark: what uses its runs
    "prompts": "is a run of prompts, not images; `metapretrain predict RUN --texts SET=FILE` uses its prompts",
    "schedule": "is a run of texts, not images; AutoModel.from_pretrained of transformers loads its folder `encoder`",
}


def save_model(folder: Path, encoder: nn.Module, head: nn.Module | None, prototypes: Tensor) -> None:
    """Write the encoder's state dict, the head's if there is one, and the mean training features (C, D) of each class.

    Without a head, the class of an image is that of the nearest prototype.
    """
    states = {ENCODER: encoder.state_dict(), PROTOTYPES: {"prototypes": prototypes}}
    if head is not None:
        states[HEAD] = head.state_dict()
    for name, state in states.items():
        save_tensors(folder / name, state)


class SavedModel(nn.Module):
    """An encoder with its head or its prototypes, as :func:`load` returns it; for images see :func:`as_uint8`."""

    prototypes: Tensor

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        if not isinstance(model["classes"], list):
            raise InputError(f"classes must be a list of names, got {model['classes']!r}")
        self.classes: list[str] = list(model["classes"])
        self.channels, self.image_size = int(model["channels"]), int(model["image_size"])
        self.polarity = _polarity(model)
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
        """Images as :func:`as_uint8` makes them, normalised, on the model's device."""
        images = as_uint8(images, self.channels, self.image_size, self.polarity)
        return normalize(images.to(next(self.encoder.parameters()).device), self.mean, self.std)

    @torch.no_grad()  # not inference_mode: features may be put into a training of the caller's
    def encode(self, images: Tensor, batch_size: int = 256, *, progress: bool = False) -> Tensor:
        """Return features float32 `(N, D)`; with `progress`, a bar shows how far it is."""
        whole("batch_size", batch_size, 1)
        parts = tqdm(check_tensor(images).split(batch_size), "encode", disable=not progress, leave=False)
        return torch.cat([self.encoder(self.prepare(part)).float() for part in parts])

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
        """Classify into new classes, by the prototypes of a few support images and their labels, integers `(S,)`."""
        return few_shot_classifier(ProtoNet(self.encoder), self.prepare, images, labels)


def _benchmark(config: Path) -> Any:
    """The benchmark that a run's configuration names; None where it names none."""
    try:
        return json.loads(config.read_text(encoding="utf-8"))["config"]["benchmark"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def load(run: str | Path, device: str | torch.device = "cpu") -> SavedModel | SavedLearner:
    """Load the model of a finished run folder; no code from the folder is run (safetensors and JSON only).

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
    device = check_device(str(device))
    folder = Path(run)
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"{folder} is not a run folder: it has no config.json; name one below runs/")
    encoded = (folder / ENCODER).is_file()
    if not encoded and not (folder / LEARNER).is_file():
        said = f"has not finished: it has no {ENCODER}; continue it with --resume"
        if (folder / TEXT / "config.json").is_file():
            said = "is a run of texts, not images; give tables (--sst FILE), or use metapretrain.load(folder)"
        raise InputError(f"{folder} {OTHERS.get(_benchmark(config), said)}")
    check_sums(folder)
    try:
        described = json.loads(config.read_text(encoding="utf-8"))["config"]
        model = SavedModel(described["model"]) if encoded else SavedLearner(described)
    except (ValueError, LookupError, TypeError, OverflowError, RuntimeError) as error:  # also what no memory can hold
        raise InputError(
            f"{config} does not describe a model ({' '.join(repr(error).split())}); is it of an older version?"
        ) from None
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
