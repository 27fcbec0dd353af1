"""The command `metapretrain`: its subcommands; imports wait until one runs, so that help is quick."""

from __future__ import annotations

import logging
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metapretrain import __version__
from metapretrain.checks import check_device, require
from metapretrain.errors import InputError, one_of
from metapretrain.options import (
    Parser,
    add_device_options,
    add_int_list,
    common_options,
    main_guard,
    named_file,
    nonnegative_int,
    pixels,
    positive_int,
)

if TYPE_CHECKING:
    from metapretrain.data.registry import DatasetInfo


def run_demo(options: Namespace) -> int:
    """Train the demo's methods on digits and show their table."""
    from metapretrain.experiments.images.experiment import run_demo as run

    return run(options)


def run_doctor(options: Namespace) -> int:
    """Show versions, devices and what is missing."""
    from metapretrain.training.environment import doctor as report

    print(report())
    return 0


def run_data(options: Namespace) -> int:
    """List the data sets, or describe, download and check one."""
    from metapretrain.data import stl10
    from metapretrain.data.registry import DATASETS

    if options.name is None:
        if options.download:
            raise InputError(f"name the data set first: {', '.join(DATASETS)}")
        if options.data_dir is not None:
            return _check_all(options.data_dir, DATASETS)
        print("\n\n".join(_described(info) for info in DATASETS.values()))
        print("\nYour own texts are tables with columns that you name: docs/own-text-tasks.md")
        print("\nWhat a folder holds: metapretrain data --data-dir DIR; one set: metapretrain data NAME --data-dir DIR")
        return 0
    info = DATASETS[one_of("data set", options.name, DATASETS)]
    if options.download:
        if info.name != "stl10":
            raise InputError(f"--download is for stl10; {info.name} has nothing to download")
        if options.data_dir is None:
            raise InputError("--download needs --data-dir, the folder to download into")
        stl10.download_stl10(options.data_dir)
    print(_described(info) if options.data_dir is None and info.needs_folder else info.check(options.data_dir))
    return 0


def _described(info: DatasetInfo) -> str:
    from metapretrain.data.registry import GIVES

    layout = f"DIR/{info.place}: {info.layout}" if info.place else info.layout
    lines = {"source": info.source, "terms": info.terms, "layout": layout, "for": info.read_by or GIVES[info.gives]}
    return "\n".join([info.name, *(f"  {name:7} {text}" for name, text in lines.items())])


def _check_all(folder: Path, known: Mapping[str, DatasetInfo]) -> int:
    """Show which data sets can be read from a folder."""
    if not folder.is_dir():
        raise InputError(f"no such folder: {folder}")
    missing = []
    logging.disable(logging.WARNING)  # counts of files and rows left out, of all sets, would hide what is printed
    try:
        for info in known.values():
            if info.needs_folder:
                try:
                    print(info.check(folder))
                except (InputError, OSError):  # a folder of another set that may not be read hides no set
                    missing.append(info.name)
    finally:
        logging.disable(logging.NOTSET)
    if missing:
        print(f"cannot be read from {folder}: {', '.join(missing)} (metapretrain data NAME --data-dir DIR says why)")
    return 0


def run_report(options: Namespace) -> int:
    """Write the table of a folder of runs in three formats and show one."""
    from metapretrain.report.results import bundle, collect
    from metapretrain.report.table import build_table, write

    text = write(options.runs, options.out)
    if options.bundle is not None:
        bundle(collect(options.runs).results, options.bundle)
    if options.format != "markdown":
        table = build_table(collect(options.runs))
        text = table.csv() if options.format == "csv" else table.json()
    print(text, end="" if text.endswith("\n") else "\n")
    return 0


def run_plot(options: Namespace) -> int:
    """Draw the curves and the comparison of a folder of runs."""
    from metapretrain.report.figures import plot as draw
    from metapretrain.report.figures import redraw_maps

    maps = redraw_maps(options.runs, options.reducer) if options.reducer is not None else []
    for path in [*draw(options.runs, options.out, options.metrics), *maps]:
        print(path)
    return 0


def run_corrupt(options: Namespace) -> int:
    """Add accuracy under standard corruptions to the results of finished runs: a line each."""
    from metapretrain.data.registry import load_images
    from metapretrain.evaluation.robustness import corrupt_runs

    device, folder = check_device(options.device), options.data_dir
    for run, scores in corrupt_runs(options.runs, lambda name, size: load_images(name, folder, "test", size), device):
        clean, corrupted = scores["corrupt_clean_accuracy"], scores["corrupt_accuracy"]
        print(f"{run}: {corrupted:.2%} under corruption, {clean:.2%} of the same images without")
    print(f"now in the results; the table: metapretrain report {options.runs}")
    return 0


