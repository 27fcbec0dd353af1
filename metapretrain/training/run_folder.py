"""The folder of one run: locked while in use, whole at any moment, cut back when the run is continued."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from metapretrain.errors import InputError
from metapretrain.files import json_bytes, one_line_errors, plain, read_json, write_all, write_whole
from metapretrain.training import environment
from metapretrain.training.logs import FINALS, METRICS, MetricsFile, Tracker, Trackers, cut_embeddings, write_embedding
from metapretrain.training.settings import check_same, flatten

_log = logging.getLogger(__name__)
_held: set[tuple[int, int, int]] = set()  # process, device and file: POSIX locks exclude other processes alone


class Lock:
    """An exclusive lock on a file, held until :meth:`release` or the process's end (kill -9 included).

    A POSIX record lock: unlike `flock`, no child inherits it. The process loses it when it closes any descriptor of the
    file, which is made when missing and never removed.
    Raises InputError: another process (or another run of this one) holds it; OSError: the file cannot be made.
    """

    def __init__(self, file: Path) -> None:
        import fcntl

        if file.exists() and _identity(file) in _held:  # not opened here: its closing would release the lock
            raise _in_use(file, str(os.getpid()))
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EAGAIN}:
                holder = os.read(descriptor, 64).decode(errors="replace").strip()
                os.close(descriptor)
                raise _in_use(file, holder) from error
            if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}:
                os.close(descriptor)
                raise
            _log.warning("the file system of %s has no locks: start no second run in it", file.parent)
        os.ftruncate(descriptor, 0)
        write_all(descriptor, f"{os.getpid()}\n".encode())
        self._identity = _identity(descriptor)
        self._descriptor: int | None = descriptor
        _held.add(self._identity)

    def release(self) -> None:
        """Give the lock free; a second call does nothing."""
        if self._descriptor is not None:
            _held.discard(self._identity)
            os.close(self._descriptor)
            self._descriptor = None


def _identity(file: Path | int) -> tuple[int, int, int]:
    about = os.stat(file)
    return os.getpid(), about.st_dev, about.st_ino


def _in_use(file: Path, holder: str) -> InputError:
    by = f" by process {holder}" if holder.isdigit() else ""
    return InputError(f"{file.parent} is in use{by}; wait for it to end or choose another --out")


_CONFIG, _RESULT = "config.json", "result.json"
_ROOM = "make room or choose another --out, then continue with --resume"


class RunFolder:
    """One run's folder, open for writing; use :meth:`open`, as a context manager.

    `main`: False on every rank but the first: then nothing is locked or written; `seconds_before`: wall time of earlier
    sessions, set by a loop that resumes and added to ``wall_s``; `steps_before`: updates of the pretraining that the
    run starts from, added to the steps of all that is logged. Every method that writes raises InputError, one line,
    where it cannot; what is there stays whole.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], device: str, lock: Lock | None, main: bool, log_to: Sequence[str] = ()
    ) -> None:
        self.path, self.config, self.device, self.main = path, config, device, main
        self.seconds_before, self.steps_before = 0.0, 0
        self._lock = lock
        self._started = time.monotonic()
        self._tracker = Tracker(path)
        self._metrics = MetricsFile(path)
        self._others = Trackers(log_to, path, config)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        resume: bool = False,
        main: bool = True,
        device: str | torch.device | None = None,
        log_to: Sequence[str] = (),
    ) -> RunFolder:
        """Make the folder, or continue the run in it, and lock it until :meth:`close` or the process's end.

        ``config.json`` holds {"config", "versions", "commit", "device", "command"} of the first session.

        `config` is compared as JSON has it (tuples are lists); `resume`: continue the run that is there, if one is;
        `main`: whether this process writes; only the first rank does; `device`: named in ``config.json`` and
        ``result.json``; None: the GPU when there is one; `log_to`: `wandb` or `mlflow`, beside TensorBoard.
        Raises InputError: another process uses the folder; it holds a run and `resume` is off, or of another method or
        configuration (each changed key is named); the folder cannot be written.

        Example:
            >>> import tempfile
            >>> from metapretrain.training.logs import read_metrics
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with RunFolder.open(folder, {"method": "prl", "seed": 0}) as run:
            ...         run.log(1, "train", {"loss": 0.5})
            ...         file = run.finish({"metrics": {"test_accuracy": 0.8}})
            ...     read_metrics(folder)
            [{'step': 1, 'split': 'train', 'name': 'loss', 'value': 0.5}]
        """
        folder, wanted = Path(path), plain(config)
        name = environment.device_name(device)
        if not main:
            return cls(folder, wanted, name, None, main=False)
        with one_line_errors(f"cannot use {folder} as a run folder", "choose another --out"):
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(0, "it is a file")
            if str(folder) != os.fsencode(folder).decode(errors="replace"):
                raise OSError(0, "its name is no UTF-8, which TensorBoard needs")
            folder.mkdir(parents=True, exist_ok=True)
            lock = Lock(folder / ".lock")
        try:
            run = cls(folder, wanted, name, lock, main=True, log_to=log_to)
            run._start(resume)
        except BaseException:
            lock.release()
            raise
        return run

    @property
    def checkpoints(self) -> Path:
        """The folder that :func:`metapretrain.training.checkpoint.save` is given."""
        return self.path / "checkpoint"

    @property
    def figures(self) -> Path:
        """The folder of the figures."""
        return self.path / "figures"

    @property
    def wall_seconds(self) -> float:
        """Wall time of this run so far, earlier sessions included."""
        return self.seconds_before + time.monotonic() - self._started

    def log(self, step: int, split: str, values: Mapping[str, float | torch.Tensor]) -> None:
        """Append one line a value to ``metrics.jsonl`` and write TensorBoard's ``<split>/<name>``.

        A value that is not finite is ``null`` in the file (JSON has no NaN) and itself in TensorBoard.
        """
        if not self.main:
            return
        step, numbers = step + self.steps_before, {name: float(value) for name, value in values.items()}
        with self._writing(METRICS):
            self._metrics.append(step, split, numbers)
        with self._writing("the TensorBoard events"):
            self._tracker.scalars(step, split, numbers)
        self._others.log({f"{split}/{name}": value for name, value in numbers.items()}, step)

    def figure(self, name: str, figure: Any, step: int) -> Path:
        """Save a matplotlib figure, titled with the run's method, as ``figures/<name>.png`` and a TensorBoard image."""
        file = self.figures / f"{_file_name(name)}.png"
        if not self.main:
            return file
        if "method" in self.config:
            title = f"{self.config['method']}, seed {self.config.get('seed')}"
            figure.suptitle(title, fontsize=11, parse_math=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=150, bbox_inches="tight")
        with self._writing(f"figures/{name}.png"):
            self.figures.mkdir(exist_ok=True)
            write_whole(file, picture.getvalue())
            self._tracker.image(name, picture.getvalue(), step + self.steps_before)
        return file

    def embedding(
        self,
        name: str,
        z: torch.Tensor,
        labels: Sequence[Any] | torch.Tensor,
        images: torch.Tensor | None = None,
        step: int = 0,
    ) -> None:
        """Write points for the embedding projector; see :func:`metapretrain.training.logs.write_embedding`."""
        if self.main:
            words = labels.tolist() if isinstance(labels, torch.Tensor) else labels
            with self._writing("the embedding"):
                write_embedding(self.path, _file_name(name), z, words, images, step + self.steps_before)

    def hparams(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write the configuration and the final metrics for TensorBoard's HPARAMS tab."""
        if self.main:
            with self._writing("the TensorBoard events"):
                self._tracker.hparams(config, metrics)
            self._others.log({f"{FINALS}{name}": float(one) for name, one in metrics.items() if one is not None})

    def cut_back(self, step: int) -> None:
        """Drop what was logged after `step`, where a run is continued from; -1 drops everything."""
        if not self.main:
            return
        step += self.steps_before if step >= 0 else 0
        with self._writing(METRICS):
            self._metrics.cut_back(step)
        with self._writing("the TensorBoard events"):
            self._tracker.cut_back(step)
            cut_embeddings(self.path, step)

    def finish(self, result: Mapping[str, Any]) -> Path:
        """Write ``result.json``: `result` with what every result has, where it does not say it itself.

        Added: schema, status ("complete"), wall_s, peak_memory_bytes, device, versions, commit, command. Absolute paths
        in its texts are cut to their last part; a number that is not finite becomes ``null``.
        """
        file = self.path / _RESULT
        if not self.main:
            return file
        usual = {"wall_s": round(self.wall_seconds, 3), "peak_memory_bytes": environment.peak_memory_bytes()}
        usual |= self._made_by()
        whole = {"schema": 1, "status": "complete", **usual, **result}
        order = ["schema", *(key for key in result if key != "schema"), "status", *usual]
        with self._writing(_RESULT):
            write_whole(file, json_bytes(environment.without_absolute_paths(plain({key: whole[key] for key in order}))))
            self._tracker.flush()
        return file

    def result(self) -> dict[str, Any] | None:
        """Return what ``result.json`` holds, or None when there is none."""
        return read_json(self.path / _RESULT)

    def close(self) -> None:
        """Close the files and give the folder free."""
        self._others.close()
        try:
            self._tracker.close()
        except OSError as error:
            _log.warning("the last TensorBoard events of %s were not written: %s", self.path, error)
        finally:
            self._metrics.close()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _made_by(self) -> dict[str, Any]:
        """What a configuration and a result say of where they come from."""
        found = {"device": self.device, "versions": environment.versions()}
        return found | {"commit": environment.commit(), "command": environment.command()}

    def _start(self, resume: bool) -> None:
        for left_by_kill in self.path.glob(".*.tmp"):
            left_by_kill.unlink(missing_ok=True)
        stored = read_json(self.path / _CONFIG)
        left = [name for name in (METRICS, _RESULT, "checkpoint") if (self.path / name).exists()]
        if stored is None or not (left or resume):  # a run that was refused after it was opened is begun anew
            if left:
                raise InputError(f"{self.path} holds {left[0]} but no {_CONFIG}; choose another --out")
            with self._writing(_CONFIG):
                write_whole(self.path / _CONFIG, json_bytes({"config": self.config, **self._made_by()}))
            return
        if not resume:
            raise InputError(f"{self.path} already holds a run; continue it with --resume or choose another --out")
        check_same(self.path, stored.get("config"), self.config)
        if (self.path / _RESULT).exists():
            return
        started = "%s was started with %s and goes on with %s: its end may differ in the last bits"
        about, before = flatten({"versions": environment.versions(), "device": self.device}), flatten(stored)
        for key in ("versions.torch", "device"):  # the device's name has the number of threads
            if before.get(key) != about[key]:
                _log.warning(started, self.path, f"{key} {before.get(key)}", about[key])

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return one_line_errors(f"cannot write {what} in {self.path}", _ROOM)


def _file_name(name: str) -> str:
    if re.fullmatch(r"\w[\w.+-]*", name) is None:
        raise InputError(f"a figure's or embedding's name is letters, digits and . _ + -, not {name!r}")
    return name
