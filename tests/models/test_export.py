"""Exported models compute what the run's own model does: ONNX, torch.export, torchvision and timm."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from metapretrain import files
from metapretrain.cli import main
from metapretrain.data.images import LIGHT_ON_DARK, light_on_dark
from metapretrain.errors import InputError
from metapretrain.models.encoders import build_encoder, build_head
from metapretrain.models.export import export
from metapretrain.models.saved import load, save_model
from tests.models.test_saved_learner import write_run

CASES: dict[str, dict[str, Any]] = {
    "linear": {"encoder": "resnet18", "head": "linear"},
    "3x3": {"encoder": "resnet18", "stem": "3x3", "head": "mlp"},
    "prototypes": {"encoder": "small-conv", "head": None},
    "drawings": {"encoder": "conv4", "head": "linear", "channels": 1, "polarity": LIGHT_ON_DARK},
}


def moved(module: nn.Module) -> nn.Module:
    """Statistics of BatchNorm that matter."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_mean, -0.2, 0.2)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
            nn.init.uniform_(part.bias, -0.2, 0.2)
    return module


def write_images_run(folder: Path, *, channels: int = 3, **about: Any) -> Path:
    torch.manual_seed(0)
    model = {"stem": "standard", "classes": ["cat", "dog", "emu"], "channels": channels, "image_size": 32, **about}
    model |= {"mean": [0.4, 0.5, 0.6][:channels], "std": [0.2, 0.25, 0.3][:channels]}
    encoder = moved(build_encoder(model["encoder"], channels=channels, image_size=32, stem=model["stem"]))
    head = build_head(model["head"], encoder.features, 3) if model["head"] else None
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"config": {"model": model}}))
    save_model(folder, encoder, head, torch.randn(3, encoder.features))
    return folder


def images(channels: int, count: int = 5) -> Tensor:
    found = torch.randint(0, 256, (count, channels, 32, 32), dtype=torch.uint8)
    found[0, :, 4:-4, 4:-4] = 10  # dark on light paper
    found[0, :, 0] = found[0, :, -1] = found[0, :, :, 0] = found[0, :, :, -1] = 250
    return found


def computed(format: str, file: Path, shown: Tensor) -> list[Tensor]:
    if format == "torch":
        return list(torch.export.load(file).module()(shown))
    runtime = pytest.importorskip("onnxruntime", reason="the optional dependency onnxruntime runs the file")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(value) for value in session.run(None, {"images": shown.numpy()})]


@pytest.mark.parametrize("format", ["torch", "onnx"])
@pytest.mark.parametrize("case", CASES)
def test_a_whole_model_gives_the_same_features_and_logits(case: str, format: str, tmp_path: Path) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript", reason="the optional dependency onnxscript writes the file")
    run = write_images_run(tmp_path / "run", **CASES[case])
    file = export(run, format)
    assert file == run / "export" / {"onnx": "model.onnx", "torch": "model.pt2"}[format]
    model = load(run)
    for count in (1, 5):  # any number of images
        shown = images(model.channels, count)
        features, logits = computed(format, file, shown)
        torch.testing.assert_close(features, model.encode(shown), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits, model.logits(shown), rtol=1e-5, atol=1e-5)
    if case == "drawings":  # the polarity is inside
        same = computed(format, file, light_on_dark(shown))[0]
        torch.testing.assert_close(same, features, rtol=1e-5, atol=1e-5)
        assert not torch.equal(light_on_dark(shown), shown)


@pytest.mark.parametrize("kind", ["protonet", "maml"])
def test_learners_of_embeddings_are_exported_and_those_that_adapt_are_refused(kind: str, tmp_path: Path) -> None:
    write_run(tmp_path, kind, batchnorm="batch")
    if kind == "maml":
        with pytest.raises(InputError, match="a learner such as maml adapts its weights"):
            export(tmp_path, "torch")
        return
    shown = images(1)[..., :16, :16].contiguous()
    (features,) = computed("torch", export(tmp_path, "torch"), shown)
    torch.testing.assert_close(features, load(tmp_path).encode(shown), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="no names of torchvision or timm"):
        export(tmp_path, "timm")


@pytest.mark.parametrize("case", ["linear", "3x3"])
def test_weights_load_into_torchvisions_network(case: str, tmp_path: Path) -> None:
    import torchvision

    run = write_images_run(tmp_path / "run", **CASES[case])
    assert main(["export", str(run), "--format", "torchvision", "--out", str(tmp_path / "w.safetensors")]) == 0
    net = torchvision.models.resnet18(num_classes=3)
    if case == "3x3":
        net.conv1, net.maxpool, net.fc = nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.Identity(), nn.Identity()
    net.load_state_dict(load_file(tmp_path / "w.safetensors"))
    model, shown = load(run), images(3)
    x = (shown.float() / 255 - torch.tensor(model.mean).view(3, 1, 1)) / torch.tensor(model.std).view(3, 1, 1)
    expected = model.logits(shown) if case == "linear" else model.encode(shown)
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("about", [{"head": "linear"}, {"head": "linear", "channels": 1}, {"head": None}])
def test_timm_loads_the_folder_as_one_of_its_models(about: dict[str, Any], tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="the optional dependency timm loads the folder")
    run = write_images_run(tmp_path / "run", encoder="resnet18", **about)
    folder = export(run, "timm")
    net = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    model = load(run)
    shown = images(model.channels)
    told = timm.data.resolve_model_data_config(net)
    assert told["input_size"] == (model.channels, 32, 32)
    assert (tuple(told["mean"]), tuple(told["std"])) == (model.mean, model.std)
    mean, std = (torch.tensor(told[name]).view(-1, 1, 1) for name in ("mean", "std"))
    expected = model.logits(shown) if about["head"] else model.encode(shown)
    with torch.no_grad():
        torch.testing.assert_close(net((shown.float() / 255 - mean) / std), expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_exported_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tmp_path / "texts"
    (texts / "encoder").mkdir(parents=True)
    (texts / "encoder" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="is of texts: its folder encoder is a model of transformers"):
        export(texts)
    with pytest.raises(InputError, match="is not a run folder"):
        export(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"unknown format 'onx'; did you mean 'onnx'\?"):
        export(texts, "onx")
    deep = write_images_run(tmp_path / "deep", **CASES["3x3"])
    with pytest.raises(InputError, match="timm has no ResNet-18 with the stem 3x3"):
        export(deep, "timm")
    for format, out in (
        ("torch", tmp_path),
        ("timm", deep / "config.json"),
        ("torchvision", deep / "encoder.safetensors"),
    ):
        with pytest.raises(InputError, match="is there already, as another kind or a file of the run"):
            export(deep, format, out)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match="pip install onnx onnxscript; or take --format torch"):
        export(deep, "onnx")


@pytest.mark.parametrize("format", ["torch", "torchvision"])
def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_file(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = write_images_run(tmp_path / "run", **CASES["linear" if format == "torchvision" else "prototypes"])
    monkeypatch.setattr(files, "write_durably", full)
    with pytest.raises((InputError, files.CheckpointError), match=r"cannot write .*out: No space left on device"):
        export(run, format, tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []
