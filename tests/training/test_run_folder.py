"""The run folder is locked, whole at any moment, and says what a run is."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.files import write_file
from metapretrain.training.run_folder import RunFolder
from tests.forks import Popen, python
from tests.training.run_files import CONFIG, figure, lines, one_line, scalars

ROOT = Path(__file__).resolve().parents[2]


def test_config_json_says_what_a_run_is(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "a" / "b", CONFIG, device="cpu") as run:
        stored = json.loads((run.path / "config.json").read_text())
    assert stored["config"] == {**CONFIG, "model": {"encoder": "resnet18", "mean": [0.5, 0.5]}}
    assert set(stored) == {"config", "versions", "commit", "device", "command"}
    assert stored["versions"]["torch"] == torch.__version__
    assert stored["device"].startswith("cpu")
    assert "/" + str(tmp_path).split("/")[1] not in stored["command"]
    assert run.checkpoints == run.path / "checkpoint"


def test_an_existing_run_needs_resume(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.finish({})
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(InputError, match=r"--resume.*--out") as refused:
        RunFolder.open(tmp_path, CONFIG)
    one_line(refused.value)
    RunFolder.open(tmp_path, CONFIG, resume=True).close()
    assert (tmp_path / "config.json").read_bytes() == before


def test_resume_of_what_was_not_begun_begins_it(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "new", CONFIG, resume=True).close()
    assert (tmp_path / "new" / "config.json").exists()


def test_a_changed_configuration_names_every_key_with_both_values(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, CONFIG).close()
    other = {"method": "prl-query", "seed": 0, "lr": 0.2, "model": {"encoder": "mlp", "mean": [0.5, 0.5]}, "epochs": 3}
    with pytest.raises(InputError) as refused:
        RunFolder.open(tmp_path, other, resume=True)
    said = one_line(refused.value)
    assert "lr was 0.1, is 0.2" in said
    assert 'model.encoder was "resnet18", is "mlp"' in said
    assert "epochs was not set, is 3" in said
    assert "seed" not in said
    assert "mean" not in said
    with pytest.raises(InputError, match=r"lr was 0\.1, is not set"):
        RunFolder.open(tmp_path, {key: CONFIG[key] for key in ("method", "seed", "model")}, resume=True)


def test_a_part_that_an_older_version_did_not_keep_is_named_once(tmp_path: Path) -> None:
    """Checksums of files, say, of which each has three entries: the same options cannot be given again."""
    RunFolder.open(tmp_path, CONFIG).close()
    now = {**CONFIG, "plain": {"files": {"ptb.zip": {"bytes": 3, "md5": "0"}}}}
    with pytest.raises(InputError) as refused:
        RunFolder.open(tmp_path, now, resume=True)
    assert one_line(refused.value).count("plain") == 1 and "older version" in str(refused.value)


def test_true_is_not_one_in_a_configuration(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, {"warm": True}).close()
    with pytest.raises(InputError, match="warm was true, is 1"):
        RunFolder.open(tmp_path, {"warm": 1}, resume=True)


def test_a_checkpoint_of_another_method_is_said_so(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, CONFIG).close()
    with pytest.raises(InputError, match=r"another method: 'prl-query', given 'simclr'") as refused:
        RunFolder.open(tmp_path, {**CONFIG, "method": "simclr", "lr": 5}, resume=True)
    one_line(refused.value)


def test_another_torch_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RunFolder.open(tmp_path, CONFIG).close()
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["versions"]["torch"] = "2.6.0"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with caplog.at_level(logging.WARNING):
        RunFolder.open(tmp_path, CONFIG, resume=True).close()
    assert "torch 2.6.0" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"config": 3}'])
def test_a_damaged_config_is_refused(tmp_path: Path, text: str) -> None:
    RunFolder.open(tmp_path, CONFIG).close()
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json") as refused:
        RunFolder.open(tmp_path, CONFIG, resume=True)
    one_line(refused.value)
    (tmp_path / "config.json").unlink()
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(InputError, match=r"holds checkpoint but no config\.json"):
        RunFolder.open(tmp_path, CONFIG, resume=True)


def test_what_cannot_be_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="as a run folder") as refused:
            RunFolder.open(path, CONFIG)
        assert "choose another --out" in one_line(refused.value)


HOLDER = """
import sys, time
from metapretrain.training.run_folder import RunFolder
run = RunFolder.open(sys.argv[1], {"method": "m"}, resume=True)
run.log(1, "train", {"loss": 1.0})
if len(sys.argv) > 2:
    import ctypes, multiprocessing, os
    if sys.argv[2] == "multiprocessing":
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        child = worker.pid
    else:
        child = os.fork() if sys.argv[2] == "os" else ctypes.CDLL(None).fork()  # the latter calls no handler of Python
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
else:
    print("holding", flush=True)
