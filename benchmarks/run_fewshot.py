"""Few-shot learning: Omniglot, CIFAR-FS, FC100 or your own images, by prototypes, ridge regression, MAML and variants.

Each row learns on the training classes, takes the weights that are best on the validation classes, and is tested
once on a frozen set of episodes of the test classes; docs/fewshot.md gives the reason for each choice below.

    python benchmarks/run_fewshot.py --data-dir DIR --seeds 0 1 2 --test-episodes 1000
    python benchmarks/run_fewshot.py --data-dir DIR --settings lake --methods protonet
    python benchmarks/run_fewshot.py --data-dir DIR --encoder runs/stl10/stl10-paper/simclr-s0 --head nearest logistic
    python benchmarks/run_fewshot.py --smoke
"""

from __future__ import annotations

import re
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ctrl_c  # noqa: F401
import torch
from fewshot_experiment import WITHIN, FewShotExperiment, FewShotRecipe, SavedEncoder
from fewshot_learning import SUPERVISED, FewShotMethod
from report_fewshot import layout_of
from score_lake import LAKE_LAYOUT, lake_plans, load_lake
from script_options import take_image_folder

from metapretrain.data.few_shot import FewShotData
from metapretrain.data.images import ImageSet
from metapretrain.data.registry import DATASETS, load_few_shot, names_giving
from metapretrain.episodes import EpisodeSpec, to_metadataset
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.base import Machine
from metapretrain.experiments.command import Table, machine_of, script_main, table_arguments, table_parser
from metapretrain.experiments.recipe import override
from metapretrain.experiments.saved import load_encoder
from metapretrain.models.encoders import ENCODERS, LEARN2LEARN
from metapretrain.models.pretrained import ENCODER_HEADS, FINETUNE, TUNING
from metapretrain.models.saved import LEARNERS, adapts
from metapretrain.options import Parser, option_type, pixels, positive_int
from metapretrain.protonet.learner import HEADS

SETTINGS = ("5w1s", "5w5s", "20w1s", "20w5s")
LAKE = "lake"  # Lake's 20 runs: 20-way 1-shot, one query a class, inside an alphabet
ENCODER = "encoder"
Rows = dict[str, FewShotMethod | SavedEncoder]

# Drawings: Omniglot.
# Snell et al. (2017): 60-way training episodes, 5 queries per class.
PROTONET = FewShotMethod("protonet", updates=20_000, tasks=1, ways=60, queries=5)
# Finn et al. (2017): 5-way with 1 inner step of 0.4 and 32 tasks, 20-way with 5 inner steps of 0.1 and 16 tasks; with
# five steps training is steadier where the outer gradient is clipped (ours, docs/results/omniglot.md).
MAML = {
    False: FewShotMethod("maml", updates=30_000, tasks=32, inner_lr=0.4, inner_steps=1, test_steps=3),
    True: FewShotMethod("maml", updates=30_000, tasks=16, inner_lr=0.1, inner_steps=5, test_steps=5, clip=1.0),
}
# Nichol et al. (2018) learn from ten images per class, a fifth of them at each of five steps, and take more steps in
# the test; the rates, plain SGD inside and AdamW outside are ours (docs/results/maml.md).
REPTILE = FewShotMethod(
    "reptile",
    updates=30_000,
    tasks=5,
    shots=9,
    queries=1,
    lr=0.01,
    inner_lr=0.3,
    inner_steps=5,
    test_steps=50,
    batches=5,
)
# Antoniou et al. (2019), without scales and shifts by step: a rate for each layer and step, losses that
# fade out over the first 10 of 100 epochs (here 15%), one query a class, cosine to 1e-5; 8 tasks at 20 ways, else 16.
PLUS: dict[str, Any] = {
    "inner_lr": 0.1,
    "inner_steps": 5,
    "test_steps": 5,
    "learn_rates": True,
    "fade": 0.15,
    "queries": 1,
    "lr_end": 0.01,
    "clip": 1.0,
}
# The training of the rows "supervised-*": as long as others' on 4,112 classes of 20 images.
DRAWN_SUPERVISED = FewShotMethod("supervised", updates=20_000, tasks=256, optimizer="sgd", lr=0.05, weight_decay=5e-4)

