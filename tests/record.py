"""Record what the project computes, and compare two recordings: a restructuring must change no result.

    python tests/record.py OUT                         # record this checkout into the folder OUT
    python tests/record.py OUT --root CHECKOUT --only stl10,text-strong
    python tests/record.py --compare BASE NEW          # list all differences; exit status 1 if there are any

A recording is one JSON file a group of commands; `--only stl10` takes the groups `stl10` and `stl10-*`. It uses command
lines and documented names alone, so that the same script records the code before and after. Of each run it keeps the
SHA-256 of every tensor, table and figure, and `metrics.jsonl`, `result.json` and `config.json` without times, speeds,
memory, versions, commit, command and device. Reports of the runs are made once these are set to fixed values.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import itertools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MACHINE = {"versions", "commit", "command", "device", "devices", "peak_memory_bytes", "peak_memory_mib"}
TIME = re.compile(r"(^|_)(wall_s|seconds|per_s)$")
# TensorBoard's files repeat metrics.jsonl, with times; checksums are of files that stand beside them, one with versions
LEFT_OUT = re.compile(r"events\.out\.tfevents|\.lock$|/report/|weights\.sha256$")
LONGEST = 20_000  # characters of a JSON file that is kept as it is, and not as its checksum

SCRIPTS = ("stl10", "text", "prompts", "schedule", "fewshot")
STL10, TEXT, PROMPTS, SCHEDULE, FEWSHOT = (f"run_{name}.py --smoke --seeds 0 1" for name in SCRIPTS)
DIGITS = f"{STL10} --dataset digits --methods"
SCHEDULES = ("uniform", "proportional", "round-robin", "exp3", "utility:updates=2", "utility:utility=taylor,updates=2")
RUN = "runs/stl10/image-folder-strong-smoke/prl-query-unfrozen-linear-s0"
COMMANDS = ("", "demo ", "data ", "report ", "plot ", "corrupt ", "predict ", "few-shot ", "doctor ")
# Long ones first, so that two jobs end at about the same time.
GROUPS: dict[str, list[str]] = {
    "fewshot": [f"{FEWSHOT} --methods all --settings 5w1s"],
    "fewshot-more": [
        f"{FEWSHOT} --methods fomaml,protonet --settings 20w1s --queries 3 --no-figures",
        f"{FEWSHOT} --methods anil,protonet --settings 5w5s --queries 3 --holder learn2learn --no-figures "
        "--backbone l2l-cnn4",
        f"{FEWSHOT} --methods maml,metasgd --settings 5w1s --queries 5 --backbone mlp --tag steps --no-figures "
        "--set batchnorm=support inner_steps=2 clip=1.0",
        "run_fewshot.py --dataset made --seeds 0 1 --dry-run"],
    "text": [
        f"{TEXT} --methods all",
        "metapretrain predict runs/text/made-paper-smoke/proto-s0 --sst texts.csv --para texts.csv --out predicted",
        "metapretrain predict runs/text/made-paper-smoke/cosine-s1 --texts sts=texts.csv --out predicted/cosine"],
    "text-strong": [f"{TEXT} --recipe strong --methods all --no-figures"],
    "text-schedule": [f"{TEXT} --methods cross,proto --no-figures --schedule {x}" for x in (*SCHEDULES, "fixed:sst")],
    "text-more": [
        f"{TEXT} --methods weighted-sts,proto-separate --sts-head mlp --pooling cls --policy shortest --tag mlp",
        f"{TEXT} --methods cross,proto-query --loss-weights sst=1,para=0.5,sts=2 --validate --tag weights",
        *("run_text.py --data-dir data --encoder tiny --methods cross,proto,baseline --seeds 0 1 --no-figures "
          f"--recipe {recipe} --set epochs=1 batch_size=16 validation=20" for recipe in ("paper", "strong"))],
    "prompts": [f"{PROMPTS} --methods all",
                "metapretrain predict runs/prompts/made-equal-tiny-smoke/metapt-kmeans-s0 --texts sst2=texts.csv"],
    "prompts-schedule": [f"{PROMPTS} --methods metapt-kmeans,multitask --sets sst2 --no-figures --schedule {x}"
                         for x in (*SCHEDULES, "fixed:task-0")],
    "prompts-more": [
        f"{PROMPTS} --methods ppt,metapt-kmeans,metapt-random --sets sst5,rte,mrpc --budget paper "
        "--draw random --set meta.steps=6 meta.order=1 meta.inner_steps=2",
        f"{PROMPTS} --methods metapt-label,multitask --sets sst2 --tag learned --tasks-per-pass 2 "
        "--set meta.learned=true meta.inner_clip=1.0 meta.query=other",
        "run_prompts.py --data-dir data --model tiny --sets sst2 --methods pt,ppt,metapt-kmeans --seeds 0 1 "
        "--no-figures --reads 160 --set embedder=tiny rows=40 test_rows=20 examples=10 validation=10 tune.epochs=3 "
        "mixed.epochs=2 meta.clusters=3 meta.shots=2 validations=2 held_out=1"],
    "schedule": [f"{SCHEDULE} --methods all"],
    "schedule-more": [
        f"{SCHEDULE} --methods utility-exact,utility-taylor,uniform-block4 --recipe relative --no-figures "
        "--set epsilon=0.3 samples=1 joint=false",
        f"{SCHEDULE} --methods exp3,utility-exact --sources masked-lm,response-selection --targets squad,rte "
        "--downstream conll04 --validate --tag others"],
    "stl10": [f"{DIGITS} all"],
    "stl10-strong": [f"{DIGITS} all --recipe strong --no-figures"],
    "stl10-schedule": [f"{DIGITS} all --no-figures --schedule {one}" for one in (*SCHEDULES, "fixed:prl")],
    "stl10-more": [
        f"{STL10} --image-folder images --image-size 16 --recipe strong --corrupt "
        "--methods supervised-mlp,prl-query-unfrozen-linear,simclr-frozen",
        f"{DIGITS} prl-standard-frozen-mlp --validate --tag chosen --set prl.lr=0.01 proto.temperature=2",
        f"{DIGITS} supervised-resnet18 --train-on-all --tag whole --no-figures",
        f"metapretrain predict {RUN} images/test/image-0/0.png images/test/image-1/1.png",
        f"metapretrain few-shot {RUN} --image-folder classes --ways 3 --shots 1 2 --queries 5 --episodes 50",
        "run_fewshot.py --image-folder classes --image-size 16 --queries 5 --test-episodes 20 --settings 2w2s "
        f"--encoder {RUN} --seeds 0 1 --no-figures",
        *(f"run_stl10.py --dataset digits --recipe {recipe} --dry-run" for recipe in ("paper", "strong"))],
    "docs-tables": [],  # reports of the bundles in docs/results
    "demo": ["metapretrain demo --smoke --seeds 0 1",
             "metapretrain corrupt runs/demo/digits-smoke/supervised-s0 --device cpu",
             "metapretrain plot runs/demo --out plots"],
    "help": [*(f"metapretrain {name}--help" for name in COMMANDS), *(f"run_{name}.py --help" for name in SCRIPTS)],
    "docs-built": [],  # what docs/build_results.py writes into docs/results
    "api": [],  # values of the documented names, to the bit
}  # fmt: skip


class Recorder:
    """Runs the commands of a group in a folder of its own and describes what they leave there."""

    def __init__(self, root: Path, group: str, folder: Path) -> None:
        self.root, self.group, self.folder, self.failed = root, group, folder, list[str]()
        self.env = os.environ | {
            "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120", "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def record(self) -> dict[str, Any]:
        if self.group == "api":
            return {"api": json.loads(self.run([str(Path(__file__).resolve()), "--api"])[1] or "{}")}
        if self.group.startswith("docs"):
            for part in ("docs", "benchmarks"):
                shutil.copytree(self.root / part, self.folder / part)
            return self.docs_tables() if self.group == "docs-tables" else self.docs_built()
        make_data(self.folder)
        commands = {}
        for line in GROUPS[self.group]:
            words = shlex.split(line)
            plain = {"--help", "--dry-run"} & set(words)  # a training's table has times: `report` makes another one
            trains = not plain and (words[0] != "metapretrain" or words[1] == "demo")
            if words[0] != "metapretrain":
                words = [str(self.root / "benchmarks" / words[0]), *words[1:], "--device", "cpu"]
            status, output = self.run(["-m", *words] if words[0] == "metapretrain" else words)
            commands[line] = {"exit status": status, "output": [] if trains else output.splitlines()}
        found: dict[str, Any] = {"commands": commands, "files": described(self.folder)}
        results = list(self.folder.glob("runs/**/result.json"))
        for path in results:
            path.write_text(json.dumps(json.loads(path.read_text(), object_hook=settled)))
        return found | ({"report": self.report(Path("runs"))} if results else {})

    def run(self, command: list[str]) -> tuple[int, str]:
        """Exit status and output of a Python command."""
        done = subprocess.run([sys.executable, *command], cwd=self.folder, env=self.env, capture_output=True, text=True)
        if done.returncode:
            self.failed += [f"exit status {done.returncode}: {shlex.join(command)}", *done.stderr.splitlines()[-5:]]
        return done.returncode, done.stdout

    def report(self, runs: Path) -> dict[str, Any]:
        """Table and bundle of a folder of runs, or of a bundle."""
        out, bundle = self.folder / "tables", self.folder / "bundle.json"
        shutil.rmtree(out, ignore_errors=True)
        bundle.write_text("[]")  # what a failed report leaves
        status, _ = self.run(["-m", "metapretrain", "report", str(runs), "--out", str(out), "--bundle", str(bundle)])
        tables = {path.name: path.read_text().splitlines() for path in sorted(out.glob("*"))}
        rows = [json.dumps(row, sort_keys=True) for row in json.loads(bundle.read_text(), object_hook=without_machine)]
        kept = rows if runs.name == "runs" else checksum(str(rows).encode())
        return {"exit status": status, **tables, "bundle": kept}

    def docs_tables(self) -> dict[str, Any]:
        files = sorted(self.folder.glob("docs/results/*.json"))
        return {path.stem: self.report(path) for path in files if '"schema"' in path.read_text(encoding="utf-8")}

    def docs_built(self) -> dict[str, Any]:
        pages = sorted(self.folder.glob("docs/results/*.md"))
        block = re.compile(r"(<!-- (\S+) -->\n)(.*?)(<!-- /\2 -->)", re.DOTALL)
        for page in pages:
            page.write_text(
                block.sub(r"\1\4", page.read_text(encoding="utf-8")), encoding="utf-8"
            )  # all tables are new
        status, _ = self.run(["docs/build_results.py"])
        texts = [page.read_text(encoding="utf-8") for page in pages]
        tables = {found[2]: found[3].splitlines() for text in texts for found in block.finditer(text)}
        full = {path.name: path.read_text(encoding="utf-8") for path in self.folder.glob("docs/results/tables/*")}
        return {"exit status": status, "tables": tables, "full": full}


def described(folder: Path) -> dict[str, Any]:
    """What the commands left in a folder, by the files' names."""
    found: dict[str, Any] = {}
    for path in sorted(path for part in ("runs", "plots", "predicted") for path in folder.glob(f"{part}/**/*")):
        name = path.relative_to(folder).as_posix()
        if LEFT_OUT.search(name) or not path.is_file():
            continue
        content = path.read_bytes()
        found[name] = checksum(content)
        if path.suffix == ".safetensors":
            found[name] = tensors(content)
        elif path.name == "metrics.jsonl":
            rows = map(json.loads, content.splitlines())
            found[name] = [" ".join(map(str, row.values())) for row in rows if not TIME.search(row["name"])]
        elif path.suffix == ".json" and len(content) < LONGEST:
            found[name] = json.loads(content, object_hook=without_machine)
    return found


