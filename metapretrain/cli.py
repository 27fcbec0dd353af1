"""The command `metapretrain`: subcommands, options and help; `metapretrain.commands` carries them out."""

from __future__ import annotations

from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from metapretrain import __version__, commands
from metapretrain.arguments import Parser, add_int_list, named_file, nonnegative_int, positive_int
from metapretrain.options import add_device_options, common_options, main_guard

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
  metapretrain few-shot RUN --image-folder DIR   k-shot accuracy of a run's encoder on your own classes
  metapretrain doctor                       versions, devices and what is missing

Each has --help. RUN is a run's folder, such as runs/demo/digits-demo/prl-query-s0. In a checkout there are also

  python benchmarks/run_stl10.py            prototypes, SimCLR and supervision on images
  python benchmarks/run_text.py             sentiment, paraphrases and similarity in one encoder
  python benchmarks/run_fewshot.py          MAML and its kin, prototypical networks
  python benchmarks/run_prompts.py          soft prompts, pretrained or not
  python benchmarks/run_schedule.py         which pretraining task next
  python benchmarks/run_speed.py            speed beside other libraries
  python benchmarks/run_scale.py            whole runs by 1, 2 and 4 processes

with --smoke for a first look (run_stl10.py: --dataset digits --smoke).

Next: metapretrain {{next}}"""
EXAMPLES = {
    "demo": ("demo", "demo --smoke --methods supervised,prl-query --seeds 0"),
    "data": ("data", "data stl10 --data-dir data/stl10", "data --data-dir data"),
    "report": (
        "report runs/stl10", "report runs/text", "report runs/fewshot", "report runs/prompts",
        "report runs/schedule --format csv", "report runs/stl10 --bundle stl10.json",
    ),
    "plot": (
        "plot runs/stl10", "plot runs/text --metrics validation/sst_accuracy train/loss_sst",
        "plot runs/stl10/stl10-paper/prl-query-frozen-linear-s0 --reducer umap --out figures",
    ),
    "corrupt": ("corrupt runs/stl10 --data-dir data/stl10",),
    "predict": (
        "predict runs/stl10/stl10-strong/prl-query-frozen-linear-s0 cat.png dog.png",
        "predict runs/text/cs224n-strong/proto-s0 --sst reviews.csv --para questions.csv --out predicted",
        "predict runs/prompts/yelp5-equal-smollm2/metapt-kmeans-s0 --texts sst2=reviews.csv",
        "predict runs/text/mine-short/cross-s0 --texts topic=new.csv",
    ),
    "few-shot": ("few-shot runs/stl10/stl10-paper/simclr-s0 --image-folder photos --ways 5 --shots 1 5",),
    "doctor": ("doctor",),
}  # fmt: skip


def build_parser() -> Parser:
    """The parser of the whole command; `command` is the function that carries out the chosen subcommand."""
    parser = Parser(prog="metapretrain", description="Meta-learning for pretraining.")
    parser.add_argument("--version", action="version", version=f"metapretrain {__version__}")
    add = parser.add_subparsers(metavar="COMMAND", title="commands").add_parser

    def subcommand(name: str, run: Callable[[Namespace], int], about: str) -> Parser:
        sentence = f"{about[0].upper()}{about[1:]}."
        examples = "\n".join(f"  metapretrain {words}" for words in EXAMPLES[name])
        sub = add(name, help=about, description=sentence, epilog=f"examples:\n{examples}")
        sub.set_defaults(command=run)
        return sub

    demo = subcommand("demo", commands.demo, "pretraining methods side by side on small images")
    common_options(demo, "demo", methods=DEMO_METHODS, seeds=(0, 1, 2), data_dir=False, tag=False)
    demo.add_argument("--no-figures", action="store_true", help="draw no maps, confusion matrices and curves")
    demo.add_argument("--job", action="store_true", help=SUPPRESS)  # one of several side by side
    _data(subcommand("data", commands.data, "the data sets: source, terms and layout; checks a folder"))
    _report(subcommand("report", commands.report, "the table of a folder of runs, with intervals"))
    plot = subcommand("plot", commands.plot, "the curves and the comparison of a folder of runs")
    plot.add_argument("runs", type=Path, metavar="RUNS", help="a run's folder or one with runs below it")
    plot.add_argument("--out", type=Path, metavar="DIR", help="default: figures, beside the runs")
    plot.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help="such as validation/accuracy")
    plot.add_argument("--reducer", choices=REDUCERS, help="also map each run's embeddings again, by this method")
    corrupt = subcommand("corrupt", commands.corrupt, "accuracy under corruptions, added to the results of runs")
    corrupt.add_argument("runs", type=Path, metavar="RUNS", help="a finished run's folder or one with runs below it")
    corrupt.add_argument("--data-dir", type=Path, metavar="DIR", help="the folder of the data")
    add_device_options(corrupt, precision=False)
    _predict(subcommand("predict", commands.predict, "classify images or texts with a run's model"))
    _few_shot(subcommand("few-shot", commands.few_shot, "k-shot accuracy of a run's encoder on your images"))
    subcommand("doctor", commands.doctor, "versions, devices and what is missing")
    return parser


def _data(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this data set only")
    parser.add_argument("--data-dir", type=Path, metavar="DIR",
                        help="check whether NAME can be read from DIR, or which sets can")  # fmt: skip
    parser.add_argument("--download", action="store_true", help="first fetch NAME into DIR")


def _report(parser: Parser) -> None:
    parser.add_argument("runs", type=Path, metavar="RUNS", help="a folder with runs below it")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where it is written (default: RUNS/report)")
    parser.add_argument("--format", choices=("markdown", "csv", "json"), default="markdown",
                        help="what is shown; all three are written (default: markdown)")  # fmt: skip
    parser.add_argument("--bundle", type=Path, metavar="FILE",
                        help="keep all results in one small file: enough for this report")  # fmt: skip


def _predict(parser: Parser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a finished run, or of a saved prompt")
    add("files", type=Path, nargs="*", metavar="FILE", help="image files")
    for task in ("sst", "para", "sts"):
        add(f"--{task}", type=Path, metavar="FILE",
            help=f"texts of task {task}: a table with id and sentence, or sentence1 and sentence2")  # fmt: skip
    add("--texts", type=named_file, action="append", default=[], metavar="TASK=FILE", help="texts of another task")
    add("--out", type=Path, metavar="DIR",
        help="where predictions of texts are written (RUN/predictions, or RUN/own-texts of prompts)")  # fmt: skip
    add("--model", metavar="NAME", help="the language model of prompts (default: the one that the run or prompt names)")
    add_device_options(parser, precision=False)


def _few_shot(parser: Parser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a finished run")
    add("--image-folder", type=Path, required=True, metavar="DIR", help="images in one subfolder a class")
    add("--ways", type=positive_int, default=5, help="classes in an episode (default: 5)")
    add_int_list(parser, "--shots", (1, 5), "support images a class, one or more numbers (default: 1 5)")
    add("--queries", type=positive_int, default=15, help="query images a class (default: 15)")
    add("--episodes", type=positive_int, default=600, help="episodes averaged over (default: 600)")
    add("--seed", type=nonnegative_int, default=0, help="of the episodes (default: 0)")
    add_device_options(parser, precision=False)


def _next() -> str:
    """What to try now: the table of the runs that are here, or the demo."""
    results = sorted(Path("runs").glob("*/*/*/result.json"), key=lambda path: path.stat().st_mtime)
    return f"report {results[-1].parents[2].as_posix()}" if results else "demo"


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    options = build_parser().parse_args(argv)
    if not hasattr(options, "command"):
        print(OVERVIEW.format(next=_next()))
        return 0
    command: Callable[[Namespace], int] = options.command
    return command(options)
