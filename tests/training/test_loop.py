"""The loop: exact resumes, honest failures, and the same result over ranks."""

import contextlib
import os
import sys
import textwrap
import time
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn

from metapretrain.episodes import ShuffledBatches, TaskStream
from metapretrain.errors import InputError
from metapretrain.training import KeepBest, RunFolder, TrainingError, TrainSettings, load_latest, logs, train
from metapretrain.training.logs import read_metrics


class Toy(nn.Module):
    """Dropout, BatchNorm and two parameter shapes: everything whose state a resume has to restore."""

    def __init__(self, hang_at: int | None = None, poison_at: int | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(64, 6, generator=generator)
        self.y = (self.x.sum(1) > 0).long()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))
        with torch.random.fork_rng():
            torch.manual_seed(1)
            for part in self.model:
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
        self.hang_at, self.poison_at, self.calls = hang_at, poison_at, 0

    def forward(self, batches):
        self.calls += 1
        if self.calls == self.hang_at:
            time.sleep(600)
        loss = {
            name: nn.functional.cross_entropy(self.model(self.x[rows]), self.y[rows]) for name, rows in batches.items()
        }
        if self.calls == self.poison_at:
            return {name: value * float("nan") for name, value in loss.items()}
        return loss


def stream(steps=40, batch=8):
    return TaskStream({"toy": ShuffledBatches(64, batch, seed=3)}, "longest", seed=3, steps=steps)


def settings(**changes):
    usual = {"steps": 40, "lr": 0.05, "device": "cpu", "log_every": 7, "checkpoint_every": 10, "ema": 0.9}
    return TrainSettings(**(usual | changes))


