"""Processes that find the package imported: forks of one that has imported it and done nothing else."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SERVER = """
import os, runpy, signal, sys
import accelerate, torch, torch._dynamo, torch.nn.parallel, torchvision
import metapretrain.experiments.fewshot.learning, metapretrain.experiments.images.training
import metapretrain.experiments.text.experiment
for line in sys.stdin:
    asked = eval(line)
    if isinstance(asked, int):
        print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
        continue
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    code, words, environment, errors = asked
    signal.alarm(240)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(2, 1)
    sys.argv = ["-c", *words]
    if code.endswith(".py"):
        runpy.run_path(code, run_name="__main__")
    else:
        exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})
    sys.exit()
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        environment.pop(name, None)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True, env=environment)


def _ask(question: object) -> int:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    print(repr(question), file=server.stdin, flush=True)
    return int(server.stdout.readline())


def ended(code: str, words: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Run code, or a file, in a process per environment, side by side, and fail with what a failed one wrote."""
    errors = [folder / f"errors-{len(environments)}-{number}" for number in range(len(environments))]
    given = zip(words, environments, errors, strict=True)
    started = [_ask((code, list(own), dict(environment), str(file))) for own, environment, file in given]
    found = [_ask(process) for process in started]
    assert set(found) == {0}, "\n".join(file.read_text() for file in errors)