time.sleep(60)
"""


def hold(run: Path, *more: str) -> tuple[Popen, str]:
    child = Popen([sys.executable, "-c", HOLDER, str(run), *more], stdout=subprocess.PIPE, warm=False)
    assert child.stdout is not None
    return child, child.stdout.readline().decode().strip()


@pytest.mark.parametrize("forked_by", ["os", "multiprocessing", "C"])
def test_a_second_process_is_refused_and_a_killed_one_does_not_block(tmp_path: Path, forked_by: str) -> None:
    holder, worker = hold(tmp_path, forked_by)  # the worker outlives it
    try:
        with pytest.raises(InputError, match=f"in use by process {holder.pid}") as refused:
            RunFolder.open(tmp_path, {"method": "m"}, resume=True)
        one_line(refused.value)
        assert lines(tmp_path) == [(1, 1.0)]
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(int(worker), 0)  # the worker is alive
        with RunFolder.open(tmp_path, {"method": "m"}, resume=True) as run:
            assert run.result() is None
            assert scalars(tmp_path, "train/loss") == [(1, 1.0)]
    finally:
        os.kill(int(worker), signal.SIGKILL)
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()


def test_a_second_run_in_this_process_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG), pytest.raises(InputError, match="in use"):
        RunFolder.open(tmp_path, CONFIG, resume=True)
    with pytest.raises(InputError, match="another method"):
        RunFolder.open(tmp_path, {"method": "x"}, resume=True)
    RunFolder.open(tmp_path, CONFIG, resume=True).close()  # a refusal has not kept the lock


def test_a_refusal_in_the_same_process_leaves_the_lock_held(tmp_path: Path) -> None:
    """A POSIX lock is lost when the process closes any descriptor of the file."""
    script = f"from metapretrain.training.run_folder import RunFolder; RunFolder.open({str(tmp_path)!r}, {CONFIG!r})"
    with RunFolder.open(tmp_path, CONFIG) as run:
        with pytest.raises(InputError, match=f"in use by process {os.getpid()}"):
            RunFolder.open(tmp_path, CONFIG, resume=True)
        done = python("-c", script, warm=False)
        assert f"in use by process {os.getpid()}" in done.stderr
        run.close()
        with RunFolder.open(tmp_path, CONFIG, resume=True):
            run.close()  # once more: not the lock of another
            with pytest.raises(InputError, match="in use"):
                RunFolder.open(tmp_path, CONFIG, resume=True)


def test_a_fork_holds_no_lock_and_takes_it_when_the_holder_has_closed(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path, CONFIG)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        status = 1
        try:
            with pytest.raises(InputError):
                RunFolder.open(tmp_path, CONFIG, resume=True)
            os.read(told, 1)  # until the holder has closed
            RunFolder.open(tmp_path, CONFIG, resume=True)
            status = 0
        finally:
            os._exit(status)  # whatever happened: a child that returned would go on with the other tests
    os.close(told)
    time.sleep(0.3)
    run.close()
    os.close(tell)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", CONFIG, main=False) as run:
        run.log(1, "train", {"loss": 1.0})
        run.figure("curve", figure(), 1)
        run.embedding("z", torch.zeros(2, 2), [0, 1])
        run.hparams(CONFIG, {"accuracy": 1.0})
        run.cut_back(0)
        run.finish({"metrics": {}})
        assert run.result() is None
    assert list(tmp_path.iterdir()) == []


def test_result_has_what_every_result_has_and_no_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = "/home/someone"
    monkeypatch.setattr(sys, "argv", [f"{home}/bench/run_stl10.py", "--data-dir", f"{home}/stl10", "--out=runs/x"])
    given = {
        "benchmark": "stl10",
        "method": "prl-query",
        "metrics": {"test_accuracy": 0.8},
        "data": {f"{home}/stl10/train_X.bin": {"bytes": 3, "official": None}},
        "note": [f"from {home}/notes.txt", "https://example.org/a"],
    }
    with RunFolder.open(tmp_path, CONFIG, device="cpu") as run:
        run.seconds_before = 1000.0
        file = run.finish(given)
        result = run.result()
    assert file == tmp_path / "result.json"
    assert result is not None
    assert next(iter(result)) == "schema"
    assert (result["schema"], result["status"]) == (1, "complete")
    assert home not in file.read_text()
    assert result["command"] == "run_stl10.py --data-dir stl10 --out=runs/x"
    assert result["data"] == {"train_X.bin": {"bytes": 3, "official": None}}
    assert result["note"] == ["from notes.txt", "https://example.org/a"]
    assert 1000 < result["wall_s"] < 1100
    assert result["peak_memory_bytes"] > 1_000_000
    assert result["device"].startswith("cpu")
    assert {"versions", "commit"} <= set(result)


def test_result_keeps_what_it_is_given(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        assert run.result() is None
        run.finish({"status": "failed", "wall_s": 5})
        result = run.result()
    assert result is not None
    assert (result["status"], result["wall_s"]) == ("failed", 5)


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.finish({"metrics": {"a": 1}})

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match=r"cannot write result\.json .*No space left on device") as refused:
            run.finish({"metrics": {"a": 2}})
        one_line(refused.value)
        result = run.result()
        assert result is not None
        assert result["metrics"] == {"a": 1}
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))


def test_left_over_temporary_files_are_removed(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, CONFIG).close()
    (tmp_path / ".result.json.123.tmp").write_text("half")
    RunFolder.open(tmp_path, CONFIG, resume=True).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.json"]


def test_the_import_is_light(modules_after: Callable[..., set[str]]) -> None:
    new = modules_after("import metapretrain.training.run_folder, metapretrain.training.checkpoint", quiet=True)
    heavy = {"tensorboard", "matplotlib", "PIL", "transformers", "google", "accelerate", "sklearn"}
    assert "metapretrain.training.checkpoint" in new and not new & heavy


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "\xff"])
def test_a_config_of_another_shape_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"config\.json is damaged: not a JSON object"):
        RunFolder.open(tmp_path, {}, resume=True)


def test_a_name_that_is_no_utf8_is_kept(tmp_path):
    config = {"classes": ["cat", "\udcff"]}
    RunFolder.open(tmp_path, config).close()
    RunFolder.open(tmp_path, config, resume=True).close()
    with pytest.raises(InputError, match="classes was"):
        RunFolder.open(tmp_path, {"classes": ["cat", "\udcfe"]}, resume=True)


def test_another_number_of_threads_is_told_once_a_resume_and_not_for_a_finished_run(tmp_path, caplog):
    RunFolder.open(tmp_path, {}, device="cpu").close()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with RunFolder.open(tmp_path, {}, resume=True, device="cpu") as run:
            assert f"goes on with cpu ({threads + 1} threads)" in caplog.text
            run.finish({})
        caplog.clear()
        RunFolder.open(tmp_path, {}, resume=True, device="cpu").close()
        assert not caplog.text
    finally:
        torch.set_num_threads(threads)


def test_a_folder_whose_name_is_no_utf8_is_refused(tmp_path):
    with pytest.raises(InputError, match="no UTF-8"):
        RunFolder.open(tmp_path / "\udcff", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["report/table.md", "predictions/sst.csv"])
def test_what_a_killed_process_left_half_written_is_removed_by_the_next(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    code = "import os, signal, sys; from metapretrain.files import write_file; from pathlib import Path; "
    code += "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL); write_file(Path(sys.argv[1]), 'new')"
    killed = python("-c", code, str(file), warm=False)
    assert killed.returncode == -signal.SIGKILL and len(list(file.parent.glob(".*.tmp"))) == 1
    left = next(file.parent.glob(".*.tmp")).name
    dead = left.split(".")[-2]  # of a writer that lives, of another file, of another machine, and not ours
    names = [left.replace(dead, str(os.getppid())), f".other.csv.{dead}.tmp", f".{file.name}.other-host.{dead}.tmp"]
    of_others = [file.parent / name for name in (*names, ".notes.tmp")]
    for other in of_others:
        other.write_text("")
    write_file(file, "whole")
    assert sorted(file.parent.iterdir()) == sorted([file, *of_others]) and file.read_text() == "whole"


def test_a_run_without_an_update_is_begun_anew_with_other_options(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, CONFIG).close()
    other = {**CONFIG, "words": ["bad", "good"]}
    with pytest.raises(InputError, match="words"):
        RunFolder.open(tmp_path, other, resume=True)
    with RunFolder.open(tmp_path, other) as run:
        assert json.loads((tmp_path / "config.json").read_text())["config"]["words"] == ["bad", "good"]
        run.finish({})
    with pytest.raises(InputError, match="already holds a run"):
        RunFolder.open(tmp_path, CONFIG)
