"""The shared main of the scripts: options, the folder's name, rows side by side or in turn, and their table."""

import logging
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from metapretrain.checks import check_device, check_precision, require
from metapretrain.errors import InputError, brief
from metapretrain.evaluation.robustness import corrupt_runs
from metapretrain.experiments.base import Experiment, Machine
from metapretrain.files import plain, read_json
from metapretrain.options import JOB, Parser, common_options, main_guard
from metapretrain.report.figures import REDUCERS, usable_reducer
from metapretrain.training.environment import running
from metapretrain.training.logs import METRICS, ProgressLine

log = logging.getLogger(__name__)
STOP_SECONDS = 10.0  # after Ctrl-C or a signal a job has this long to end by itself


def slots(device: str, per_device: int) -> list[dict[str, str]]:
    """Return the environment of each place where a job can run: `per_device` on every GPU, or on the CPU."""
    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        return [{"CUDA_VISIBLE_DEVICES": name} for _ in range(per_device) for name in visible]
    threads = max(1, (os.cpu_count() or 1) // per_device)
    return [{"OMP_NUM_THREADS": str(threads)} for _ in range(per_device)]


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, and the process then as they do, unless they are ignored."""
    caught: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        caught.append(number)
        if len(caught) == 1:
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    taken = [one for one in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(one) is signal.SIG_DFL]
    try:
        for one in taken:
            signal.signal(one, interrupt)
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)
        for number in caught:
            signal.raise_signal(number)


def run_jobs(jobs: Mapping[str, Sequence[str]], places: Sequence[Mapping[str, str]], logs: Path) -> None:
    """Run the commands of `jobs` by name, in order, one at a time in each place; what they print goes to `logs`.

    Ctrl-C, SIGTERM and SIGHUP end the jobs first. Scripts of ours end also with this process when it is killed.
    InputError: some jobs failed; each is named with the last line that it printed. The others are done first.
    """
    from tqdm.auto import tqdm

    logs.mkdir(parents=True, exist_ok=True)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in jobs:
        waiting.put(name)
    failed: dict[str, str] = {}
    stopped = threading.Event()
    running: set[subprocess.Popen[bytes]] = set()
    ended = 0
    lock = threading.Lock()

    def work(place: Mapping[str, str]) -> None:
        nonlocal ended
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            reason = run(name, place)
            with lock:
                ended += 1
                bar.update()
                if reason is not None:
                    failed[name] = reason
                    if not stopped.is_set():
                        others = "; the others go on" * (ended < len(jobs))
                        with bar.external_write_mode(file=sys.stderr):
                            log.error("job %s failed: %s (log: %s)%s", name, reason, logs / f"{name}.log", others)

    def run(name: str, place: Mapping[str, str]) -> str | None:
        log = logs / f"{name}.log"
        try:
            with log.open("wb") as file, lock:
                if stopped.is_set():
                    return "not started"
                environment = {**os.environ, **place, JOB: "1"}
                process = subprocess.Popen(jobs[name], stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment)
                running.add(process)
        except OSError as error:
            return str(error)
        status = process.wait()
        process.stdin.close()  # type: ignore[union-attr]  # open till then: its end is ours
        with lock:
            running.discard(process)
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return (lines[-1] if lines else f"exit status {status}") if status else None

    places = places[: len(jobs)]
    with _signals_interrupt(), tqdm(total=len(jobs), desc="jobs", unit="job", disable=None) as bar:
        threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in places]
        for thread in threads:
            thread.start()
        line = ProgressLine("jobs", len(jobs), unit="done") if bar.disable else None
        try:
            while alive := [thread for thread in threads if thread.is_alive()]:
                alive[0].join(1.0)
                if line is not None:
                    line.at(ended)
        except KeyboardInterrupt:
            with lock:
                stopped.set()
                ending = list(running)
                for process in ending:
                    process.terminate()
            until = time.monotonic() + STOP_SECONDS
            for process in ending:  # not by the threads: Python to 3.12 takes one for dead whose join was interrupted
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, until - time.monotonic()))
            with lock:
                for process in running:
                    process.kill()
            raise
    if failed:
        told = "; ".join(f"{name}: {line}" for name, line in failed.items())
        raise InputError(f"{len(failed)} of {len(jobs)} jobs failed (logs in {logs}): {told}")


def table_parser(
    about: str | None,
    benchmark: str,
    *,
    change: str,
    methods: Iterable[str] = (),
    default_methods: str = "all",
    recipes: Iterable[str] = (),
    schedule: str = "",
    held_out: str = "",
    compiled: str = "",
    drawn: str = "curves",
    maps: bool = False,
) -> Parser:
    """Return the parser of a benchmark's script, with the options that these share.

    Args:
        about: what `--help` begins with.
        benchmark, methods, default_methods: see :func:`metapretrain.options.common_options`.
        change: of `--set`, what is changed, with examples; recipes: names for `--recipe`; the first one is the default.
        schedule, compiled: help of `--schedule` and `--compile`; empty: the script has no such option.
        held_out: the parts that `--validate` leaves alone; empty: the script has no such option.
        drawn: what `--no-figures` leaves out; maps: whether maps of embeddings are drawn.
    """
    parser = Parser(description=about)
    common_options(parser, benchmark, methods=methods, default_methods=default_methods)
    add = parser.add_argument
    if known := tuple(recipes):
        add("--recipe", choices=known, default=known[0], help=f"default: {known[0]}")
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", dest="changes", help=f"change {change}")
    if schedule:
        add("--schedule", metavar="NAME", help=schedule)
    if held_out:
        add("--validate", action="store_true", help=f"leave the {held_out} alone: for choosing a recipe")
    if compiled:
        add("--compile", action="store_true", help=compiled)
        add("--no-cuda-graph", action="store_true", help="on a GPU, start the kernels of each update one by one")
    add("--no-figures", action="store_true", help=f"draw no {drawn}")
    if maps:
        add("--reducer", choices=tuple(REDUCERS), default="tsne", help="of maps of embeddings (default: tsne)")
    add("--job", action="store_true", help=SUPPRESS)  # one of several side by side: prints no table
    add("--config", metavar="FILE", help="run the row of a run's config.json again; options that are given win")
    return parser


def machine_of(options: Namespace) -> Machine:
    """Return the machine that the common options name, and this process's rank under `accelerate launch`."""
    device = check_device(options.device)
    check_precision(options.precision, device)
    rank, world = 0, 1
    if "WORLD_SIZE" in os.environ:
        from metapretrain.training.environment import make_accelerator

        accelerator = make_accelerator(device, options.precision)
        rank, world = accelerator.process_index, accelerator.num_processes
    graph = False if getattr(options, "no_cuda_graph", False) else None
    compiled, local = (getattr(options, name, False) for name in ("compile", "local_batchnorm"))
    log_to = tuple(getattr(options, "log_to", ()))
    return Machine(device, options.precision, compiled, graph, local, rank, world, log_to)


def folder_name(options: Namespace, *parts: str | None) -> str:
    """Name the recipe in the folder of a table: parts such as recipe and schedule, then `--tag` and `smoke`.

    Example:
        >>> folder_name(Namespace(tag="mine", smoke=True), "paper", None, "utility:alpha=0.1")
        'paper-utility-alpha-0.1-mine-smoke'
    """
    given = [re.sub(r"[^\w.+-]", "-", part or "") for part in parts]
    return "-".join(filter(None, [*given, options.tag, "smoke" * options.smoke]))


def table_arguments(options: Namespace, *parts: str | None) -> dict[str, Any]:
    """Return the arguments of an :class:`Experiment` that the common options give; `parts` name its folder."""
    drawn = not (options.no_figures or getattr(options, "validate", False))
    found = {
        "recipe_name": folder_name(options, *parts),
        "out": options.out,
        "figures": options.seeds[0] if drawn else None,
        "resume": options.resume,
    }
    return found | ({"reducer": options.reducer} if "reducer" in options else {})


class Table(NamedTuple):
    """An experiment with all its rows by name, and the options that its jobs need besides those that were given."""

    experiment: Experiment[Any, Any, Any, Any, Any]
    methods: Mapping[str, Any]
    more: Sequence[str] = ()


def row_options(about: Mapping[str, Any]) -> dict[str, list[str] | None]:
    """The options that choose the row of a run's configuration; None: an option that has to be left out."""
    return {"--methods": [str(about["method"])], "--seeds": [str(about["seed"])]}


def script_main(
    file: str,
    options_of: Callable[[Sequence[str] | None], Namespace],
    tables_of: Callable[[Namespace], Sequence[Table]],
    row: Callable[[Mapping[str, Any]], Mapping[str, list[str] | None]] = row_options,
) -> Callable[..., int]:
    """Return the `main` of the script `file`: read its options, then its data, and run its tables.

    `row` gives the options that choose the row of a run's configuration and "command", for `--config`.
    """

    @main_guard
    def main(argv: Sequence[str] | None = None) -> int:
        called = file if argv is not None else sys.argv[0]
        given = with_config(Path(file).name, sys.argv[1:] if argv is None else argv, row)
        options = options_of(given)
        if "reducer" in options:
            options.reducer = usable_reducer(options.reducer)
        jobs = [word for word in given if word != "--download"]  # once is enough
        with running([called, *given]):
            tables = tables_of(options)
            check_config(sys.argv[1:] if argv is None else argv, tables, options)
            for experiment, batch in due(tables, options, [file, *jobs]):
                tell(experiment.run(batch))
        return 0

    return main


# Options of a run's command that say nothing of its result, or that stay the caller's to give.
_NOT_AGAIN = {"--out", "--resume", "--job", "--jobs-per-device", "--dry-run", "--download", "--plugin", "--log-to"}
_SAME_CHOICES = _NOT_AGAIN | {"--tag", "--seeds", "--device", "--precision", "--data-dir", "--no-figures"}
_ADDED = {"--set", "--table"}  # given again, they add to what was given
_PLACES = ("--data-dir", "--image-folder", "--unlabelled", "--pretrained")


def with_config(
    script: str, argv: Sequence[str], row: Callable[[Mapping[str, Any]], Mapping[str, list[str] | None]] = row_options
) -> list[str]:
    """Return the words of `argv`; `--config FILE` is replaced by those that run the row of FILE again.

    FILE is a run's `config.json` or its folder. Other words win; `--out`, `--plugin` and `--log-to` are not taken over.
    Raises InputError: no such file, one of another script or of a pretraining, or data that are not where they were.
    """
    file, given = _config_file(argv)
    if file is None:
        return given
    if (about := read_json(file)) is None:
        raise InputError(f"--config {file}: no such file; give the config.json in the folder of a run")
    command = str(about.get("command"))
    config: Any = about.get("config")
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    described = isinstance(config, dict) and {"method", "seed"} <= config.keys()
    if not words or Path(words[0]).name != script or not described:
        raise InputError(f"--config {file} is not of {script}: its command is {command!r}")
    if (read_json(file.with_name("result.json")) or {}).get("kind") == "pretraining":
        raise InputError(f"--config {file} is of a pretraining that rows share; give the config.json of such a row")
    known, mine = _by_option(words[1:]), {option for option, _ in _by_option(given)}
    chosen = row({**config, "command": command})
    mine |= {"--image-folder"} if "--dataset" in mine else set()
    if "--plugin" not in mine and any(option == "--plugin" for option, _ in known):
        raise InputError(f"--config {file} was run with a file of your own: give it again by --plugin FILE")
    kept = [part for part in known if part[0] not in _NOT_AGAIN | chosen.keys() | (mine - _ADDED)]
    for option, values in kept:
        if option in _PLACES and values and not Path(values[0]).exists():
            told = "a run keeps the last part of an absolute path alone"
            raise InputError(f"--config {file} was run with {option} {values[0]}, which is not here ({told}); give it")
    kept += [(option, values) for option, values in chosen.items() if values is not None and option not in mine]
    return [word for option, values in kept for word in (option, *values)] + given


def _config_file(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file that `--config` names, and the other words."""
    reader = Parser(add_help=False)
    reader.add_argument("--config", type=Path)
    read, given = reader.parse_known_args(list(argv))
    named: Path | None = read.config
    return (named / "config.json" if named is not None and named.is_dir() else named), given


def check_config(argv: Sequence[str], tables: Sequence[Table], options: Namespace) -> None:
    """Refuse `--config FILE` where the choices in FILE are not those of its command, which is run again.

    Nothing is compared where the command line may change choices, and no choice that FILE or this version has not.
    """
    file, given = _config_file(argv)
    if file is None or {option for option, _ in _by_option(given)} - _SAME_CHOICES:
        return
    written: Any = (read_json(file) or {})["config"].get("choices")
    name, (experiment, methods, _) = options.methods[0], tables[0]
    now: Any = plain(experiment.whole_config(name, methods[name], options.seeds[0])).get("choices")
    changed = [key for key in written if key in now and written[key] != now[key]] if written and now else []
    if changed:
        told = f"{changed[0]} {brief(written[changed[0]])}, and {brief(now[changed[0]])} by its command"
        raise InputError(f"--config {file} has {told}, which is what runs again: change values by --set")


def _by_option(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The options of a command, each with its values."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            found.append((option, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
    return found


def due(
    tables: Sequence[Table],
    options: Namespace,
    command: Sequence[str],
    end: Callable[[Experiment[Any, Any, Any, Any, Any]], str] | None = None,
) -> Iterator[tuple[Experiment[Any, Any, Any, Any, Any], list[Any]]]:
    """Yield what is to be run, the rows of `options.methods` for `options.seeds` of each table; then print the table.

    With `--dry-run`, and where rows run side by side, nothing is left to the caller.

    Args:
        tables: all are checked before the first one is trained.
        command: script or module with the options that every job gets; jobs that run side by side add their rows.
        end: returns what is printed last, in place of :func:`show`.

    InputError: a run would be refused (before anything is trained), or some jobs failed.
    """
    chosen = [(table, {name: table.methods[name] for name in options.methods}) for table in tables]
    if getattr(options, "corrupt", False):
        require("PIL.Image", "--corrupt", "; or leave it out")
    if options.dry_run:
        lines: list[str] = []
        for (experiment, *_), rows in chosen:
            counts = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in experiment.data.counts.items())
            lines += [f"{experiment.root}: seeds {' '.join(map(str, options.seeds))}; {counts}", *experiment.plan(rows)]
        print("\n".join(lines))
        missing = [table.experiment.lacking(rows, options.seeds, load=False) for table, rows in chosen]
        for told in filter(None, dict.fromkeys(missing)):
            log.warning("%s", told)
        return
    left = []
    for table, rows in chosen:
        table.experiment.check(rows, options.seeds)
        left += table.experiment.left(rows, options.seeds)
    places = slots(options.device, options.jobs_per_device)
    for (experiment, _, more), rows in chosen:
        if len(places) > 1 and experiment.machine.world == 1 and not options.job:
            run_jobs(_jobs(rows, options, [*command, *more]), places, experiment.root / "logs")
        else:
            for batch in experiment.work(rows, options.seeds):
                yield experiment, _placed(experiment, batch, left)
        if len(experiment.data.test) and experiment.machine.rank == 0 and not options.job:
            if getattr(options, "corrupt", False):
                images, device = experiment.data.test, experiment.machine.device
                for run, scores in corrupt_runs(experiment.root, lambda *_, found=images: found, device):
                    print(f"{run.name}: accuracy {scores['corrupt_accuracy']:.4f} under corruption")
            experiment.save_layout()
            show(experiment) if end is None else print(end(experiment))


def _placed(experiment: Experiment[Any, Any, Any, Any, Any], batch: Sequence[Any], left: list[Path]) -> list[Any]:
    paths = list(dict.fromkeys(left))
    at = [paths.index(path) + 1 for one in batch if (path := experiment.path(one.name, one.seed)) in paths]
    place = f"run {'-'.join(dict.fromkeys((str(min(at)), str(max(at)))))} of {len(paths)}" if at else ""
    return [replace(one, place=place) for one in batch]


def tell(results: Iterable[Mapping[str, Any]]) -> None:
    """Print the scores of rows that leave the test part alone: they are in no table."""
    for result in results:
        if result.get("kind") == "tuning":
            print(f"{result['method']} seed {result['seed']}, validation only: {result['metrics']}")


def show(experiment: Experiment[Any, Any, Any, Any, Any]) -> None:
    """Write the table and the figures of all runs of an experiment and print them with what to look at next."""
    text, figures = write_all(experiment)
    print(f"\n{text}")
    print(f"table    {experiment.root / 'report' / 'table.md'}")
    for file in figures:
        print(f"figure   {file}")
    print(f"curves   tensorboard --logdir {experiment.root}")


def write_all(experiment: Experiment[Any, Any, Any, Any, Any]) -> tuple[str, list[Path]]:
    """Write the table and the figures of all runs; return the table and the files of all figures."""
    from metapretrain.report.figures import plot
    from metapretrain.report.table import write

    root, draw = experiment.root, experiment.draw or (lambda _: [])
    text = write(root)
    drawn = experiment.figures is not None and any(root.rglob(METRICS))  # a row that trains nothing has no curves
    return text, [*([*plot(root), *draw(root)] if drawn else []), *sorted(root.glob("*/figures/*.png"))]


def _jobs(chosen: Mapping[str, Any], options: Namespace, command: Sequence[str]) -> dict[str, list[str]]:
    """One job per seed and pretraining: its rows wait for the same encoder; supervised rows stand alone."""
    groups: dict[str, list[str]] = {}
    for name, method in chosen.items():
        groups.setdefault(getattr(method, "pretraining", None) or name, []).append(name)
    jobs = {}
    for seed in options.seeds:
        own = ["--seeds", str(seed), "--jobs-per-device", "1", "--job", *["--no-figures"] * (seed != options.seeds[0])]
        for group, names in groups.items():
            jobs[f"{group}-s{seed}"] = [sys.executable, *command, "--methods", ",".join(names), *own]
    return jobs