def run_predict(options: Namespace) -> int:
    """Classify image files with a run's model, a line ``file TAB class`` each; or tables of texts, a file each."""
    named = [(name, getattr(options, name)) for name in ("sst", "para", "sts")]
    named = [(name, file) for name, file in named if file is not None] + options.texts
    tables = dict(named)
    if len(tables) < len(named):
        raise InputError(f"one file per task, but there are several of one: {', '.join(name for name, _ in named)}")
    if bool(tables) == bool(options.files):
        raise InputError("give image files, or texts such as --sst FILE or --texts TASK=FILE")
    if tables:
        from metapretrain.data.tables import table_options
        from metapretrain.evaluation.predictions import table_scores
        from metapretrain.experiments.saved import predict_files

        device, how = check_device(options.device), table_options(options.table)
        held = dict(options.calibrate) if options.probabilities or options.calibrate else None
        more = {"model": options.model, "table": how, "held": held}
        with _table_options_told():
            written = predict_files(options.run, tables, options.out, device, **more)
        for path in written:
            scores = ", ".join(f"{name} {value:.4f}" for name, value in table_scores(path).items())
            print(path, *[scores] * bool(scores), sep="\t")
        return 0
    from metapretrain.data.image_folder import read_images
    from metapretrain.models.saved import load

    model = load(options.run, device=check_device(options.device))
    images = read_images(options.files, model.image_size, channels=model.channels)
    for path, label in zip(options.files, model.predict(images).tolist(), strict=True):
        print(f"{path}\t{model.classes[label]}")
    return 0


def run_export(options: Namespace) -> int:
    """Write a run's image model for other programs."""
    from metapretrain.models.export import export

    print(export(options.run, options.format, options.out))
    return 0


def run_push(options: Namespace) -> int:
    """Upload a run with its model card to the Hugging Face Hub, or show what would be."""
    from metapretrain.experiments.push import model_card, push_to_hub, pushed_files

    if options.dry_run:
        print("\n".join(pushed_files(options.run)), model_card(options.run, options.repo), sep="\n\n")
        return 0
    print(push_to_hub(options.run, options.repo, private=options.private))
    return 0


def run_completion(options: Namespace) -> int:
    """Print the script that completes this command in a shell."""
    shtab = require("shtab", "completion")
    parser = build_parser()
    commands = next(action for action in parser._actions if isinstance(action.choices, dict)).choices
    for sub in commands.values():  # type: ignore[union-attr]
        for action in sub._actions:
            if action.type is Path:
                action.complete = shtab.FILE if action.metavar == "FILE" else shtab.DIRECTORY
    print(shtab.complete(parser, options.shell))
    return 0


