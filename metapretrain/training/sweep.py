"""Several small runs side by side: a queue of commands over devices, each with a log file."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from metapretrain.errors import InputError

STOP_SECONDS = 10.0  # after Ctrl-C a job has this long to end by itself


def slots(device: str, per_device: int) -> list[dict[str, str]]:
    """Return the environment of each place where a job can run: `per_device` on every GPU, or on the CPU.

    Example:
        >>> len(slots("cpu", 2))
        2
    """
    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        return [{"CUDA_VISIBLE_DEVICES": name} for _ in range(per_device) for name in visible]
    threads = max(1, (os.cpu_count() or 1) // per_device)
    return [{"OMP_NUM_THREADS": str(threads)} for _ in range(per_device)]


def run_jobs(jobs: Mapping[str, Sequence[str]], places: Sequence[Mapping[str, str]], logs: Path) -> None:
    """Run the commands of `jobs` by name, in order, one at a time in each place; what they print goes to `logs`.

    Raises:
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
    lock = threading.Lock()

    def work(place: Mapping[str, str]) -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            reason = run(name, place)
            with lock:
                if reason is not None:
                    failed[name] = reason
                bar.update()

    def run(name: str, place: Mapping[str, str]) -> str | None:
        log = logs / f"{name}.log"
        try:
            with log.open("wb") as file, lock:
                if stopped.is_set():
                    return "not started"
                process = subprocess.Popen(jobs[name], stdout=file, stderr=file, env={**os.environ, **place})
                running.add(process)
        except OSError as error:
            return str(error)
        status = process.wait()
        with lock:
            running.discard(process)
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return (lines[-1] if lines else f"exit status {status}") if status else None

    places = places[: len(jobs)]
    with tqdm(total=len(jobs), desc="jobs", unit="job", disable=None) as bar:
        threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in places]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
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
