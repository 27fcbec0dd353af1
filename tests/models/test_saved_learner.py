"""Saved few-shot learners: what is loaded classifies as the learner that was trained; bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from torch import Tensor

from metapretrain import load
from metapretrain.data.image_folder import read_images
from metapretrain.data.images import LIGHT_ON_DARK, ImageSet, light_on_dark
from metapretrain.data.registry import load_images
from metapretrain.errors import InputError
from metapretrain.experiments.images.data import describe
from metapretrain.models import build_encoder
from metapretrain.models.encoders import build_backbone
from metapretrain.models.saved import BATCH, LEARNER, SavedLearner, as_uint8, make_learner, needs_company, save_model

MODEL = {"classes": ["a", "b", "c", "d"], "channels": 1, "image_size": 16, "mean": [0.4], "std": [0.2]}
CHOICES = {"inner_lr": 0.2, "inner_steps": 1, "test_steps": 2, "batchnorm": "batch", "chunk": None}


def write_run(folder: Path, kind: str, model: Any = None, dataset: str = "mine", **changes: Any) -> Any:
    """A run of a learner that has seen some images; returns the learner."""
    torch.manual_seed(0)
    choices = {**CHOICES, "learner": kind, **changes}
    ways = None if kind == "protonet" else 3
    net = build_backbone("conv4", ways=ways, channels=1, image_size=16, mean=[0.4], std=[0.2])
    learner = make_learner(choices, net, 3)
    x, y = torch.randint(0, 256, (2, 6, 1, 16, 16), dtype=torch.uint8), torch.tensor([[0, 1, 2] * 2] * 2)
    learner.backward((x, y), (x, y))  # running statistics and records move
    with torch.no_grad():
        for p in learner.parameters():
            p -= 0.1 * p.grad
    config = {
        "model": model or MODEL,
        "dataset": dataset,
        "choices": choices,
        "backbone": "conv4",
        "tested": {"ways": 3, "shots": 2, "queries": 1},
    }
    (folder / "config.json").write_text(json.dumps({"config": config}))
    save_file(learner.state_dict(), folder / LEARNER)
    return learner.eval()


def images(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 1, 16, 16), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("batchnorm", ["batch", "support"])
@pytest.mark.parametrize("kind", ["maml", "fomaml", "anil", "metasgd", "protonet"])
def test_a_loaded_learner_classifies_as_the_one_that_was_trained(kind: str, batchnorm: str, tmp_path: Path) -> None:
    learner = write_run(tmp_path, kind, batchnorm=batchnorm)
    model = load(tmp_path)
    assert isinstance(model, SavedLearner) and not model.training
    support, query, codes = images(6, 1), images(5, 2), torch.tensor([0, 1, 2] * 2)
    labels = torch.tensor([7, 30, 41])
    classifier = model.adapt(support, labels[codes])
    expected = learner.logits((support[None], codes[None]), (query[None], torch.zeros(1, 5).long()))[0]
    torch.testing.assert_close(classifier.logits(query), expected)
    assert classifier.predict(query).tolist() == labels[expected.argmax(1)].tolist()
    assert classifier.classes.tolist() == [7, 30, 41]
    two = model.adapt(support[:2], labels[:2])
    assert two.logits(query).shape == (5, 2)
    large = torch.nn.functional.interpolate(query.float() / 255, scale_factor=2).expand(-1, 3, -1, -1)
    assert classifier.logits(large).shape == (5, 3)


@pytest.mark.parametrize("batchnorm", ["batch", "support"])
@pytest.mark.parametrize("kind", ["anil", "protonet"])
def test_features_are_what_the_head_sees(kind: str, batchnorm: str, tmp_path: Path) -> None:
    learner, seen = write_run(tmp_path, kind, batchnorm=batchnorm), []
    model, x = load(tmp_path), images(4, 3)
    if kind == "protonet":
        expected = learner.module(x)
    else:
        learner.module.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        learner._outputs()({}, x)
        expected = seen[0]
    torch.testing.assert_close(model.encode(x), expected.detach())
    alone = torch.cat([model.encode(one[None]) for one in x])
    same = bool(torch.allclose(alone, model.encode(x), atol=1e-4))
    assert same != needs_company(model.learner)


def test_an_encoder_with_other_classes_takes_new_ones_by_their_prototypes(tmp_path: Path) -> None:
    described = {**MODEL, "encoder": "mlp", "stem": "standard", "head": None}
    (tmp_path / "config.json").write_text(json.dumps({"config": {"model": described}}))
    torch.manual_seed(0)
    save_model(tmp_path, build_encoder("mlp", channels=1, image_size=16), None, torch.randn(4, 512))
    model, support, query = load(tmp_path), images(4, 1), images(6, 2)
    found = model.adapt(support, torch.tensor([5, 2, 2, 5])).logits(query)
    z = model.encode(support)
    centres = torch.stack([z[1:3].mean(0), z[[0, 3]].mean(0)])
    expected = -(model.encode(query)[:, None] - centres).square().sum(-1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("batchnorm", ["frozen", "support"])
@pytest.mark.parametrize("kind", ["maml", "anil", "metasgd", "protonet"])
def test_many_images_go_in_batches_and_the_support_is_learned_once(
    kind: str, batchnorm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, kind, batchnorm=batchnorm)
    model, sizes = load(tmp_path), []
    prepare = model.prepare
    monkeypatch.setattr(model, "prepare", lambda x: sizes.append(len(x)) or prepare(x))
    classifier, many = model.adapt(images(6, 1), [0, 1, 2] * 2), images(2 * BATCH + 3, 2)
    found = classifier.logits(many)
    assert sizes == [6, BATCH, BATCH, 3]
    each = torch.cat([classifier.logits(part) for part in many.split(100)])
    torch.testing.assert_close(found, each, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(classifier.probabilities(many[:4]).sum(1), torch.ones(4))


def test_the_inner_loop_runs_once_and_in_evaluation_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "maml", batchnorm="frozen")
    model, rows = load(tmp_path), []
    encoder = model.learner.module.encoder
    forward = type(encoder).forward
    monkeypatch.setattr(type(encoder), "forward", lambda self, x: rows.append(len(x)) or forward(self, x))
    classifier = model.adapt(images(6, 1), torch.tensor([0, 1, 2] * 2))
    assert rows.count(6) >= 2  # two inner steps, and the engine's look at the first
    rows.clear()
    model.train()  # as a caller may have left it
    first = classifier.predict(images(BATCH + 4, 2))
    assert rows == [BATCH, 4]
    model.eval()
    assert torch.equal(first, classifier.predict(images(BATCH + 4, 2)))


def test_queries_that_share_batch_statistics_stay_together(tmp_path: Path) -> None:
    learner = write_run(tmp_path, "maml", batchnorm="batch")
    support, codes, many = images(6, 1), torch.tensor([0, 1, 2] * 2), images(BATCH + 9, 2)
    expected = learner.logits((support[None], codes[None]), (many[None], torch.zeros(1, len(many)).long()))[0]
    torch.testing.assert_close(load(tmp_path).adapt(support, codes).logits(many), expected, rtol=1e-4, atol=1e-4)


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    write_run(tmp_path, "maml")
    model, x = load(tmp_path), images(4, 1)
    with pytest.raises(InputError, match="has no classes yet"):
        model.predict(x)
    with pytest.raises(InputError, match="got 4 support rows and 3 labels"):
        model.adapt(x, torch.tensor([0, 1, 2]))
    for wrong in (torch.ones(4), torch.eye(4).long(), torch.tensor([0, 1, -1, 1]), [0, 1, -100, 1]):
        with pytest.raises(InputError, match=r"labels must be a tensor or list of integers .* but not -1 or -100"):
            model.adapt(x, wrong)
    with pytest.raises(InputError, match="labels have 4 classes; this run has learned 3-way tasks"):
        model.adapt(x, torch.arange(4))
    whole = (tmp_path / "config.json").read_text()
    config = json.loads(whole)
    config["config"]["tested"]["ways"] = []
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"config\.json does not describe a model"):
        load(tmp_path)
    config = json.loads(whole)
    del config["config"]["choices"]["inner_lr"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"does not describe a model \(KeyError\('inner_lr'\)\)"):
        load(tmp_path)
    config = json.loads(whole)
    config["config"]["choices"]["batchnorm"] = "per-step"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=r"unknown batchnorm 'per-step'.*older version, train it again, or load it with"
    ):
        load(tmp_path)


def glyph(number: int) -> np.ndarray:
    """A drawing as Omniglot publishes it: 105 x 105, dark strokes on white paper."""
    image = Image.new("L", (105, 105), 255)
    points = [tuple(xy) for xy in np.random.default_rng(number).integers(8, 97, (6, 2)).tolist()]
    ImageDraw.Draw(image).line(points, fill=0, width=3)
    return np.asarray(image)


@pytest.mark.parametrize("bits", ["1", "L", "RGB"])
@pytest.mark.parametrize("kind", ["protonet", "maml", "encoder"])
def test_drawings_of_either_polarity_are_seen_as_in_training(kind: str, bits: str, tmp_path: Path) -> None:
    paper = [tmp_path / f"{number}-paper.png" for number in range(6)]
    for number, file in enumerate(paper):
        Image.fromarray(glyph(number)).convert(bits).save(file)
        Image.fromarray(255 - glyph(number)).convert(bits).save(tmp_path / f"{number}-board.png")
    trained = 255 - read_images(paper, 16, channels=1)  # as the reader of Omniglot does
    described = MODEL | {"polarity": LIGHT_ON_DARK}
    if kind == "encoder":
        write_images_run(tmp_path, described)
        wanted = write_images_run(tmp_path / "as-is", MODEL)
    else:
        write_run(tmp_path, kind, model=described)
        (tmp_path / "as-is").mkdir()
        write_run(tmp_path / "as-is", kind)
        wanted = load(tmp_path / "as-is")
    model, labels = load(tmp_path), torch.tensor([0, 0, 1, 1, 2, 2])
    board = read_images(sorted(tmp_path.glob("*-board.png")), 16, channels=1)
    for images in (trained, read_images(paper, 16, channels=1), board, read_images(paper, 16)):
        torch.testing.assert_close(model.encode(images), wanted.encode(trained), atol=1e-4, rtol=1e-4)
        expected = wanted.adapt(trained, labels).logits(trained)
        torch.testing.assert_close(model.adapt(images, labels).logits(images), expected, atol=1e-3, rtol=1e-3)


def write_images_run(folder: Path, described: dict[str, Any]) -> Any:
    """A run of an image encoder, loaded."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    about = described | {"encoder": "mlp", "stem": "standard", "head": None}
    (folder / "config.json").write_text(json.dumps({"config": {"model": about}}))
    save_model(folder, build_encoder("mlp", channels=1, image_size=16), None, torch.randn(4, 512))
    return load(folder)


