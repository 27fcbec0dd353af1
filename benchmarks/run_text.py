"""Prototypical pretraining for text: sentiment (SST), paraphrases (PARA) and similarity (STS) in one encoder.

Each row trains one encoder and a head for each task and is scored once on the dev parts; choices are made on rows held
out of the training parts. Every trained row has the same number of updates, pretraining and fine-tuning together.

    python benchmarks/run_text.py --data-dir DIR --recipe paper --seeds 0 1 2
    python benchmarks/run_text.py --smoke
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ctrl_c  # noqa: F401
from report_text import LAYOUT
from script_options import add_table_options, own_tasks, refuse_two_schedules, schedule_names

from metapretrain.data.registry import load_text_tasks, names_giving
from metapretrain.data.texts import TextTask, hold_out
from metapretrain.errors import InputError
from metapretrain.experiments.command import Table, machine_of, script_main, table_arguments, table_parser
from metapretrain.experiments.recipe import Proto, override
from metapretrain.experiments.text.data import TextData
from metapretrain.experiments.text.experiment import TextExperiment
from metapretrain.experiments.text.recipe import STS_HEADS, TextMethod, TextPhase, TextRecipe
from metapretrain.experiments.text.streams import POLICIES
from metapretrain.models.hub import text_source
from metapretrain.options import names, positive_int

log = logging.getLogger("metapretrain.run_text")

# A row: what the encoder starts from, how pairs are encoded, which heads are trained and how. Rows that name a
# pretraining share it. The paper used the cosine for STS from the weighted rows on: they leave the head to --sts-head.
METHODS = {
    "baseline": TextMethod(frozen=True),
    "unfrozen": TextMethod(),
    "combine-add": TextMethod(combine="add"),
    "combine-concat": TextMethod(combine="concat"),
    "cosine-untrained": TextMethod(sts="cosine", trained=False),
    "cosine": TextMethod(sts="cosine"),
    "shared": TextMethod(shared=True),
    "cross": TextMethod(joined=True),
    "weighted-sst": TextMethod(favoured="sst", sts=None),
    "weighted-para": TextMethod(favoured="para", sts=None),
    "weighted-sts": TextMethod(favoured="sts", sts=None),
    "pcgrad": TextMethod(joined=True, surgery=True),
    "pretrain-ce": TextMethod("cross-entropy", joined=True),
    "cross-cosine": TextMethod(joined=True, sts="cosine"),  # PARA as one sequence, STS by the cosine
    "proto-cosine": TextMethod("proto-cosine", joined=True, sts="cosine"),
    "pretrain-ce-cosine": TextMethod("cross-entropy-cosine", joined=True, sts="cosine"),
    "proto-ordinal": TextMethod("proto-ordinal", joined=True),  # scores between two classes belong to both
    "pretrain-ce-ordinal": TextMethod("cross-entropy-ordinal", joined=True),
    "proto-frozen": TextMethod("proto", joined=True, frozen=True),
    "proto-separate": TextMethod("proto-separate", sts=None),
    "proto": TextMethod("proto", joined=True),
    "proto-query": TextMethod("proto-query", joined=True),
    "proto-epoch": TextMethod("proto-epoch", joined=True),
    "proto-ensemble": TextMethod("proto-ensemble", joined=True),
}
SAME = {"combine-mult": "unfrozen"}  # appendix A.1.1 multiplies: one run, two names

# "paper": section 5.3. "strong": what the trials of tune_text.py chose, the same budget for every row.
PLAIN = TextPhase(lr=1e-5)
PAPER = TextRecipe(epochs=20, joint=PLAIN, pretrain=PLAIN, finetune=PLAIN, frozen=PLAIN)
DECAYED = TextPhase(lr=1e-4, schedule="linear", warmup=0.06, clip=1.0)
SQUARED = Proto(distance="sqeuclidean", temperature=8.0, query_fraction=0.5)
STRONG = TextRecipe(
    epochs=6,
    joint=replace(DECAYED, label_smoothing=0.1),
    pretrain=DECAYED,
    finetune=DECAYED,
    pretrain_share=0.25,
    frozen=TextPhase(lr=1e-3, schedule="linear"),
    scheduler="proportional",
    multiple=16,
    proto=SQUARED,
    query=SQUARED,
)
RECIPES = {"paper": PAPER, "strong": STRONG}
NAMED = ("encoder", "pooling", "policy", "loss_weights", "sts_head", "updates")  # choices with an option of their own


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = table_parser(
        __doc__,
        "text",
        methods=[*METHODS, *SAME],
        recipes=RECIPES,
        change="the recipe: joint.lr=2e-5",
        schedule="one task per update, in place of a batch of each: "
        f"{schedule_names('TASK')}; utility:alpha=0.05 sets an option",
        held_out="dev parts",
        compiled="compile the encoder (GPU); pcgrad, which goes back twice, is not",
        drawn="maps and curves",
        maps=True,
    )
    add = parser.add_argument
    add(
        "--tasks",
        type=names("set of text tasks", names_giving("text-tasks")),
        metavar="A,B|all",
        help=f"sets that the tasks are from: {', '.join(names_giving('text-tasks'))} (cs224n, unless --train is given)",
    )
    add_table_options(parser, "dev", "kind=regression or pair-regression, low and high for scores")
    add("--qqp", type=Path, metavar="DIR", help="more paraphrases for training: GLUE's QQP files")
    add("--encoder", metavar="NAME", help="minilm (default), bert-tiny, tiny, package:NAME, a folder or a hub model")
    add("--pooling", choices=("auto", "mean", "cls"), help="of the encoder's last states (default: its own)")
    add("--updates", type=positive_int, metavar="N", help="of each row, in place of the recipe's epochs")
    add("--policy", choices=POLICIES, help="an epoch is the longest loader (default) or the shortest")
    add("--loss-weights", metavar="TASK=W,...", help="such as sst=1,para=0.5,sts=1, in all rows but weighted-*")
    add("--sts-head", choices=STS_HEADS, help="of weighted-* and proto-separate (default: cosine)")
    options: Namespace = parser.parse_args(argv)
    if options.tasks is None:
        options.tasks = [] if options.train else ["cs224n"]
    options.methods = list(dict.fromkeys(SAME.get(name, name) for name in options.methods))
    return options


def recipe_of(options: Namespace) -> TextRecipe:
    """Return the chosen recipe with the changes of the command line."""
    refuse_two_schedules(options.schedule, options.changes)
    recipe = RECIPES[options.recipe]
    if options.smoke:
        quick = TextPhase(lr=3e-3)
        recipe = replace(
            recipe,
            epochs=2,
            batch_size=16,
            pool=2,
            encoder="tiny",
            joint=quick,
            pretrain=quick,
            finetune=quick,
            frozen=quick,
        )
    given = {name: getattr(options, name) for name in NAMED}
    given["scheduler"] = options.schedule
    given = {name: value for name, value in given.items() if value is not None}
    return override(replace(recipe, **given), options.changes)


def tasks_of(options: Namespace, recipe: TextRecipe) -> list[TextTask]:
    """Read the tasks; those of CS224N are small made ones in a smoke run."""
    given = list(options.tasks)
    if options.qqp is not None and "cs224n" not in given:
        raise InputError("--qqp adds to the tasks of cs224n: leave it out, or name cs224n in --tasks")
    made: list[TextTask] = []
    if options.smoke and "cs224n" in given:
        from metapretrain.data.made import made_tasks

        made = made_tasks(rows=64)
        given.remove("cs224n")
    if "cs224n" in given and options.data_dir is None:
        raise InputError("--data-dir is needed: the folder of CS224N's files (metapretrain data says where they are)")
    named = load_text_tasks(given, options.data_dir, recipe.validation, qqp=options.qqp) if given else []
    own = []
    for task in own_tasks(options, "dev")[0]:  # at most a fifth of its training rows are held back to choose by
        train, held = hold_out(task.train, min(recipe.validation, len(task.train) // 5))
        own.append(replace(task, train=train, validation=held))
    return [*made, *named, *own]


def tables_of(options: Namespace) -> list[Table]:
    """Read the tasks; of all rows, those are left out that need other tasks, or all of them in an update."""
    machine, recipe = machine_of(options), recipe_of(options)
    text_source(recipe.encoder)  # missing weights are told before any data is read
    tasks = tasks_of(options, recipe)
    if set(options.methods) == set(METHODS):
        known = {task.name for task in tasks}
        away = [name for name in options.methods if METHODS[name].favoured not in {None, *known}]
        left = [name for name in options.methods if METHODS[name].surgery and recipe.scheduler]
        options.methods = [name for name in options.methods if name not in (*away, *left)]
        if away:
            log.info("%s are left out: there is no such task here", ", ".join(away))
        if left:
            log.info("%s is left out: it needs a batch of each task in an update (--set scheduler=)", ", ".join(left))
    sources = ["made" if options.smoke and name == "cs224n" else name for name in options.tasks]
    sources += dict(options.train)
    dataset = "-".join([*sources, *["qqp"] * (options.qqp is not None and not options.smoke)])
    experiment = TextExperiment(
        "text",
        dataset,
        recipe=recipe,
        data=TextData(tuple(tasks), options.validate),
        machine=machine,
        layout=LAYOUT,
        **table_arguments(options, options.recipe, Path(options.encoder or "").name, options.schedule),
    )
    return [Table(experiment, METHODS)]


main = script_main(__file__, options_of, tables_of)


if __name__ == "__main__":
    sys.exit(main())
