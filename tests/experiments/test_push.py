"""Runs and prompts pushed to a fake hub: what is uploaded, what the card says, and errors of one line."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from benchmarks import run_fewshot, run_prompts, run_stl10
from metapretrain import load
from metapretrain.cli import main
from metapretrain.errors import InputError
from metapretrain.experiments.push import model_card, push_to_hub, pushed_files

USUAL = ["--smoke", "--device", "cpu", "--no-figures"]
SCRIPTS = {
    "images": (run_stl10, ["--dataset", "digits", "--methods", "supervised-mlp", "--seeds", "0", "1"]),
    "fewshot": (run_fewshot, ["--methods", "protonet", "--settings", "5w1s"]),
    "prompts": (run_prompts, ["--methods", "pt", "--sets", "sst2"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each kind."""
    out, found = tmp_path_factory.mktemp("runs"), {}
    for kind, (script, words) in SCRIPTS.items():
        assert script.main([*words, *USUAL, "--out", str(out / kind)]) == 0
        found[kind] = sorted(path.parent for path in (out / kind).rglob("result.json"))[0]
    return found


class Hub(BaseHTTPRequestHandler):
    """Takes repositories and commits; every file is small enough to come in the commit itself."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        address = f"http://127.0.0.1:{server.server_port}"
        if self.headers.get("Authorization") != "Bearer good":
            return self.answer(401, {"error": "Invalid credentials"})
        if self.path == "/api/repos/create":
            server.made.append(json.loads(body))
            return self.answer(200, {"url": f"{address}/me/model"})
        if self.path.endswith("/preupload/main"):
            how = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": one["path"], **how} for one in json.loads(body)["files"]]
            return self.answer(200, {"files": files})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        lines = [json.loads(line) for line in body.splitlines()]
        server.commits.append(
            {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
        )
        repo = self.path.removeprefix("/api/models/").removesuffix("/commit/main")
        return self.answer(200, {"commitUrl": f"{address}/{repo}/commit/{'0' * 40}", "commitOid": "0" * 40})

    def answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Hub)
    server.made, server.commits = [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "good")
    yield server
    server.shutdown()
    server.server_close()


def test_a_pushed_run_loads_as_the_run_does(runs: dict[str, Path], hub: Any, tmp_path: Path, capsys: Any) -> None:
    assert main(["push", str(runs["images"]), "me/model", "--private"]) == 0
    assert capsys.readouterr().out.strip().endswith("/me/model")
    assert hub.made[0]["name"] == "model" and hub.made[0]["organization"] == "me"
    assert hub.made[0].get("private") is True or hub.made[0].get("visibility") == "private"
    (files,) = hub.commits
    kept = {path.relative_to(runs["images"]).as_posix() for path in runs["images"].rglob("*") if path.is_file()}
    left_out = {name for name in kept if name.startswith(("metrics", "events", "predictions", "projector", ".lock"))}
    assert left_out and set(files) == (kept - left_out) | {"README.md"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(load(tmp_path).logits(images), load(runs["images"]).logits(images))


def test_the_card_says_what_the_run_says(runs: dict[str, Path]) -> None:
    card = model_card(runs["images"], "me/model")
    front = huggingface_hub.ModelCard(card).data
    assert front.library_name == "metapretrain" and "image" in front.tags
    result = json.loads((runs["images"] / "result.json").read_text())
    assert f"{100 * result['metrics']['test_accuracy']:.2f}" in card
    (row,) = [line for line in card.splitlines() if line.startswith("| test % |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert " to " in cells[2] and "±" in cells[3]  # over examples; over both seeds
    for part in (result["command"], "train 360", "A smoke run", "test 400", 'snapshot_download("me/model")', "seed 0"):
        assert part in card, part
    few = model_card(runs["fewshot"], "me/few")
    assert (
        f"± {100 * json.loads((runs['fewshot'] / 'result.json').read_text())['metrics']['test_ci95']:.2f} over" in few
    )


def test_prompts_and_a_prompt_alone(runs: dict[str, Path], hub: Any, tmp_path: Path) -> None:
    assert push_to_hub(runs["prompts"], "me/prompts").endswith("/me/prompts")
    assert "prompts/sst2/adapter_model.safetensors" in hub.commits[0]
    assert b'subfolder="prompts/sst2"' in hub.commits[0]["README.md"]
    alone = tmp_path / "prompt"
    shutil.copytree(runs["prompts"] / "prompts" / "sst2", alone)
    push_to_hub(alone, "me/prompt")
    files = hub.commits[1]
    assert {"adapter_config.json", "adapter_model.safetensors", "prompt.json"} < set(files)
    assert b"nothing was recorded of its training" in files["README.md"]


def test_a_dry_run_shows_files_and_card(runs: dict[str, Path], hub: Any, capsys: Any) -> None:
    assert main(["push", str(runs["fewshot"]), "me/few", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("config.json\nlearner.safetensors\n") and "## Limits" in shown
    assert hub.made == hub.commits == []


def test_what_cannot_be_pushed_is_one_line(
    runs: dict[str, Path], hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    cases = {"OWNER/NAME, not 'model'": (runs["images"], "model"), "has no weights.sha256": (tmp_path, "me/model")}
    broken = tmp_path / "broken"
    shutil.copytree(runs["images"], broken)
    (broken / "encoder.safetensors").write_bytes(b"other")
    cases["encoder.safetensors is damaged"] = (broken, "me/model")
    for told, (run, repo) in cases.items():
        with pytest.raises(InputError, match=told):
            push_to_hub(run, repo)
    for repo in ("model", "../model", "me/my model"):  # refused without an upload too
        assert main(["push", str(runs["images"]), repo, "--dry-run"]) == 2
        assert capsys.readouterr().err.startswith("error: a repository of the hub is OWNER/NAME, not")
    with pytest.raises(InputError, match=r"cannot push to me/model: .*401"):
        push_to_hub(runs["images"], "me/model", token="bad")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"cannot push to me/model: .*is the network there"):
        push_to_hub(runs["images"], "me/model")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["push", str(runs["images"]), "me/model"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: there is no token of the hub: run hf auth login") and error.count("\n") == 1
    assert hub.made == hub.commits == []


def test_files_of_services_and_exports_are_no_part_of_a_run(runs: dict[str, Path], tmp_path: Path) -> None:
    from metapretrain.files import write_sums

    run = tmp_path / "run"
    shutil.copytree(runs["images"], run)
    for name in ("wandb/run-1/files/wandb-summary.json", "export/timm/config.json", "export/timm/model.safetensors"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    write_sums(run)
    assert pushed_files(run) == pushed_files(runs["images"])