def checksum(content: bytes) -> str:
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}"


def tensors(content: bytes) -> dict[str, str]:
    """Type, shape and SHA-256 of each tensor of a safetensors file."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    found = {"metadata": json.dumps(header.pop("__metadata__", {}), sort_keys=True)}
    for name, about in sorted(header.items()):
        low, high = about["data_offsets"]
        found[name] = f"{about['dtype']} {about['shape']} {checksum(content[start + low : start + high])}"
    return found


def varies(name: str) -> bool:
    """Whether a field differs between machines, checkouts and moments."""
    return name in MACHINE or TIME.search(name) is not None


def without_machine(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if not varies(name)}


def settled(found: dict[str, Any]) -> dict[str, Any]:
    """The same fields with fixed values in place of those that differ."""
    stand_ins = {str: "fixed", int: 1, float: 1}
    return {name: stand_ins.get(type(value), value) if varies(name) else value for name, value in found.items()}


def make_data(folder: Path) -> None:
    """Small images, texts and data sets in their publishers' formats, the same everywhere."""
    import numpy as np
    from PIL import Image

    pixels, words = np.random.default_rng(0), random.Random(0)
    for part, classes, size in (("images/train", 4, 40), ("images/test", 4, 15), ("classes", 10, 8)):
        for label, number in itertools.product(range(classes), range(size)):
            image = pixels.integers(0, 120, (16, 16, 3)) + 13 * np.array([label, 9 - label, label % 3])
            path = folder / part / f"{part[:5]}-{label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.astype(np.uint8)).save(path)

    def say(label: int) -> str:
        middle = " ".join(words.choices("the a film plot actor scene was seems very rather not and".split(), k=6))
        return f"{middle} {('terrible', 'bad', 'maybe', 'good', 'great')[label % 5]} {words.randrange(1000)}"

    def write(name: str, rows: Iterable[str]) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(rows) + "\n")

    write("texts.csv", ["id,sentence,sentence1,sentence2", *(f"{n},{say(n)},{say(n)},{say(2 * n)}" for n in range(12))])
    for split, size in (("train", 80), ("dev", 30)):
        for name, labels in (("quora", "is_duplicate"), ("sts", "similarity")):
            scores = [n % 2 if name == "quora" else n % 11 / 2 for n in range(size)]
            rows = [f"{n}\t{split}{n}\t{say(n)}\t{say(3 * n)}\t{score:.1f}" for n, score in enumerate(scores)]
            write(f"data/cs224n/{name}-{split}.csv", [f"\tid\tsentence1\tsentence2\t{labels}", *rows])
        rows = [f"{n}\t{split}{n}\t{say(n)}\t{n % 5}" for n in range(size)]
        write(f"data/cs224n/ids-sst-{split}.csv", ["\tid\tsentence\tsentiment", *rows])
        write(f"data/sst2/stsa.binary.{split}", [f"{n % 2} {say(1 + 2 * (n % 2))}" for n in range(size)])
        yelp = [f'"{n % 5 + 1}","{say(n)}"' for n in range(5 * size)]
        write(f"data/yelp5/{'test' if split == 'dev' else split}.csv", yelp)


