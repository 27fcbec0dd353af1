"""The table of `run_schedule.py`: downstream tasks and their mean, what the choice of sources cost, and its curves."""

from __future__ import annotations

from metapretrain.experiments.schedule.experiment import downstream_column
from metapretrain.report.layout import Column, Layout

DOWNSTREAM = {
    "wic": "accuracy",
    "mrpc": "accuracy",
    "qnli": "accuracy",
    "rte": "accuracy",
    "cola": "matthews",
    "conll04": "f1",
    "conll2003": "f1",
    "squad": "f1",
    "cb": "accuracy",
    "copa": "accuracy",
}

LAYOUT = Layout(
    columns=(
        Column("downstream", "downstream", "downstream %", drawn="mean over downstream tasks"),
        *(downstream_column(task, metric) for task, metric in DOWNSTREAM.items()),
    ),
    main="downstream",
    legend=(
        "Test parts of tasks that were no target, after fine-tuning with the same small budget; mean ± half-width of "
        "the 95% interval over seeds (Student t). Downstream: plain mean of the tasks' figures."
    ),
    further=(
        Column("target_loss", "target_loss", "target loss", False),
        Column("probe_share", "probe_share", "probes, % of compute"),
        Column("taylor_rank_correlation", "taylor_rank_correlation", "Taylor: rank correlation", False, True),
        Column("taylor_regret", "taylor_regret", "Taylor: regret", False, True),
        Column("peak_memory", "peak_memory_mib", "peak memory, MiB", False, True),
        Column("validation_downstream", "validation_downstream", "validation: downstream %"),
    ),
    further_legend=(
        "Target loss: mean over the setting's targets on rows that no utility saw; aware and agnostic rows have other "
        "targets. Taylor: agreement of its utilities with exact ones on the same batches, mean over the evaluations; "
        "the regret is 0 where its first source is the best one and 1 where it is the worst."
    ),
    baselines=(("uniform-aware",), ("uniform-agnostic",)),
    first_row=True,
    compared=("downstream", *DOWNSTREAM),
    notes=("schedule",),
    part="test",
    settings=("aware", "agnostic"),
)
