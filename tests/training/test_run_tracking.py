"""Figures, embeddings and hyperparameters of a run, as TensorBoard reads them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.training.logs import COLOURS, Tracker
from metapretrain.training.run_folder import RunFolder
from tests.training.run_files import CONFIG, events, figure, lines, projector, scalars


def test_a_figure_is_a_file_and_a_tensorboard_image(tmp_path: Path) -> None:
    from PIL import Image

    with RunFolder.open(tmp_path, CONFIG) as run:
        file = run.figure("t-sne", figure(), 3)
        assert file == tmp_path / "figures" / "t-sne.png"
    with Image.open(file) as image:
        size = image.size
    (shown,) = events(tmp_path).Images("figures/t-sne")
    assert (shown.step, shown.width, shown.height) == (3, *size)


def test_a_large_figure_is_made_smaller_for_tensorboard_only(tmp_path: Path) -> None:
    from PIL import Image

    large = figure()
    large.set_size_inches(12, 6)
    with RunFolder.open(tmp_path, CONFIG) as run:
        file = run.figure("large", large, 3)
    with Image.open(file) as image:
        assert image.width > 1200
    (shown,) = events(tmp_path).Images("figures/large")
    assert shown.width == 800 and 300 < shown.height < 500


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", 'a"b', "a b"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        with pytest.raises(InputError, match="letters, digits"):
            run.figure(name, figure(), 1)
        with pytest.raises(InputError, match="letters, digits"):
            run.embedding(name, torch.zeros(1, 1), [0])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_projector_reads_points_labels_and_images(tmp_path: Path, channels: int, dtype: torch.dtype) -> None:
    from PIL import Image

    z = torch.randn(5, 3, dtype=torch.float64)
    images = torch.randint(0, 256, (5, channels, 4, 6), dtype=torch.uint8)
    given = images if dtype == torch.uint8 else images / 255
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.embedding("train", z.bfloat16().float(), torch.arange(5), step=1)
        run.embedding("train", z, ["cat", "a\tdog", "", "x\ny", "cat"], given, step=2)
        run.embedding("train", z, [1] * 5, given, step=1)  # replaced
    first, second = projector(tmp_path)
    assert (first.tensor_name, second.tensor_name) == ("train:00000001", "train:00000002")
    assert np.loadtxt(tmp_path / second.tensor_path, delimiter="\t") == pytest.approx(z.numpy(), rel=1e-5)
    assert (tmp_path / second.metadata_path).read_text() == "cat\na dog\n-\nx y\ncat\n"
    assert (tmp_path / first.metadata_path).read_text() == "1\n" * 5
    assert list(second.sprite.single_image_dim) == [6, 4]
    with Image.open(tmp_path / second.sprite.image_path) as sheet:
        pixels = torch.from_numpy(np.array(sheet))
    assert pixels.shape == (12, 18, 3)
    colours = [COLOURS[place] for place in (2, 1, 0, 3, 2)]  # of the words in their order: -, a dog, cat, x y
    for i in range(5):
        row, column = divmod(i, 3)
        cell = pixels[row * 4 : row * 4 + 4, column * 6 : column * 6 + 6]
        colour = torch.tensor([int(colours[i][place : place + 2], 16) for place in (1, 3, 5)]) / 255
        tint = colour.view(3, 1, 1) if channels == 1 else 1.0
        expected = images[i].expand(3, 4, 6) * tint
        assert (cell.permute(2, 0, 1) - expected).abs().max() <= 0.51


def test_tensorboards_own_projector_plugin_serves_the_points(tmp_path: Path) -> None:
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.projector.projector_plugin import ProjectorPlugin
    from werkzeug.test import Client

    with RunFolder.open(tmp_path, CONFIG) as run:
        run.embedding("z", torch.eye(4)[:, :2], ["a", "b", "c", "d"], torch.zeros(4, 3, 2, 2), step=1)
    apps = ProjectorPlugin(TBContext(logdir=str(tmp_path))).get_plugin_apps()

    def ask(route: str, **query: str) -> Any:
        answer = Client(apps[route]).get("/", query_string={"run": ".", **query})
        assert answer.status_code == 200, answer.data
        return answer

    (served,) = ask("/info").json["embeddings"]
    assert served["tensorName"] == "z:00000001"
    assert served["tensorShape"] == [4, 2]
    points = np.frombuffer(ask("/tensor", name=served["tensorName"]).data, dtype=np.float32)
    assert points.reshape(4, 2).tolist() == torch.eye(4)[:, :2].tolist()
    assert ask("/metadata", name=served["tensorName"]).data == b"a\nb\nc\nd\n"
    assert ask("/sprite_image", name=served["tensorName"]).data[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("z", "labels", "images"),
    [
        (torch.zeros(3), [0, 1, 2], None),
        (torch.zeros(3, 2), [0, 1], None),
        (torch.zeros(3, 2), [0, 1, 2], torch.zeros(2, 3, 4, 4)),
    ],
)
def test_points_that_do_not_fit_are_refused(tmp_path: Path, z: Any, labels: Any, images: Any) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run, pytest.raises(InputError, match="the projector takes"):
        run.embedding("z", z, labels, images)


def test_every_tensor_of_the_projector_has_words_and_thumbnails_in_the_colour_of_its_word(tmp_path: Path) -> None:
    from PIL import Image

    with RunFolder.open(tmp_path, CONFIG) as run:
        run.embedding("texts", torch.randn(12, 3), [f"class {i % 6}" for i in range(12)], step=1)
        run.embedding("digits", torch.randn(4, 3), [0, 1, 0, 1], torch.ones(4, 1, 8, 8), step=1)
    for entry in projector(tmp_path):
        words = (tmp_path / entry.metadata_path).read_text().splitlines()
        with Image.open(tmp_path / entry.sprite.image_path) as sheet:
            side = sheet.width // 8
            shown = [sheet.getpixel((8 * (i % side) + 4, 8 * (i // side) + 4)) for i in range(len(words))]
        assert len(set(shown)) == len(set(words)) == len(set(zip(words, shown, strict=True)))


def test_tensorboard_opens_on_validations(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        for split, name in (("train", "learning_rate"), ("train", "loss_a"), ("validation", "accuracy")):
            run.log(1, split, {name: 0.5})
        run.figure("confusion", figure(), 1)
        run.hparams(CONFIG, {"accuracy": 0.5})
    tags = events(tmp_path).Tags()
    shown = sorted(tag for tag in [*tags["scalars"], *tags["images"]] if not tag.startswith("_"))
    assert shown[0] == "eval/accuracy"


def test_what_follows_a_pretraining_is_logged_after_its_updates(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.steps_before = 100
        for step in (5, 10, 15):
            run.log(step, "train", {"loss": 1.0})
        run.figure("a", figure(), 10)
        run.embedding("z", torch.zeros(2, 2), [0, 1], step=15)
        run.cut_back(10)
        assert [step for step, _ in lines(tmp_path)] == [105, 110] and list(projector(tmp_path)) == []
        assert [event.step for event in events(tmp_path).Images("figures/a")] == [110]
        run.cut_back(-1)
    assert lines(tmp_path) == [] and not events(tmp_path).Tags()["images"]


def test_a_figure_names_the_method_of_its_run(tmp_path: Path) -> None:
    drawn = figure()
    with RunFolder.open(tmp_path, {"method": "prl$query$", "seed": 3}) as run:
        run.figure("confusion", drawn, 1)
    assert drawn.get_suptitle() == "prl$query$, seed 3"


def test_hparams_are_in_the_run_itself(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"loss": 1.0})
        run.hparams({**CONFIG, "none": None, "sizes": [1, 2]}, {"knn_accuracy": 0.5, "test_accuracy": 0.75})
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    found = events(tmp_path)
    assert scalars(tmp_path, "when_done/test_accuracy") == [(0, 0.75)]
    assert scalars(tmp_path, "train/loss") == [(1, 1.0)]
    text = str(found.SummaryMetadata("_hparams_/session_start_info"))
    assert all(word in text for word in ("lr", "model.encoder", "resnet18"))
    columns = str(found.SummaryMetadata("_hparams_/experiment"))
    assert 0 < columns.index("when_done/test_accuracy") < columns.index("when_done/knn_accuracy")


def test_columns_of_hparams_are_not_those_of_a_pretraining(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.hparams(CONFIG, {"knn_accuracy": 0.5, "validation_accuracy": 0.75})
    assert scalars(tmp_path, "when_done/knn_accuracy") == [(0, 0.5)]
    assert events(tmp_path).SummaryMetadata("_hparams_/session_start_info")
    with pytest.raises(KeyError):
        events(tmp_path).SummaryMetadata("_hparams_/experiment")


def test_without_tensorboard_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match="tensorboard, which is not installed: pip install tensorboard"):
        _ = Tracker(tmp_path).writer
