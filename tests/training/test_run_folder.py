"""The run folder is locked, whole at any moment, and shows no step twice after a resume."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.training.run_folder import RunFolder, read_metrics
from metapretrain.training.tracking import Tracker

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"method": "prl-query", "seed": 0, "lr": 0.1, "model": {"encoder": "resnet18", "mean": (0.5, 0.5)}}


def events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    """All (step, value) of `tag`, sorted: files of one second are read in the order of their names."""
    return sorted((event.step, event.value) for event in events(run).Scalars(tag))


def lines(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["value"]) for line in read_metrics(run)]


def one_line(error: BaseException) -> str:
    said = str(error)
    assert "\n" not in said
    return said


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
    RunFolder.open(tmp_path, CONFIG).close()
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
    other = {
        "method": "prl-query",
        "seed": 0,
        "lr": 0.2,
        "model": {"encoder": "mlp", "mean": [0.5, 0.5]},
        "epochs": 3,
    }
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
    RunFolder.open(tmp_path, other, resume=True, may_change=["lr", "model.encoder", "epochs"]).close()


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
    import os
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
else:
    print("holding", flush=True)
time.sleep(60)
"""


def hold(run: Path, *more: str) -> tuple[subprocess.Popen[str], str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run), *more], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def test_a_second_process_is_refused_and_a_killed_one_does_not_block(tmp_path: Path) -> None:
    holder, worker = hold(tmp_path, "with a worker that outlives it")
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


def test_log_writes_both_at_once(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"loss": torch.tensor(0.5), "lr": np.float32(0.25)})
        run.log(2, "test", {"accuracy": 1})
        assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
            '{"step": 1, "split": "train", "name": "loss", "value": 0.5}',
            '{"step": 1, "split": "train", "name": "lr", "value": 0.25}',
            '{"step": 2, "split": "test", "name": "accuracy", "value": 1.0}',
        ]
        assert scalars(tmp_path, "train/loss") == [(1, 0.5)]
        assert scalars(tmp_path, "test/accuracy") == [(2, 1.0)]


