"""A checkpoint, learner, encoder or prompt of a stranger runs no code: files that would leave a mark, were they run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import metapretrain
from benchmarks import run_fewshot, run_prompts, run_stl10, run_text
from metapretrain.errors import InputError
from metapretrain.experiments.saved import predict_files
from metapretrain.files import SUMS, load_tensors
from metapretrain.models.language_models import load_language_model
from metapretrain.models.text_encoders import build_text_encoder, load_text_encoder, save_text_encoder
from metapretrain.prompts import PromptedModel, SoftPrompt
from metapretrain.training import load_latest, save
from tests.reliability.lengths import only_long

SMOKE = ["--smoke", "--device", "cpu", "--no-figures"]
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".npy"}


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What code of the stranger would make."""
    return tmp_path / "mark"


def pickles(mark: Path, file: Path) -> list[bytes]:
    """A plain pickle, and the two formats of torch.save."""
    found = [pickle.dumps(Bomb(mark))]
    for zipped in (True, False):
        torch.save({"weight": Bomb(mark)}, file, _use_new_zipfile_serialization=zipped)
        found.append(file.read_bytes())
    return found


def refused(load: Callable[[], Any], mark: Path) -> str:
    """The one line by which `load` is refused; no mark was left."""
    with pytest.raises(InputError) as error:
        load()
    assert not mark.exists() and "\n" not in str(error.value)
    return str(error.value)


def test_the_bomb_works(mark: Path, tmp_path: Path) -> None:
    for data in pickles(mark, tmp_path / "x.pt"):
        (tmp_path / "x.pt").write_bytes(data)
        with contextlib.suppress(RuntimeError):  # a plain pickle is no file of torch: said after it has run
            torch.load(tmp_path / "x.pt", weights_only=False)
        assert mark.is_dir()
        mark.rmdir()


def run_of(main: Callable[..., int], out: Path, *words: str) -> Path:
    """The folder of the one run of a script."""
    assert main([*SMOKE, *words, "--out", str(out)]) == 0
    (run,) = (path.parent for path in out.rglob("result.json") if "pretrain-" not in path.parent.name)
    return run


@pytest.fixture(params=["images", "learner", only_long("texts")])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A finished run that :func:`metapretrain.load` takes."""
    words: dict[str, tuple[Callable[..., int], list[str]]] = {
        "images": (run_stl10.main, ["--dataset", "digits", "--methods", "supervised-mlp"]),
        "learner": (run_fewshot.main, ["--settings", "2w1s", "--methods", "protonet", "--set", "updates=1"]),
        "texts": (run_text.main, ["--methods", "cosine"]),
    }
    main, given = words[request.param]
    return run_of(main, tmp_path / "runs", *given)


def test_a_finished_run(model: Path, mark: Path, tmp_path: Path) -> None:
    metapretrain.load(model)
    for file in sorted(path for path in model.rglob("*.safetensors")):
        whole = file.read_bytes()
        for data in pickles(mark, tmp_path / "x.pt"):
            file.write_bytes(data)
            assert file.parent.name in refused(lambda: metapretrain.load(model), mark)
            file.unlink()
            for suffix in WEIGHTS - {".safetensors"}:  # the name that a library would look for next
                file.with_suffix(suffix).write_bytes(data)
                file.with_name(f"pytorch_model{suffix}").write_bytes(data)
            refused(lambda: metapretrain.load(model), mark)
        file.write_bytes(whole)
    metapretrain.load(model)
    assert not mark.exists()


def test_a_checkpoint(mark: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 1, {"w": torch.ones(1)})
    for data in pickles(mark, tmp_path / "x.pt"):
        refused(lambda: load_tensors(tmp_path / "x.pt"), mark)
        refused(lambda: load_latest(tmp_path / "x.pt"), mark)
        for file in folder.iterdir():
            whole = file.read_bytes()
            file.write_bytes(data)
            refused(lambda: load_latest(tmp_path / "run"), mark)
            file.write_bytes(whole)


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A saved text encoder."""
    save_text_encoder(build_text_encoder("tiny"), tmp_path / "encoder")
    return tmp_path / "encoder"


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    """A saved language model."""
    for part in load_language_model("tiny"):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


LOADERS: list[tuple[str, Callable[[Any], Any]]] = [
    ("encoder", load_text_encoder),
    ("language_model", load_language_model),
]