@pytest.mark.parametrize("name", ["omniglot", "digits", "made"])
def test_a_model_of_drawings_says_their_polarity(name: str, tmp_path: Path) -> None:
    data = drawings(name, tmp_path)
    described = describe(SimpleNamespace(train=data, mean=(0.0,), std=(1.0,)), "conv4", "standard", None)
    assert described["polarity"] == LIGHT_ON_DARK
    assert torch.equal(light_on_dark(data.images), data.images)
    assert torch.equal(light_on_dark(255 - data.images), data.images)


@pytest.mark.parametrize("paper", [0, 60, 128, 200, 255])
def test_blank_and_dim_paper_is_dark(paper: int) -> None:
    blank = torch.full((1, 1, 12, 12), paper, dtype=torch.uint8)
    assert light_on_dark(blank).unique().tolist() == [min(paper, 255 - paper)]
    for ink in {0, 60, 128, 200, 255} - {paper}:
        drawn = blank.clone()
        drawn[:, :, 2:9, 5:7] = ink
        seen = light_on_dark(drawn)
        assert seen[0, 0, 0, 0] < seen[0, 0, 4, 5] and torch.equal(seen, light_on_dark(seen))


def drawings(name: str, folder: Path) -> ImageSet:
    if name == "digits":
        return load_images(name, None, "train")
    if name == "made":
        return load_images(name, None, "train")
    (folder / "images_evaluation").mkdir()
    for number in range(20):
        place = folder / "images_background" / "Greek" / f"character{number // 10:02}"
        for drawing in range(20):
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(glyph(number + drawing)).convert("1").save(place / f"{drawing:02}.png")
    (folder / "splits").mkdir()
    (folder / "splits" / "train.txt").write_text("Greek/character00/rot000\nGreek/character01/rot090\n")
    return load_images("omniglot", folder, "train", 28)


