"""Every file of a checkpoint or of a finished run, cut at random lengths and flipped at random bits."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import metapretrain
from benchmarks import run_fewshot, run_prompts, run_schedule, run_stl10, run_text
from metapretrain.errors import InputError
from metapretrain.experiments.saved import predict_files
from metapretrain.files import SUMS
from metapretrain.models import build_text_encoder, load_text_encoder, save_text_encoder
from metapretrain.models.language_models import load_language_model
from metapretrain.prompts import SoftPrompt, write_adapter
from metapretrain.prompts.soft_prompt import read_notes
from metapretrain.training import CheckpointError, checkpoint, load_latest, loop
from tests.reliability.lengths import lengths

SMOKE = ["--smoke", "--device", "cpu", "--no-figures"]
RUNS: dict[str, tuple[Any, list[str]]] = {
    "images": (run_stl10.main, ["--dataset", "digits", "--methods", "supervised-mlp"]),
    "few-shot": (run_fewshot.main, ["--settings", "2w1s", "--methods", "maml", "--validation-episodes", "2"]),
    "texts": (run_text.main, ["--methods", "cosine"]),
    "prompts": (run_prompts.main, ["--methods", "pt", "--sets", "sst2"]),
    "schedule": (run_schedule.main, ["--methods", "uniform", "--settings", "agnostic"]),
}


def damaged(file: Path, draws: int, seed: int) -> Iterator[str]:
    """Cut `file` at random lengths and flip random bits of it, one damage at a time; say what was done."""
    whole, drawn = file.read_bytes(), random.Random(f"{seed} {file.name}")
    for _ in range(draws):
        length = drawn.randrange(len(whole))
        file.write_bytes(whole[:length])
        yield f"{file.name} cut at {length} of {len(whole)}"
        place, bit = drawn.randrange(len(whole)), drawn.randrange(8)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        file.write_bytes(flipped)
        yield f"{file.name} with bit {bit} of byte {place} flipped"
    file.write_bytes(whole)


def equal(a: Any, b: Any) -> bool:
    """Whether two nests are the same, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


