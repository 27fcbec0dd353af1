"""The main columns of the text benchmark: its tasks and their mean."""

from __future__ import annotations

from metapretrain.evaluation.layout import Column

TASKS = (
    Column("sst", "sst_accuracy", "SST accuracy %", True, True, "sst_dev", "proportion"),
    Column("para", "para_accuracy", "PARA accuracy %", True, True, "para_dev", "proportion", marked=True),
    Column("sts", "sts_pearson", "STS Pearson", False, True, "sts_dev", "correlation", marked=True),
)
OVERALL = Column(
    "overall", "overall", "overall", False, parts=("sst", "para", "sts"), marked=True, drawn="overall on dev"
)