def test_an_older_run_on_omniglot_has_its_polarity(tmp_path: Path) -> None:
    write_run(tmp_path, "protonet", dataset="omniglot-5w1s")
    assert load(tmp_path).polarity == LIGHT_ON_DARK
    config = json.loads((tmp_path / "config.json").read_text())
    config["config"]["model"]["polarity"] = "upside down"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="unknown polarity 'upside down'"):
        load(tmp_path)


def test_one_channel_becomes_three_without_a_copy_in_floating_point(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda _: pytest.fail("12 bytes for each pixel of one"))
        assert torch.equal(as_uint8(given, 3, 8), given.expand(1, 3, 8, 8))
    assert torch.equal(as_uint8(given.expand(1, 3, 8, 8), 1, 8), given)


def test_pictures_that_are_no_squares_are_cut_as_files_are(tmp_path: Path) -> None:
    pixels = np.zeros((40, 90, 3), dtype=np.uint8)
    pixels[:, 25:65] = np.random.default_rng(0).integers(0, 255, (40, 40, 3))
    Image.fromarray(pixels).save(tmp_path / "x.png")
    read, given = read_images([tmp_path / "x.png"], 20), torch.from_numpy(pixels).permute(2, 0, 1)[None]
    assert (as_uint8(given, 3, 20).int() - read.int())[..., 1:-1, 1:-1].abs().max() <= 1