# Photographs: CIFAR-FS, FC100 and folders. Crops with padding, flips and colour jitter are those of Lee et al. (2019)
# and Tian et al. (2020); numbers of updates are ours.
PHOTOS: dict[str, Any] = {"flip": True, "jitter": 0.4}
# With conv4 from scratch, 20-way episodes of 15 queries; with a ResNet-12 from the encoder of the supervised training,
# 4 episodes an update of the test's ways by SGD, cosines times a learned scale that starts at 10, as Chen et al. (2021,
# Meta-Baseline) do; their rate is 1e-3 for 4,000 updates.
CONV4_EPISODES = FewShotMethod("protonet", updates=10_000, tasks=1, ways=20, queries=15)
# R2-D2 with conv4, chosen on CIFAR-FS's validation classes (docs/results/conv4.md): no jitter, always 5 shots.
CONV4_RIDGE: dict[str, Any] = {"jitter": 0.0, "shots": 5, "lr": 3e-3}
RESNET_EPISODES = FewShotMethod(
    "protonet",
    updates=1_000,
    tasks=4,
    queries=15,
    optimizer="sgd",
    lr=2e-3,
    weight_decay=5e-4,
    distance="cosine",
    temperature=0.1,
    learn_temperature=True,
    pretrained=True,
    validations=10,
)
# Finn et al. (2017) on photographs: 4 tasks, 5 inner steps, 10 in the test, 15 queries; the inner rate is ours.
PHOTO_MAML = FewShotMethod(
    "maml", updates=15_000, tasks=4, queries=15, inner_lr=0.1, inner_steps=5, test_steps=10, clip=1.0
)
# Tian et al. (2020): 64 images per update, SGD of 0.05 in steps, decay 5e-4, 100 epochs: rate times decay sums to 0.9.
# Here 50 epochs of CIFAR-FS's images by a cosine: batches four times as large, four times the rate, decay 1e-3 (0.75).
PHOTO_SUPERVISED = FewShotMethod(
    "supervised", updates=7_500, tasks=256, optimizer="sgd", lr=0.2, weight_decay=1e-3, warmup=0.02, validations=12
)
METHODS = (
    "protonet",
    "r2d2",
    "maml",
    "maml-transductive",
    "maml++",
    "fomaml",
    "anil",
    "metasgd",
    "reptile",
    "supervised-centroid",
    "supervised-logistic",
)
SUPERVISED_ROWS = {head: f"supervised-{'centroid' if head == 'centred' else head}" for head in HEADS}
ENCODER_ROWS = {head: ENCODER + f"-{head}" * (head != "nearest") for head in ENCODER_HEADS}
KNOWN = frozenset(LEARNERS)
DEFAULT = ("protonet", "maml", "fomaml", "anil", "metasgd")