def run_few_shot(options: Namespace) -> int:
    """Show an encoder's k-shot accuracy on images or texts by each head, and differences to the first head."""
    from metapretrain import EpisodeSampler, EpisodeSpec
    from metapretrain.data.image_folder import load_image_folder
    from metapretrain.data.registry import DATASETS, load_images
    from metapretrain.data.tables import table_options
    from metapretrain.evaluation.episodes import evaluate_embeddings, evaluate_finetuning
    from metapretrain.evaluation.intervals import paired_interval
    from metapretrain.experiments.recipe import override
    from metapretrain.experiments.saved import load_encoder, read_classes
    from metapretrain.models.pretrained import FINETUNE, FineTuning, features_centre, kept_features, resized

    how, tuned = override(FineTuning(), options.changes), FINETUNE in options.head
    if options.changes and not tuned:
        raise InputError(f"--set {options.changes[0]} is of fine-tuning: give --head {FINETUNE}, or leave it out")
    if options.ways < 2:
        raise InputError("--ways 1: the only class is always right; give 2 or more")
    of_texts, centre = options.texts is not None, None
    if (options.label != "label" or options.table) and not of_texts:
        raise InputError("--label and --table are of --texts: leave them out")
    if options.data_dir is not None and options.dataset is None:
        raise InputError("--data-dir is of --dataset: leave it out")
    model: Any = load_encoder(options.encoder, check_device(options.device), texts=of_texts)
    if options.image_size is not None:
        resized(model, options.image_size)
    if of_texts:
        with _table_options_told():
            rows = read_classes(options.texts, options.label, table_options(options.table))
        shown: Any = rows.first if rows.second is None else list(zip(rows.first, rows.second, strict=True))
        labels = rows.labels
    else:
        if options.dataset is not None:
            images = load_images(options.dataset, options.data_dir, "test").require_labels()
            if "centred" in options.head and DATASETS[options.dataset].gives == "few-shot":
                centre = features_centre(model, load_images(options.dataset, options.data_dir, "train").images)
        else:
            images = load_image_folder(options.image_folder, "all", model.image_size, channels=model.channels)
        shown, labels = images.images, images.labels
        if seen := sorted({*getattr(model, "classes", ())} & {*images.classes}):
            told = "%d classes are of the encoder's training, such as %r: this is no accuracy on new ones"
            logging.getLogger(__name__).warning(told, len(seen), seen[0])
    if set(options.head) != {FINETUNE}:
        z = kept_features(model, shown)
        centre = z.mean(0) if centre is None else centre
    for shots in options.shots:
        spec, first = EpisodeSpec(options.ways, shots, options.queries), None
        for head in dict.fromkeys(options.head):
            sampler = EpisodeSampler(labels, spec, options.episodes or (100 if tuned else 600), seed=options.seed)
            if head == FINETUNE:
                result = evaluate_finetuning(model, shown, sampler, how)
            else:
                result = evaluate_embeddings(z, sampler, head=head, centre=centre)
            line = f"{options.ways}-way {shots}-shot  {f'{head}  ' if len(options.head) > 1 else ''}{result}"
            if first is not None:
                gap = paired_interval(result.values, first.values)
                line += f"  minus {options.head[0]}: {gap.mean:+.2%}{f' +- {gap.half_width:.2%}' * gap.known}"
            print(line, flush=True)
            first = first or result
    return 0


@contextmanager
def _table_options_told() -> Iterator[None]:
    """Errors of tables name options of the command line."""
    from metapretrain.data.tables import TableError

    try:
        yield
    except TableError as error:
        raise InputError(f"{error.plain}; give {error.as_arguments('--table')}") from error


HEADS = ("nearest", "normalised", "centred", "logistic", "finetune")  # as in models.pretrained
FORMATS = ("onnx", "torch", "torchvision", "timm")  # as in models.export
REDUCERS = ("tsne", "umap")  # as in evaluation.figures
DEMO_METHODS = ("supervised", "prl-standard", "prl-query", "simclr")

OVERVIEW = f"""metapretrain {__version__}: meta-learning for pretraining

  metapretrain demo                         pretraining methods side by side on small images, in 3 minutes
  metapretrain data                         the data sets it reads: source, terms, layout; checks a folder
  metapretrain report runs/stl10            the table of a folder of runs
  metapretrain plot runs/stl10              its figures
  metapretrain corrupt runs/stl10 --data-dir DIR   accuracy of its models on corrupted test images
  metapretrain predict RUN image.png ...    classify your own images with a run's model
  metapretrain predict RUN --sst FILE ...   predict your own texts with a run's model (--texts TASK=FILE: other tasks)
  metapretrain push RUN me/model            a run or prompt to the Hugging Face Hub, with a model card
  metapretrain export RUN                   its image model as ONNX, and for torch.export, torchvision, timm
  metapretrain few-shot RUN --image-folder DIR   k-shot accuracy of an encoder on your own classes (--texts FILE)
  metapretrain doctor                       versions, devices and what is missing
  metapretrain completion bash              completes this command by the tab key (also zsh)

Each has --help. RUN is a run's folder, such as runs/demo/digits-demo/prl-query-s0. In a checkout there are also

  python benchmarks/run_stl10.py            prototypes, SimCLR and supervision on images
  python benchmarks/run_text.py             sentiment, paraphrases and similarity in one encoder
  python benchmarks/run_fewshot.py          MAML and its variants, prototypical networks
  python benchmarks/run_prompts.py          soft prompts, pretrained or not
  python benchmarks/run_schedule.py         which pretraining task next
  python benchmarks/run_speed.py            speed beside other libraries
  python benchmarks/run_scale.py            whole runs by 1, 2 and 4 processes

with --smoke for a first look (run_stl10.py: --dataset digits --smoke).

Next: metapretrain {{next}}"""
EXAMPLES = """
demo
demo --smoke --methods supervised,prl-query --seeds 0
data
data stl10 --data-dir data/stl10
data --data-dir data
report runs/stl10
report runs/stl10 --bundle stl10.json
plot runs/stl10
plot runs/stl10/stl10-paper/prl-query-frozen-linear-s0 --reducer umap --out figures
corrupt runs/stl10 --data-dir data/stl10
predict runs/stl10/stl10-strong/prl-query-frozen-linear-s0 cat.png dog.png
predict runs/text/cs224n-strong/proto-s0 --sst reviews.csv --para questions.csv --out predicted
predict runs/prompts/yelp5-equal-smollm2/metapt-kmeans-s0 --texts sst2=reviews.csv
export runs/stl10/stl10-paper/simclr-s0 --format torch --out model.pt2
few-shot runs/stl10/stl10-paper/simclr-s0 --image-folder photos --ways 5 --shots 1 5
few-shot timm:resnet50 --dataset cifar-fs --data-dir data/cifar100 --head nearest centred logistic
few-shot runs/text/cs224n-strong/proto-s0 --texts news.csv --label topic --ways 3 --shots 5
push runs/stl10/stl10-strong/simclr-s0 me/simclr-stl10 --private
push RUN me/my-prompt --dry-run
doctor
completion bash
"""


