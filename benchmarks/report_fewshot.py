"""The table of `run_fewshot.py`: accuracy over test episodes beside the papers' figures."""

from __future__ import annotations

from metapretrain.report.layout import Column, Layout, Published

# Omniglot with the split of Vinyals et al. (2016). ProtoNet: Snell et al. (2017), table 1; MAML: Finn et al. (2017),
# table 1, convolutional.
PUBLISHED = {
    f"omniglot-{setting}": {"protonet": Published({"test": protonet}), "maml": Published({"test": maml})}
    for setting, protonet, maml in (
        ("5w1s", 0.988, 0.987),
        ("5w5s", 0.997, 0.999),
        ("20w1s", 0.960, 0.958),
        ("20w5s", 0.989, 0.989),
    )
}

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
    published=PUBLISHED,
    published_counts={"test_classes": 1692, "test_images": 33_840},  # 423 characters, rotated; 20 images each
    cited=("test",),
)
