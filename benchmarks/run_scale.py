"""Whole runs by 1, 2 and 4 processes with the same batch an update: the same result within its interval, and how fast.

Every launch is one of a benchmark's own script, by torchrun where it has several processes. Those that fit beside each
other on the machine's GPUs run at the same time. On a GPU updates are recorded as CUDA graphs; without, each number of
processes runs for the first seed alone, to measure its speed, unless --recorded-only leaves these launches out.

    python benchmarks/run_scale.py --stl10 DIR --omniglot DIR --cs224n DIR --precision bf16 --results FILE
    python benchmarks/run_scale.py --smoke --device cpu
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ctrl_c  # noqa: F401
from run_speed import surroundings

from metapretrain.checks import check_device
from metapretrain.errors import InputError
from metapretrain.evaluation.intervals import mean_interval, paired_interval
from metapretrain.experiments.command import run_jobs, slots
from metapretrain.files import write_file
from metapretrain.options import Parser, add_int_list, add_run_options, main_guard, names
from metapretrain.report.markdown import markdown_table, shown

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Work:
    """A script with its words, and what is read from its results.

    `rows` are its methods with the pretraining of which the speed is taken, None for their own training; `data` is the
    option here that names its data; `rate` the entry of a result that holds the speed.
    """

    script: str
    rows: Mapping[str, str | None]
    words: str
    smoke: str
    data: str
    unit: str
    rate: str
    metric: str = "test_accuracy"
    mixed: bool = True  # --precision is for it; second-order gradients are computed in fp32


WORK = {
    "images": Work(
        "run_stl10.py",
        {"prl-query-frozen-linear": "pretrain-prl-query", "simclr": "pretrain-simclr"},
        "--recipe strong --set batch_size=512 epochs=16",
        "--dataset digits --set batch_size=64 epochs=2",
        "stl10",
        "images",
        "images_per_s",
    ),
    "tasks": Work(
        "run_fewshot.py",
        {"maml": None},
        "--settings 5w1s --set tasks=64 updates=200 validations=1",
        "--set tasks=4 updates=8",
        "omniglot",
        "tasks",
        "updates_per_s",
        mixed=False,
    ),
    "tokens": Work(
        "run_text.py",
        {"proto": None},
        "--recipe strong --set batch_size=192 epochs=2",
        "--set batch_size=16",
        "cs224n",
        "tokens",
        "tokens_per_s",
        "overall",
    ),
}


@dataclass(frozen=True)
class Launch:
    """One start of a script, for some seeds one after the other."""

    work: str
    processes: int
    graph: bool
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.work}-{self.processes}{'-graph' * self.graph}"


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(prog="run_scale.py", description=__doc__)
    add = parser.add_argument
    add("--work", type=names("work", WORK), default=list(WORK), metavar="A,B|all", help=", ".join(WORK))
    for name in dict.fromkeys(work.data for work in WORK.values()):
        add(f"--{name}", type=Path, metavar="DIR", help="the folder of its data, as --data-dir of its script")
    add("--encoder", metavar="NAME", help="of run_text.py")
    add_run_options(parser, "scale", (0, 1, 2))
    add_int_list(parser, "--processes", (1, 2, 4), "(default: 1 2 4)")
    add("--recorded-only", action="store_true", help="on GPUs, leave out the launches without CUDA graphs")
    add("--results", type=Path, metavar="FILE", help="write what was measured there, as JSON, after each launch")
    options: Namespace = parser.parse_args(argv)
    return options


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Run the launches and print the table of what came out."""
    options = options_of(argv)
    for name in options.work:
        if getattr(options, WORK[name].data) is None and not options.smoke:
            raise InputError(f"{name} need --{WORK[name].data}, the folder of their data")
    if min(options.processes) < 1:
        raise InputError("--processes takes whole numbers of at least 1, not 0")
    if options.device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device is auto, cpu or cuda (all that are visible), not {options.device}")
    if options.results is not None:
        check_writable(options.results)
    cuda = check_device(options.device).startswith("cuda")
    places = slots(options.device, 1) if cuda else [{"OMP_NUM_THREADS": "1"}] * (os.cpu_count() or 1)
    if options.recorded_only and not cuda:
        raise InputError("--recorded-only needs a GPU: no updates are recorded on a CPU; leave it out")
    wanted = wanted_launches(options, cuda)
    for launch in wanted:
        if launch.processes > len(places):
            print(f"{launch.name} left out: {len(places)} {'GPUs' if cuda else 'cores'} here", file=sys.stderr)
    fitting = [launch for launch in wanted if launch.processes <= len(places)]
    if not fitting:
        raise InputError(f"nothing was run; --processes takes 1 to {len(places)} here")
    run_all(fitting, places, options)
    return 0