def weights(toy):
    return {name: value.clone() for name, value in toy.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_learns_and_reports():
    toy = Toy()
    report = train(toy, stream(), settings(lr=0.2, ema=None))
    assert report.steps == 40 and report.batches == {"toy": 40}
    toy.eval()
    assert (toy.model(toy.x).argmax(1) == toy.y).float().mean() > 0.85


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_a_training_without_a_terminal_tells_how_far_it_is(seconds, caplog, monkeypatch):
    monkeypatch.setattr(logs, "TOLD_SECONDS", seconds)
    monkeypatch.setattr(logs.ProgressLine, "told", time.monotonic())
    with caplog.at_level("INFO", "metapretrain"):
        train(Toy(), stream(), settings(), title="toy seed 0")
    told = [line for line in caplog.messages if line.startswith("toy seed 0: ")]
    assert len(told) == (40 if seconds == 0 else 0)
    assert not told or (told[0].startswith("toy seed 0: 1 of 40 updates") and told[-1].endswith("about 0 s left"))


def test_short_trainings_tell_how_far_they_are_together(caplog, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(logs.ProgressLine, "told", 0.0)
    with caplog.at_level("INFO", "metapretrain"):
        for number in range(10):  # 12 s each: none lasts 30 s
            before = logs.PLACE.set(f"run {number + 1} of 10")
            line = logs.ProgressLine("toy", total=4)
            for step in range(1, 5):
                clock[0] += 3
                line.at(step)
            logs.PLACE.reset(before)
    assert [message.split(":")[0] for message in caplog.messages] == [f"run {n} of 10, toy" for n in (3, 5, 8, 10)]
    assert caplog.messages[0] == "run 3 of 10, toy: 2 of 4 updates, about 6 s left"


def test_same_seed_same_bits_and_the_global_generator_is_left_alone():
    ends = []
    for noise in (1, 2):
        toy = Toy()
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        train(toy, stream(), settings())
        assert torch.equal(before, torch.get_rng_state())
        ends.append(weights(toy))
    assert same(*ends)
    toy = Toy()
    train(toy, stream(), settings(seed=1))
    assert not same(ends[0], weights(toy))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_killed_in_an_update_resumes_to_the_same_bits(tmp_path, optimizer):
    class Killed(RuntimeError):
        pass

    class Mortal(Toy):
        def forward(self, batches):
            if self.calls == 27:
                raise Killed
            return super().forward(batches)

    chosen = settings(optimizer=optimizer, lr=0.01)
    whole = Toy()
    with RunFolder.open(tmp_path / "whole", {"method": "toy"}) as run:
        train(whole, stream(), chosen, run=run)
    with RunFolder.open(tmp_path / "cut", {"method": "toy"}) as run, pytest.raises(Killed):
        train(Mortal(), stream(), chosen, run=run)
    rest = Toy()
    with RunFolder.open(tmp_path / "cut", {"method": "toy"}, resume=True) as run:
        report = train(rest, stream(), chosen, run=run)
    assert report.resumed_from == 20 and same(weights(whole), weights(rest))
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "cut")


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
import torch
from test_loop import Toy, settings, stream
from metapretrain.training import RunFolder, train
toy = Toy(hang_at={hang_at})
with RunFolder.open({folder!r}, {{"method": "toy"}}, resume=True) as run:
    train(toy, stream(), settings(checkpoint_every=4), run=run)
torch.save(toy.state_dict(), {end!r})
"""


def test_kill_9_then_resume_ends_with_the_same_bits(tmp_path):
    from tests import forks  # here, as the script imports this module, and cannot import that

    def start(name="cut", hang_at=None):
        folder, end = str(tmp_path / name), str(tmp_path / f"{name}.pt")
        script = SCRIPT.format(tests=os.path.dirname(__file__), folder=folder, end=end, hang_at=hang_at)
        return forks.Popen([sys.executable, "-c", textwrap.dedent(script)])

    process, deadline, found = start(hang_at=7), time.monotonic() + 120, []
    try:
        while not found and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            found = list((tmp_path / "cut").glob("checkpoint/step-*"))
    finally:
        process.kill()
        process.wait()
    assert found and not (tmp_path / "cut.pt").exists()
    assert start().wait(timeout=120) == start("whole").wait(timeout=120) == 0  # with as many threads
    assert same(torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "cut.pt"))


def test_a_damaged_newest_checkpoint_falls_back_and_ends_the_same(tmp_path, caplog):
    with RunFolder.open(tmp_path / "run", {"method": "toy"}) as run:
        train(Toy(), stream(), settings(), run=run)
    newest = sorted((tmp_path / "run/checkpoint").glob("step-*"))[-1] / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    toy = Toy()
    with RunFolder.open(tmp_path / "run", {"method": "toy"}, resume=True) as run:
        report = train(toy, stream(), settings(), run=run)
    whole = Toy()
    train(whole, stream(), settings())
    assert report.resumed_from == 20 and same(weights(whole), weights(toy))
    assert "tensors.safetensors" in caplog.text


def test_nan_stops_with_the_step_and_the_last_good_checkpoint(tmp_path):
    with RunFolder.open(tmp_path / "run", {"method": "toy"}) as run, pytest.raises(TrainingError) as error:
        train(Toy(poison_at=24), stream(), settings(), run=run)
    assert "at step 24" in str(error.value) and "step-00000020" in str(error.value)
    assert load_latest(tmp_path / "run/checkpoint").step == 20


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    from metapretrain.training import checkpoint

    real, done = checkpoint.write_durably, []

    def fill(path, data):
        done.append(path)
        if len(done) > 4:
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(checkpoint, "write_durably", fill)
    with RunFolder.open(tmp_path / "run", {"method": "toy"}) as run, pytest.raises(InputError) as error:
        train(Toy(), stream(), settings(), run=run)
    assert "No space left" in str(error.value) and "\n" not in str(error.value)
    assert load_latest(tmp_path / "run/checkpoint").step == 10


def test_a_run_out_of_memory_names_the_option_and_goes_on_when_there_is_some(tmp_path):
    class Greedy(Toy):
        def forward(self, batches):
            if self.calls == 25:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(batches)

    with (
        RunFolder.open(tmp_path / "run", {"method": "toy"}) as run,
        pytest.raises(TrainingError, match=r"out of memory on cpu at step 25: lower the batch size \(batch_size\)"),
    ):
        train(Greedy(), stream(), settings(), run=run)
    whole, rest = Toy(), Toy()
    train(whole, stream(), settings())
    with RunFolder.open(tmp_path / "run", {"method": "toy"}, resume=True) as run:
        report = train(rest, stream(), settings(), run=run)
    assert report.resumed_from == 20 and same(weights(whole), weights(rest))


def test_a_stream_that_ends_early_says_so():
    with pytest.raises(TrainingError, match="ended after 12 of 40"):
        train(Toy(), stream(steps=12), settings())


def test_accumulation_equals_a_larger_batch():
    class Plain(Toy):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Linear(6, 2)

    one, two = Plain(), Plain()
    train(one, stream(steps=10, batch=16), settings(steps=10, ema=None))
    train(two, stream(steps=20, batch=8), settings(steps=10, ema=None, accumulate=2))
    torch.testing.assert_close(weights(one), weights(two))


def test_moving_average_is_that_of_the_weights():
    class Recorder(Toy):
        seen: list

        def forward(self, batches):
            self.seen.append(self.model[0].weight.detach().clone())
            return super().forward(batches)

    toy = Recorder()
    toy.seen = []
    last = Toy()
    train(toy, stream(steps=6), settings(steps=6, ema=0.5))
    train(last, stream(steps=6), settings(steps=6, ema=None))
    history = [*toy.seen[1:], last.model[0].weight.detach()]
    average = history[0]
    for value in history[1:]:
        average = 0.5 * average + 0.5 * value
    torch.testing.assert_close(toy.model[0].weight, average)


def test_moving_average_covers_heads_and_leaves_counters_alone():
    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model, self.head = nn.Linear(4, 3), nn.Linear(3, 1)
            self.seen = []
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, batches):
            self.calls += 1
            self.seen.append(self.head.weight.detach().clone())
            return {name: self.head(self.model(torch.ones(2, 4))).square().mean() for name in batches}

    headed, last = Headed(), Headed()
    train(headed, stream(steps=6), settings(steps=6, ema=0.5))
    train(last, stream(steps=6), settings(steps=6, ema=None))
    average = headed.seen[1]
    for value in [*headed.seen[2:], last.head.weight.detach()]:
        average = 0.5 * average + 0.5 * value
    torch.testing.assert_close(headed.head.weight.detach(), average)
    assert not torch.equal(headed.head.weight, last.head.weight) and headed.calls == 6


def test_evaluation_is_called_and_logged(tmp_path):
    steps = []

    def evaluate(step):
        steps.append(step)
        return {"accuracy": 0.5}

    with RunFolder.open(tmp_path / "run", {"method": "toy"}) as run:
        train(Toy(), stream(), settings(evaluate_every=15), run=run, evaluate=evaluate)
    assert steps == [15, 30, 40]
    logged = [row for row in read_metrics(tmp_path / "run") if row["split"] == "validation"]
    assert [row["step"] for row in logged] == steps


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps is"),
        ({"steps": True}, "steps is"),
        ({"steps": 1.5}, "steps is"),
        ({"lr": float("nan")}, "lr is"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"precision": "bf32"}, "unknown precision"),
        ({"ema": 1.0}, "ema is"),
        ({"clip": 0.0}, "clip is"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"device": "cuda:99"}, "'cuda:99' is not available"),
        ({"precision": "fp16"}, "'fp16' needs a GPU"),
    ],
)
def test_bad_settings_are_one_line(changes, words):
    with pytest.raises(InputError) as error:
        train(Toy(), stream(), settings(**changes))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_wall_time_counts_the_sessions_before(tmp_path):
    with RunFolder.open(tmp_path / "run", {"method": "toy"}) as run:
        run.seconds_before = 1000.0
        train(Toy(), stream(), settings(), run=run)
    with RunFolder.open(tmp_path / "run", {"method": "toy"}, resume=True) as run:
        train(Toy(), stream(), settings(), run=run)
        assert 1000 < run.wall_seconds < 1100


KEEPING = {"ema": None, "evaluate_every": 5}


class Watched:
    """Validations whose values are given; notes the weights that they saw."""

    def __init__(self, toy, values):
        self.toy, self.values, self.seen = toy, values, {}

    def __call__(self, step):
        self.seen[step] = weights(self.toy)
        return {"score": self.values[step // 5]}


def test_the_best_weights_are_kept():
    toy = Toy()
    watched = Watched(toy, [None, 0.1, 0.3, 0.2, 0.3, 0.1, 0.0, 0.2, 0.1])
    report = train(toy, stream(), settings(**KEEPING), evaluate=watched, keep_best="score")
    assert (report.steps, report.best.step, report.best.value, report.best.since) == (40, 10, 0.3, 6)
    assert same(weights(toy), watched.seen[10]) and [row["step"] for row in report.best.history] == [*range(5, 41, 5)]


def test_training_ends_by_patience_and_may_keep_the_start():
    toy = Toy()
    before, best = weights(toy), KeepBest("score", patience=3, start=True)
    report = train(toy, stream(), settings(**KEEPING), evaluate=Watched(toy, [0.5] * 9), keep_best=best)
    assert (report.steps, best.step) == (15, 0) and same(weights(toy), before)


def test_what_is_kept_survives_an_error_and_a_resume(tmp_path):
    class Killed(RuntimeError):
        pass

    class Mortal(Toy):
        def forward(self, batches):
            if self.calls == 27:
                raise Killed
            return super().forward(batches)

    def trained(toy, folder):
        watched = Watched(toy, [None, 0.1, 0.3, 0.2, 0.25, 0.2, 0.1, 0.2, 0.1])
        with RunFolder.open(tmp_path / folder, {}, resume=True) as run:
            return train(toy, stream(), settings(**KEEPING), run=run, evaluate=watched, keep_best="score")

    whole, cut, rest = Toy(), Mortal(), Toy()
    trained(whole, "whole")
    with pytest.raises(Killed):
        trained(cut, "cut")
    assert same(weights(cut), weights(whole))
    report = trained(rest, "cut")
    assert report.resumed_from == 20 and (report.best.step, len(report.best.history)) == (10, 8)
    assert same(weights(rest), weights(whole))


def test_weights_that_diverged_are_refused_or_those_before_are_kept(caplog):
    def trained(best):
        toy = Toy(poison_at=12)
        watched = Watched(toy, range(9))
        return toy, watched, train(toy, stream(), settings(**KEEPING), evaluate=watched, keep_best=best)

    with pytest.raises(TrainingError, match="NaN or infinite at step 12"):
        trained("score")
    toy, watched, report = trained(KeepBest("score", forgiving=True, name="toy"))
    assert (report.steps, report.best.step, report.best.diverged) == (15, 10, True)
    assert same(weights(toy), watched.seen[10])
    assert "toy diverged by step 15: that of step 10 is kept; lower its lr" in caplog.messages


def test_a_stream_that_may_end_ends_the_training():
    toy, source = Toy(), stream(steps=12)
    source.may_end = True
    report = train(toy, source, settings(**KEEPING), evaluate=Watched(toy, range(9)), keep_best="score")
    assert report.steps == 12 and [row["step"] for row in report.best.history] == [5, 10, 12]


def test_groups_of_a_step_have_rates_of_their_own():
    class Grouped(Toy):
        def parameter_groups(self):
            first, *others = self.parameters()
            return [
                {"params": [first], "lr": 1e-3, "weight_decay": 0.0},
                {"params": others, "lr": 1e-2, "weight_decay": 0.1},
            ]

    toy, twin = Grouped(), Toy()
    chosen = settings(steps=1, ema=None, optimizer="adamw", schedule="linear", warmup_steps=2)
    train(toy, stream(), chosen)
    moved = [(new - old).abs().max().item() for new, old in zip(toy.parameters(), twin.parameters(), strict=True)]
    assert moved[0] == pytest.approx(5e-4, rel=1e-3) and max(moved[1:]) == pytest.approx(5e-3, rel=0.2)


def test_keeping_the_best_needs_validations():
    with pytest.raises(InputError, match="keep_best needs evaluate"):
        train(Toy(), stream(), settings(ema=None), keep_best="score")


class Counting(nn.Module):
    """The loss of update n is n; of the task that has a batch."""

    def __init__(self, end=None):
        super().__init__()
        self.w, self.end = nn.Parameter(torch.zeros(1)), end
        self.register_buffer("update", torch.zeros(()))

    def forward(self, batches):
        if self.update == self.end:
            raise KeyboardInterrupt
        self.update += 1
        return {name: self.update + 0 * self.w.sum() for name in batches}


@examples(max_examples=12, deadline=None)
@given(st.integers(1, 23), st.integers(1, 8), st.integers(1, 23))
def test_no_logged_loss_covers_fewer_updates_than_the_others(steps, every, cut):
    with TemporaryDirectory() as folder:
        chosen = settings(steps=steps, log_every=every, ema=None, checkpoint_every=cut)
        for resume in (False, True) if cut < steps else (False,):
            with RunFolder.open(folder, {"method": "count"}, resume=resume) as run:
                step = Counting(None if resume else cut)  # cut short at a checkpoint, if at all
                with contextlib.suppress(KeyboardInterrupt):
                    report = train(step, stream(steps), chosen, run=run)
        logged = [(line["step"], line["value"]) for line in read_metrics(folder) if line["name"] == "loss_toy"]
    assert [step for step, _ in logged] == sorted({*range(every, steps + 1, every), steps})
    for at, value in logged:
        first = at - every + 1 if at % every == 0 else max(1, at - at % every - every + 1)
        assert value == pytest.approx((first + at) / 2), (at, first)
    assert report.losses == {"toy": logged[-1][1]}