def methods_of(
    ways: int, photos: bool = False, backbone: str = "conv4", image_size: int = 28
) -> dict[str, FewShotMethod]:
    """The rows of a setting; variants of MAML differ from it by the learner alone.

    On photographs `maml` and its variants are inductive (statistics of the support); on Omniglot they are
    transductive, as published, and so is `maml-transductive` everywhere.
    """
    deep = backbone.startswith("resnet")
    plus = {**PLUS, "updates": 40_000, "tasks": 8 if ways >= 20 else 16}
    ridge: dict[str, Any] = {"learner": "r2d2"} | (CONV4_RIDGE if photos and not deep else {})
    if not photos:
        embedding, maml, reptile, supervised = PROTONET, MAML[ways >= 20], REPTILE, DRAWN_SUPERVISED
    else:
        more = {**PHOTOS, "pad": image_size // 8}
        embedding = replace(RESNET_EPISODES if deep else CONV4_EPISODES, **more, drop=0.1 * deep)
        maml = replace(PHOTO_MAML, **more, batchnorm="support")
        reptile = replace(REPTILE, **more, batchnorm="support", inner_lr=0.1, lr=0.003)
        supervised = replace(PHOTO_SUPERVISED, **more, drop=0.1 * deep)
        plus = {**plus, "tasks": 4, "queries": 15}
    rows = {
        "protonet": embedding,
        "r2d2": replace(embedding, **ridge, temperature=1.0, distance="sqeuclidean", learn_temperature=False),
        "maml-transductive": replace(maml, batchnorm="batch"),
        "maml++": replace(maml, **plus),
        "reptile": reptile,
        **{name: replace(supervised, head=head) for head, name in SUPERVISED_ROWS.items()},
    }
    others = {name: replace(maml if adapts(name) else embedding, learner=name) for name in LEARNERS}
    return {name: rows.get(name) or others[name] for name in dict.fromkeys([*all_methods(), *SUPERVISED_ROWS.values()])}


def all_methods() -> list[str]:
    """The rows, and those of learners that a `--plugin` has added to `LEARNERS`."""
    return [*METHODS, *[name for name in LEARNERS if name not in KNOWN]]


HOLDERS = ("labels", "learn2learn")


def held_by(holder: str, data: FewShotData) -> FewShotData:
    """The data with the classes of their rows as `holder` has them, one of `HOLDERS`: the same ones by each.

    Raises:
        InputError: an unknown name, or learn2learn is not installed.
    """
    if one_of("holder", holder, HOLDERS) == "labels":
        return data
    return replace(data, train=_held(data.train), validation=_held(data.validation), test=_held(data.test))


def _held(images: ImageSet) -> ImageSet:
    classes = to_metadataset(images.images, images.labels).indices_to_labels
    return replace(images, labels=torch.tensor([classes[row] for row in range(len(images))]))


def with_validation(data: FewShotData) -> FewShotData:
    """The data with the validation classes among those of training: once everything has been chosen by them."""
    train, held = data.train, data.validation
    images, labels = torch.cat([train.images, held.images]), torch.cat([train.labels, held.labels + len(train.classes)])
    classes, files = [*train.classes, *held.classes], {**train.files, **held.files}
    return replace(data, train=replace(train, images=images, labels=labels, classes=classes, files=files, names=()))


@option_type
def ways_shots(text: str) -> list[str]:
    """Ways and shots such as `5w1s,20w5s`, `all` of the four of the papers, or `lake`."""
    given = list(SETTINGS) if text == "all" else [part for part in text.split(",") if part]
    wrong = [part for part in given if re.fullmatch(rf"[1-9]\d*w[1-9]\d*s|{LAKE}", part) is None]
    if wrong or not given:
        raise InputError(f"expected ways and shots such as 5w1s,20w5s, all or lake; given {(wrong or [text])[0]!r}")
    if single := [part for part in given if part.startswith("1w")]:
        raise InputError(f"{single[0]}: the only class is always right; give 2 ways or more")
    return list(dict.fromkeys(given))


def _parser(methods: Iterable[str]) -> Parser:
    parser = table_parser(
        __doc__,
        "fewshot",
        methods=methods,
        default_methods=",".join(DEFAULT),
        change="the methods: updates=1000 lr=0.002; the supervised training that rows share: supervised.turns=true; "
        "the head finetune: finetune.steps=20",
        compiled="compile the meta-steps of MAML and its variants (a minute or two; default: on a GPU, where it pays)",
    )
    sets, backbones = names_giving("few-shot", "images"), (*ENCODERS, *LEARN2LEARN)
    settings = "such as 5w1s; all: 5w1s,5w5s,20w1s,20w5s (default); lake: Lake's 20 runs"
    held = "draw episodes from labels (default) or from learn2learn's MetaDataset"
    encoder = "score an encoder, beside given --methods: a run, timm:NAME, torchvision:NAME, OWNER/NAME, a folder"
    head = f"{', '.join(HEADS)}: of --encoder (default: nearest) and supervised rows; {FINETUNE}: of --encoder alone, "
    head += "trains it too, in each episode anew, at some 30 passes of each support image (others: 1)"
    add = parser.add_argument
    add("--no-compile", dest="compile", action="store_false", default=None, help="never compile the meta-steps")
    parser.set_defaults(compile=None, methods=None)
    add("--dataset", choices=sets, default="omniglot", metavar="NAME", help=f"{', '.join(sets)} (default: omniglot)")
    add("--image-folder", type=Path, metavar="DIR", help="short for --dataset image-folder --data-dir DIR")
    add("--image-size", type=pixels, metavar="PIXELS", help="default: the data set's own (Omniglot: 28)")
    add("--settings", type=ways_shots, default=list(SETTINGS), metavar="A,B|all|lake", help=settings)
    add("--queries", type=positive_int, default=15, metavar="N", help="of each class of a scored episode (default: 15)")
    add(
        "--backbone", choices=backbones, default="conv4", metavar="NAME", help=f"{', '.join(backbones)}; default: conv4"
    )
    add("--holder", choices=HOLDERS, default="labels", help=held)
    add("--within", choices=WITHIN, help="Omniglot: episodes inside one alphabet: all, or those of validation and test")
    add("--trainval", action="store_true", help="learn from the validation classes too; the last weights are tested")
    add("--encoder", metavar="ENCODER", help=encoder)
    add("--head", nargs="+", choices=ENCODER_HEADS, metavar="HEAD", help=head)
    add("--test-episodes", type=positive_int, default=600, metavar="N", help="default: 600")
    add("--validation-episodes", type=positive_int, default=200, metavar="N", help="default: 200")
    add("--beside", action="store_true", help=SUPPRESS)  # the row is one of several: see `row_options`
    return parser


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    named = dict.fromkeys([*all_methods(), *SUPERVISED_ROWS.values(), *ENCODER_ROWS.values()])
    parser = _parser(named)
    options: Namespace = parser.parse_args(argv)
    if options.methods is not None and len(options.methods) == len(named):  # all
        options.methods = [*all_methods(), *[ENCODER] * (options.encoder is not None)]
    try:
        options.methods = rows_of(options)
    except InputError as error:
        parser.error(str(error))
    options.all_rows = not (options.job or options.beside)  # else what `--set` says may be of rows that others run
    options.beside |= not _shared_alone(options.methods)
    take_image_folder(options, "omniglot")
    if options.smoke and options.data_dir is None and DATASETS[options.dataset].needs_folder:
        options.dataset = "made"
    return options


def rows_of(options: Namespace) -> list[str]:
    """The rows that `--methods`, `--encoder` and `--head` ask for.

    Raises:
        InputError: nothing but an encoder's rows, and no encoder; supervised rows are to be fine-tuned; or a head
            that no row has.
    """
    if options.methods is None:
        names = list(DEFAULT) if options.encoder is None else [ENCODER]
    elif options.encoder is None:
        names = [name for name in options.methods if name not in ENCODER_ROWS.values()]
        if not names:
            raise InputError(f"method {options.methods[0]} needs one to score: --encoder ENCODER")
    else:
        encoded = options.job or any(name in ENCODER_ROWS.values() for name in options.methods)
        names = options.methods + [ENCODER] * (not encoded)
    for rows in (SUPERVISED_ROWS, ENCODER_ROWS) if options.head is not None else ():
        if any(name in rows.values() for name in names):
            if not rows.keys() >= set(options.head):
                raise InputError(f"--head {FINETUNE} is of --encoder alone: give the folder of a supervised run to it")
            names = [name for name in names if name not in rows.values()] + [rows[head] for head in options.head]
    if (
        options.head is not None
        and not options.job
        and not {*names} & {*SUPERVISED_ROWS.values(), *ENCODER_ROWS.values()}
    ):
        told = "is of --encoder and supervised rows; leave it out, or give one of them"
        raise InputError(f"--head {' '.join(options.head)} {told}")
    return names


def _shared_alone(methods: Iterable[str]) -> bool:
    """Whether all rows but those of an encoder are of the shared supervised training."""
    return all(name.startswith((SUPERVISED, ENCODER)) for name in methods)


def smoke(method: FewShotMethod) -> FewShotMethod:
    """The method made so short that it only shows that everything runs."""
    tasks = 20 if method.head is not None else 2
    return replace(method, updates=4, tasks=tasks, validations=2, ways=None, test_steps=min(method.test_steps, 5))


def changes(options: Namespace, prefix: str = "") -> list[str]:
    """What `--set` says of the names with a prefix, without it: `supervised`, `finetune` or "", that of the methods."""
    found = []
    for change in options.changes:
        given, dot, rest = change.partition("=")[0].rpartition(".")
        if given not in ("", SUPERVISED, FINETUNE):
            raise InputError(
                f"--set {change}: unknown prefix {given!r}; give {SUPERVISED}.{rest}=VALUE for the supervised training "
                f"that rows share, {FINETUNE}.{rest}=VALUE for that head, or {rest}=VALUE for the methods"
            )
        if rest in ("learner", "head"):
            raise InputError(f"--set {change} would make another method under this one's name: choose it by --methods")
        if given == prefix:
            found.append(change.removeprefix(given + dot))
    return found


def changes_of(options: Namespace, method: FewShotMethod) -> list[str]:
    """What `--set` says of a row: names without a prefix reach the supervised training only where it stands alone."""
    if method.learner != SUPERVISED:
        return changes(options)
    return [*([] if options.beside else changes(options)), *changes(options, SUPERVISED)]


def check_changes(options: Namespace, rows: Rows) -> None:
    """Raise InputError for what `--set` says of nothing that is run."""
    methods = [row for name in options.methods if isinstance(row := rows[name], FewShotMethod)]
    reached = {
        "": any(row.learner != SUPERVISED or not options.beside for row in methods),
        SUPERVISED: any(row.pretraining is not None for row in methods),
        FINETUNE: ENCODER_ROWS[FINETUNE] in options.methods,
    }
    for prefix, some in reached.items():
        if not some and (unused := changes(options, prefix)):
            told = f"--set {f'{prefix}.' * bool(prefix)}{unused[0]} changes none of {', '.join(options.methods)}"
            names = [f"{other}.NAME=VALUE" if other else "NAME=VALUE" for other, used in reached.items() if used]
            raise InputError(f"{told}; leave it out" + f", or give {' or '.join(names)}" * bool(names))


def table_of(options: Namespace, setting: str, data: FewShotData, machine: Machine) -> Table:
    """The table of one setting, and all its rows by name."""
    lake = setting == LAKE
    ways, shots, queries = (20, 1, 1) if lake else (*map(int, re.findall(r"\d+", setting)), options.queries)
    episodes = {"test": options.test_episodes, "validation": options.validation_episodes}
    photos = data.train.channels == 3
    methods = methods_of(ways, photos, options.backbone, data.train.image_size)
    if options.smoke:
        episodes = {"test": 20, "validation": 5}
        methods = {name: smoke(method) for name, method in methods.items()}
    chosen = {name: method for name, method in methods.items() if name in options.methods}
    rows: Rows = {name: override(method, changes_of(options, method)) for name, method in chosen.items()}
    if options.encoder is not None:
        tuning = override(TUNING, changes(options, FINETUNE))
        rows |= {name: SavedEncoder(options.encoder, head, tuning) for head, name in ENCODER_ROWS.items()}
    if options.all_rows:
        check_changes(options, rows)
    supervised = methods[SUPERVISED_ROWS["centred"]]
    supervised = override(replace(supervised, head=None), changes_of(options, supervised))
    dataset, within = ("omniglot-lake", options.within or "tests") if lake else (options.dataset, options.within or "")
    recipe = FewShotRecipe(
        EpisodeSpec(ways, shots, queries),
        options.backbone,
        20 if lake else episodes["test"],
        episodes["validation"],
        within,
        supervised=supervised,
        trainval=options.trainval,
    )
    trainval = "trainval" if options.trainval else None
    experiment = FewShotExperiment(
        "fewshot",
        "-".join(filter(None, [dataset, options.within and f"within-{options.within}", trainval, setting])),
        recipe=recipe,
        data=data,
        machine=machine,
        layout=layout_of(dataset, options.backbone),
        plans=lake_plans() if lake else None,
        **table_arguments(options, options.backbone),
    )
    return Table(experiment, rows, ["--settings", setting, *["--beside"] * options.beside])


def tables_of(options: Namespace) -> list[Table]:
    """Read the images once; each setting is a table."""
    machine = machine_of(options)
    if options.encoder is not None:  # before the data are read: it may need a package or a network that is not there
        load_encoder(options.encoder, machine.device)
    if LAKE in options.settings:
        if options.dataset != "omniglot" or options.data_dir is None or len(options.settings) > 1:
            raise InputError("--settings lake stands alone and needs Omniglot: --data-dir DIR, with " + LAKE_LAYOUT)
        found = FewShotData.of(load_lake(options.data_dir, options.image_size))
    else:
        found = load_few_shot(options.dataset, options.data_dir, options.image_size)
    data = held_by(options.holder, found)
    if options.smoke and LAKE not in options.settings:
        data = data.first(25, images=40)
    if options.trainval:
        data = with_validation(data)
    return [table_of(options, setting, data, machine) for setting in options.settings]


def row_options(about: Mapping[str, Any]) -> dict[str, list[str] | None]:
    """The options that choose the row of a run's configuration, one of a setting and perhaps by a head.

    A row that was one of several is run again as one of them: see `changes_of` and `check_changes`.
    """
    name, command = str(about["method"]), str(about.get("command"))
    found = {"--seeds": [str(about["seed"])], "--settings": [str(about["dataset"]).rpartition("-")[2]]}
    given = re.search(r"--methods[= ](\S+)", command)
    methods = given[1].split(",") if given else []
    several = (methods != [name] or "--encoder" in command) and not _shared_alone(methods)
    last: dict[str, list[str] | None] = {"--beside": []} if several else {}
    heads = {row: head for head, row in SUPERVISED_ROWS.items()}
    if name == ENCODER or name.startswith(f"{ENCODER}-"):  # then the head, but nearest, and the encoder's name
        head = next((head for head in ENCODER_HEADS if name.startswith(f"{ENCODER}-{head}")), "nearest")
        return {**found, "--methods": [ENCODER], "--head": [head], **last}
    if name in heads:
        return {**found, "--methods": [SUPERVISED_ROWS["centred"]], "--head": [heads[name]], "--encoder": None, **last}
    return {**found, "--methods": [name], "--head": None, "--encoder": None, **last}


main = script_main(__file__, options_of, tables_of, row_options)


if __name__ == "__main__":
    sys.exit(main())