@pytest.fixture(params=lengths(["images"], list(RUNS)))
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoint folders that runs of the benchmarks would leave, were they killed before the end."""
    kept: list[Path] = []
    usual = checkpoint.save

    def save_and_copy(folder: Path, step: int, state: Any, **settings: Any) -> Path:
        usual(tmp_path / f"kept-{len(kept) // 2}", step, state)
        kept.append(tmp_path / f"kept-{len(kept) // 2}")
        return usual(folder, step, state, **settings)

    monkeypatch.setattr(checkpoint, "save", save_and_copy)
    monkeypatch.setattr(loop._Loop, "_checkpoint_due", lambda self: self.step in (1, 2))
    for name in request.param:
        main, words = RUNS[name]
        assert main([*SMOKE, *words, "--out", str(tmp_path / "runs")]) == 0
    return sorted({path for path in kept if len(list(path.glob("step-*"))) == 2})


@pytest.mark.parametrize("draws", lengths(3, 20))
def test_a_damaged_checkpoint_is_never_loaded(checkpoints: list[Path], draws: int) -> None:
    assert checkpoints
    for folder in checkpoints:
        first, second = sorted(folder.glob("step-*"))
        newest = load_latest(folder)
        assert newest is not None and newest.path == second
        aside = second.with_name("aside")
        second.rename(aside)
        before = load_latest(folder)
        aside.rename(second)
        assert before is not None
        for file in sorted(second.iterdir()):
            for what in damaged(file, draws, seed=0):
                found = load_latest(folder)
                assert found is not None and found.path == first and equal(found.state, before.state), what
        assert equal(load_latest(folder).state, newest.state)  # type: ignore[union-attr]
        shutil.rmtree(first)
        for file in sorted(second.iterdir()):
            for what in damaged(file, draws, seed=1):
                with pytest.raises(CheckpointError, match="no checkpoint in"):
                    pytest.fail(f"{what}: loaded {load_latest(folder)}")


def test_the_comparison_finds_a_change_of_any_kind() -> None:
    """The checks of this module rest on it."""
    state = {"w": torch.ones(2), "betas": (0.9, [1, None]), "zero": 0.0}
    assert equal(state, {"w": torch.ones(2), "betas": (0.9, [1, None]), "zero": 0.0})
    for name, other in {"w": torch.ones(2).double(), "betas": [0.9, [1, None]], "zero": -0.0}.items():
        assert not equal(state, {**state, name: other}), name
    for other in (torch.tensor([1.0, 1.5]), [1.0, 1.0], None):
        assert not equal(state, {**state, "w": other}), other
    assert not equal(state, dict(reversed(state.items())))


def predictions(kind: str, run: Path, out: Path) -> Any:
    """What a finished run predicts, as a user gets it."""
    if kind in ("images", "few-shot"):
        model = metapretrain.load(run)
        side = model.image_size
        images = torch.arange(6 * side**2).remainder(251).to(torch.uint8).view(6, 1, side, side)
        few = model.adapt(images[:4], torch.tensor([0, 1, 1, 0])).logits(images[4:])
        return [few, model.encode(images[:2]), *([model.logits(images), model.classes] if kind == "images" else [])]
    (out / "new.csv").write_text("id,sentence\n1,a good film\n2,a bad one\n3,neither\n")
    task = "sst" if kind == "texts" else "sst2"
    (written,) = predict_files(run, {task: out / "new.csv"}, out, **({"model": "tiny"} if kind == "prompts" else {}))
    texts = {"texts": lambda: metapretrain.load(run).encode(["a good film", "a bad one"])}
    return [written.read_text(), *[encode() for of, encode in texts.items() if of == kind]]


@pytest.mark.parametrize("draws", lengths(2, 20))
@pytest.mark.parametrize("kind", ["images", "few-shot", "texts", "prompts"])
def test_a_damaged_file_of_a_finished_run_is_refused_or_decides_no_prediction(
    kind: str, draws: int, tmp_path: Path
) -> None:
    main, words = RUNS[kind]
    assert main([*SMOKE, *words, "--out", str(tmp_path / "runs")]) == 0
    run = next(path.parent for path in (tmp_path / "runs").rglob("result.json") if (path.parent / SUMS).is_file())
    whole = predictions(kind, run, tmp_path)
    listed = {line.partition("  ")[2] for line in (run / SUMS).read_text().splitlines()}
    assert "config.json" in listed and (kind != "texts" or "encoder/tokenizer.json" in listed)
    for file in sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size):
        must = file.relative_to(run).as_posix() in listed
        check(lambda: predictions(kind, run, tmp_path), whole, file, draws if must else 1, must)


@pytest.mark.parametrize("draws", lengths(3, 20))
def test_damaged_prompts_are_refused(draws: int, tmp_path: Path) -> None:
    write_adapter(tmp_path, torch.randn(5, 8), load_language_model("tiny")[0], "decoder-only", {"space": True})
    whole = SoftPrompt.from_adapter(tmp_path).weight, read_notes(tmp_path)
    for file in sorted(path for path in tmp_path.iterdir() if path.name != SUMS):
        check(lambda: (SoftPrompt.from_adapter(tmp_path).weight, read_notes(tmp_path)), whole, file, draws, True)


@pytest.mark.parametrize("draws", lengths(3, 20))
def test_a_damaged_encoder_is_refused(draws: int, tmp_path: Path) -> None:
    save_text_encoder(build_text_encoder("tiny"), tmp_path)
    for file in sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.name != SUMS):
        check(lambda: load_text_encoder(tmp_path), None, file, draws, True)


def check(load: Callable[[], Any], whole: Any, file: Path, draws: int, must: bool) -> None:
    """Damage `file`: loading is refused in one line; where it need not be, it may give what it gave before."""
    for what in damaged(file, draws, seed=2):
        try:
            found, refused = load(), ""
        except InputError as error:
            found, refused = None, str(error)
        assert "\n" not in refused, what
        assert refused or (not must and equal(found, whole)), what
