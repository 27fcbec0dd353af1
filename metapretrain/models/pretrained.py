"""Pretrained image encoders of timm, torchvision, transformers or your own, and features that are kept."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.checks import check_device
from metapretrain.errors import InputError
from metapretrain.files import json_bytes, kept, load_tensors, sha256, tensor_sum
from metapretrain.models.hub import SAFE, not_loaded, quietly, safe_config
from metapretrain.models.saved import SavedModel

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

    Raises:
        InputError: a library that is not installed, a model that it does not have or cannot fetch, or other weights.
    """
    kind, _, rest = str(name).partition(":")
    model, _, file = rest.partition("@")
    loader = {"timm": _timm, "torchvision": _torchvision}.get(kind)
    try:
        found = _transformers(str(name)) if loader is None else loader(model, Path(file) if file else None)
    except ImportError as error:
        raise InputError(f"{name} needs a package that is not installed: {error}; or {ALLOWED}") from None
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        told = f"{name} is no image encoder that can be loaded: {' '.join(str(error).split())[:300]}"
        raise not_loaded(error, str(name), told, ALLOWED) from None
    return found.to(memory_format=torch.channels_last).to(check_device(str(device)))  # twice as fast on a CPU


def _timm(name: str, file: Path | None) -> PretrainedModel:
    import timm

    net = timm.create_model(name, pretrained=file is None, num_classes=0)
    if file is not None:
        _fill(net, file)
    about = timm.data.resolve_model_data_config(net)
    return PretrainedModel(net, about["input_size"][-1], about["mean"], about["std"])


def _torchvision(name: str, file: Path | None) -> PretrainedModel:
    import torchvision

    weights = torchvision.models.get_model_weights(name).DEFAULT
    net = torchvision.models.get_model(name, weights=weights if file is None else None)
    last = [place for place, part in net.named_modules() if isinstance(part, nn.Linear)][-1]
    net.set_submodule(last, nn.Identity())
    if file is not None:
        _fill(net, file)
    shown = weights.transforms()
    return PretrainedModel(net, shown.crop_size[0], shown.mean, shown.std)


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
