"""Soft prompts for a frozen language model, pretrained or not, tuned on a few examples of each sentiment set (MetaPT).

Every row starts from a prompt, tunes it on the same few examples of each downstream set and is scored on its test rows.
All pretrained rows read the same number of pretraining examples; one pretraining serves all sets. With `--recipe fair`
they have the same passes through the model, updates, decay, start and rows to choose by.

    python benchmarks/run_prompts.py --data-dir DIR --seeds 0 1 2 3 4
    python benchmarks/run_prompts.py --data-dir DIR --recipe fair --seeds 0 1 2 3 4 5 6 7 8 9 10 11 12
    python benchmarks/run_prompts.py --smoke
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ctrl_c  # noqa: F401
from lend_prompts import LendingExperiment
from pseudo_labels import pseudo_labelled
from report_prompts import LAYOUT
from script_options import add_table_options, own_tasks, refuse_two_schedules, schedule_names, single_machine_of

from metapretrain.data.made import made_sentiment
from metapretrain.data.published import concatenate
from metapretrain.data.registry import PLAIN, load_plain, load_sentiment, names_giving
from metapretrain.data.texts import SentenceData
from metapretrain.errors import InputError
from metapretrain.experiments.command import Table, folder_name, script_main, table_arguments, table_parser
from metapretrain.experiments.prompts.data import NO_TEXTS, PromptData
from metapretrain.experiments.prompts.recipe import Meta, PromptMethod, PromptRecipe, Tuning
from metapretrain.experiments.recipe import override
from metapretrain.models.hub import text_source
from metapretrain.models.language_models import language_source
from metapretrain.options import Parser, names, option_type, positive_int

log = logging.getLogger(__name__)

PRETRAINING = "yelp5"
DOWNSTREAM = ("sst5", "sst2", "amazon5", "amazon2", "sentihood", "semeval-restaurant", "semeval-laptop")
PAIRS = ("rte", "mrpc")
ELSEWHERE = (PRETRAINING, "amazon5-kindle")  # what prompts are pretrained on, and another sample of amazon5

# A row: what the prompt starts from, how it is pretrained on which meta tasks, and what is tuned.
METHODS = {
    "zero-shot": PromptMethod("none", tuned="nothing"),
    "ft": PromptMethod("none", tuned="model"),
    "pt": PromptMethod("random"),
    "pt-vocab": PromptMethod("vocabulary"),
    "ppt": PromptMethod(objective="mixed"),
    "multitask": PromptMethod(objective="multitask", grouping="kmeans"),
    "metapt-kmeans": PromptMethod(objective="meta", grouping="kmeans"),
    "metapt-lda": PromptMethod(objective="meta", grouping="lda"),
    "metapt-random": PromptMethod(objective="meta", grouping="random"),
    "metapt-label": PromptMethod(objective="meta", grouping="label"),
    "ppt-pseudo": PromptMethod(objective="mixed", source="pseudo"),
    "metapt-pseudo": PromptMethod(objective="meta", grouping="kmeans", source="pseudo"),
}
LABELS = (2, 3, 5)
ROWS = {
    **METHODS,
    "reptile-kmeans": PromptMethod(objective="reptile", grouping="kmeans"),
    "reptile-random": PromptMethod(objective="reptile", grouping="random"),
    "ppt-235": PromptMethod(objective="mixed", labels=LABELS),
    "multitask-235": PromptMethod(objective="multitask", grouping="kmeans", labels=LABELS),
    "metapt-235": PromptMethod(objective="meta", grouping="kmeans", labels=LABELS),
    "reptile-235": PromptMethod(objective="reptile", grouping="kmeans", labels=LABELS),
}  # with those of recipe fair alone

# Equal terms: 4 rows per update through the model once each way, 4,000 updates with a linear decay, a start from the
# vocabulary and 320 rows to choose by, whatever the row. MetaPT takes one inner step of first order.
FAIR = PromptRecipe(
    budget="fair",
    reads=16_000,
    length=48,
    max_length=96,
    validations=10,
    held_out=8,
    meta=Meta(shots=2, lr=3e-3, inner_lr=0.1, order=1),
)
RECIPES = {"equal": PromptRecipe(), "fair": FAIR, "paper": PromptRecipe(budget="paper")}
TRIAL = PromptRecipe(
    model="tiny",
    embedder="tiny",
    length=5,
    max_length=40,
    reads=80,
    rows=100,
    validations=2,
    held_out=1,
    examples=10,
    validation=10,
    test_rows=20,
    meta=Meta(clusters=5, shots=2),
    mixed=Tuning(epochs=5),
    tune=Tuning(epochs=2),
    full=Tuning(lr=1e-3, epochs=1),
)


@option_type
def two_files(text: str) -> tuple[Any, ...]:
    """A name with the tables of its training and its test rows, as ``NAME=TRAIN,TEST`` or ``NAME=TRAIN``."""
    name, _, files = text.partition("=")
    parts = files.split(",")
    if not name or not all(parts) or len(parts) > 2:
        raise InputError(f"expected NAME=TRAIN.csv,TEST.csv or NAME=TRAIN.csv, given {text!r}")
    return (name, *map(Path, parts))


def parser_of(about: str | None = __doc__) -> Parser:
    """The command line, also of the scripts that hand options on to this one."""
    parser = table_parser(
        about,
        "prompts",
        methods=ROWS,
        change="the recipe: meta.inner_lr=0.5 examples=640 rows=1000",
        schedule=f"which meta tasks a step takes, in place of all: {schedule_names('task-0')}, "
        "with options (docs/prompts.md)",
        held_out="test parts",
    )
    parser.set_defaults(methods=None)
    add = parser.add_argument
    add("--model", metavar="NAME", help="smollm2 (default), tiny, package:NAME, a folder, a hub model (t5-base)")
    told = (
        "of pretraining: the same reads for all rows (equal, default), the same terms in all (fair), the paper's steps"
    )
    add("--recipe", "--budget", dest="recipe", choices=RECIPES, default="equal", help=told)
    told = "pretraining examples read (40000), or with recipe fair, half of the passes of each row (16000)"
    add("--reads", type=positive_int, metavar="N", help=told)
    add("--draw", choices=("stratified", "random"), default="stratified", help="of the few examples")
    known = dict.fromkeys((*DOWNSTREAM, *PAIRS, *(name for name in names_giving("sentences") if name not in ELSEWHERE)))
    add(
        "--sets",
        type=names("set", known),
        metavar="A,B|all",
        help=f"{', '.join(known)} (default: those of one sentence, or of --train)",
    )
    add_table_options(parser, "test", "words=A,B: label words, by default the names of the classes")
    told = "a set of your own from tables: --train NAME=TRAIN and, with a second file, --test NAME=TEST"
    add("--set-from", type=two_files, action="append", default=[], metavar="NAME=TRAIN[,TEST]", help=told)
    add(
        "--cache",
        type=Path,
        metavar="DIR",
        help="where a converted model is kept (default: the user's cache), and the meta tasks of LDA",
    )
    add(
        "--pretrained",
        type=Path,
        metavar="DIR",
        help="a table's folder: pretrained prompts that are there, of the same choices, are copied",
    )
    add("--rows-per-pass", type=positive_int, default=64, metavar="N", help="rows through the model at once (64)")
    add("--tasks-per-pass", type=positive_int, metavar="N", help="meta tasks through the model at once (all)")
    told = "compile T5's or Llama's layers for pretraining, on a GPU: a "
    told += "minute, then steps of T5-base and SmolLM2 are 3 times as fast in bf16, 1.2 to 1.4 times in fp32 (H200)"
    add("--compile", action="store_true", help=told)
    return parser


def own_options(parser: Parser, about: str | None, argv: Sequence[str] | None) -> tuple[Namespace, list[str]]:
    """Read a script's `parser` beside the options here: what it names, with the tag, and words for :func:`options_of`.

    `--help` lists both, and no option is without a meaning.
    """
    both = parser_of(about)
    for action in parser._actions:
        both._add_action(action)
    read = both.parse_args(argv)
    if read.config is not None:
        raise InputError("--config is of run_prompts.py; name the options of its command here")
    own, rest = parser.parse_known_args(argv)
    return Namespace(**vars(own), tag=read.tag), rest


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    options: Namespace = parser_of().parse_args(argv)
    options.train = [*options.train, *((name, train) for name, train, *_ in options.set_from)]
    options.test = [*options.test, *((name, file) for name, _, *test in options.set_from for file in test)]
    if options.sets is None:
        options.sets = [] if options.train else list(DOWNSTREAM)
    if options.methods is None:  # pseudo labels need more data: only made ones are always there
        options.methods = [name for name, method in ROWS.items() if options.smoke or method.source == "labelled"]
    if options.recipe != "fair" and {*ROWS} - {*METHODS} <= {*options.methods}:  # all: those that the recipe has
        options.methods = [name for name in options.methods if name in METHODS]
    return options


def recipe_of(options: Namespace) -> PromptRecipe:
    """Return the recipe with the changes of the command line."""
    refuse_two_schedules(options.schedule, options.changes, "meta.scheduler")
    recipe = replace(TRIAL, budget=options.recipe) if options.smoke else RECIPES[options.recipe]
    wanted = {name: getattr(options, name) for name in ("model", "reads")}
    if wanted["model"] is not None and Path(wanted["model"], "config.json").is_file():
        wanted["model"] = str(Path(wanted["model"]).absolute())  # its prompts are used from other places
    given = {name: value for name, value in wanted.items() if value is not None}
    changes = options.changes if options.schedule is None else [*options.changes, f"meta.scheduler={options.schedule}"]
    return override(replace(recipe, stratified=options.draw == "stratified", **given), changes)


def data_of(options: Namespace, recipe: PromptRecipe) -> PromptData:
    """Read the data sets, or make small ones for a smoke run; rows without pretraining need no data of others."""
    own, words = own_tasks(options, "test")
    mine = [SentenceData(one.name, one.classes, one.train, replace(one.dev, split="test")) for one in own]
    words = {one.name: one.classes for one in own} | words
    pretraining: SentenceData | None = None
    pseudo = any(ROWS[name].source == "pseudo" for name in options.methods)
    plain = NO_TEXTS
    if options.smoke:
        made = made_sentiment()
        pretraining = made[PRETRAINING]
        sets = [made.get(name) or load_sentiment(name, options.data_dir) for name in options.sets]
        plain = made_sentiment(seed=1, pretraining=400)[PRETRAINING].train  # a tiny encoder knows no other words
    elif options.data_dir is None and not options.sets and not needs_pretraining(options):
        sets = []
    elif options.data_dir is None:
        told = "; zero-shot, ft, pt and pt-vocab of your own tables need none" * bool(options.train)
        raise InputError(f"--data-dir is needed: the folder that holds those of the data sets (docs/prompts.md){told}")
    else:
        pretraining, *sets = (load_sentiment(name, options.data_dir) for name in (PRETRAINING, *options.sets))
        if pseudo:
            plain = concatenate([load_plain(name, options.data_dir) for name in PLAIN], "plain")
    sets += mine
    for one in (one for one in sets if one.note):
        log.info("%s: %s", one.name, one.note)
    return PromptData.of(pretraining, sets, recipe, options.validate, plain, words, pseudo_labelled)


def needs_pretraining(options: Namespace) -> bool:
    """Whether a row that is asked for starts from a pretraining."""
    return any(ROWS[name].objective is not None for name in options.methods)


def dataset_of(options: Namespace) -> str:
    """What the folder of the table is named after: what prompts are pretrained on, and one's own tables."""
    alone = options.data_dir is None and not options.sets
    base = "made" if options.smoke else "" if alone else PRETRAINING
    return "-".join(filter(None, [base, *dict(options.train)]))


