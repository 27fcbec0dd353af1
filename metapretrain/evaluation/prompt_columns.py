"""The tables of the prompts benchmark."""

from __future__ import annotations

from metapretrain.evaluation.layout import Column, Layout
from metapretrain.evaluation.prompt_notes import prompt_notes

SETS = ("sst5", "sst2", "amazon5", "amazon2", "sentihood", "semeval-restaurant", "semeval-laptop")
PAIRS = ("rte", "mrpc")

PROMPTS = Layout(
    columns=(
        Column("mean", "mean_accuracy", "mean %", parts=SETS, drawn="mean accuracy over sets"),
        *(
            Column(name, f"{name}_accuracy", f"{name} %", True, True, f"{name}_test", "proportion")
            for name in (*SETS, *PAIRS)
        ),
    ),
    main="mean",
    legend=(
        "Accuracy on test rows, the same for all rows and seeds; mean ± half-width of the 95% interval over seeds "
        "(Student t). Majority class: the most frequent one of the training part. Zero-shot: the hard text alone."
    ),
    further=(
        Column("mean_f1", "mean_f1", "macro-F1: mean %"),
        *(Column(f"{name}_f1", f"{name}_f1", f"{name} %", True, True) for name in (*SETS, *PAIRS)),
        Column("validation_mean", "validation_mean_accuracy", "validation: mean %", True, True),
    ),
    further_legend="Macro-F1: plain mean of the F1 of each class, so that the majority class alone is no good answer.",
    baselines=(("ppt",), ("multitask",)),
    first_row=True,
    compared=("mean", "mean_f1", *SETS),
    published="paper: " + " / ".join(SETS),
    cited=SETS,
    star="pretrained on other data in the paper",
    majority="majority_",
    notes=prompt_notes,
    part="test",
)