def test_numbers_that_are_not_finite_leave_valid_json(tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    with RunFolder.open(tmp_path, {**CONFIG, "limit": math.inf}) as run:
        run.log(1, "train", {"a": math.nan, "b": math.inf, "c": 1.5})
        run.finish({"metrics": {"test_accuracy": math.nan, "knn_accuracy": torch.tensor(0.25)}})
        result = run.result()
    for name in ("config.json", "result.json"):
        json.loads((tmp_path / name).read_text(), parse_constant=refuse)
    found = [
        json.loads(text, parse_constant=refuse)
        for text in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["value"] for line in found] == [None, None, 1.5]
    assert [math.isnan(line["value"]) for line in read_metrics(tmp_path)] == [True, True, False]
    assert result is not None
    assert result["metrics"] == {"test_accuracy": None, "knn_accuracy": 0.25}
    assert scalars(tmp_path, "train/b") == [(1, math.inf)]


@pytest.mark.parametrize("torn", [b'{"step": 3, "spl', b"\x00\x00\x00", b'{"step": 3, "split": "train"}'])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"loss": 1.0})
        run.log(2, "train", {"loss": 2.0})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert lines(tmp_path) == [(1, 1.0), (2, 2.0)]
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.log(3, "train", {"loss": 3.0})
    assert lines(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert caplog.text == ""


def test_a_damaged_line_in_the_middle_is_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = '{"step": 1, "split": "train", "name": "loss", "value": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(good + "garbage\n" + '{"step": 1}\n' + good)
    with caplog.at_level(logging.WARNING):
        assert lines(tmp_path) == [(1, 1.0), (1, 1.0)]
    assert "2 damaged lines" in caplog.text


def test_a_resume_shows_no_step_twice(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        for step in range(1, 8):
            run.log(step, "train", {"loss": 10.0 + step})
        run.embedding("before", torch.zeros(2, 2), ["a", "b"], step=2)
        run.embedding("after", torch.zeros(2, 2), ["a", "b"], step=6)
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(4)
        assert lines(tmp_path) == [(step, 10.0 + step) for step in range(1, 5)]
        assert scalars(tmp_path, "train/loss") == [(step, 10.0 + step) for step in range(1, 5)]
        assert [entry.tensor_name for entry in projector(tmp_path)] == ["before:00000002"]
        for step in range(5, 9):
            run.log(step, "train", {"loss": 20.0 + step})
    expected = [(step, (10.0 if step < 5 else 20.0) + step) for step in range(1, 9)]
    assert lines(tmp_path) == expected
    assert scalars(tmp_path, "train/loss") == expected
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.log(9, "train", {"loss": 29.0})
        run.cut_back(-1)
        run.log(0, "train", {"loss": 30.0})
    assert lines(tmp_path) == [(0, 30.0)]
    assert scalars(tmp_path, "train/loss") == [(0, 30.0)]


def test_event_files_are_cut_whatever_the_order_of_their_names(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        for step in range(1, 6):
            run.log(step, "train", {"loss": 10.0 + step})
    (old,) = tmp_path.glob("events.out.*")
    old.rename(tmp_path / "events.out.tfevents.9999999999.another-machine-whose-clock-is-ahead")
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(3)
        run.log(4, "train", {"loss": 24.0})
    assert scalars(tmp_path, "train/loss") == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 24.0)]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_event_file_is_cut(tmp_path: Path, cut: int) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        for step in range(1, 4):
            run.log(step, "train", {"loss": 10.0 + step})
    (file,) = tmp_path.glob("events.out.*")
    os.truncate(file, file.stat().st_size - cut)
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(1)
        run.log(2, "train", {"loss": 22.0})
    assert scalars(tmp_path, "train/loss") == [(1, 11.0), (2, 22.0)]


def test_the_purge_mark_of_an_older_resume_hides_nothing(tmp_path: Path) -> None:
    ahead = tmp_path / "events.out.tfevents.9999999999.another-machine-whose-clock-is-ahead"
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"loss": 11.0})
        run.log(2, "train", {"loss": 12.0})
    before = set(tmp_path.glob("events.out.*"))
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(1)
        run.log(2, "train", {"loss": 22.0})
        run.log(3, "train", {"loss": 23.0})
    (set(tmp_path.glob("events.out.*")) - before).pop().rename(ahead)
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(2)
        run.log(3, "train", {"loss": 33.0})
    assert scalars(tmp_path, "train/loss") == [(1, 11.0), (2, 22.0), (3, 33.0)]


def test_a_tensorboard_that_is_watching_drops_the_steps_too(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        for step in range(1, 6):
            run.log(step, "train", {"loss": 10.0 + step})
    (old,) = tmp_path.glob("events.out.*")
    old.rename(tmp_path / "events.out.tfevents.0000000001.first")
    watching = events(tmp_path)
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(3)
        run.log(4, "train", {"loss": 24.0})
        watching.Reload()
    shown = [(event.step, event.value) for event in watching.Scalars("train/loss")]
    assert shown == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 24.0)]


def test_cut_back_keeps_what_was_not_finite(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"a": math.nan})
        run.cut_back(1)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["value"] is None


def figure() -> Any:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(2, 1))
    drawn.subplots().plot([0, 1], [1, 0])
    return drawn


def test_a_figure_is_a_file_and_a_tensorboard_image(tmp_path: Path) -> None:
    from PIL import Image

    with RunFolder.open(tmp_path, CONFIG) as run:
        file = run.figure("t-sne", figure(), 3)
        assert file == tmp_path / "figures" / "t-sne.png"
    with Image.open(file) as image:
        size = image.size
    (shown,) = events(tmp_path).Images("t-sne")
    assert (shown.step, shown.width, shown.height) == (3, *size)


