"""Every command of the README and of docs: run where it needs nothing, else checked as far as its plan goes.

- ``metapretrain ...`` is run, on runs of the page's own Python or of smoke runs, and images and texts made here.
- ``python benchmarks/X.py --smoke`` is run with one row of its rows (all rows: ``pytest -m slow`` on this file).
- Other scripts of benchmarks show their plan (``--smoke --dry-run``): no hub, no data, no GPU.
- ``make`` and ``pip install`` are checked against what the project itself uses.
- ``accelerate launch`` and ``torchrun`` are checked by their own parsers, the script that they start as above.

A command of no such kind fails.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from metapretrain.cli import main as metapretrain
from metapretrain.models.hub import ALIASES
from tests.test_docs import DOCS, ROOT, blocks, load_script

CPU = ["--device", "cpu", "--precision", "fp32"]
QUICK = {  # one row of a smoke run, and what `metapretrain` then finds
    "run_fewshot.py": ["--methods", "protonet", "--settings", "5w1s", "--no-figures"],
    "run_prompts.py": ["--methods", "pt", "--sets", "sst2", "--no-figures"],
    "run_schedule.py": ["--methods", "uniform", "--settings", "aware", "--no-figures"],
    "run_text.py": ["--methods", "proto", "--no-figures"],
}
DEMO = ["demo", "--smoke", "--methods", "prl-query", "--seeds", "0", "--no-figures"]
MADE = {  # which run stands in for runs below this folder
    "runs/demo": "demo/digits-smoke/prl-query-s0",
    "runs/stl10": "demo/digits-smoke/prl-query-s0",
    "runs/text": "text/made-paper-smoke/proto-s0",
    "runs/fewshot": "fewshot/made-5w1s-conv4-smoke/protonet-s0",
    "runs/prompts": "prompts/made-equal-tiny-smoke/pt-s0",
}
SENTENCES = "id,sentence,sentence1,sentence2\na,a good film,a good film,a fine film\nb,a bad film,a bad film,rain\n"


def lines_of(path: Path) -> Iterator[str]:
    """The commands of a page; a loop of the shell gives one for each of its values."""
    for block in blocks(path, "bash"):
        loop: tuple[str, list[str]] | None = None
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip()
            begun = re.fullmatch(r"for (\w+) in (.*); do", line)
            if begun:
                loop = begun[1], begun[2].split()
            elif line == "done":
                loop = None
            elif loop and line:
                yield from (line.replace(f"${loop[0]}", value) for value in loop[1])
            elif line and not line.startswith("#"):
                yield line


PAGES = {str(path.relative_to(ROOT)): list(lines_of(path)) for path in DOCS}
# Their Python makes what their commands use.
OWN_RUNS = {"docs/fewshot-texts.md", "docs/own-images.md", "docs/own-prompts.md", "docs/own-text-tasks.md"}
PAGES = {name: lines for name, lines in PAGES.items() if lines}


@pytest.fixture(scope="module")
def smoke_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smoke")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return tmp_path


class Checks:
    """Runs or checks one command of a page in the current folder."""

    def __init__(self, page: str, smoke_runs: Path) -> None:
        self.page, self.smoke_runs = page, smoke_runs

    def check(self, line: str) -> None:
        chosen = re.compile(r" --set \$\(cat runs/\w+/(\w+\.txt)\)")  # what trials have written
        for file in chosen.findall(line):
            assert any(f'"{file}"' in path.read_text() for path in (ROOT / "benchmarks").glob("tune_*.py")), file
        line = chosen.sub("", line)
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        kinds = {
            "metapretrain": self.metapretrain,
            "python": self.script,
            "make": self.make,
            "pip": self.pip,
            "accelerate": self.accelerate,
            "torchrun": self.torchrun,
        }
        assert words[0] in kinds, f"no test knows how to check {line!r}"
        kinds[words[0]](words[1:])

    def metapretrain(self, words: list[str]) -> None:
        if words == ["demo"]:
            words = [*DEMO, "--out", str(self.smoke_runs)]
        for before, word in pairwise(words):
            if word.startswith("runs/") and before not in ("--out", "--bundle"):
                self.make_runs(Path(word))
            elif word.startswith("docs/results/"):
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / word, word)
            elif word.endswith(".png") and not Path(word).exists():
                Image.fromarray(np.full((9, 12, 3), 128, np.uint8)).save(word)
            elif word.endswith(".csv") and not Path(word.split("=")[-1]).exists():
                Path(word.split("=")[-1]).write_text(SENTENCES)
        if "--image-folder" in words:
            self.make_images(Path(words[words.index("--image-folder") + 1]))
        if "--plugin" in words:
            place = words.index("--plugin") + 1
            words = [*words[:place], str(ROOT / words[place]), *words[place + 1 :]]
        assert metapretrain(words) == 0

    def script(self, words: list[str]) -> None:
        path = ROOT / words[0]
        assert path.is_file(), f"{self.page} names {words[0]}, which does not exist"
        module, options = load_script(path), words[1:]
        parsed = ("run_speed.py", "run_scale.py", "plot_text.py", "probe_heads.py", "table_transfer.py")
        if path.name in parsed or path.parent.name == "docs":
            module.options_of(options)  # it measures this machine, reads runs, or needs a browser
        elif path.name.startswith("tune"):
            assert module.main([*options, *CPU[:2], "--dry-run"]) == 0
        elif options == ["--smoke"]:
            assert module.main([*options, *CPU, *QUICK[path.name], "--resume", "--out", str(self.smoke_runs)]) == 0
        else:
            if "--encoder" in options and options[options.index("--encoder") + 1].startswith("runs/"):
                self.make_runs(Path(options[options.index("--encoder") + 1]))
            data = ["--dataset", "digits"] if path.name == "run_stl10.py" else []
            if path.name.startswith("sweep"):
                data = ["--values", "20"]  # the made data are too few for those of a figure
            else:
                module.options_of(options)
            if "lake" in options:  # Lake's tests have no synthetic stand-in
                return
            plan = [*without_data(options), *data, *CPU, "--smoke", "--dry-run", "--out", "runs"]
            assert module.main(plan) == 0

    def make(self, words: list[str]) -> None:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words) <= set(targets)

    def pip(self, words: list[str]) -> None:
        used = (ROOT / "setup.py").read_text(encoding="utf-8") + (ROOT / ".ci/setup-env.sh").read_text(encoding="utf-8")
        assert words[0] == "install"
        for word in words[1:]:
            if word.startswith("--config-settings"):
                word = word.partition("=")[2]
            assert word in used, f"{word} is nothing that setup.py or .ci/setup-env.sh installs"

    def accelerate(self, words: list[str]) -> None:
        from accelerate.commands.launch import launch_command_parser

        options = launch_command_parser().parse_args(words[1:])
        assert words[0] == "launch"
        self.script([options.training_script, *options.training_script_args])

    def torchrun(self, words: list[str]) -> None:
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words)
        if options.rdzv_backend == "c10d":
            host, _, port = options.rdzv_endpoint.partition(":")
            assert host and port.isdigit() and 0 <= options.node_rank < int(options.nnodes)
        self.script([options.training_script, *options.training_script_args])

    def make_runs(self, folder: Path) -> None:
        """Make the run, or the folder of runs, that a command names, unless the page has: a smoke run."""
        if folder.exists():
            return
        made = self.smoke_runs / MADE["/".join(folder.parts[:2])]
        if not made.exists():
            if made.parts[-3] == "demo":
                assert metapretrain([*DEMO, "--device", "cpu", "--out", str(self.smoke_runs)]) == 0
            else:
                self.script([f"benchmarks/run_{made.parts[-3]}.py", "--smoke"])
        place = folder if re.search(r"-s\d+$", folder.name) else folder / made.parent.name / made.name
        shutil.copytree(made, place)

    @staticmethod
    def make_images(folder: Path) -> None:
        if folder.exists():
            return
        random = np.random.default_rng(0)
        for name in "abcde":
            (folder / name).mkdir(parents=True, exist_ok=True)
            for number in range(20):  # 5 shots and 15 queries
                pixels = random.integers(0, 256, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / name / f"{number}.png")


def without_data(options: list[str]) -> list[str]:
    """The options without those that name data, or weights that an installed package has: a smoke run makes its own."""
    kept, rest = [], iter(options)
    for word in rest:
        if word in ("--data-dir", "--qqp", "--image-folder", "--downstream"):
            next(rest)
        elif word == "--encoder":
            name = next(rest)
            kept += [] if name in ALIASES else [word, name]
        elif word == "--model":
            name = next(rest)
            kept += [] if name.startswith("package:") else [word, name]
        elif word != "--compile" and not word.startswith("embedder="):  # for a GPU; weights of a package
            # A smoke run has 100 rows and 80 reads, too few for the larger numbers.
            kept.append(re.sub(r"^(examples=|meta\.clusters=)\d*(\d\d)$", r"\g<1>10", word))
    return kept


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page(page: str, here: Path, smoke_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks(page, smoke_runs)
    if page in OWN_RUNS:
        names: dict[str, object] = {"__name__": "documented"}
        for number, block in enumerate(blocks(ROOT / page, "python"), start=1):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
        assert {path.name for path in here.iterdir()} <= {"data", "runs"}, "git ignores these two in the checkout"
    for line in PAGES[page]:
        try:
            checks.check(line)
        except (AssertionError, SystemExit) as error:
            pytest.fail(f"{page}: {line}\n{error}\n{capsys.readouterr().err}")
        assert capsys.readouterr().err.count("Traceback") == 0


@pytest.mark.parametrize("line", ["curl example.org", "metapretrain no-such-command", "python benchmarks/none.py"])
def test_a_command_that_cannot_be_checked_fails(line: str, here: Path, smoke_runs: Path) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        Checks("README.md", smoke_runs).check(line)


def test_loops_are_unrolled(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("```bash\nfor n in 1 20; do\n  a --b x$n \\\n    --c $n\ndone\nd # e\n```\n")
    lines = [" ".join(line.split()) for line in lines_of(tmp_path / "page.md")]
    assert lines == ["a --b x1 --c 1", "a --b x20 --c 20", "d # e"]


SMOKE = sorted({line for lines in PAGES.values() for line in lines if line.endswith(" --smoke")})


@pytest.mark.slow
@pytest.mark.parametrize("line", SMOKE)
def test_smoke_commands_as_they_stand(line: str, tmp_path: Path) -> None:
    words = [sys.executable, *shlex.split(line)[1:], "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    assert "tensorboard --logdir" in done.stdout
