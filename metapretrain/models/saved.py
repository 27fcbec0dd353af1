"""Trained image models on the disk, few-shot learners included, and what they are used for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from metapretrain.checks import check_device, decisive, whole
from metapretrain.data.images import LIGHT_ON_DARK, light_on_dark, normalisation, normalize, resize
from metapretrain.errors import InputError, one_of
from metapretrain.files import CheckpointError, check_sums, load_tensors, save_tensors
from metapretrain.maml import ANIL, FOMAML, MAML, MetaSGD, Reptile, functional
from metapretrain.models.encoders import Backbone, build_backbone, build_encoder, build_head
from metapretrain.nests import evaluation_mode
from metapretrain.protonet.learner import R2D2, Classifier, EmbeddingLearner, ProtoNet
from metapretrain.protonet.prototypes import proto_logits, prototypes, unlabelled


def as_uint8(images: Tensor, channels: int, image_size: int, polarity: str | None = None) -> Tensor:
    """Images (N, 1 or 3, H, W), uint8 or float in 0..1, as uint8 (N, channels, image_size, image_size).

    They are cut to a square about the centre, and for a model of drawings have its polarity (:func:`light_on_dark`).
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or not min(images.shape[2:]):
        raise InputError(f"images must be (N, 1 or 3, H, W), got {tuple(images.shape)}")
    if images.is_floating_point():
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise InputError("float images must lie in 0..1, without NaN; give 0..255 as uint8")
        images = (images * 255).round().clamp(0, 255).to(torch.uint8)
    if images.dtype != torch.uint8:
        raise InputError(f"images must be uint8 in 0..255 or float in 0..1, got {images.dtype}")
    if images.shape[1] == 1:
        images = images.expand(-1, channels, -1, -1)
    elif channels == 1:
        weights = torch.tensor([0.299, 0.587, 0.114], device=images.device).view(1, 3, 1, 1)
        images = (images.float() * weights).sum(1, keepdim=True).round().to(torch.uint8)
    images = resize(images, image_size)
    return images if polarity is None else light_on_dark(images)


LEARNER = "learner.safetensors"
LEARNERS: dict[str, Any] = {  # classes; add your own: its only option is `ways=`, or it is a variant of MAML
    "protonet": ProtoNet,
    "r2d2": R2D2,
    "maml": MAML,
    "fomaml": FOMAML,
    "anil": ANIL,
    "metasgd": MetaSGD,
    "reptile": Reptile,
    "supervised": Classifier,
}


def adapts(learner: str) -> bool:
    """Whether a learner adapts weights, and so has a head of its own; the others classify by features."""
    return issubclass(LEARNERS[one_of("learner", learner, LEARNERS)], MAML)


def make_learner(choices: Mapping[str, Any], net: Backbone, ways: int) -> Any:
    """The learner that a run's choices name, over a backbone; `ways` are the classes of a training episode."""
    name = choices["learner"]
    if name == "supervised":
        features: Any = net.encoder.features
        outputs = ways * (4 if choices.get("turns") else 1)
        return Classifier(net, features, outputs, head=choices.get("head") or "centred")
    if not adapts(name):
        names = ("temperature", "distance", "learn_temperature") if name == "protonet" else ()
        more = {name: choices[name] for name in names if name in choices}
        return LEARNERS[name](net, ways=ways, **more)
    kind = LEARNERS[name]
    adapted: dict[str, Any] = {} if choices.get("adapt_norms", True) or kind is ANIL else {"only": without_norms(net)}
    more = adapted | {name: choices[name] for name in ("test_steps", "batchnorm", "chunk")}
    newer: dict[str, Any] = {"learn_rates": False} | ({"batches": 1} if issubclass(kind, Reptile) else {})
    more |= {name: choices.get(name, default) for name, default in newer.items()}
    return kind(net, choices["inner_lr"], steps=choices["inner_steps"], **more)


def without_norms(net: nn.Module) -> list[str]:
    """Names of the parameters but for the scales and shifts of normalisation layers."""
    norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    left_out = {id(p) for part in net.modules() if isinstance(part, norms) for p in part.parameters()}
    return [name for name, p in net.named_parameters() if id(p) not in left_out]


def needs_company(learner: nn.Module) -> bool:
    """Whether features depend on the images that are encoded together, through the statistics of BatchNorm."""
    normalised = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in learner.modules())
    return normalised and isinstance(learner, MAML) and learner.batchnorm != "frozen"