@pytest.mark.parametrize(("kind", "load"), LOADERS)
def test_weights_of_a_model_folder(
    kind: str, load: Callable[[Any], Any], request: pytest.FixtureRequest, mark: Path, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(kind)
    load(folder)
    for data in pickles(mark, tmp_path / "x.pt"):
        (folder / "model.safetensors").write_bytes(data)
        refused(lambda: load(folder), mark)
        (folder / "model.safetensors").unlink()
        for name in ("pytorch_model.bin", "model.bin", "model.pt", "pytorch_model.pt", "model.ckpt"):
            (folder / name).write_bytes(data)
        index = {"metadata": {}, "weight_map": {"w": "pytorch_model.bin"}}
        for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            refused(lambda: load(folder), mark)
            (folder / name).write_text(json.dumps(index))
        refused(lambda: load(folder), mark)
        for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            (folder / name).unlink()


CODE = "import os\nos.mkdir({mark!r})\nclass Model: ...\n"


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("kind", "load"), LOADERS)
def test_code_beside_a_model(
    kind: str,
    load: Callable[[Any], Any],
    known: bool,
    request: pytest.FixtureRequest,
    mark: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder: Path = request.getfixturevalue(kind)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks where nobody has said no
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM")
    (folder / "evil.py").write_text(CODE.format(mark=str(mark)))
    change(folder / "config.json", auto_map=dict.fromkeys(classes, "evil.Model"), trust_remote_code=True)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Model", "evil.Model"]})
    change(folder / "tokenizer_config.json", trust_remote_code=True, tokenizer_class="Model")
    if not known:
        change(folder / "config.json", model_type="evil", architectures=["Model"])
        refused(lambda: load(folder), mark)
        return
    with contextlib.suppress(InputError):
        load(folder)  # a model of transformers' own: the code is passed over
    assert not mark.exists()


@pytest.mark.parametrize(("kind", "load"), LOADERS)
def test_a_model_that_asks_for_code_of_the_hub(
    kind: str, load: Callable[[Any], Any], request: pytest.FixtureRequest, mark: Path
) -> None:
    folder: Path = request.getfixturevalue(kind)
    (folder / SUMS).unlink(missing_ok=True)  # a stranger's model has none, or right ones
    change(folder / "config.json", attn_implementation="stranger/kernel")
    assert "code of the hub" in refused(lambda: load(folder), mark)


@pytest.mark.parametrize(("kind", "load"), LOADERS)
def test_an_adapter_inside_a_model_folder(
    kind: str, load: Callable[[Any], Any], request: pytest.FixtureRequest, mark: Path, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(kind)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "auto_mapping": {"parent_library": "evil"}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    for data in pickles(mark, tmp_path / "x.pt"):
        (folder / "adapter_model.bin").write_bytes(data)
        assert "adapter" in refused(lambda: load(folder), mark)


def test_a_prompt(mark: Path, tmp_path: Path) -> None:
    run = run_of(run_prompts.main, tmp_path / "runs", "--methods", "pt", "--sets", "sst2")
    folder = run / "prompts" / "sst2"
    net, tokenizer = load_language_model("tiny")
    table = tmp_path / "own.csv"
    table.write_text("id,sentence\n1,a good one\n")
    loads: list[Callable[[], Any]] = [
        lambda: SoftPrompt.from_adapter(folder),
        lambda: predict_files(run, {"sst2": table}, tmp_path / "out"),
    ]
    PromptedModel.load(folder, net, tokenizer)
    for load in loads:
        load()
    for sums in run.rglob(SUMS):
        sums.unlink()
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for data in pickles(mark, tmp_path / "x.pt"):
        weights.write_bytes(data)
        for load in loads:
            assert weights.name in refused(load, mark)
        weights.unlink()
        for name in ("adapter_model.bin", "adapter_model.pt", "prompt.bin"):
            (folder / name).write_bytes(data)
        for load in loads:
            assert "safe_serialization" in refused(load, mark)
        weights.write_bytes(whole)
        for name in ("adapter_config.json", "prompt.json"):
            kept = (folder / name).read_bytes()
            (folder / name).write_bytes(data)
            refused(loads[1], mark)
            (folder / name).write_bytes(kept)


def change(file: Path, **values: Any) -> None:
    """Set values of a JSON object."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
