"""ImageSet, splits, digits and the registry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metapretrain.data.images import ImageSet, load_digits_images, resize, validation_split
from metapretrain.data.registry import DATASETS, load_images, names_giving
from metapretrain.errors import InputError


def _set(count: int = 6) -> ImageSet:
    images = torch.arange(count * 3 * 16).remainder(256).to(torch.uint8).view(count, 3, 4, 4)
    return ImageSet(images, torch.arange(count) % 3, ["a", "b", "c"], "toy", "train")


def test_subset_keeps_order_pairs_and_names() -> None:
    rows = _set()
    for index in ([4, 0], torch.tensor([4, 0]), np.array([4, 0])):
        part = rows.subset(index)
        assert torch.equal(part.images, rows.images[[4, 0]]) and part.labels.tolist() == [1, 0]
        assert (part.classes, part.name, part.split) == (rows.classes, "toy", "train")
    assert len(rows.subset(rows.labels == 2)) == 2
    assert rows.to("cpu").images.device.type == "cpu" and rows.to("meta").labels.device.type == "meta"


def test_statistics_are_those_of_all_pixels() -> None:
    images = torch.randint(0, 256, (700, 3, 5, 5), generator=torch.Generator().manual_seed(0))
    mean, std = ImageSet(images.to(torch.uint8), torch.zeros(700, dtype=torch.int64), ["a"]).statistics()
    values = images.double() / 255
    torch.testing.assert_close(torch.tensor(mean).double(), values.mean((0, 2, 3)), atol=1e-6, rtol=0)
    expected = values.var((0, 2, 3), correction=0).sqrt()
    torch.testing.assert_close(torch.tensor(std).double(), expected, atol=1e-6, rtol=0)
    with pytest.raises(InputError, match="an empty set has no mean"):
        _set().subset([]).statistics()


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.rand(2, 3, 4, 4), torch.tensor([0, 1]), "images must be uint8"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), r"got torch.uint8 \(2, 4, 4\)"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0.0, 1.0]), "labels must be int64"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1, 1]), "2 images but 3 labels"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 2]), r"0..1 .* got 0..2"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([-2, 1]), "got -2..1"),
    ],
)
def test_a_bad_set_is_one_line(images: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        ImageSet(images, labels, ["a", "b"])
    assert "\n" not in str(error.value)


def test_resize_is_torchvisions_with_antialiasing() -> None:
    from torchvision.transforms.v2 import functional as reference

    images = torch.randint(0, 256, (3, 3, 20, 20), generator=torch.Generator().manual_seed(0))
    images = images.to(torch.uint8)
    expected = reference.resize(images.float(), [8, 8], antialias=True).round().clamp(0, 255)
    assert torch.equal(resize(images, 8).float(), expected)
    assert resize(images, 20) is images
    assert resize(images[:0], 8).shape == (0, 3, 8, 8)
    for bad in (0, -1, 2.5):
        with pytest.raises(InputError, match=r"image size is .*; give a whole number"):
            resize(images, bad)


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=80), share=st.floats(0, 0.9), seed=st.integers(0, 5))
def test_a_split_is_disjoint_complete_stratified_and_fixed(labels: list[int], share: float, seed: int) -> None:
    size = int(share * len(labels))
    try:
        train, held = validation_split(labels, size, seed)
    except InputError:  # some class would have nothing left to train on
        counts = np.bincount(labels)
        assert min(count - size * count / len(labels) for count in counts[counts > 0]) < 1
        return
    assert sorted(train.tolist() + held.tolist()) == list(range(len(labels)))
    assert len(held) == size and train.dtype == held.dtype == torch.int64
    y = torch.tensor(labels)
    for label in set(labels):
        fair = size * labels.count(label) / len(labels)
        assert abs(int((y[held] == label).sum()) - fair) < 1
        assert bool((y[train] == label).any())
    again = validation_split(y, size, seed)
    assert torch.equal(again[0], train) and torch.equal(again[1], held)


def test_the_split_of_stl10s_labels_is_fifty_a_class_and_stays_the_same() -> None:
    labels = torch.arange(5000) % 10
    train, held = validation_split(labels, 500)
    assert labels[held].bincount().tolist() == [50] * 10 and labels[train].bincount().tolist() == [450] * 10
    assert held[:6].tolist() == [0, 4, 5, 25, 30, 35]  # fixed for ever: results rest on it
    assert not torch.equal(validation_split(labels, 500, seed=1)[1], held)
    assert len(validation_split(labels, 0)[0]) == 5000


@pytest.mark.parametrize("size", [-1, 6, 7, 1.5, True, None])
def test_an_impossible_validation_size_is_one_line(size: object) -> None:
    with pytest.raises(InputError, match=r"validation size is .*; give a whole number from 0 to 5"):
        validation_split([0, 0, 0, 1, 1, 1], size)


def test_labels_that_cannot_be_split_are_one_line() -> None:
    with pytest.raises(InputError, match="2 of 3 rows have no label"):
        validation_split([-1, 0, -1], 1)
    with pytest.raises(InputError, match=r"labels must be integers \(N,\), got float64"):
        validation_split([0.5, 1.0], 1)
    with pytest.raises(InputError, match="no training row of class 7"):
        validation_split([3, 3, 3, 7, 3, 3], 5)


def test_digits_are_scikit_learns_split_without_overlap() -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    train, test = load_digits_images("train"), load_digits_images("test")
    assert (len(train), len(test)) == (1347, 450)
    both = torch.cat([train.images, test.images]).flatten(1).double() / 255 * 16
    labels = torch.cat([train.labels, test.labels])
    order = np.lexsort(both.round().numpy().T)
    expected = np.lexsort(source.data.T)
    assert np.array_equal(both.round().numpy()[order], source.data[expected])
    assert np.array_equal(labels.numpy()[order], source.target[expected])
    assert int(test.labels.bincount().min()) >= 43 and int(test.images.max()) == 255
    with pytest.raises(InputError, match="unknown split"):
        load_digits_images("valid")


def test_every_row_of_the_registry_says_what_it_is_and_is_read_by_name() -> None:
    images = ["stl10", "digits", "omniglot", "image-folder", "made", "cifar-fs", "fc100"]
    assert names_giving("images", "few-shot") == [*images, "mini-imagenet", "tiered-imagenet", "cub"]
    for name, info in DATASETS.items():
        assert info.name == name and info.terms and info.source and info.layout
        if info.needs_folder:
            with pytest.raises(InputError, match=f"{name} needs a data folder"):
                info.check(None)
        if info.needs_folder and name in names_giving("images", "few-shot"):
            with pytest.raises(InputError, match=f"{name} needs a data folder"):
                load_images(name, None, "train")
    assert DATASETS["digits"].check(None) == "digits: train 1,347 images, test 450 images"
    assert load_images("digits", None, "train", 16).images.shape == (1347, 1, 16, 16)
    with pytest.raises(InputError, match="unknown data set 'stl-10'; did you mean 'stl10'"):
        load_images("stl-10", None, "train")
    with pytest.raises(InputError, match="unknown split of digits 'unlabeled'"):
        load_images("digits", None, "unlabeled")