def told(*values: Any) -> str:
    """Shapes, a mean and the SHA-256 of tensors."""
    flat = [value.detach().contiguous() for value in values]
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in flat)).hexdigest()
    return f"{[tuple(one.shape) for one in flat]} mean {flat[0].double().mean().item():.9g} sha256 {digest}"


def api() -> dict[str, Any]:
    """Values of the documented names, as text that differs if a bit does."""
    import torch

    import metapretrain as mp
    from metapretrain.episodes import ShuffledBatches
    from metapretrain.protonet import DISTANCES

    found: dict[str, Any] = {"this checkout": Path(mp.__file__).parents[1] == Path(os.environ["PYTHONPATH"])}
    labels = [row * row % 11 for row in range(600)]
    features = torch.randn(600, 6, generator=torch.Generator().manual_seed(0)) + torch.tensor(labels)[:, None]
    for spec, seed in itertools.product(((5, 1, 5), (3, 5, 2), ((2, 4), (1, 3), (2, 5)), (None, 4, 4)), (0, 7)):
        groups = [row % 3 for row in range(600)] if seed else None
        sampler = mp.EpisodeSampler(labels, mp.EpisodeSpec(*spec), 600, seed=seed, epoch=seed, groups=groups)
        plans = [(list(e), e.support_y.tolist(), e.query_y.tolist(), e.classes, e.group) for e in sampler]
        found[f"EpisodeSampler {spec} {seed}"] = checksum(repr(plans).encode())
    sampler = mp.EpisodeSampler(labels, mp.EpisodeSpec(5, 2, 3), 40, seed=1, rank=1, world_size=2)
    found["EpisodeLoader"] = told(*(episode.query.x for episode in mp.EpisodeLoader(features, sampler)))
    found["ShuffledBatches"] = told(*ShuffledBatches(600, 64, seed=3), *ShuffledBatches(600, 64, seed=3, labels=labels))
    loaders = {name: list(range(size)) for name, size in (("a", 7), ("b", 3), ("c", 5))}
    for policy in ("longest", "shortest", "proportional", "round-robin"):
        found[f"TaskStream {policy}"] = str(list(mp.TaskStream(loaders, policy, seed=5, steps=25)))
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        parts = mp.split_support_query(torch.tensor(labels[:50]), 0.3, generator, stratified=bool(seed))
        found[f"split_support_query {seed}"] = told(*parts)
    topics = [f"word{label} word{label % 3} other" for label in labels]
    for method, given in (("kmeans", features), ("random", features), ("label", features), ("lda", topics)):
        own = labels if method == "label" else None
        found[f"group_tasks {method}"] = told(mp.group_tasks(given, 12, method, 3, labels=own, smallest=5))
    for distance, (name, mode, options) in itertools.product(DISTANCES, (
        ("standard", "standard", {}), ("query", "query", {"seed": 4}), ("stratified", "query", {"stratified": True}),
        ("learned", "query", {"learn_temperature": True, "temperature": 2.0, "label_smoothing": 0.1, "seed": 1}),
        ("epoch", "standard", {"memory": "epoch", "num_classes": 11}),
    )):  # fmt: skip
        loss_of, z = mp.ProtoLoss(mode, distance=distance, **options), features[:64].clone().requires_grad_()
        losses = torch.stack([loss_of(z, torch.tensor(labels[:64])) for _ in range(3)])
        losses.sum().backward()
        found[f"ProtoLoss {distance} {name}"] = told(losses, z.grad)
    found["SoftPrompt"] = told(mp.SoftPrompt.random(5, 7, seed=2)())
    return found | learned(mp, torch) | scheduled(mp, torch)


