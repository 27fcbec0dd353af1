"""Saved models: what is loaded is what was trained, and every bad folder is one line."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file, save_file

import metapretrain
from metapretrain.data.images import normalize
from metapretrain.errors import InputError
from metapretrain.files import load_tensors, save_tensors
from metapretrain.models import Encoder, build_encoder, build_head, build_text_encoder
from metapretrain.models.saved import ENCODER, HEAD, PROTOTYPES, FewShotClassifier, load, save_model
from tests.forks import python

MODEL: dict[str, Any] = {
    "encoder": "small-conv",
    "stem": "standard",
    "head": "mlp",
    "classes": ["cat", "dog", "owl"],
    "channels": 3,
    "image_size": 8,
    "mean": [0.4, 0.5, 0.6],
    "std": [0.2, 0.25, 0.3],
}


def write_run(folder: Path, **changes: Any) -> tuple[Encoder, torch.nn.Module | None]:
    """Write a run as an experiment does, with BatchNorm statistics that are not the initial ones."""
    model = MODEL | changes
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    encoder = build_encoder(model["encoder"], **{name: model[name] for name in ("channels", "image_size", "stem")})
    encoder.train()(torch.randn(32, model["channels"], 8, 8))
    head = build_head(model["head"], encoder.features, 3) if model["head"] else None
    (folder / "config.json").write_text(json.dumps({"config": {"model": model}}))
    save_model(folder, encoder, head, torch.randn(3, encoder.features))
    return encoder.eval(), head


@pytest.fixture
def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (9, 3, 8, 8), generator=generator, dtype=torch.uint8)


@torch.no_grad()
def test_features_and_predictions_are_those_of_the_trained_model(tmp_path: Path, images: torch.Tensor) -> None:
    encoder, head = write_run(tmp_path)
    model = metapretrain.load(tmp_path)
    z = encoder(normalize(images, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)))
    assert head is not None
    assert torch.equal(model.encode(images), z)
    assert torch.equal(model.logits(images), head(z))
    assert torch.equal(model.predict(images), head(z).argmax(1))
    assert model.classes == ["cat", "dog", "owl"] and not model.training
    torch.testing.assert_close(model.encode(images, batch_size=2), z)


def test_a_new_process_gives_the_same_bits(tmp_path: Path, images: torch.Tensor) -> None:
    write_run(tmp_path)
    model = load(tmp_path)
    save_file({"images": images}, tmp_path / "images.safetensors")
    code = (
        "import sys, metapretrain\nfrom safetensors.torch import load_file, save_file\n"
        "model = metapretrain.load(sys.argv[1])\nx = load_file(sys.argv[1] + '/images.safetensors')['images']\n"
        "save_file({'z': model.encode(x), 'y': model.predict(x)}, sys.argv[1] + '/end.safetensors')"
    )
    torch_threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    done = python("-c", torch_threads + code, str(tmp_path), warm=False)
    assert done.returncode == 0, done.stderr
    end = load_file(tmp_path / "end.safetensors")
    assert torch.equal(end["z"], model.encode(images)) and torch.equal(end["y"], model.predict(images))


def test_without_a_head_the_nearest_prototype_decides(tmp_path: Path, images: torch.Tensor) -> None:
    write_run(tmp_path, head=None)
    model = load(tmp_path)
    z = model.encode(images)
    assert torch.equal(model.prototypes, load_file(tmp_path / PROTOTYPES)["prototypes"])
    model.prototypes.copy_(z[[4, 7, 2]])
    assert model.predict(images[[2, 4, 7]]).tolist() == [2, 0, 1]
    slow = [min(range(3), key=lambda c, row=row: float((row - model.prototypes[c]).norm())) for row in z]
    assert model.predict(images).tolist() == slow


def test_grey_colour_float_and_other_sizes(tmp_path: Path, images: torch.Tensor) -> None:
    write_run(tmp_path / "colour")
    write_run(tmp_path / "grey", channels=1, mean=[0.5], std=[0.2])
    colour, grey = load(tmp_path / "colour"), load(tmp_path / "grey")
    assert torch.equal(colour.encode(images.float() / 255), colour.encode(images))
    one = images[:, :1]
    assert torch.equal(colour.encode(one), colour.encode(one.expand(-1, 3, -1, -1)))
    # a grey picture in three planes has its own grey levels, by the usual weights
    assert torch.equal(grey.prepare(one.expand(-1, 3, -1, -1)), grey.prepare(one))
    pure = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    pure[[0, 1, 2], [0, 1, 2]] = 200
    levels = (grey.prepare(pure)[:, 0, 0, 0] * 0.2 + 0.5) * 255
    torch.testing.assert_close(levels, torch.tensor([60.0, 117.0, 23.0]), atol=0.01, rtol=0)
    large = images.repeat_interleave(3, 2).repeat_interleave(3, 3)[:, :, :20]
    assert colour.prepare(large).shape == (9, 3, 8, 8)
    assert colour.encode(images[:0]).shape == (0, 128) and colour.predict(images[:0]).shape == (0,)


def test_files_and_pil_images_are_read_as_tensors_are(tmp_path: Path, images: torch.Tensor) -> None:
    write_run(tmp_path)
    model, files = load(tmp_path), [tmp_path / f"{row}.png" for row in range(len(images))]
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    for picture, file in zip(pictures, files, strict=True):
        picture.save(file)
    wanted = model.predict(images)
    for given in (files, [str(file) for file in files], pictures, [picture.convert("RGBA") for picture in pictures]):
        assert torch.equal(model.predict(given), wanted)
        assert torch.equal(model.encode(given), model.encode(images))
    assert torch.equal(model.predict(pictures[0]), wanted[:1]) and torch.equal(model.predict(files[0]), wanted[:1])
    assert model.predict([]).shape == (0,)
    shares = model.probabilities(files)
    torch.testing.assert_close(shares, model.logits(images).softmax(1))
    names = [(model.classes[row.argmax()], float(row.max())) for row in shares]
    assert model.classify(files) == names
    classifier = model.adapt(files[:4], [0, 1, 1, 0])
    assert torch.equal(classifier.predict(pictures), model.adapt(images[:4], [0, 1, 1, 0]).predict(images))
    for bad, said in (
        ([files[0], 7], "paths or PIL images, got int"),
        (images.numpy(), "paths or PIL images, got ndarray"),
        ([tmp_path / "none.png"], "there is no image"),
        ([Image.new("F", (8, 8))], "cannot read a PIL image: its pixels are of floating point"),
    ):
        with pytest.raises(InputError, match=said):
            model.predict(bad)


def test_features_can_enter_a_training_of_ones_own(tmp_path: Path, images: torch.Tensor) -> None:
    write_run(tmp_path)
    head = torch.nn.Linear(128, 2)
    head(load(tmp_path).encode(images)).sum().backward()
    assert head.weight.grad is not None


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (torch.zeros(3, 8, 8), "(N, 1 or 3, H, W)"),
        (torch.zeros(1, 2, 8, 8), "(N, 1 or 3, H, W)"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.int64), "torch.int64"),
        (torch.full((1, 3, 8, 8), 7.0), "in 0..1"),
        (torch.full((1, 3, 8, 8), float("nan")), "in 0..1"),
    ],
)
def test_images_of_another_kind_are_refused(tmp_path: Path, bad: torch.Tensor, part: str) -> None:
    write_run(tmp_path)
    with pytest.raises(InputError) as error:
        load(tmp_path).encode(bad)
    assert part in str(error.value)


def _no_config(run: Path) -> None:
    (run / "config.json").unlink()


def _unfinished(run: Path) -> None:
    (run / ENCODER).unlink()


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (pytest.fail, ("the pickle was run",))


def _pickled(run: Path) -> None:
    (run / ENCODER).write_bytes(pickle.dumps(Bomb()))


def _torch_saved(run: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, run / HEAD)


def _other_encoder(run: Path) -> None:
    save_file(build_encoder("mlp", channels=3, image_size=8).state_dict(), run / ENCODER)


def _other_head(run: Path) -> None:
    save_file(build_head("mlp", 128, 4).state_dict(), run / HEAD)


def _no_head(run: Path) -> None:
    (run / HEAD).unlink()


def _no_prototypes(run: Path) -> None:
    (run / PROTOTYPES).unlink()


def _empty_prototypes(run: Path) -> None:
    save_file({"other": torch.zeros(3, 128)}, run / PROTOTYPES)


def _other_prototypes(run: Path) -> None:
    save_file({"prototypes": torch.zeros(5, 128)}, run / PROTOTYPES)


def _truncated(run: Path) -> None:
    (run / ENCODER).write_bytes((run / ENCODER).read_bytes()[:-9])


def _no_model(run: Path) -> None:
    (run / "config.json").write_text('{"config": {"seed": 0}}')


def _torn_config(run: Path) -> None:
    (run / "config.json").write_text('{"config": {"mod')


def _unknown_encoder(run: Path) -> None:
    (run / "config.json").write_text(json.dumps({"config": {"model": MODEL | {"encoder": "vit"}}}))


def _of_a_schedule(run: Path) -> None:
    (run / ENCODER).unlink()
    (run / "encoder").mkdir()
    (run / "encoder" / "config.json").write_text("{}")
    (run / "config.json").write_text(json.dumps({"config": {"benchmark": "schedule", "model": {}}}))


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (_no_config, ["not a run folder", "config.json"]),
        (_unfinished, ["has not finished", "--resume"]),
        (_pickled, [ENCODER, "safetensors"]),
        (_torch_saved, [HEAD, "safetensors"]),
        (_other_encoder, [ENCODER, "not of the model"]),
        (_other_head, [HEAD, "not of the model"]),
        (_no_head, [HEAD, "No such file"]),
        (_no_prototypes, [PROTOTYPES, "No such file"]),
        (_empty_prototypes, [PROTOTYPES, "(3, 128)"]),
        (_other_prototypes, [PROTOTYPES, "(3, 128)"]),
        (_truncated, [ENCODER, "safetensors"]),
        (_no_model, ["config.json", "model"]),
        (_torn_config, ["config.json", "does not describe a model"]),
        (_unknown_encoder, ["vit", "resnet18"]),
        (_of_a_schedule, ["run of texts, not images", "AutoModel"]),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_bad_run_folder_is_one_line(tmp_path: Path, damage: Any, parts: list[str]) -> None:
    write_run(tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere is not a run folder"):
        load(tmp_path / "nowhere")
    for run in (None, 3, b"runs"):
        with pytest.raises(InputError, match="named by its folder, not by a "):
            metapretrain.load(run)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as error:
        save_model(tmp_path / "file", build_encoder("mlp", image_size=2), None, torch.zeros(1, 1))
    told = str(error.value)
    assert "cannot write" in told and "encoder.safetensors" in told and "\n" not in told


def edited(folder: Path, **changes: Any) -> Path:
    """A run of an untrained model whose config.json says something else."""
    model: dict[str, Any] = {"encoder": "mlp", "stem": "standard", "head": None, "classes": ["a", "b"], "channels": 1}
    model |= {"image_size": 4, "mean": [0.5], "std": [0.25]}
    save_model(folder, build_encoder("mlp", channels=1, image_size=4), None, torch.zeros(2, 512))
    text = json.dumps({"config": {"model": model | changes}}).replace("Infinity", "1e999")
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"image_size": 10**9},
        {"image_size": math.inf},
        {"channels": 10**12},
        {"mean": [None]},
        {"mean": "abc"},
        {"mean": [0.5] * 3, "std": [0.5] * 3},
        {"std": [0]},
        {"mean": [math.nan]},
        {"classes": "ab"},
        {"encoder": ["mlp"]},
    ],
)
def test_a_config_of_another_shape_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="does not describe a model") as error:
        load(edited(tmp_path, **changes))
    assert "\n" not in str(error.value)


def test_a_config_nested_without_end_is_one_line(tmp_path: Path) -> None:
    (edited(tmp_path) / "config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="does not describe a model"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["encoder", "prototypes"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, name: str) -> None:
    """Else every image would be of the first class."""
    file = edited(tmp_path) / f"{name}.safetensors"
    save_tensors(file, {key: value * math.nan for key, value in load_tensors(file).items()})
    with pytest.raises(InputError, match=f"{name}.safetensors holds NaN or infinity"):
        load(tmp_path)


def test_prototypes_in_half_precision_are_used(tmp_path: Path) -> None:
    file = edited(tmp_path) / "prototypes.safetensors"
    save_tensors(file, {"prototypes": torch.zeros(2, 512).half()})
    assert load(tmp_path).predict(torch.zeros(1, 1, 4, 4)).shape == (1,)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_one_line(tmp_path: Path, device: str) -> None:
    with pytest.raises(InputError, match="device"):
        load(edited(tmp_path), device)


def test_what_is_no_batch_of_images_is_refused(tmp_path: Path) -> None:
    model = load(edited(tmp_path))
    for images in ([[0]], torch.zeros(1, 1, 0, 4)):
        with pytest.raises(InputError, match="images must be"):
            model.encode(images)  # type: ignore[arg-type]
    for size in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="batch_size"):
            model.encode(torch.zeros(1, 1, 4, 4), size)  # type: ignore[arg-type]


def test_encoding_shows_a_bar_where_it_is_asked_to(
    tmp_path: Path, images: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    texts = build_text_encoder("tiny")
    for encode in (
        lambda **shown: metapretrain.load(tmp_path).encode(images, 2, **shown),
        lambda **shown: texts.encode(["a", "b", "c"], 1, **shown),
    ):
        quiet = encode()
        assert capsys.readouterr().err == ""
        assert torch.equal(encode(progress=True), quiet) and "encode" in capsys.readouterr().err


@pytest.mark.parametrize("stem", ["standard", "3x3"])
@pytest.mark.parametrize("head", ["linear", None])
def test_torchvision_loads_a_resnet18(tmp_path: Path, stem: str, head: str | None) -> None:
    write_run(tmp_path, encoder="resnet18", stem=stem, head=head, image_size=32)
    model = load(tmp_path)
    net = torchvision.models.resnet18(num_classes=3)
    if head is None:
        net.fc = torch.nn.Identity()
    if stem == "3x3":
        with pytest.raises(RuntimeError, match=r"size mismatch for conv1\.weight"):
            net.load_state_dict(model.torchvision_state())
        net.conv1 = torch.nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
        net.maxpool = torch.nn.Identity()
    net.load_state_dict(model.torchvision_state())
    x = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = net.eval()(normalize(x, model.mean, model.std))
    torch.testing.assert_close(found, model.logits(x) if head else model.encode(x), rtol=1e-4, atol=1e-5)


def test_other_encoders_have_no_names_of_torchvision(tmp_path: Path) -> None:
    write_run(tmp_path)
    with pytest.raises(InputError, match="only resnet18 has its names"):
        load(tmp_path).torchvision_state()


@pytest.mark.parametrize("head", ["mlp", None])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_outputs_that_are_not_finite_are_refused_and_counted(
    tmp_path: Path, images: torch.Tensor, head: str | None, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, head=head)
    model = load(tmp_path)
    whole, factors = model.encode, torch.ones(9, 1)
    monkeypatch.setattr(model, "encode", lambda rows, **options: whole(rows) * factors[: len(rows)])
    adapted = model.adapt(images, [0, 1, 2] * 3)
    factors[[0, 2]] = bad
    for call in (model.predict, model.probabilities, model.classify, adapted.predict, adapted.probabilities):
        with pytest.raises(InputError, match="outputs of 2 of 3 inputs are NaN or infinite"):
            call(images[:3])
    with pytest.raises(InputError, match="outputs of 2 of 3 inputs"):  # support
        model.adapt(images[:3], [0, 1, 2])


def test_a_class_without_probability_is_no_fault_but_a_row_without_a_class_is() -> None:
    none = -math.inf
    assert FewShotClassifier(lambda x: x, torch.tensor([4, 7])).predict(torch.tensor([[none, 1.0]])).tolist() == [7]
    for row in ([none, none], [math.nan, 1.0], [1.0, math.inf]):
        with pytest.raises(InputError, match="outputs of 1 of 2 inputs"):
            FewShotClassifier(lambda x: x, torch.tensor([4, 7])).predict(torch.tensor([[0.0, 1.0], row]))
