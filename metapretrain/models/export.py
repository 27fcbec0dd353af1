"""A run's image model in formats of others: ONNX, `torch.export`, and weights that torchvision or timm load."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.checks import require
from metapretrain.data.images import light_on_dark
from metapretrain.errors import InputError, one_of
from metapretrain.files import json_bytes, one_line_errors, save_tensors, write_whole
from metapretrain.models.encoders import Backbone
from metapretrain.models.saved import TEXT, SavedLearner, SavedModel, adapts, load


class Exported(nn.Module):
    """Images uint8 (N, C, S, S) of the model's size to features (N, D), and with a head or prototypes logits (N, K).

    Polarity and normalisation are inside; cutting and resizing are not.
    """

    def __init__(self, model: SavedModel | SavedLearner) -> None:
        super().__init__()
        self.light_on_dark = model.polarity is not None
        self.head: nn.Module | None = None
        self.prototypes: Tensor | None = None
        if isinstance(model, SavedLearner):
            if adapts(model.name):
                raise InputError(
                    f"a learner such as {model.name} adapts its weights to each task, which no file of this kind can: "
                    "export a run of protonet, r2d2 or supervised, or use metapretrain.load(run).adapt"
                )
            self.net = model.learner.module
        else:
            self.net = Backbone(model.encoder, None, model.mean, model.std)
            self.head, self.prototypes = model.head, None if model.head is not None else model.prototypes
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        z = self.net(light_on_dark(images) if self.light_on_dark else images).flatten(1).float()
        if self.head is not None:
            return z, self.head(z)
        if self.prototypes is not None:
            return z, -(z[:, None] - self.prototypes).square().sum(-1).sqrt()
        return (z,)


def export(run: str | Path, format: str = "onnx", out: str | Path | None = None) -> Path:
    """Write the image model of a finished run for other programs; return the file, or the folder of `timm`.

    `format`: `onnx` and `torch` (a `.pt2` of `torch.export`) hold the whole model, see :class:`Exported`; `torchvision`
    and `timm` the weights of a ResNet-18 under the names there, `timm` also normalisation and classes, for
    `timm.create_model("local-dir:FOLDER", pretrained=True)`. `out`: by default in the folder `export` of the run.
    InputError: no finished run of images, a format that its model has not, or onnx and onnxscript are not installed.
    """
    write = FORMATS[one_of("format", format, FORMATS)]
    if (Path(run) / TEXT / "config.json").is_file():
        told = f"{run} is of texts: its folder {TEXT} is a model of transformers as it stands"
        raise InputError(f"{told}; for ONNX give that folder to optimum (optimum-cli export onnx)")
    model = load(run)
    default = {"onnx": "model.onnx", "torch": "model.pt2", "torchvision": "torchvision.safetensors"}
    path = Path(run) / "export" / default.get(format, format) if out is None else Path(out)
    if path.exists() and (path.is_dir() != (format == "timm") or path.resolve().parent == Path(run).resolve()):
        raise InputError(f"{path} is there already, as another kind or a file of the run; give another --out")
    with one_line_errors(f"cannot write {path}", "give another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(model, path)
    return path


def _about(model: Any) -> dict[str, Any]:
    return {name: getattr(model, name) for name in ("classes", "channels", "image_size", "mean", "std", "polarity")}


def _program(model: Any) -> tuple[Exported, dict[str, Any]]:
    """The module, and how `torch.export` is called: any number of images."""
    images = torch.zeros(2, model.channels, model.image_size, model.image_size, dtype=torch.uint8)
    return Exported(model), {"args": (images,), "dynamic_shapes": {"images": {0: torch.export.Dim("batch")}}}


def _onnx(model: Any, path: Path) -> None:
    module, how = _program(model)
    how |= {"input_names": ["images"], "output_names": ["features", "logits"][: len(module(*how["args"]))]}
    require("onnxscript", "format onnx", "; or take --format torch")
    require("onnx", "format onnx", "; or take --format torch")
    program: Any = torch.onnx.export(module, **how, dynamo=True, verbose=False)
    program.model.metadata_props["metapretrain"] = json.dumps(_about(model))
    program.save(str(path), external_data=False)


def _torch(model: Any, path: Path) -> None:
    module, how = _program(model)
    program, stream = torch.export.export(module, **how), io.BytesIO()  # on a full disk torch's own writer aborts
    torch.export.save(program, stream, extra_files={"metapretrain": json.dumps(_about(model))})
    write_whole(path, stream.getvalue())


def _resnet_state(model: Any) -> dict[str, Tensor]:
    if not isinstance(model, SavedModel):
        raise InputError("a few-shot learner has no names of torchvision or timm: take --format onnx or torch")
    return model.torchvision_state()


def _torchvision(model: Any, path: Path) -> None:
    save_tensors(path, _resnet_state(model))


def _timm(model: Any, path: Path) -> None:
    state = _resnet_state(model)
    if state["conv1.weight"].shape[-1] != 7:
        raise InputError("timm has no ResNet-18 with the stem 3x3: take --format onnx, torch or torchvision")
    about = _about(model)
    classes = len(model.classes) if "fc.weight" in state else 0
    shape = [model.channels, model.image_size, model.image_size]
    shown = {"input_size": shape, "mean": about["mean"], "std": about["std"], "interpolation": "bilinear"}
    shown |= {"crop_pct": 1.0, "first_conv": "conv1", "classifier": "fc", "num_classes": classes}
    config = {"architecture": "resnet18", "num_classes": classes, "num_features": 512, "pretrained_cfg": shown}
    config |= {"model_args": {"in_chans": model.channels}, "label_names": model.classes, "polarity": model.polarity}
    path.mkdir(exist_ok=True)
    write_whole(path / "config.json", json_bytes(config))
    save_tensors(path / "model.safetensors", state)


FORMATS: dict[str, Any] = {"onnx": _onnx, "torch": _torch, "torchvision": _torchvision, "timm": _timm}
