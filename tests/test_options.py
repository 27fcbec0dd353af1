"""Options: every wrong value is one line on stderr with the nearest valid name, exit status 2."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from metapretrain.checks import check_device, check_precision
from metapretrain.errors import InputError
from metapretrain.options import Parser, common_options, load_plugin, main_guard, names, positive_int

METHODS = ("supervised", "prl-standard", "prl-query", "simclr")


def script() -> Parser:
    parser = Parser(prog="run_x.py")
    common_options(parser, "stl10", methods=METHODS, seeds=(0, 1, 2))
    parser.add_argument("--ways", type=positive_int, default=5)
    parser.add_argument("--recipe", choices=("paper", "strong"), default="paper")
    return parser


def error_line(argv: Sequence[str], capsys: pytest.CaptureFixture[str], parser: Parser | None = None) -> str:
    with pytest.raises(SystemExit) as stop:
        (parser or script()).parse_args(argv)
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    return shown.err


def test_values_are_read_and_defaults_stand() -> None:
    given = script().parse_args("--seeds 3 1 --methods simclr,prl-query --device cuda:1".split())
    assert (given.seeds, given.methods, given.device) == ([3, 1], ["simclr", "prl-query"], "cuda:1")
    defaults = script().parse_args([])
    assert (defaults.seeds, defaults.methods, defaults.jobs_per_device) == ([0, 1, 2], list(METHODS), 1)
    assert not (defaults.resume or defaults.smoke or defaults.dry_run)
    assert str(defaults.out) == "runs"
    assert not hasattr(defaults, "_parser")


def test_seeds_may_be_given_with_commas() -> None:
    assert script().parse_args(["--seeds", "0,1,2"]).seeds == [0, 1, 2]
    assert script().parse_args(["--seeds", "0,1", "5"]).seeds == [0, 1, 5]


def test_all_methods_keep_their_order_and_repeats_are_dropped() -> None:
    parse = names("method", METHODS)
    assert parse("all") == parse(f"{METHODS[-1]},all") == list(METHODS)
    assert parse(" simclr , supervised,simclr") == ["simclr", "supervised"]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--methdos", "all"], ["--methdos", "did you mean '--methods'"]),
        (["--methdos=all"], ["--methdos'", "did you mean '--methods'"]),
        (["--method", "all"], ["did you mean '--methods'"]),
        (["stray"], ["unexpected argument 'stray'", "--help"]),
        (["--methods", "prl-qery"], ["--methods", "'prl-qery'", "did you mean 'prl-query'", "supervised"]),
        (["--methods", ","], ["--methods", "between commas"]),
        (["--seeds", "0", "1", "x"], ["--seeds", "whole number", "'x'"]),
        (["--seeds", "0", "1.5"], ["--seeds", "'1.5'"]),
        (["--seeds", "1", "1"], ["--seeds", "1 is given 2 times"]),
        (["--seeds"], ["--seeds", "expected at least one argument"]),
        (["--ways", "-3"], ["--ways", "at least 1", "-3"]),
        (["--ways", "0"], ["--ways", "at least 1", "given 0"]),
        (["--ways", "two"], ["--ways", "'two'"]),
        (["--jobs-per-device", "0"], ["--jobs-per-device", "at least 1"]),
        (["--recipe", "papper"], ["unknown recipe 'papper'", "did you mean 'paper'"]),
        (["--precision", "bf61"], ["unknown precision 'bf61'", "did you mean 'bf16'"]),
        (["--device", "gpu"], ["--device", "'gpu'", "did you mean 'cuda'"]),
        (["--device", "cuda:x"], ["--device", "'cuda:x'", "did you mean 'cuda'"]),
        (["--device", "cpuu"], ["did you mean 'cpu'"]),
    ],
)
def test_wrong_options_are_one_line(argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = error_line(argv, capsys)
    for part in parts:
        assert part in line


def test_negative_seed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "at least 0, given -1" in error_line(["--seeds", "0,-1"], capsys)


def subcommands() -> Parser:
    parser = Parser(prog="tool")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("report").add_argument("--format")
    commands.add_parser("plot").add_argument("--colour")
    return parser


def test_wrong_subcommand_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    line = error_line(["reprot"], capsys, subcommands())
    assert "unknown command 'reprot'; did you mean 'report'? allowed: plot, report" in line


def test_wrong_option_of_a_subcommand_names_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    line = error_line(["report", "--formt", "csv"], capsys, subcommands())
    assert "did you mean '--format'" in line
    assert "--colour" not in line


def test_device_auto_and_cpu() -> None:
    assert check_device("cpu") == "cpu"
    assert check_device("auto") in ("cpu", "cuda", "mps")


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"'cuda' is not available.*--device auto"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (check_device("cuda:1"), check_device("auto")) == ("cuda:1", "cuda")
    with pytest.raises(InputError, match=r"'cuda:9' is not available: this machine has cuda:0 to cuda:1"):
        check_device("cuda:9")
    with pytest.raises(InputError, match="did you mean 'cuda'"):
        check_device("gpu")


def test_precision_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_precision("bf16", "cpu") == "bf16"
    assert check_precision("fp16", "cuda") == "fp16"
    with pytest.raises(InputError, match=r"'fp16' needs a GPU.*bf16 or fp32"):
        check_precision("fp16", "cpu")
    with pytest.raises(InputError, match="did you mean 'fp32'"):
        check_precision("f32", "cpu")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(InputError, match="not supported by 'cuda'"):
        check_precision("bf16", "cuda")


def test_guard_turns_bad_input_into_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @main_guard
    def main(argv: Sequence[str] | None = None) -> int:
        raise InputError("two\n  lines")

    assert main([]) == 2
    assert capsys.readouterr().err == "error: two lines\n"


def test_guard_on_interrupt_says_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    @main_guard
    def main(argv: Sequence[str] | None = None) -> int:
        raise KeyboardInterrupt

    assert main([]) == 130
    assert capsys.readouterr().err == "interrupted; the same command with --resume goes on (the demo: without)\n"


def test_guard_hides_no_bug_and_passes_the_status_on() -> None:
    @main_guard
    def broken(argv: Sequence[str] | None = None) -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        broken([])
    assert main_guard(lambda argv: None)([]) == 0
    assert main_guard(lambda argv: 3)([]) == 3


def test_reader_of_a_pipe_may_leave() -> None:
    code = (
        "from metapretrain.options import main_guard\n"
        "def main(argv):\n"
        "    for line in range(200_000): print(line)\n"
        "raise SystemExit(main_guard(main)([]))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 1


def guarded(error: BaseException) -> int:
    def main(argv: Sequence[str] | None = None) -> int:
        raise error

    return main_guard(main)([])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(36, "File name too long", "x"), "error: x: File name too long; make room"),
        (OSError(28, "No space left on device"), "error: No space left on device; make room"),
        (MemoryError("Unable to allocate 2 PiB"), "error: out of memory (Unable to allocate 2 PiB); take smaller"),
        (RuntimeError("[enforce fail] can't allocate memory: 9 bytes"), "error: out of memory ([enforce"),
        (torch.OutOfMemoryError("CUDA out of memory"), "error: out of memory (CUDA"),
    ],
)
def test_guard_says_in_one_line_what_the_machine_lacks(
    error: BaseException, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(error) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(line) and shown.count("\n") == 1


def printed(body: str, **options: Any) -> subprocess.CompletedProcess[str]:
    code = f"from metapretrain.options import main_guard\nraise SystemExit(main_guard(lambda argv: {body})([]))"
    return subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False, timeout=120, **options
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = printed("print('table')", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_text_that_the_terminal_cannot_show_is_escaped() -> None:
    body = r"print('80.1 \u00b1 0.4', 'cat\udcff.png')"
    for encoding, shown in (("ascii", "80.1 \\xb1 0.4 cat\\udcff.png\n"), ("utf-8", "80.1 ± 0.4 cat\\udcff.png\n")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = printed(body, stdout=subprocess.PIPE, env=environment, encoding="utf-8")
        assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")


def test_a_closed_stderr_is_no_error() -> None:
    code = "from tqdm import tqdm\nfrom metapretrain.options import main_guard\nimport sys\n"
    code += "sys.exit(main_guard(lambda argv: len(list(tqdm([0, 0, 0]))))([]))"
    assert subprocess.run(["sh", "-c", '"$0" -c "$1" 2>&-', sys.executable, code], check=False).returncode == 3


@pytest.mark.parametrize("script", ["cli", "tune_stl10", "tune_text"])
def test_what_names_its_own_folders_takes_no_tag(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = "metapretrain.cli" if script == "cli" else f"benchmarks.{script}"
    with pytest.raises(SystemExit):
        importlib.import_module(name).main([*["demo"] * (script == "cli"), "--tag", "x"])
    assert "unknown option '--tag'" in capsys.readouterr().err


def test_a_plugin_is_imported_once_before_any_name_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, known = tmp_path / "mine.py", ["here"]
    file.write_text("import os\nos.environ['PLUGIN_NAMES'] = os.environ.get('PLUGIN_NAMES', '') + 'x'\n")

    @main_guard
    def main(argv: Sequence[str] | None = None) -> int:
        known.append(os.environ.get("PLUGIN_NAMES", ""))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLUGIN_NAMES", "")
        assert main(["--seeds", "0", "--plugin", str(file)]) == main([f"--plugin={file}"]) == 0
        assert known == ["here", "x", "x"]
    for wrong in (tmp_path / "none.py", tmp_path):
        assert main(["--plugin", str(wrong)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 2 and "no such Python file" in told


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = 1\ndef f(:\n", "line 2: SyntaxError"),
        ("import math\n\nmath.nothing\n", "line 3: AttributeError"),
        ("def f():\n    return 1 / 0\nf()\n", "line 2: ZeroDivisionError"),
    ],
)
def test_an_error_in_a_plugin_is_one_line(code: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(InputError, match=told):
        load_plugin(file)