def build_parser() -> Parser:
    """The parser of the whole command; `command` is the function that carries out the chosen subcommand."""
    parser = Parser(prog="metapretrain", description="Meta-learning for pretraining.")
    parser.add_argument("--version", action="version", version=f"metapretrain {__version__}")
    add = parser.add_subparsers(metavar="COMMAND", title="commands").add_parser

    def subcommand(name: str, run: Callable[[Namespace], int], about: str) -> Parser:
        sentence = f"{about[0].upper()}{about[1:]}."
        examples = "\n".join(f"  metapretrain {line}" for line in EXAMPLES.splitlines() if line.split()[:1] == [name])
        sub = add(name, help=about, description=sentence, epilog=f"examples:\n{examples}")
        sub.set_defaults(command=run)
        return sub

    demo = subcommand("demo", run_demo, "pretraining methods side by side on small images")
    common_options(demo, "demo", methods=DEMO_METHODS, seeds=(0, 1, 2), data_dir=False, tag=False)
    demo.add_argument("--no-figures", action="store_true", help="draw no maps, confusion matrices and curves")
    demo.add_argument("--job", action="store_true", help=SUPPRESS)  # one of several side by side
    data = subcommand("data", run_data, "the data sets: source, terms and layout; checks a folder")
    data.add_argument("name", nargs="?", metavar="NAME", help="show this data set only")
    data.add_argument("--data-dir", type=Path, metavar="DIR", help="check if DIR has the files of NAME, or of what")
    data.add_argument("--download", action="store_true", help="first fetch NAME into DIR")
    data.add_argument("--plugin", action="append", metavar="FILE", help="Python file that registers your data sets")
    report = subcommand("report", run_report, "the table of a folder of runs, with intervals")
    report.add_argument("runs", type=Path, metavar="RUNS", help="a folder with runs below it")
    report.add_argument("--out", type=Path, metavar="DIR", help="where it is written (default: RUNS/report)")
    report.add_argument("--plugin", action="append", metavar="FILE", help="Python file that adds notes of your own")
    about = "what is shown; all three are written (default: markdown)"
    report.add_argument("--format", choices=("markdown", "csv", "json"), default="markdown", help=about)
    report.add_argument("--bundle", type=Path, metavar="FILE", help="keep all results in one file for this report")
    plot = subcommand("plot", run_plot, "the curves and the comparison of a folder of runs")
    plot.add_argument("runs", type=Path, metavar="RUNS", help="a run's folder or one with runs below it")
    plot.add_argument("--out", type=Path, metavar="DIR", help="default: figures, beside the runs")
    plot.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help="such as validation/accuracy")
    plot.add_argument("--reducer", choices=REDUCERS, help="also map each run's embeddings again, by this method")
    corrupt = subcommand("corrupt", run_corrupt, "accuracy under corruptions, added to the results of runs")
    corrupt.add_argument("runs", type=Path, metavar="RUNS", help="a finished run's folder or one with runs below it")
    corrupt.add_argument("--data-dir", type=Path, metavar="DIR", help="the folder of the data")
    add_device_options(corrupt, precision=False)
    _predict(subcommand("predict", run_predict, "classify images or texts with a run's model"))
    export = subcommand("export", run_export, "a run's image model as ONNX, torch.export, for torchvision or timm")
    export.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run of images")
    export.add_argument("--format", choices=FORMATS, default="onnx", help="default: onnx")
    export.add_argument("--out", type=Path, metavar="FILE", help="a folder for timm (default: below RUN/export)")
    push = subcommand("push", run_push, "a run or prompt to the Hugging Face Hub, with a model card")
    push.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run, or of a saved prompt")
    push.add_argument("repo", metavar="REPO", help="OWNER/NAME; it is made if it is not there")
    push.add_argument("--private", action="store_true", help="make it a private one")
    push.add_argument("--dry-run", action="store_true", help="show the files and the card, upload nothing")
    _few_shot(subcommand("few-shot", run_few_shot, "k-shot accuracy of an encoder on your images or texts"))
    subcommand("doctor", run_doctor, "versions, devices and what is missing")
    completion = subcommand("completion", run_completion, "a script that completes this command in your shell")
    completion.add_argument("shell", choices=("bash", "zsh"), metavar="bash|zsh")
    return parser