def root_of(options: Namespace) -> Path:
    """The folder of a table."""
    out: Path = options.out
    return out / "prompts" / f"{dataset_of(options)}-{folder_name(options, *name_parts(recipe_of(options)))}"


def name_parts(recipe: PromptRecipe) -> tuple[str, ...]:
    """What the folder of a table is named after."""
    return recipe.budget, Path(recipe.model).name, recipe.meta.scheduler


def experiment_of(options: Namespace) -> LendingExperiment:
    """Read the data and return the experiment; nothing is trained or written yet."""
    machine, recipe = single_machine_of(options), recipe_of(options)
    language_source(recipe.model, options.cache)  # missing weights are told before any data is read
    if needs_pretraining(options):
        text_source(recipe.embedder)
    return LendingExperiment(
        "prompts",
        dataset_of(options),
        recipe=recipe,
        data=data_of(options, recipe),
        machine=machine,
        cache=options.cache,
        rows_per_pass=options.rows_per_pass,
        tasks_per_pass=options.tasks_per_pass,
        lender=options.pretrained,
        layout=LAYOUT,
        **table_arguments(options, *name_parts(recipe)),
    )


main = script_main(__file__, options_of, lambda options: [Table(experiment_of(options), ROWS)])

if __name__ == "__main__":
    sys.exit(main())