def test_a_large_figure_is_made_smaller_for_tensorboard_only(tmp_path: Path) -> None:
    from PIL import Image

    large = figure()
    large.set_size_inches(12, 6)
    with RunFolder.open(tmp_path, CONFIG) as run:
        file = run.figure("large", large, 3)
    with Image.open(file) as image:
        assert image.width > 1200
    (shown,) = events(tmp_path).Images("large")
    assert shown.width == 800 and 300 < shown.height < 500


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", 'a"b', "a b"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        with pytest.raises(InputError, match="letters, digits"):
            run.figure(name, figure(), 1)
        with pytest.raises(InputError, match="letters, digits"):
            run.embedding(name, torch.zeros(1, 1), [0])


def projector(run: Path) -> Any:
    from google.protobuf import text_format
    from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

    return text_format.Parse((run / "projector_config.pbtxt").read_text(), ProjectorConfig()).embeddings


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_projector_reads_points_labels_and_images(
    tmp_path: Path, channels: int, dtype: torch.dtype
) -> None:
    from PIL import Image

    z = torch.randn(5, 3, dtype=torch.float64)
    images = torch.randint(0, 256, (5, channels, 4, 6), dtype=torch.uint8)
    given = images if dtype == torch.uint8 else images / 255
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.embedding("train", z.bfloat16().float(), torch.arange(5), step=1)
        run.embedding("train", z, ["cat", "a\tdog", "", "x\ny", "cat"], given, step=2)
        run.embedding("train", z, [1] * 5, given, step=1)  # replaced
    first, second = projector(tmp_path)
    assert (first.tensor_name, second.tensor_name) == ("train:00000001", "train:00000002")
    assert np.loadtxt(tmp_path / second.tensor_path, delimiter="\t") == pytest.approx(z.numpy(), rel=1e-5)
    assert (tmp_path / second.metadata_path).read_text() == "cat\na dog\n-\nx y\ncat\n"
    assert (tmp_path / first.metadata_path).read_text() == "1\n" * 5
    assert list(second.sprite.single_image_dim) == [6, 4]
    with Image.open(tmp_path / second.sprite.image_path) as sheet:
        pixels = torch.from_numpy(np.array(sheet))
    assert pixels.shape == (12, 18, 3)
    for i in range(5):
        row, column = divmod(i, 3)
        cell = pixels[row * 4 : row * 4 + 4, column * 6 : column * 6 + 6]
        assert torch.equal(cell.permute(2, 0, 1), images[i].expand(3, 4, 6))


def test_tensorboards_own_projector_plugin_serves_the_points(tmp_path: Path) -> None:
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.projector.projector_plugin import ProjectorPlugin
    from werkzeug.test import Client

    with RunFolder.open(tmp_path, CONFIG) as run:
        run.embedding("z", torch.eye(4)[:, :2], ["a", "b", "c", "d"], torch.zeros(4, 3, 2, 2), step=1)
    apps = ProjectorPlugin(TBContext(logdir=str(tmp_path))).get_plugin_apps()

    def ask(route: str, **query: str) -> Any:
        answer = Client(apps[route]).get("/", query_string={"run": ".", **query})
        assert answer.status_code == 200, answer.data
        return answer

    (served,) = ask("/info").json["embeddings"]
    assert served["tensorName"] == "z:00000001"
    assert served["tensorShape"] == [4, 2]
    points = np.frombuffer(ask("/tensor", name=served["tensorName"]).data, dtype=np.float32)
    assert points.reshape(4, 2).tolist() == torch.eye(4)[:, :2].tolist()
    assert ask("/metadata", name=served["tensorName"]).data == b"a\nb\nc\nd\n"
    assert ask("/sprite_image", name=served["tensorName"]).data[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("z", "labels", "images"),
    [
        (torch.zeros(3), [0, 1, 2], None),
        (torch.zeros(3, 2), [0, 1], None),
        (torch.zeros(3, 2), [0, 1, 2], torch.zeros(2, 3, 4, 4)),
    ],
)
def test_points_that_do_not_fit_are_refused(tmp_path: Path, z: Any, labels: Any, images: Any) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run, pytest.raises(InputError, match="the projector takes"):
        run.embedding("z", z, labels, images)


