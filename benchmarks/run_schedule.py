"""Which pretraining task next? Schedulers beside each other on one encoder, downstream-aware and agnostic.

Each row pretrains the encoder with the same number of source updates, the sources chosen by its scheduler, and is
then fine-tuned with a fixed small budget on tasks that were no target; docs/scheduling.md says what the columns mean.

    python benchmarks/run_schedule.py --data-dir DIR --seeds 0 1 2
    python benchmarks/run_schedule.py --data-dir DIR --methods fixed,utility-exact --settings aware
    python benchmarks/run_schedule.py --smoke
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ctrl_c  # noqa: F401
import pike  # noqa: F401
from report_schedule import LAYOUT, plot_schedule
from schedule_experiment import ScheduleExperiment
from scratch_encoders import SIZES, Encoders
from script_options import single_machine_of
from source_tasks import schedule_texts

from metapretrain.errors import InputError, one_of
from metapretrain.experiments.command import Table, script_main, table_arguments, table_parser
from metapretrain.experiments.recipe import override
from metapretrain.experiments.schedule.recipe import (
    FIXED,
    SETTINGS,
    ScheduleData,
    ScheduleMethod,
    ScheduleRecipe,
    scheduler_names,
)
from metapretrain.experiments.schedule.tasks import PretrainingTask, load_schedule_tasks, made_schedule_tasks
from metapretrain.options import names, positive_int

SOURCES = (
    "masked-lm",
    "capitalisation",
    "token-document",
    "reordering",
    "sentence-distance",
    "response-selection",
    "span-selection",
    "cloze-qa",
)
TARGETS = ("conll04", "rte", "squad")
DOWNSTREAM = ("wic", "mrpc", "qnli", "cola", "conll2003")

# "paper": utilities are raw sums of losses. "relative": each target's losses are divided by their mean first.
RECIPES = {"paper": ScheduleRecipe(), "relative": ScheduleRecipe(normalise="relative")}
SMOKE = {
    "updates": 12,
    "batch_size": 8,
    "encoder": "tiny",
    "block": 4,
    "epsilon": 0.0,
    "floor": 0.0,
    "head_updates": 1,
    "target_batches": 1,
    "evaluations": 2,
    "finetune_updates": 4,
    "finetune_batch": 8,
}


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = table_parser(
        __doc__, "schedule", recipes=RECIPES, change="the recipe: updates=2000 alpha=0.1", held_out="test parts"
    )
    add = parser.add_argument
    add(
        "--methods",
        default=",".join(scheduler_names()),
        metavar="A,B|all",
        help=f"{', '.join(scheduler_names())}, fixed:SOURCE, or fixed for one row each; all: these too; "
        "uniform-block50: a decision every 50 updates; uniform-updates8000: a row of 8,000 updates; "
        "softmax:temperature=0.3,smoothing=0.8: options of the scheduler",
    )
    add("--settings", type=names("setting", SETTINGS), default=list(SETTINGS), metavar="A,B", help="aware, agnostic")
    add("--encoder", metavar="NAME", help=f"{', '.join(SIZES)} from scratch (default: small), minilm, tiny, a folder")
    for what, usual in (("sources", SOURCES), ("targets", TARGETS), ("downstream", DOWNSTREAM)):
        add(f"--{what}", metavar="A,B", help=f"default: {','.join(usual)}")
    add("--max-length", type=positive_int, default=128, metavar="TOKENS", help="of a sequence (default: 128)")
    options: Namespace = parser.parse_args(argv)
    return options


def rows_of(sources: Sequence[str], targets: Sequence[str]) -> dict[str, ScheduleMethod]:
    """Every row that these tasks allow, by name.

    Example:
        >>> list(rows_of(["mlm"], ["squad"]))[-3:]
        ['fixed-mlm-agnostic', 'fixed-mlm-aware', 'fixed-squad-aware']
    """
    rows = [ScheduleMethod(name, setting) for setting in SETTINGS for name in scheduler_names()]
    rows += [ScheduleMethod(FIXED, "agnostic", source) for source in sources]
    rows += [ScheduleMethod(FIXED, "aware", source) for source in (*sources, *targets)]
    return {row.name: row for row in rows}


def rows_named(text: str, rows: Mapping[str, ScheduleMethod], settings: Sequence[str]) -> dict[str, ScheduleMethod]:
    """The rows that `--methods` and `--settings` name, such as `uniform`, `uniform-aware`, `fixed` or `fixed:SOURCE`.

    `uniform-block50` is `uniform` with a decision every 50 updates, `uniform-updates8000` has as many updates, and
    `softmax:temperature=0.3,smoothing=0.8` options of its own. The name of each row that is found is taken too, as
    rows side by side and `--config` give it.

    Raises:
        InputError: a name that is no row in these settings.
    """
    within = [name for name, row in rows.items() if row.setting in settings]
    groups = {name: [f"{name}-{setting}" for setting in settings] for name in scheduler_names()}
    groups |= {name: [name] for name in within}
    fixed = [name for name in within if rows[name].scheduler == FIXED]
    for name in fixed:
        groups.setdefault(f"{FIXED}:{rows[name].source}", []).append(name)
    groups |= {FIXED: fixed, "all": within}
    key = "[a-z0-9_]+"
    given = [part.strip() for part in re.split(rf",(?!{key}=)", text) if part.strip()]
    found = {}
    for part in given:
        name, _, own = part.partition(":") if "=" in part else (part, "", "")
        parts = re.fullmatch(rf"(.+?)((?:-{key}=.+?)*)(?:-block(\d+))?(?:-updates(\d+))?((?:-aware|-agnostic)?)", name)
        assert parts is not None
        own = ",".join(filter(None, [re.sub(rf"-(?={key}=)", ",", parts[2])[1:], own]))  # a row's own name has dashes
        changes: dict[str, Any] = {"options": own} if own else {}
        changes |= {what: int(of) for what, of in zip(("block", "updates"), parts.groups()[2:4], strict=True) if of}
        plain = f"{parts[1]}{parts[5]}" if changes else name
        for row in groups[one_of("method", plain, groups)]:
            method = replace(rows[row], **changes)
            found[method.name] = method
    if not found:
        raise InputError(f"--methods names no row; there are: {', '.join(groups)}")
    return found


def recipe_of(options: Namespace) -> ScheduleRecipe:
    """Return the chosen recipe with the changes of the command line."""
    smoke: dict[str, Any] = SMOKE if options.smoke else {}
    recipe = replace(RECIPES[options.recipe], **smoke)
    return override(replace(recipe, encoder=options.encoder or recipe.encoder), options.changes)


def data_of(options: Namespace, encoder: str, device: str) -> tuple[ScheduleData, Encoders]:
    """Read the tasks, or make small ones for a smoke run, with the encoder's tokenizer; `device` is where it runs."""
    usual: tuple[tuple[str, ...], ...] = (SOURCES, TARGETS, DOWNSTREAM)
    if options.smoke:
        usual = (("masked-lm", "reordering"), ("conll04", "squad"), ("rte",))
    given = (options.sources, options.targets, options.downstream)
    sources, targets, downstream = (
        names if text is None else tuple(filter(None, (part.strip() for part in text.split(","))))
        for text, names in zip(given, usual, strict=True)
    )
    tasks: dict[str, PretrainingTask] = {}
    if options.smoke:
        encoders = Encoders(encoder)
        for made in made_schedule_tasks(0, encoders.tokenizer, names=(*sources, *targets, *downstream)):
            tasks |= made
    else:
        if options.data_dir is None:
            raise InputError("--data-dir is needed: the folder of the texts (metapretrain data says where they are)")
        texts = schedule_texts(options.data_dir) if encoder in SIZES else []
        encoders, wanted = Encoders(encoder, texts, max_length=options.max_length), (*sources, *targets, *downstream)
        # One width on a GPU: updates are then one CUDA graph a task, and padding costs less than launches.
        multiple = options.max_length if device.startswith("cuda") else 16
        tasks = load_schedule_tasks(
            options.data_dir, encoders.tokenizer, names=wanted, max_length=options.max_length, multiple=multiple
        )
    files = {name: about for task in tasks.values() for name, about in task.files.items()}
    return ScheduleData(tasks, sources, targets, downstream, options.validate, files), encoders


def tables_of(options: Namespace) -> list[Table]:
    """Read the tasks, which say what rows there are."""
    machine, recipe = single_machine_of(options), recipe_of(options)
    data, encoders = data_of(options, recipe.encoder, machine.device)
    rows = rows_named(options.methods, rows_of(data.sources, data.targets), options.settings)
    options.methods = list(rows)
    experiment = ScheduleExperiment(
        "schedule",
        "made" if options.smoke else "texts",
        recipe=recipe,
        data=data,
        machine=machine,
        make_encoder=encoders,
        layout=LAYOUT,
        draw=plot_schedule,
        **table_arguments(options, options.recipe, Path(options.encoder or "").name),
    )
    return [Table(experiment, rows)]


main = script_main(__file__, options_of, tables_of)


if __name__ == "__main__":
    sys.exit(main())