def is_transductive(learner: Any) -> bool:
    """Whether the prediction for a query depends on the other queries of its episode, through BatchNorm."""
    return needs_company(learner) and learner.batchnorm == "batch"


BATCH = 256  # images that go through a model at once


@dataclass(frozen=True)
class FewShotClassifier:
    """Maps rows to logits (N, W), as `load(run).adapt(rows, labels)` returns it; `classes` (W,) are sorted labels."""

    outputs: Callable[[Any], Tensor]
    classes: Tensor

    @torch.no_grad()
    def logits(self, rows: Any) -> Tensor:
        """Return logits (N, W), in the order of `classes`."""
        return self.outputs(rows)

    def probabilities(self, rows: Any) -> Tensor:
        """Return the softmax of the logits, (N, W)."""
        return decisive(self.logits(rows)).softmax(1)

    def predict(self, rows: Any) -> Tensor:
        """Return the label of each row, (N,)."""
        return self.classes[decisive(self.logits(rows)).argmax(1)]


def support_classes(labels: Any, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The classes (W,) of support labels in sorted order, and the place of each label among them (S,)."""
    try:
        y = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        y = torch.zeros(())
    whole = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    if not whole or y.ndim != 1 or not len(y) or unlabelled(y).any():
        told = "one for each support row, but not -1 or -100, which mark rows without one"
        raise InputError(f"labels must be a tensor or list of integers (S,), {told}")
    if rows != len(y):
        raise InputError(f"got {rows} support rows and {len(y)} labels; give one label for each row")
    classes, codes = y.to(device).unique(return_inverse=True)
    return classes, codes


@torch.no_grad()
def by_prototypes(encode: Callable[[Any], Tensor], rows: Any, labels: Any) -> FewShotClassifier:
    """Classify by the squared distance to the mean embedding of each class's support rows (Snell et al., 2017)."""
    z = encode(rows)
    decisive(z.abs())
    classes, codes = support_classes(labels, len(z), z.device)
    centres, _ = prototypes(z, codes, len(classes))
    return FewShotClassifier(lambda queries: proto_logits(encode(queries), centres, "sqeuclidean"), classes)


class Saved(nn.Module):
    """The trained model of a run, of images or texts, as its folder is loaded: it embeds, and learns new classes."""

    def encode(self, inputs: Any, batch_size: int = BATCH, *, progress: bool = False) -> Tensor:
        """Return features float32 (N, D) of images or texts; `progress` shows a bar."""
        raise NotImplementedError

    def network(self) -> tuple[nn.Module, Callable[[Any], Any]]:
        """The module that gives features (N, D), and what makes its input of images or texts."""
        raise NotImplementedError

    def adapt(self, inputs: Any, labels: Any) -> FewShotClassifier:
        """Classify into new classes, by the prototypes of a few support examples and their labels, integers (S,)."""
        return by_prototypes(self.encode, inputs, labels)


Kind = TypeVar("Kind", bound=Saved)


def build_described(config: Path, build: Callable[[], Kind]) -> Kind:
    """The model that a run's configuration describes; InputError where nothing can be built from it."""
    try:
        return build()
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as error:  # or no memory
        told = str(error) if isinstance(error, InputError) else " ".join(repr(error).split())
        advice = "if it is of an older version, train it again, or load it with that version"
        raise InputError(f"{config} does not describe a model ({told}); {advice}") from None


class _Images(Saved):
    """What saved models of images share; images are :func:`as_uint8`'s, a path, a PIL image or a list of either."""

    def __init__(self, model: Mapping[str, Any], dataset: Any = None) -> None:
        super().__init__()
        if not isinstance(model["classes"], list):
            raise InputError(f"classes must be a list of names, got {model['classes']!r}")
        self.classes: list[str] = list(model["classes"])
        self.channels, self.image_size = int(model["channels"]), int(model["image_size"])
        older = str(dataset).startswith("omniglot") and self.channels == 1  # such runs do not say so
        found = model.get("polarity", LIGHT_ON_DARK if older else None)
        self.polarity = None if found is None else one_of("polarity", found, [LIGHT_ON_DARK])
        self.mean, self.std = tuple(model["mean"]), tuple(model["std"])
        normalisation(self.mean, self.std)
        if len(self.mean) != self.channels:
            raise InputError(f"mean and std must have {self.channels} values, one a channel, got {len(self.mean)}")

    def read(self, images: Any) -> Tensor:
        """A tensor of images as it is; files and PIL images as :func:`metapretrain.data.image_folder.read_images`."""
        if isinstance(images, Tensor):
            return images
        from metapretrain.data.image_folder import read_images

        return read_images(images, self.image_size, channels=self.channels)

    def prepare(self, images: Tensor) -> Tensor:
        """Images as :func:`as_uint8` makes them, on the model's device."""
        images = as_uint8(images, self.channels, self.image_size, self.polarity)
        return images.to(next(self.parameters()).device)

    def logits(self, images: Any) -> Tensor:
        """Return logits (N, classes)."""
        raise NotImplementedError

    def probabilities(self, images: Any) -> Tensor:
        """Return the softmax of the logits, (N, classes)."""
        return decisive(self.logits(images)).softmax(1)

    def predict(self, images: Any) -> Tensor:
        """Return the predicted classes int64 (N,), indices into `classes`."""
        return decisive(self.logits(images)).argmax(1)

    def classify(self, images: Any) -> list[tuple[str, float]]:
        """Return the name of each image's most probable class, and its probability."""
        best = self.probabilities(images).max(1)
        return [(self.classes[c], p) for c, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


class SavedLearner(_Images):
    """A few-shot learner with its weights; `classes` are those it was trained on, new ones come by :meth:`adapt`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config["model"], config.get("dataset"))
        tested = config["tested"]["ways"]
        self.ways = min(tested if isinstance(tested, int) else tested[-1], len(self.classes))
        choices = config["choices"]
        self.name = str(choices["learner"])
        ways = self.ways if adapts(choices["learner"]) else None
        about: dict[str, Any] = {name: getattr(self, name) for name in ("channels", "image_size", "mean", "std")}
        net = build_backbone(config["backbone"], ways=ways, drop=choices.get("drop", 0.0), **about)
        classes = len(self.classes) if choices["learner"] == "supervised" else self.ways
        self.learner = make_learner(choices, net, classes)

    def network(self) -> tuple[nn.Module, Callable[[Any], Any]]:
        """The module that gives features (N, D), and what makes its input of images."""
        if not isinstance(self.learner, EmbeddingLearner):
            raise InputError("a run of MAML and its variants adapts its weights by itself; fine-tune another encoder")
        return self.learner.module, lambda images: self.prepare(self.read(images))

    @torch.no_grad()
    def encode(self, images: Any, batch_size: int = BATCH, *, progress: bool = False) -> Tensor:
        """Features float32 (N, D) before adaptation, see :func:`needs_company` for which depend on each other."""
        net: Any = self.learner.module
        if isinstance(self.learner, EmbeddingLearner):
            parts = tqdm(self.read(images).split(batch_size), "encode", disable=not progress, leave=False)
            with evaluation_mode(net):
                return torch.cat([net(self.prepare(part)).flatten(1).float() for part in parts])
        body = Backbone(net.encoder, None, self.mean, self.std).to(net.scale.device)
        apply, params, buffers = functional(body, self.learner.batchnorm)
        z: Tensor = apply(params, buffers, self.prepare(self.read(images)))
        return z.flatten(1).float()

    def adapt(self, images: Any, labels: Any) -> FewShotClassifier:
        """Learn new classes, once, from support images and their labels, integers (S,) but -1 and -100.

        Where :func:`is_transductive`, the predictions of all images of a call depend on each other.
        """
        if isinstance(self.learner, ProtoNet):
            return super().adapt(images, labels)
        if isinstance(self.learner, EmbeddingLearner):
            z = self.encode(images)
            classes, codes = support_classes(labels, len(z), z.device)
            fitted = self.learner.over_features(len(classes))
            fitted.adapt(z, codes)
            return FewShotClassifier(lambda queries: fitted(self.encode(queries)), classes)
        x = self.prepare(self.read(images))
        classes, codes = support_classes(labels, len(x), x.device)
        if len(classes) > self.ways:
            raise InputError(f"labels have {len(classes)} classes; this run has learned {self.ways}-way tasks")
        outputs = self.learner.adapted((x, codes))

        def logits(queries: Any) -> Tensor:
            given = self.read(queries)
            size = max(len(given), 1) if is_transductive(self.learner) else BATCH
            return torch.cat([outputs(self.prepare(part)) for part in given.split(size)])[:, : len(classes)]

        return FewShotClassifier(logits, classes)

    def logits(self, images: Any) -> Tensor:
        """Refuse: there are no classes before :meth:`adapt`."""
        raise InputError("a few-shot learner has no classes yet: load(run).adapt(images, labels).predict(images)")


ENCODER, HEAD, PROTOTYPES = "encoder.safetensors", "head.safetensors", "prototypes.safetensors"
TEXT = "encoder"  # the folder that a run of texts has in place of the first
OTHERS = {  # benchmark: what uses its runs
    "prompts": "is a run of prompts, not images; `metapretrain predict RUN --texts SET=FILE` uses its prompts",
    "schedule": "is a run of texts, not images; AutoModel.from_pretrained of transformers loads its folder `encoder`",
}


def save_model(folder: Path, encoder: nn.Module, head: nn.Module | None, prototypes: Tensor) -> None:
    """Write state dicts of encoder and head, and each class's mean training features (C, D), used without a head."""
    states = {ENCODER: encoder.state_dict(), PROTOTYPES: {"prototypes": prototypes}}
    if head is not None:
        states[HEAD] = head.state_dict()
    for name, state in states.items():
        save_tensors(folder / name, state)


class SavedModel(_Images):
    """An encoder with its head or its prototypes, as :func:`load` returns it."""

    prototypes: Tensor

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__(model)
        size: dict[str, int] = {"channels": self.channels, "image_size": self.image_size}
        self.encoder = build_encoder(model["encoder"], stem=model["stem"], **size)
        features = self.encoder.features
        self.head = build_head(model["head"], features, len(self.classes)) if model["head"] else None
        self.register_buffer("prototypes", torch.zeros(len(self.classes), features))

    def prepare(self, images: Tensor) -> Tensor:
        """Images as :func:`as_uint8` makes them, normalised, on the model's device."""
        return normalize(super().prepare(images), self.mean, self.std)

    def network(self) -> tuple[nn.Module, Callable[[Any], Any]]:
        """The module that gives features (N, D), and what makes its input of images."""
        return self.encoder, lambda images: self.prepare(self.read(images))

    @torch.no_grad()  # not inference_mode: features may be put into a training of the caller's
    def encode(self, images: Any, batch_size: int = BATCH, *, progress: bool = False) -> Tensor:
        """Return features float32 (N, D); `progress` shows a bar."""
        whole("batch_size", batch_size, 1)
        parts = tqdm(self.read(images).split(batch_size), "encode", disable=not progress, leave=False)
        with evaluation_mode(self):
            return torch.cat([self.encoder(self.prepare(part)).float() for part in parts])

    def torchvision_state(self) -> dict[str, Tensor]:
        """The weights of a ResNet-18 under the names of `torchvision.models.resnet18` and timm, a linear head as `fc`.

        With the stem `3x3`, their `conv1` and `maxpool` have to be replaced first: see docs/own-images.md.
        """
        if not hasattr(self.encoder.backbone, "layer4"):
            raise InputError("torchvision has no network like this encoder; only resnet18 has its names")
        head = self.head.state_dict() if isinstance(self.head, nn.Linear) else {}
        return self.encoder.backbone.state_dict() | {f"fc.{name}": value for name, value in head.items()}

    @torch.no_grad()
    def logits(self, images: Any) -> Tensor:
        """Return logits (N, classes): of the head, or minus the distance to each prototype."""
        z = self.encode(images)
        if self.head is None:
            return -torch.cdist(z, self.prototypes.to(z.device))
        with evaluation_mode(self):
            scores: Tensor = self.head(z)
        return scores


def _benchmark(config: Path) -> Any:
    """The benchmark that a run's configuration names; None where it names none."""
    try:
        return json.loads(config.read_text(encoding="utf-8"))["config"]["benchmark"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def load(run: str | Path, device: str | torch.device = "cpu") -> SavedModel | SavedLearner:
    """Load the model of a finished run folder; no code from the folder is run (safetensors and JSON only).

    It is in evaluation mode and has `.encode(images)`, `.predict(images)`, `.classes`, and for new classes
    `.adapt(images, labels).predict(images)`; the learner of a few-shot run has no classes before that.
    Raises InputError: no finished run there, or weights that are missing, damaged or another model's or run's.
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

    def build() -> SavedModel | SavedLearner:
        described = json.loads(config.read_text(encoding="utf-8"))["config"]
        return SavedModel(described["model"]) if encoded else SavedLearner(described)

    model = build_described(config, build)
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
