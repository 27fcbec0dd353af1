"""The table of `run_fewshot.py`: accuracy over test episodes beside the papers' numbers."""

from __future__ import annotations

import re
from dataclasses import replace

from metapretrain.checks import PRECISIONS
from metapretrain.report.layout import Column, Layout, Published

SHOTS = ("5w1s", "5w5s", "20w1s", "20w5s")
# Omniglot with the split of Vinyals et al. (2016). ProtoNet: Snell et al. (2017), table 1; MAML: Finn et al. (2017),
# table 1, convolutional. In the order of `SHOTS`.
OMNIGLOT = {"protonet": (0.988, 0.997, 0.960, 0.989), "maml": (0.987, 0.999, 0.958, 0.989)}
# 5-way 1- and 5-shot, with the prints they are from. Bertinetto et al. (2019), table 1, 64 filters (MAML: 32, and
# transductive); Lee et al. (2019), table 2 (ProtoNet on FC100 with conv4 from Oreshkin et al., 2018; ridge regression
# is their MetaOptNet-RR); Tian et al. (2020), table 2, without distillation.
PHOTOS: dict[tuple[str, str], dict[str, tuple[float, float, str]]] = {
    ("cifar-fs", "conv4"): {
        "protonet": (0.555, 0.720, "Bertinetto"),
        "maml-transductive": (0.589, 0.715, "Bertinetto, 32 filters"),
        "r2d2": (0.600, 0.761, "Bertinetto"),
        "supervised-logistic": (0.627, 0.787, "Tian"),
    },
    ("cifar-fs", "resnet12"): {
        "protonet": (0.722, 0.835, "Lee"),
        "r2d2": (0.726, 0.843, "Lee, RR"),
        "supervised-logistic": (0.715, 0.860, "Tian"),
    },
    ("fc100", "conv4"): {"protonet": (0.353, 0.486, "Oreshkin"), "supervised-logistic": (0.396, 0.535, "Tian")},
    ("fc100", "resnet12"): {
        "protonet": (0.375, 0.525, "Lee"),
        "r2d2": (0.405, 0.553, "Lee, RR"),
        "supervised-logistic": (0.426, 0.591, "Tian"),
    },
}
COUNTS = {"cifar-fs": (20, 12_000), "fc100": (20, 12_000)}  # classes and images of the test part

LAYOUT = Layout(
    columns=(
        Column("test", "test_accuracy", "test episodes %", drawn="test accuracy"),
        Column("episodes", "test_ci95", "± over episodes"),
        Column("validation", "validation_accuracy", "validation episodes %"),
    ),
    main="test",
    legend=(
        "Mean ± half-width of the 95% interval over seeds (Student t). ± over episodes: half-width of the 95% interval "
        "over a run's test episodes, which are the same for every run."
    ),
    published={
        f"omniglot-{setting}": {name: Published({"test": scores[place]}) for name, scores in OMNIGLOT.items()}
        for place, setting in enumerate(SHOTS)
    },
    published_counts={"test_classes": 1692, "test_images": 33_840},  # 423 characters, rotated; 20 images each
    cited=("test",),
)


def without_tag(recipe: str) -> str:
    """A recipe's name without the tag of a precision or of chosen settings: `conv4-bf16` has the backbone `conv4`."""
    return re.sub(rf"-({'|'.join([*PRECISIONS, 'chosen', 'long'])})$", "", recipe)


def layout_of(dataset: str, backbone: str) -> Layout:
    """The layout with the numbers that were published for a data set and a backbone, if there are any."""
    if dataset == "omniglot-lake":  # Lake et al. (2019), table 1: an error of 13.7%
        lake = {"omniglot-lake-lake": {"protonet": Published({"test": 0.863})}}
        return replace(LAYOUT, published=lake, published_counts={"test_classes": 400, "test_images": 800})
    family = "resnet12" if backbone.startswith("resnet12") else without_tag(backbone)
    rows = PHOTOS.get((dataset, family))
    if rows is None:
        return LAYOUT
    published = {
        f"{dataset}-{setting}": {name: Published({"test": row[:2][place]}, row[2]) for name, row in rows.items()}
        for place, setting in enumerate(SHOTS[:2])
    }
    classes, images = COUNTS[dataset]
    return replace(LAYOUT, published=published, published_counts={"test_classes": classes, "test_images": images})
