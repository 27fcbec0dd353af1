"""TensorBoard's event files cut back to a step, so that steps run again do not show twice."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from metapretrain.training.files import sync_folder, write_whole

_HEADER = 8 + 4  # the length of the data and the checksum of the length
_FOOTER = 4  # the checksum of the data


def cut_events(folder: Path, step: int) -> None:
    """Drop what the event files of `folder` hold after `step`, and the torn end that a kill leaves.

    TensorBoard's own way, a `purge_step` in the next file, needs files whose names sort by time: two of one
    second, or of two machines whose clocks differ, show their steps twice.

    Args:
        folder: the run folder; no writer may be open in it.
        step: the last step that stays.

    Raises:
        OSError: a file cannot be read or written.
    """
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        stay = b"".join(record for record in _records(data) if _stays(record, step))
        if stay != data:
            write_whole(file, stay)
    sync_folder(folder)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield each whole record: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    start = 0
    while start + _HEADER <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + _HEADER + length + _FOOTER
        if end > len(data):
            return
        yield data[start:end]
        start = end


def _stays(record: bytes, step: int) -> bool:
    """Whether the event is the file's heading or not after `step`; purge marks of older sessions go."""
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event.FromString(record[_HEADER:-_FOOTER])
    if event.HasField("file_version"):
        return True
    return bool(event.step <= step and not event.HasField("session_log"))