def learned(mp: Any, torch: Any) -> dict[str, str]:
    """Losses, gradients and predictions of MAML and its variants, on each engine."""
    nn, found = torch.nn, {}
    images = torch.randn(3, 15, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    support, query = ((x, torch.arange(3).repeat(3, x.shape[1] // 3)) for x in images.split((6, 9), dim=1))
    for name, engine in itertools.product(("MAML", "FOMAML", "ANIL", "MetaSGD", "ProtoNet"), ("loop", "vmap", "auto")):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        learner = getattr(mp, name)(net, **({} if name == "ProtoNet" else {"lr": 0.1, "steps": 2, "engine": engine}))
        losses = learner.backward(support, query)
        gradients = [one.grad for one in learner.parameters() if one.grad is not None]
        found[f"{name} {engine}"] = told(losses, *gradients, learner.logits(support, query))
    return found


def scheduled(mp: Any, torch: Any) -> dict[str, str]:
    """Choices and utilities of each scheduler on a small problem of two weights."""
    w, names, found = torch.zeros(2, requires_grad=True), ["a", "b", "c"], {}

    def task(goal: float, use: int) -> Any:
        return mp.FunctionProbe(lambda generator: goal + 0.3 * torch.randn(2, generator=generator),
                                lambda batch: (w - batch)[use].square().sum())  # fmt: skip

    def utility(**options: Any) -> Any:
        sources = {"a": task(1.0, 0), "b": task(-1.0, 0), "c": task(1.0, 1)}
        return mp.UtilityScheduler(sources, {"goal": task(1.0, 0)}, [w], alpha=0.1, updates=2, seed=3, **options)

    for name, scheduler in {
        "uniform": mp.Uniform(names, seed=1), "proportional": mp.Proportional({"a": 5, "b": 2, "c": 1}, seed=1),
        "round-robin": mp.RoundRobin(names, updates=2), "fixed": mp.Fixed(names, "b"),
        "exp3": mp.Exp3(names, gamma=0.2, seed=1), "exact": utility(epsilon=0.3), "taylor": utility(utility="taylor"),
        "relative": utility(normalise="relative", smoothing=0.5, samples=3),
    }.items():  # fmt: skip
        chosen = []
        for _ in range(30):
            choice = scheduler.choose()
            scheduler.observe(choice.source, 1.0 if choice.source == "c" else 0.2)
            chosen.append((choice.source, choice.updates, choice.explored, choice.utilities))
        found[f"{name} scheduler"] = repr(chosen)
    return found


def differences(old: Any, new: Any, place: str) -> Iterator[str]:
    """What differs, a few readable lines each."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old | new:
            where = f"{place} > {name}"
            if name not in old or name not in new:
                yield f"{where}\n      only in {'BASE' if name in old else 'NEW'}"
            else:
                yield from differences(old[name], new[name], where)
    elif old != new:
        sides = ([str(one) for one in (side if isinstance(side, list) else [side])] for side in (old, new))
        changed = list(difflib.unified_diff(*sides, n=0, lineterm=""))[2:]
        yield "\n      ".join([place, *(line for line in changed if not line.startswith("@@"))])


def compare(base: Path, new: Path, groups: list[str]) -> int:
    """Print the differences of two recordings, group by group; 1 if there are any."""
    total = 0
    for name in groups:
        files = [folder / f"{name}.json" for folder in (base, new)]
        found = [f"not in {path.parent}" for path in files if not path.is_file()]
        found = found or list(differences(*(json.loads(path.read_text(encoding="utf-8")) for path in files), name))
        total += len(found)
        print("\n  ".join([f"{name}: {len(found)} differences", *found]))
    print(f"{total} differences in {len(groups)} groups")
    return int(total > 0)


def record_group(name: str, root: Path, out: Path) -> bool:
    """Record one group; whether all of its commands ended well."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"record-{name}-") as folder:
        recorder = Recorder(root, name, Path(folder))
        found = recorder.record()
    (out / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print("\n  ".join([f"{name}: {time.monotonic() - start:.0f} s", *recorder.failed]), flush=True)
    return not recorder.failed


def main() -> int:
    """Record, or compare two recordings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="the folder of the recording")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout (this one)")
    parser.add_argument("--only", default="", metavar="A,B", help=f"groups, of {', '.join(GROUPS)}")
    parser.add_argument("--jobs", type=int, default=2, help="groups side by side, one thread each (2)")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BASE", "NEW"))
    parser.add_argument("--api", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    only = tuple(name for name in options.only.split(",") if name)
    groups = [group for group in GROUPS if not only or group in only or group.rpartition("-")[0] in only]
    if options.api:
        print(json.dumps(api()))
        return 0
    if not groups or (options.out is None and options.compare is None):
        parser.error("name the folder of the recording, and groups that exist")
    if options.compare:
        return compare(*options.compare, groups)
    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(lambda name: record_group(name, options.root.resolve(), options.out), groups))
    return int(not all(done))


if __name__ == "__main__":
    sys.exit(main())
