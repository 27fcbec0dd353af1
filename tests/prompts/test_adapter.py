"""Saved prompts: read again here, by PEFT, and in a new process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.files import SUMS
from metapretrain.prompts import PromptBatch, PromptedModel, PromptMAML, SoftPrompt
from tests.forks import python
from tests.prompts.tiny import KINDS, TEXTS, model_of, prompted, tokenizer_of

peft = pytest.importorskip("peft")

LOAD = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from metapretrain import PromptedModel, SoftPrompt
for name, auto in {"gpt2": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM}.items():
    folder = f"{sys.argv[1]}/{name}"
    base = auto.from_pretrained(f"{folder}/base", dtype=torch.float64)
    ours = PromptedModel.load(f"{folder}/prompt", base, AutoTokenizer.from_pretrained(f"{folder}/base"))
    prompt, batch = SoftPrompt.from_adapter(f"{folder}/prompt"), ours.encode(torch.load(f"{folder}/texts.pt"))
    found = {"ours": ours(prompt(), batch).detach()}
    inputs = torch.load(f"{folder}/inputs.pt")
    found["peft"] = PeftModel.from_pretrained(base, f"{folder}/prompt")(**inputs).logits.detach()
    torch.save(found, f"{folder}/found.pt")
"""


def inputs_of(model: PromptedModel, batch: PromptBatch) -> dict[str, Any]:
    """What PEFT's model is called with to answer the rows."""
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if model.kind == "encoder-decoder":
        sentinel = batch.input_ids.gather(1, batch.answer[:, None])
        inputs["decoder_input_ids"] = torch.cat([torch.zeros_like(sentinel), sentinel], 1)
    return inputs