def test_hparams_are_in_the_run_itself(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"loss": 1.0})
        run.hparams({**CONFIG, "none": None, "sizes": [1, 2]}, {"knn_accuracy": 0.5, "test_accuracy": 0.75})
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    found = events(tmp_path)
    assert scalars(tmp_path, "when_done/test_accuracy") == [(0, 0.75)]
    assert scalars(tmp_path, "train/loss") == [(1, 1.0)]
    text = str(found.SummaryMetadata("_hparams_/session_start_info"))
    assert all(word in text for word in ("lr", "model.encoder", "resnet18"))
    columns = str(found.SummaryMetadata("_hparams_/experiment"))
    assert 0 < columns.index("when_done/test_accuracy") < columns.index("when_done/knn_accuracy")


def test_columns_of_hparams_are_not_those_of_a_pretraining(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.hparams(CONFIG, {"knn_accuracy": 0.5, "validation_accuracy": 0.75})
    assert scalars(tmp_path, "when_done/knn_accuracy") == [(0, 0.5)]
    assert events(tmp_path).SummaryMetadata("_hparams_/session_start_info")
    with pytest.raises(KeyError):
        events(tmp_path).SummaryMetadata("_hparams_/experiment")


def test_result_has_what_every_result_has_and_no_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = "/home/someone"
    monkeypatch.setattr(
        sys, "argv", [f"{home}/bench/run_stl10.py", "--data-dir", f"{home}/stl10", "--out=runs/x"]
    )
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


def test_a_result_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.finish({"metrics": {"a": 1}})

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(
            InputError, match=r"cannot write result\.json .*No space left on device"
        ) as refused:
            run.finish({"metrics": {"a": 2}})
        one_line(refused.value)
        result = run.result()
        assert result is not None
        assert result["metrics"] == {"a": 1}
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))


def test_metrics_on_a_full_disk_are_one_line_and_no_line_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.write
    left = [30]

    def filling(file: int, data: Any) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = usual(file, data[: left[0]])
        left[0] -= done
        return done

    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"loss": 1.0})
        monkeypatch.setattr(os, "write", filling)
        with pytest.raises(
            InputError, match=r"cannot write metrics\.jsonl .*No space left on device"
        ) as refused:
            run.log(2, "train", {"loss": 2.0})
        one_line(refused.value)
        monkeypatch.undo()
        assert (tmp_path / "metrics.jsonl").read_bytes()[-1:] != b"\n"
        run.log(3, "train", {"loss": 3.0})
    assert lines(tmp_path) == [(1, 1.0), (3, 3.0)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_left_over_temporary_files_are_removed(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, CONFIG).close()
    (tmp_path / ".result.json.123.tmp").write_text("half")
    RunFolder.open(tmp_path, CONFIG, resume=True).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.json"]


def test_without_tensorboard_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="pip install tensorboard"):
        _ = Tracker(tmp_path).writer


def test_the_import_is_light() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import metapretrain.training.run_folder; "
        "import metapretrain.training.checkpoint; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "heavy = {'tensorboard', 'matplotlib', 'PIL', 'transformers', 'google', 'accelerate', 'sklearn'}; "
        "sys.exit(str(new & heavy) if new & heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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


@pytest.mark.parametrize("line", ["[" * 100_000, '{"step": 1e999, "split": "a", "name": "b", "value": 1}',
                                  f'{{"step": {10**30}, "split": "a", "name": "b", "value": 1}}',
                                  f'{{"step": 1, "split": "a", "name": "b", "value": {10**400}}}'])  # fmt: skip
def test_metrics_that_no_number_holds_are_left_out(tmp_path, line):
    good = '{"step": 1, "split": "a", "name": "b", "value": 1.0}'
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{good}\n")
    assert [found["value"] for found in read_metrics(tmp_path)] == [1.0]


def test_a_folder_whose_name_is_no_utf8_is_refused(tmp_path):
    with pytest.raises(InputError, match="no UTF-8"):
        RunFolder.open(tmp_path / "\udcff", {})
    assert not list(tmp_path.iterdir())
