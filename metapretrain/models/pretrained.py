"""Pretrained image encoders of timm, torchvision, transformers or your own, kept features, and fine-tuning."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from metapretrain.checks import check_device, number, whole
from metapretrain.errors import InputError
from metapretrain.files import json_bytes, kept, load_tensors, sha256, tensor_sum
from metapretrain.models.hub import SAFE, not_loaded, quietly, safe_config
from metapretrain.models.saved import FewShotClassifier, SavedModel, support_classes
from metapretrain.nests import evaluation_mode
from metapretrain.protonet.learner import HEADS
from metapretrain.protonet.prototypes import prototypes

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
ALLOWED = "give a finished run, timm:NAME, torchvision:NAME, OWNER/NAME of the hub or a folder with config.json"


class PretrainedModel(SavedModel):
    """An encoder of colour images, frozen, with `encode` and `adapt` as the model of a finished run has them.

    Args:
        module: maps normalised images (B, 3, image_size, image_size) to features (B, D).
        mean, std: of each channel in 0..1 units.

    Example:
        >>> images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
        >>> PretrainedModel(nn.Sequential(nn.Flatten(), nn.Linear(48, 7)), 4).encode(images).shape
        torch.Size([2, 7])
    """

    def __init__(
        self, module: nn.Module, image_size: int, mean: Sequence[float] = MEAN, std: Sequence[float] = STD
    ) -> None:
        about = {"classes": [], "channels": 3, "image_size": image_size, "mean": mean, "std": std}
        super(SavedModel, self).__init__(about)
        self.encoder: nn.Module = module  # type: ignore[assignment]
        self.requires_grad_(False).eval()

    def logits(self, images: Any) -> Tensor:
        """Refuse: there are no classes before :meth:`adapt`."""
        raise InputError("a pretrained encoder has no classes yet: use adapt(images, labels).predict(images)")


def image_encoder(name: str | Path, device: str | torch.device = "cpu") -> PretrainedModel:
    """Load an encoder with the image size and normalisation that it was trained with.

    `name` is `timm:NAME`, `torchvision:NAME`, or a vision model of transformers: OWNER/NAME of the hub or a folder.
    `timm:NAME@FILE` and `torchvision:NAME@FILE` take the weights from a safetensors file.
    Raises InputError: a library that is not installed, a model that it has not or cannot fetch, or other weights.
    """
    kind, _, rest = str(name).partition(":")
    model, at, file = rest.partition("@")
    loader = {"timm": _timm, "torchvision": _torchvision}.get(kind)
    if loader is not None and at and not Path(file).is_file():
        raise InputError(f"{name}: no file {file!r}; give a safetensors file, or {kind}:{model} to fetch weights")
    try:
        found = _transformers(str(name)) if loader is None else loader(model, fetch=not at)
        if loader is not None and at:
            _fill(found.encoder, Path(file))
    except ImportError as error:
        raise InputError(f"{name} needs a package that is not installed: {error}; or {ALLOWED}") from None
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        told = f"{name} is no image encoder that can be loaded: {' '.join(str(error).split())[:300]}"
        raise not_loaded(error, str(name), told, ALLOWED) from None
    return found.to(memory_format=torch.channels_last).to(check_device(str(device)))  # twice as fast on a CPU


def _timm(name: str, fetch: bool) -> PretrainedModel:
    import timm

    net = timm.create_model(name, pretrained=fetch, num_classes=0)
    about = timm.data.resolve_model_data_config(net)
    return PretrainedModel(net, about["input_size"][-1], about["mean"], about["std"])


def _torchvision(name: str, fetch: bool) -> PretrainedModel:
    import torchvision

    weights = torchvision.models.get_model_weights(name).DEFAULT
    net = torchvision.models.get_model(name, weights=weights if fetch else None)
    last = [place for place, part in net.named_modules() if isinstance(part, nn.Linear)][-1]
    net.set_submodule(last, nn.Identity())
    shown = weights.transforms()
    return PretrainedModel(net, shown.crop_size[0], shown.mean, shown.std)


def resized(model: Any, image_size: int) -> None:
    """Let a pretrained encoder see images of another size in pixels; InputError: it cannot, or is another model."""
    if not isinstance(model, PretrainedModel):
        raise InputError("an image size can be given to pretrained image encoders alone; leave --image-size out")
    own, model.image_size = model.image_size, image_size
    try:
        model.encode(torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8))
    except (AssertionError, RuntimeError, ValueError) as error:
        told = " ".join(str(error).split())
        raise InputError(f"this encoder takes no images of {image_size} pixels ({told}); its own are {own}") from None


class _Pooled(nn.Module):
    """The pooled output of a vision model of transformers, or the mean of its states."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = getattr(net, "vision_model", net)

    def forward(self, images: Tensor) -> Tensor:
        output = self.net(pixel_values=images)
        pooled: Tensor | None = getattr(output, "pooler_output", None)
        return (output.last_hidden_state.mean(1) if pooled is None else pooled).flatten(1)


def _transformers(name: str) -> PretrainedModel:
    from transformers import AutoImageProcessor, AutoModel

    with quietly():
        safe_config(name, name)
        shown = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    size: Mapping[str, int] = getattr(shown, "crop_size", None) or shown.size
    side = size.get("height") or size.get("shortest_edge") or 224
    return PretrainedModel(_Pooled(AutoModel.from_pretrained(name, **SAFE)), side, shown.image_mean, shown.image_std)