def scores_of(model: PromptedModel, batch: PromptBatch, logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the label words from all logits (B, ..., V) of PEFT's model."""
    places = torch.ones_like(batch.answer) if model.kind == "encoder-decoder" else batch.answer + 6
    ids, _ = model.verbalizer.padded()
    return logits[torch.arange(len(batch)), places].log_softmax(-1)[:, ids[:, 0]]


def saved(name: str, folder: Path) -> tuple[PromptedModel, SoftPrompt]:
    model, prompt = prompted(name), SoftPrompt.random(6, 16, seed=2).double()
    maml = PromptMAML(model.model, prompt, model.template, model.verbalizer, max_length=model.max_length)
    maml.save_pretrained(folder)
    return model, prompt


@pytest.mark.parametrize("name", KINDS)
def test_peft_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    model, prompt = saved(name, tmp_path)
    batch = model.encode(TEXTS)
    scores = model(prompt(), batch).detach()
    adapted = peft.PeftModel.from_pretrained(model_of(name), tmp_path)
    with torch.no_grad():
        logits = adapted(**inputs_of(model, batch)).logits
    torch.testing.assert_close(scores_of(model, batch, logits), scores, rtol=0, atol=1e-8)


def test_a_new_process_gives_the_same_logits(tmp_path: Path) -> None:
    expected = {}
    for name in ("gpt2", "t5"):
        model, prompt = saved(name, tmp_path / name / "prompt")
        batch = model.encode(TEXTS)
        expected[name] = (model, batch, model(prompt(), batch).detach())
        model.model.save_pretrained(tmp_path / name / "base")
        tokenizer_of(name).save_pretrained(tmp_path / name / "base")
        torch.save(TEXTS, tmp_path / name / "texts.pt")
        torch.save(inputs_of(model, batch), tmp_path / name / "inputs.pt")
    done = python("-c", LOAD, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name, (model, batch, scores) in expected.items():
        found = torch.load(tmp_path / name / "found.pt")
        torch.testing.assert_close(found["ours"], scores, rtol=0, atol=1e-8)
        torch.testing.assert_close(scores_of(model, batch, found["peft"]), scores, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("name", "task"), [("gpt2", "CAUSAL_LM"), ("t5", "SEQ_2_SEQ_LM")])
def test_a_prompt_of_peft_is_an_initialisation(name: str, task: str, tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type=task, num_virtual_tokens=6)
    theirs = peft.get_peft_model(model_of(name), config).eval()
    theirs.save_pretrained(tmp_path)
    prompt, model = SoftPrompt.from_adapter(tmp_path), prompted(name)
    assert prompt.length == 6
    batch = model.encode(TEXTS)
    with torch.no_grad():
        logits = theirs(**inputs_of(model, batch)).logits
    torch.testing.assert_close(scores_of(model, batch, logits), model(prompt(), batch).detach(), rtol=0, atol=1e-8)


def test_what_is_saved_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    model = prompted("gpt2")
    model.model.config._name_or_path = str(tmp_path / "secret")
    model.save(tmp_path / "prompt", SoftPrompt.random(6, 16)())
    assert not [file for file in (tmp_path / "prompt").iterdir() if b"secret" in file.read_bytes()]
    assert {file.name for file in (tmp_path / "prompt").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "prompt.json",
        "weights.sha256",
    }


@pytest.mark.parametrize(
    "change",
    [{"template": "It was <Y>."}, {"template": None}, {"words": ["bad", 1]}, {"max_length": "x"}, {"normalise": "x"}],
)
def test_settings_that_are_damaged_are_named_with_their_file(change: dict[str, Any], tmp_path: Path) -> None:
    model, _ = saved("gpt2", tmp_path)
    (tmp_path / SUMS).unlink()
    notes = json.loads((tmp_path / "prompt.json").read_text())
    (tmp_path / "prompt.json").write_text(json.dumps(notes | change))
    with pytest.raises(InputError, match=f"prompt.json of {tmp_path}: .*{next(iter(change))[:4]}"):
        PromptedModel.load(tmp_path, model.model, tokenizer_of("gpt2"))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no adapter_config\.json"):
        SoftPrompt.from_adapter(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text("{")
    with pytest.raises(InputError, match="is damaged: not a JSON object"):
        SoftPrompt.from_adapter(tmp_path)
    config.write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(InputError, match="type LORA"):
        SoftPrompt.from_adapter(tmp_path)
    config.write_text(json.dumps({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}))
    with pytest.raises(InputError, match="safe_serialization=True"):
        SoftPrompt.from_adapter(tmp_path)
    with pytest.raises(InputError, match=r"has no prompt\.json"):
        PromptedModel.load(tmp_path, model_of("gpt2"), tokenizer_of("gpt2"))


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (torch.full((3, 16), torch.nan), "holds NaN or infinity"),
        (torch.zeros(2, 3, 16), "with L >= 1, not torch.float32 (2, 3, 16)"),
        (torch.zeros(0, 16), "not torch.float32 (0, 16)"),
        (torch.zeros(3, 15), "of floats (L, 16)"),
        (torch.zeros(3, 16, dtype=torch.int64), "not torch.int64 (3, 16)"),
        (SoftPrompt.random(3, 16), "not SoftPrompt"),
    ],
)
def test_what_is_no_prompt_replaces_none(wrong: Any, part: str, tmp_path: Path) -> None:
    model, good = prompted("gpt2"), torch.rand(3, 16)
    model.save(tmp_path, good)
    with pytest.raises(InputError) as error:
        model.save(tmp_path, wrong)
    assert part in str(error.value)
    assert torch.equal(SoftPrompt.from_adapter(tmp_path).weight, good)


def test_a_folder_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file cannot be written \(.*\); name another folder"):
        prompted("gpt2").save(tmp_path / "file", torch.zeros(3, 16))


def test_rows_beyond_those_of_the_config_are_another_prompt(tmp_path: Path) -> None:
    prompted("gpt2").save(tmp_path, torch.zeros(3, 16))
    (tmp_path / SUMS).unlink()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"num_virtual_tokens": 2}))
    with pytest.raises(InputError, match="does not hold prompt_embeddings of 2 rows"):
        SoftPrompt.from_adapter(tmp_path)