def _predict(parser: Parser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a finished run, or of a saved prompt")
    add("files", type=Path, nargs="*", metavar="FILE", help="image files")
    for task in ("sst", "para", "sts"):
        about = f"texts of task {task}: a table with id and sentence, or sentence1 and sentence2"
        add(f"--{task}", type=Path, metavar="FILE", help=about)
    files: dict[str, Any] = {"type": named_file, "action": "append", "default": [], "metavar": "TASK=FILE"}
    add("--texts", **files, help="texts of another task")
    about = "how tables are read: id, text, pair or label=COLUMN (then they are scored), header=NAME,NAME, separator, "
    about += "encoding, quotes=false, undecodable=replace, unusable=skip, format"
    add("--table", action="append", default=[], metavar="KEY=VALUE", help=about)
    about = "where predictions of texts are written (RUN/predictions, or RUN/own-texts of prompts)"
    add("--out", type=Path, metavar="DIR", help=about)
    add("--probabilities", action="store_true", help="write the probabilities of the classes of texts too, as p_CLASS")
    about = "rows with labels, used for nothing else, to which the temperature of the probabilities is fitted"
    add("--calibrate", **files, help=about)
    add("--model", metavar="NAME", help="the language model of prompts (default: the one that the run or prompt names)")
    add_device_options(parser, precision=False)


def _few_shot(parser: Parser) -> None:
    add = parser.add_argument
    told = "a finished run, timm:NAME, torchvision:NAME, a hub name or a folder; for texts also minilm or bert-tiny"
    add("encoder", metavar="ENCODER", help=told)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--image-folder", type=Path, metavar="DIR", help="images in one subfolder per class")
    data.add_argument("--texts", type=Path, metavar="FILE", help="a table with the columns sentence and label")
    data.add_argument("--dataset", metavar="NAME", help="test images of a set that `metapretrain data` lists")
    add("--data-dir", type=Path, metavar="DIR", help="the folder of --dataset")
    heads = "nearest (default), normalised, centred (on the mean of the training classes, else of all rows), logistic; "
    heads += "finetune: train the encoder too, at some 30 passes of each support row; several: paired differences too"
    add("--head", nargs="+", choices=HEADS, default=["nearest"], metavar="HEAD", help=heads)
    tuning = "of --head finetune: steps=10 lr=1e-4 head_lr=0.01 scale=10"
    add("--set", nargs="+", action="extend", default=[], dest="changes", metavar="NAME=VALUE", help=tuning)
    add("--label", default="label", metavar="COLUMN", help="column of the classes' names in --texts (default: label)")
    add("--table", action="append", default=[], metavar="KEY=VALUE", help="how --texts is read: text=COLUMN, ...")
    add("--ways", type=positive_int, default=5, help="classes in an episode (default: 5)")
    add_int_list(parser, "--shots", (1, 5), "support images per class, one or more numbers (default: 1 5)")
    add("--queries", type=positive_int, default=15, help="query images per class (default: 15)")
    add("--image-size", type=pixels, metavar="PIXELS", help="of a pretrained image encoder (default: its own)")
    add("--episodes", type=positive_int, metavar="N", help="averaged over (default: 600, with --head finetune 100)")
    add("--seed", type=nonnegative_int, default=0, help="of the episodes (default: 0)")
    add_device_options(parser, precision=False)


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    options = build_parser().parse_args(argv)
    if not hasattr(options, "command"):
        results = sorted(Path("runs").glob("*/*/*/result.json"), key=lambda path: path.stat().st_mtime)
        print(OVERVIEW.format(next=f"report {results[-1].parents[2].as_posix()}" if results else "demo"))
        return 0
    command: Callable[[Namespace], int] = options.command
    return command(options)