def _fill(net: nn.Module, file: Path) -> None:
    """Load the weights of a file; those of its classifier, which `net` has not, are left out."""
    known, state = net.state_dict(), load_tensors(file)
    missing = [key for key in known if key not in state or state[key].shape != known[key].shape]
    if missing:
        raise InputError(f"{file} is of another model: it has no {missing[0]} {tuple(known[missing[0]].shape)}")
    net.load_state_dict({key: state[key] for key in known})


def kept_features(model: Any, rows: Any) -> Tensor:
    """Features (N, D) of `rows` by `model.encode`, computed once for the same weights and rows, then kept on the disk.

    `rows` are images uint8 (N, C, H, W), texts, or pairs of texts.
    """
    data = rows.cpu().contiguous().numpy().tobytes() if isinstance(rows, Tensor) else json_bytes(list(rows))
    about = [getattr(model, name, None) for name in ("image_size", "channels", "mean", "std", "polarity", "max_length")]
    shape = list(rows.shape) if isinstance(rows, Tensor) else None
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    key = [tensor_sum(weights), sha256(data), repr(model), shape, str(about)]
    return kept("features", key, lambda: {"z": model.encode(rows, 64, progress=True).cpu()})["z"]


def features_centre(model: Any, images: Tensor) -> Tensor:
    """The mean feature (D,) of evenly spaced images, 4,800 of them or fewer."""
    return kept_features(model, images[:: -(-len(images) // 4800)]).mean(0)


FINETUNE = "finetune"
ENCODER_HEADS = (*HEADS, FINETUNE)  # how an encoder classifies: by its features, or by fine-tuning
NOT_TUNED = "fine-tuning needs an encoder with parameters that get gradients; take another head"
CHUNK = 64  # rows that go through the encoder at once


@dataclass(frozen=True)
class FineTuning:
    """How :func:`finetune` trains: `steps` of Adam, the encoder with the rate `lr`, the linear head with `head_lr`.

    The logits are `scale` / 2 times minus the squared distance to the class means before the first step.
    """

    steps: int = 10
    lr: float = 1e-4
    head_lr: float = 1e-2
    scale: float = 10.0

    def __post_init__(self) -> None:
        whole("steps", self.steps, 1)
        for name in ("lr", "head_lr", "scale"):
            number(name, getattr(self, name), above=0)


TUNING = FineTuning()


def finetune(model: Any, rows: Any, labels: Any, how: FineTuning = TUNING) -> FewShotClassifier:
    """Classify new classes by a copy of the encoder and a linear head, trained together on the support `rows`.

    The head sees features of length 1 and starts as `normalised`: with the class means m, its weights are s m and its
    biases -s/2 |m|^2 (as Proto-MAML: Triantafillou et al., 2020). Batch normalisation uses what it has recorded, and
    nothing is dropped, so the result is a function of the rows. `model` is left as it is.

    `model`: of :func:`metapretrain.experiments.saved.load_encoder`; `rows`: images uint8 (S, C, H, W) or a list of
    texts; `labels`: integers (S,) but -1 and -100. Raises InputError: an encoder without gradients, or a divergence.

    Example:
        >>> model = PretrainedModel(nn.Sequential(nn.Flatten(), nn.Linear(48, 7)), 4)
        >>> images = torch.randint(0, 255, (2, 3, 4, 4), dtype=torch.uint8)
        >>> finetune(model, images, [3, 8]).predict(images).tolist()
        [3, 8]
    """
    net, prepare = model.network()
    weights = {name: value.detach().clone().requires_grad_() for name, value in net.named_parameters()}
    if not weights:
        raise InputError(NOT_TUNED)

    def embed(inputs: Any) -> Tensor:
        with evaluation_mode(net):
            return F.normalize(functional_call(net, weights, (inputs,)).flatten(1).float(), dim=-1)

    parts = [prepare(rows[start : start + CHUNK]) for start in range(0, len(rows), CHUNK)]
    classes, codes = support_classes(labels, len(rows), next(iter(weights.values())).device)
    with torch.no_grad():
        means, _ = prototypes(torch.cat([embed(part) for part in parts]), codes, len(classes))
        weight, bias = how.scale * means, -how.scale / 2 * means.square().sum(1)
    head = [weight.requires_grad_(), bias.requires_grad_()]
    groups = [{"params": list(weights.values()), "lr": how.lr}, {"params": head, "lr": how.head_lr}]
    optimizer = torch.optim.Adam(groups, fused=True)  # twice as fast a step of MiniLM on a CPU
    for step in range(1, how.steps + 1):
        loss = 0.0
        for part, y in zip(parts, codes.split(CHUNK), strict=True):
            chunk = F.cross_entropy(F.linear(embed(part), weight, bias), y, reduction="sum") / len(codes)
            chunk.backward()
            loss += float(chunk.detach())
        if not math.isfinite(loss):
            raise InputError(f"fine-tuning diverged: its loss is {loss} at step {step}; give a lower lr than {how.lr}")
        if all(value.grad is None for value in weights.values()):
            raise InputError(NOT_TUNED)
        optimizer.step()
        optimizer.zero_grad()

    def logits(queries: Any) -> Tensor:
        starts = range(0, max(len(queries), 1), CHUNK)
        return torch.cat([F.linear(embed(prepare(queries[at : at + CHUNK])), weight, bias) for at in starts])

    return FewShotClassifier(logits, classes)
