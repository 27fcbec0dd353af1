"""Jobs side by side: order, logs, failures by name, and Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.experiments.command import run_jobs, slots
from tests.forks import Popen


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


def test_jobs_run_in_order_one_at_a_time_in_each_place(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    jobs = {f"job-{i}": shell(f"echo begin {i} >> {trace}; sleep 0.02; echo end {i} >> {trace}") for i in range(4)}
    run_jobs(jobs, [{}], tmp_path / "logs")
    expected = [f"{what} {i}" for i in range(4) for what in ("begin", "end")]
    assert trace.read_text().splitlines() == expected


def test_two_places_work_side_by_side_with_their_own_environment(tmp_path: Path) -> None:
    # each waits for the other to have begun: one after the other would never end
    wait = f"for i in $(seq 6000); do [ -e {tmp_path}/%s ] && exit 0; sleep 0.02; done; exit 1"
    jobs = {
        "a": shell(f"echo $PLACE $HOME; touch {tmp_path}/a; " + wait % "b"),
        "b": shell(f"echo $PLACE $HOME; touch {tmp_path}/b; " + wait % "a"),
    }
    run_jobs(jobs, [{"PLACE": "first"}, {"PLACE": "second"}], tmp_path / "logs")
    said = {(tmp_path / "logs" / f"{name}.log").read_text().strip() for name in jobs}
    home = os.environ.get("HOME", "")
    assert said == {f"first {home}".strip(), f"second {home}".strip()}


def test_failures_are_named_with_their_last_line_and_the_others_are_done(tmp_path: Path) -> None:
    jobs = {
        "good": shell("echo fine"),
        "bad": shell("echo first; echo 'error: no such data' >&2; echo; exit 2"),
        "silent": shell("exit 7"),
        "missing": [str(tmp_path / "no-such-program")],
        "last": shell(f"touch {tmp_path}/done"),
    }
    with pytest.raises(InputError) as error:
        run_jobs(jobs, [{}, {}], tmp_path / "logs")
    told = str(error.value)
    assert "3 of 5 jobs failed" in told and str(tmp_path / "logs") in told and "\n" not in told
    assert "bad: error: no such data" in told and "silent: exit status 7" in told
    assert "missing: " in told and "no-such-program" in told
    assert "good" not in told and (tmp_path / "done").exists()
    assert (tmp_path / "logs" / "bad.log").read_text().startswith("first\nerror: no such data")


def test_a_failure_is_told_while_the_others_go_on(tmp_path: Path) -> None:
    told = tmp_path / "told"

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.write_text(record.getMessage())

    # the good job ends only once the failure of the other one has been told
    waits = shell(f"for i in $(seq 3000); do [ -e {told} ] && exit 0; sleep 0.02; done; exit 1")
    jobs = {"good": waits, "bad": shell("echo 'error: no such data'; exit 2")}
    logger, handler = logging.getLogger("metapretrain"), Tell()
    logger.addHandler(handler)
    try:
        with pytest.raises(InputError, match="1 of 2 jobs failed"):
            run_jobs(jobs, [{}, {}], tmp_path / "logs")
    finally:
        logger.removeHandler(handler)
    log = tmp_path / "logs" / "bad.log"
    assert told.read_text() == f"job bad failed: error: no such data (log: {log}); the others go on"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_jobs_and_starts_no_more(tmp_path: Path, sent: signal.Signals) -> None:
    # A shell's background command ignores Ctrl-C, and what it starts would as well: the process asks for it again.
    code = f"""
        import signal, sys
        from pathlib import Path
        from metapretrain.experiments.command import run_jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
        job = '''if True:
            import os, signal, sys, time
            name = "%s"
            took = 1 if name == "a" else 0  # the first one to be joined is not the first to end
            signal.signal(signal.SIGTERM, lambda *_: (time.sleep(took), open("ended-" + name, "w"), sys.exit(1)))
            with open("pid-" + name, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(300)'''
        jobs = {{name: [sys.executable, "-S", "-c", job % name] for name in "abcd"}}
        run_jobs(jobs, [{{}}, {{}}], Path({str(tmp_path)!r}) / "logs")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = Popen(command, stderr=subprocess.PIPE, start_new_session=True, cwd=tmp_path, warm=False)
    deadline = time.monotonic() + 120
    while len([p for p in tmp_path.glob("pid-*") if p.read_text()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    assert process.stderr is not None
    assert len(pids) == 2, process.stderr.read()
    os.kill(process.pid, sent)  # to the parent alone: the jobs must be ended by it
    told, _ = process.stderr.read(), process.wait(timeout=120)
    assert b"failed" not in told  # they were stopped
    assert b"KeyboardInterrupt" in told if sent == signal.SIGINT else process.returncode == -sent
    left = sorted(path.name for path in tmp_path.glob("*-*"))
    assert left == ["ended-a", "ended-b", "pid-a", "pid-b"]  # each was asked to end, and no other began
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


SLEEPER = """
import os, sys, time
from metapretrain.options import main_guard
@main_guard
def main(argv):
    print(os.getpid(), flush=True)
    time.sleep(300)
main([])
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_script_ends_with_the_process_that_runs_it_as_a_job(tmp_path: Path, sent: signal.Signals) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from metapretrain.experiments.command import run_jobs
        run_jobs(dict.fromkeys("ab", [sys.executable, "-c", {SLEEPER!r}]), [{{}}, {{}}], Path({str(tmp_path)!r}))
    """
    process = Popen([sys.executable, "-c", textwrap.dedent(code)], warm=False)
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    wait_until(lambda: all(log.is_file() and log.read_text().endswith("\n") for log in logs))
    process.send_signal(sent)
    assert process.wait() == -sent
    wait_until(lambda: not any(alive(int(log.read_text())) for log in logs))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return status != "Z"


def test_a_script_that_is_no_job_does_not_wait_for_its_input(tmp_path: Path) -> None:
    code = SLEEPER.replace("time.sleep(300)", "time.sleep(0.3)")
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, cwd=Path(__file__).parents[2])
    assert done.returncode == 0


def test_slots_are_gpus_or_shares_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert slots("cpu", 3) == [{"OMP_NUM_THREADS": "2"}] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert slots("cpu", 1) == [{"OMP_NUM_THREADS": "8"}]
    once, twice = [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}], slots("auto", 2)
    assert slots("cuda", 1) == once and twice == once * 2  # both GPUs before a second job on one
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert slots("cuda", 1) == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