def wanted_launches(options: Namespace, cuda: bool) -> list[Launch]:
    """The launches that are asked for; recorded ones come first among those of as many processes."""
    graphs = ((True,) if options.recorded_only else (True, False)) if cuda else (False,)
    return [
        Launch(name, count, graph, tuple(options.seeds if graph or not cuda else options.seeds[:1]))
        for count in sorted(set(options.processes))
        for graph in graphs
        for name in options.work
    ]


def check_writable(file: Path) -> None:
    """Raise an InputError, before anything is measured, where `file` could not be written afterwards."""
    if not file.parent.is_dir():
        raise InputError(f"no folder {file.parent} for --results; make it, or name another")
    if file.is_dir():
        raise InputError(f"--results is a file; {file} is a folder: name a file in it")
    if not os.access(file.parent, os.W_OK):
        raise InputError(f"--results cannot be written into {file.parent}; name another folder")


def run_all(launches: Sequence[Launch], places: Sequence[dict[str, str]], options: Namespace) -> None:
    """Run the launches, several at a time where there is room, and write and print what they measured.

    Raises:
        InputError: some failed; each is named with the last line that it printed. The others are done first.
    """
    measured: dict[str, Any] = {**surroundings(), "rows": []}
    if options.resume and options.results is not None and options.results.is_file():
        measured["rows"] = stored_rows(options.results, measured)
    failed: dict[str, str] = {}
    free, room = list(places), threading.Condition()

    def keep(found: list[dict[str, Any]]) -> None:
        again = {key_of(row) for row in found}
        with room:
            measured["rows"] = [row for row in measured["rows"] if key_of(row) not in again] + found
            if options.results is not None:
                write_file(options.results, json.dumps(measured, indent=1) + "\n")

    def work(launch: Launch, held: list[dict[str, str]]) -> None:
        try:
            found, reason = start(launch, held, options)
            keep(found or [])
        except Exception as error:  # a thread's own traceback would be lost among those of the others
            reason = str(error) if isinstance(error, InputError) else repr(error)
        with room:
            if reason is not None:
                failed[launch.name] = reason
            print(f"{launch.name}: {reason or 'done'}", flush=True)
            free.extend(held)  # whatever happened: the launches that wait for room would wait for ever
            room.notify_all()

    threads = []
    for launch in launches:
        with room:
            room.wait_for(lambda launch=launch: len(free) >= launch.processes)  # type: ignore[misc]
            held = [free.pop(0) for _ in range(launch.processes)]
        threads.append(threading.Thread(target=work, args=(launch, held), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if measured["rows"]:
        print(f"\n{scaling_table(measured)}")
    if failed:
        told = "; ".join(f"{name}: {line}" for name, line in failed.items())
        raise InputError(f"{len(failed)} of {len(launches)} launches failed: {told}")


HEADER = (
    "method",
    "processes",
    "CUDA graph",
    "trained per second",
    "times one process",
    "seconds per run",
    "reached",
    "seeds",
    "minus one process, paired",
    "its interval includes 0",
)
LEGEND = (
    "One batch per update (in brackets: its size and the precision), shared by the processes. Trained per second: "
    "mean over seeds. Times one process: relative to the single process with the most seeds, of equals to that with a "
    "CUDA graph. Seconds per run: training, evaluation and scoring, without the start. Reached: mean ± half-width of "
    "the 95% interval over seeds (Student t); minus one process: over the same seeds, accuracies in points."
)


def scaling_table(measured: Mapping[str, Any]) -> str:
    """Return the Markdown of a file that `benchmarks/run_scale.py --results` wrote.

    Args:
        measured: hardware and versions in words, and `rows`: each with row, unit, batch, processes, cuda_graph, metric,
            and a list a seed of seeds, values, rates (units a second) and wall_s.

    Example:
        >>> row = {"row": "maml", "unit": "tasks", "batch": 8, "cuda_graph": False, "metric": "test_accuracy"}
        >>> one = {**row, "processes": 1, "seeds": [0, 1], "values": [0.9, 0.8], "rates": [50, 50], "wall_s": [3, 3]}
        >>> two = {**one, "processes": 2, "values": [0.8, 0.9], "rates": [75, 75], "wall_s": [2, 2]}
        >>> print(scaling_table({"hardware": "", "versions": "", "rows": [one, two]}).splitlines()[3])
        | maml (8) | 2 | no | 75 tasks | 1.50 | 2.0 | test accuracy, %: 85.00 ± 63.53 | 2 | +0.00 ± 127.06 | yes |
    """
    rows = sorted(measured["rows"], key=lambda row: (row["row"], row["processes"], not row["cuda_graph"]))
    single = [row for row in rows if row["processes"] == 1]
    alone = {row["row"]: row for row in sorted(single, key=lambda row: (len(row["seeds"]), row["cuda_graph"]))}
    lines = markdown_table(HEADER, [_cells(row, alone.get(row["row"])) for row in rows])
    about = f"{LEGEND} {measured['hardware']}; {measured['versions']}."
    return "\n".join([*lines, about])


def _cells(row: Mapping[str, Any], alone: Mapping[str, Any] | None) -> list[str]:
    rate, wall = (sum(row[name]) / len(row[name]) for name in ("rates", "wall_s"))
    share = "accuracy" in row["metric"]
    about = ", ".join(map(str, filter(None, (row["batch"], row.get("precision")))))
    cells = [f"{row['row']} ({about})", str(row["processes"]), "yes" if row["cuda_graph"] else "no"]
    cells += [f"{rate:,.0f} {row['unit']}", _speedup(rate, alone), f"{wall:,.1f}"]
    metric = row["metric"].replace("_", " ") + ", %" * share
    cells += [f"{metric}: {shown(mean_interval(row['values']), share)}", str(len(row["seeds"]))]
    if alone is None or alone is row:
        return [*cells, "-", "-"]
    before = dict(zip(alone["seeds"], alone["values"], strict=True))
    both = [(value, before[s]) for s, value in zip(row["seeds"], row["values"], strict=True) if s in before]
    if not both:
        return [*cells, "-", "-"]
    less = paired_interval([a for a, _ in both], [b for _, b in both])
    verdict = ("yes" if less.low <= 0 <= less.high else "no") if less.known else "-"
    return [*cells, shown(less, share, "+"), verdict]


def _speedup(rate: float, alone: Mapping[str, Any] | None) -> str:
    return "-" if alone is None else f"{rate * len(alone['rates']) / sum(alone['rates']):.2f}"


def key_of(row: Mapping[str, Any]) -> tuple[str, int, bool]:
    """What tells a row from the others: its method, the number of processes, and whether a CUDA graph was recorded."""
    return row["row"], row["processes"], row["cuda_graph"]


def stored_rows(file: Path, here: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an earlier call's result file. Each stays until it has been measured again.

    Args:
        here: hardware and versions in words, which these rows will be told to be of.

    Raises:
        InputError: it is no file of this script's, a row is damaged, or was measured elsewhere or with other versions.
    """
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        rows: list[dict[str, Any]] = stored["rows"]
        where = {name: stored[name] for name in ("hardware", "versions")}
        scaling_table({**where, "rows": rows})  # what cannot be shown is told before hours of measuring
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{file} is not a result file of run_scale.py; name another for --results") from error
    for name, value in where.items() if rows else ():
        if value != here[name]:
            raise InputError(f"{file} has rows of {value}, here is {here[name]}; name another file for --results")
    return rows


def command_of(launch: Launch, options: Namespace) -> list[str]:
    """Return the command of a launch; several processes by torchrun, which finds a free port."""
    work = WORK[launch.work]
    command = [sys.executable]
    if launch.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
        command += ["--nproc_per_node", str(launch.processes)]
    command += [str(HERE / work.script), *work.words.split(), "--no-figures", "--methods", ",".join(work.rows)]
    data = getattr(options, work.data)
    command += ["--data-dir", str(data)] if data is not None else []
    command += ["--encoder", options.encoder] if options.encoder is not None and work.data == "cs224n" else []
    command += ["--smoke", *work.smoke.split()] if options.smoke else []
    command += ["--precision", options.precision] if work.mixed else []
    command += ["--device", "cpu"] if options.device == "cpu" else []
    command += [] if launch.graph else ["--no-cuda-graph"]
    command += ["--resume"] if options.resume else []
    return [*command, "--seeds", *map(str, launch.seeds), "--out", str(folder_of(launch, options))]


def folder_of(launch: Launch, options: Namespace) -> Path:
    """Where the runs of a launch are."""
    root: Path = options.out / "scale"
    return root / launch.name


def start(
    launch: Launch, held: Sequence[Mapping[str, str]], options: Namespace
) -> tuple[list[dict[str, Any]] | None, str | None]:
    """Run a launch in its places; return the rows that it measured, or None and the reason."""
    environment = {"OMP_NUM_THREADS": "4", **os.environ, **held[0]}
    if "CUDA_VISIBLE_DEVICES" in held[0]:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(place["CUDA_VISIBLE_DEVICES"] for place in held)
    folder, command = folder_of(launch, options), command_of(launch, options)
    folder.mkdir(parents=True, exist_ok=True)
    log, began = folder / "launch.log", time.monotonic()
    bare = not_recorded(launch, log) if options.resume else None  # in an earlier call, whose runs would be kept
    if bare is None:
        try:
            run_jobs({"launch": command}, [environment], folder)
        except InputError as failed:
            told = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error:")]
            return None, f"{told[0]} (log in {log})" if told else str(failed)
        bare = not_recorded(launch, log)
    if bare is not None:
        return None, f"{bare} (log in {log}); to measure it again, remove {folder} and add --resume"
    took = time.monotonic() - began
    batch = int(re.findall(r"\b(?:batch_size|tasks)=(\d+)", " ".join(command))[-1])
    about: dict[str, Any] = {"precision": options.precision if WORK[launch.work].mixed else "fp32"}
    about |= {} if options.resume else {"launch_s": round(took, 1)}  # finished runs take no time
    return [{**row, **about} for row in read(launch, batch, folder)], None


def not_recorded(launch: Launch, log: Path) -> str | None:
    """Return the line by which a launch with CUDA graphs said that it ran without them, if it did."""
    lines = log.read_text(errors="replace").splitlines() if launch.graph and log.is_file() else []
    return next((line.strip() for line in lines if "not recorded as CUDA graphs" in line), None)


def read(launch: Launch, batch: int, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a finished launch: a value, a speed and the seconds of each seed.

    Raises:
        InputError: a run was not made by as many processes as were started.
    """
    work = WORK[launch.work]
    results: dict[tuple[str, int], dict[str, Any]] = {}
    for file in folder.glob("*/*/*/result.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        results[result["method"], result["seed"]] = result
        if result.get("processes", 1) != launch.processes:
            raise InputError(f"{file} is of another number of processes than {launch.processes}")
    about = {"unit": work.unit, "batch": batch, "processes": launch.processes, "cuda_graph": launch.graph}
    times = batch if work.rate == "updates_per_s" else 1
    found = []
    for method, pretraining in work.rows.items():
        rows = [results[method, seed] for seed in launch.seeds]
        timed = [results[pretraining or method, seed] for seed in launch.seeds]
        found.append(
            {
                "row": method,
                **about,
                "metric": work.metric,
                "seeds": list(launch.seeds),
                "values": [row["metrics"][work.metric] for row in rows],
                "rates": [round(result[work.rate] * times, 1) for result in timed],
                "wall_s": [round(row["wall_s"] + row.get("pretrain_wall_s", 0.0), 2) for row in rows],
            }
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
