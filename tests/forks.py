"""Processes that find torch or the package imported: forks of one that has imported it and done nothing else."""

from __future__ import annotations

import array
import atexit
import functools
import gc
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, TimeoutExpired
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
WARM = """
import accelerate, sklearn.datasets, sklearn.discriminant_analysis, torchvision
import torch._dynamo, torch.nn.parallel, torch.utils.tensorboard, transformers.models.bert.modeling_bert
import metapretrain.data.few_shot, metapretrain.models.saved, metapretrain.experiments.images.training
import metapretrain.experiments.text.experiment
"""
_LARGEST = 1 << 20  # bytes of a question


def serve(questions: socket.socket) -> None:
    """Fork for each question until no more can come; all are waited for, so that their seconds are counted."""
    gc.freeze()
    children = set()
    while True:
        asked, given, *_ = socket.recv_fds(questions, _LARGEST, 4)
        children -= {child for child in children if os.waitpid(child, 0 if not asked else os.WNOHANG)[0]}
        if not asked:
            os._exit(0)
        child = os.fork()
        children.add(child)
        if not child:
            questions.close()
            if asked == b"warm":
                exec(WARM, {})
                serve(socket.socket(fileno=given[0]))
            return _start(eval(asked), given)
        for one in given:
            os.close(one)


def _start(asked: tuple[list[str], dict[str, str], str, bool], given: Sequence[int]) -> None:
    """Become the process that was asked for; one more tells its number and how it ended."""
    words, environment, folder, session = asked
    status = given[3]
    child = os.fork()
    if child:
        for one in given[:3]:
            os.close(one)
        os.write(status, array.array("q", [child]).tobytes())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(status, array.array("q", [code]).tobytes())
        os._exit(0)
    os.close(status)
    signal.alarm(240)
    if session:
        os.setsid()
    for number, one in enumerate(given[:3]):
        os.dup2(one, number)
        os.close(one)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    code = 1
    try:
        run(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        print(*[end.code] * isinstance(end.code, str), end="", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # to take down what was imported would last longer than most of what is run


def run(words: Sequence[str]) -> None:
    """Run what follows `python` on a command line."""
    kind, *rest = words
    if kind == "-c":
        code, *rest = rest
        sys.path[0], sys.argv = "", ["-c", *rest]
        exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        module, *rest = rest
        sys.path[0], sys.argv = os.getcwd(), [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(kind).parent), [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


_OPEN: list[socket.socket] = []  # of the servers, to which questions go
_SERVER: list[subprocess.Popen[bytes]] = []


def close() -> None:
    """End the servers."""
    while _OPEN:
        _OPEN.pop().close()
    while _SERVER:
        _SERVER.pop().wait(10)


@functools.cache
def _server(warm: bool) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _OPEN.append(ours)
    with theirs:
        if warm:
            socket.send_fds(_server(False), [b"warm"], [theirs.fileno()])
            return ours
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            environment.pop(name, None)
        words = [sys.executable, __file__, str(theirs.fileno())]
        fds = [theirs.fileno()]
        _SERVER.append(subprocess.Popen(words, stdin=DEVNULL, env=environment, cwd=ROOT, pass_fds=fds))
    return ours


class Popen:
    """What :class:`subprocess.Popen` is for a command of Python: a fork that has imported torch, or the package too."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        start_new_session: bool = False,
        warm: bool = True,
    ) -> None:
        assert words[0] == sys.executable
        opened, passed = [], []
        self.pipes: list[IO[bytes] | None] = []
        for number, end in enumerate((stdin, stdout, stderr)):
            pipe = None
            if end == PIPE:
                inner, outer = reversed(os.pipe()) if number else os.pipe()
                pipe, end = FileIO(outer, "rb" if number else "wb"), inner
                opened.append(inner)
            elif end == DEVNULL:
                opened.append(end := os.open(os.devnull, os.O_RDWR))
            self.pipes.append(pipe)  # type: ignore[arg-type]
            passed.append(number if end is None else end if isinstance(end, int) else end.fileno())
        self.stdin, self.stdout, self.stderr = self.pipes
        self._status, status = os.pipe()
        environment = dict(os.environ if env is None else env)
        question = repr((list(map(str, words[1:])), environment, str(cwd or Path.cwd()), start_new_session))
        socket.send_fds(_server(warm), [question.encode()], [*passed, status])
        for one in (*opened, status):
            os.close(one)
        self.pid = self._told()
        self.returncode: int | None = None

    def _told(self) -> int:
        (number,) = array.array("q", os.read(self._status, 8))
        return number

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise TimeoutExpired("a fork", timeout or 0.0)
            self.returncode = self._told()
            os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def python(*words: str, warm: bool = True, **options: Any) -> CompletedProcess[str]:
    """What a command of Python, without `python`, printed and how it ended."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given = {"stdin": DEVNULL, "stdout": output, "stderr": errors, **options}
        status = Popen([sys.executable, *words], warm=warm, **given).wait()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return CompletedProcess(list(words), status, *texts)


def ended(code: str, words: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Run code, or a file, in a process per environment, side by side, and fail with what a failed one wrote."""
    errors = [folder / f"errors-{len(environments)}-{number}" for number in range(len(environments))]
    kind = [code] if code.endswith(".py") else ["-c", code]
    started = []
    for own, environment, file in zip(words, environments, errors, strict=True):
        with file.open("w") as open_file:
            command = [sys.executable, *kind, *own]
            started.append(Popen(command, stdin=DEVNULL, stdout=open_file, stderr=open_file, env=environment))
    found = [process.wait() for process in started]
    assert set(found) == {0}, "\n".join(file.read_text() for file in errors)


if __name__ == "__main__":
    import torch  # noqa: F401

    serve(socket.socket(fileno=int(sys.argv[1])))
