"""A process that forks a benchmark run for each line of its input, so that each can be killed after a cheap start.

A line is a JSON list of a script's name and its words; two lines come back: the child's process id when it has begun,
its exit status when it has ended (-9: killed).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
CHECKPOINT_EVERY = 2  # updates, in place of once a minute


def serve() -> None:
    """Answer lines until the input ends; nothing is computed here, so that a fork is safe."""
    from metapretrain.training import loop

    loop._Loop._checkpoint_due = lambda self: self.step % CHECKPOINT_EVERY == 0  # type: ignore[method-assign]
    sys.path.insert(0, str(SCRIPTS))
    for module in ("accelerate", "sklearn.datasets", "sklearn.discriminant_analysis", "torch.utils.tensorboard"):
        importlib.import_module(module)  # here, so that no child has to
    for line in sys.stdin:
        script, log, words = json.loads(line)
        main = importlib.import_module(script).main
        child = os.fork()
        if child == 0:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = 1
            try:
                status = main(words)
            finally:
                sys.stdout.flush()
                os._exit(status)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
