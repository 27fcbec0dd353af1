"""A finished run, or a saved prompt, on the Hugging Face Hub, with a model card that the run fills in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from metapretrain.errors import InputError
from metapretrain.experiments.saved import ENCODER, PROMPTS, content_of, refuse_trial
from metapretrain.files import SUMS, check_sums, read_json
from metapretrain.prompts.soft_prompt import CONFIG, OURS
from metapretrain.report.markdown import figure_text, limits, markdown_table, printable
from metapretrain.report.results import collect
from metapretrain.report.rows import Row
from metapretrain.report.table import build_table

RESULT = "result.json"


def pushed_files(folder: Path) -> list[str]:
    """The files that are uploaded: those that decide a prediction, their checksums, and the result; no data, no logs.

    InputError: nothing finished is there, or a file is not the one that was written.
    """
    refuse_trial(folder)
    if not (folder / SUMS).is_file():
        raise InputError(f"{folder} has no {SUMS}: give the folder of a finished run, or of a saved prompt")
    check_sums(folder)
    names = [line.partition("  ")[2] for line in (folder / SUMS).read_text(encoding="utf-8").splitlines()]
    return [*names, SUMS, *[RESULT] * (folder / RESULT).is_file()]


def model_card(run: str | Path, repo: str) -> str:
    """Return a model card: method, data, figures with intervals, command, use and limits, as the run has them.

    `repo` is OWNER/NAME, as the card's examples name it.
    """
    folder = Path(run)
    result, config = read_json(folder / RESULT) or {}, (read_json(folder / "config.json") or {}).get("config", {})
    kind = content_of(folder)
    about = {"library_name": "metapretrain", "tags": ["metapretrain", kind.rstrip("s")]}
    base = config.get("choices", {}).get("model") if kind == "prompts" else None
    if (folder / OURS).is_file():
        base = (read_json(folder / CONFIG) or {}).get("base_model_name_or_path")
    if isinstance(base, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", base):
        about["base_model"] = base
    head = "".join(f"{name}: {value if isinstance(value, str) else list(value)}\n" for name, value in about.items())
    title = f"{result['method']} on {result['dataset']}" if result else "a soft prompt"
    parts = [f"---\n{head}---\n\n# {repo.partition('/')[2]}: {printable(title)}\n"]
    if result:
        benchmark, recipe, seed, device = (result.get(name) for name in ("benchmark", "recipe", "seed", "device"))
        parts += [
            f"Made by metapretrain: benchmark {benchmark}, recipe {recipe}, seed {seed}.\n",
            f"## Figures\n\n{_figures(folder, result)}",
            f"## Data\n\n{_data(result)}",
            f"## Command\n\n```\n{result.get('command')}\n```\n",
            f"Commit {result.get('commit') or 'unknown'}, on {device}."
            " All choices are in `config.json`; the script's `--config config.json` runs it again.\n",
        ]
    parts += [f"## Use\n\n{_use(folder, kind, repo)}", f"## Limits\n\n{_limits(folder, result)}"]
    return "\n".join(parts)


def _figures(folder: Path, result: dict[str, Any]) -> str:
    own = _row_in(folder, result["method"])
    if own is None:
        return "It has no figures on a test part.\n"
    columns, row = own
    table = folder.resolve().parent
    found = _row_in(table, result["method"]) if (table / "report" / "layout.json").is_file() else None
    together = found[1] if found is not None and len(found[1].seeds) > 1 else None
    header = ["metric", "this model", "95% interval over test examples"]
    header += [] if together is None else ["mean over seeds ± 95% interval"]
    lines = []
    for column in columns:
        if column.name in row.scores:
            spread = limits(column, row.test_sets.get(column.name))
            half = result["metrics"].get(column.metric.replace("accuracy", "ci95"))
            if half is not None and column.metric.endswith("accuracy"):
                spread = f"± {100 * half:.2f} over episodes"
            cells = [column.title, figure_text(column, row.scores[column.name]), spread]
            lines.append(cells + ([] if together is None else [figure_text(column, together.scores.get(column.name))]))
    seeds = "" if together is None else f"\nSeeds: {', '.join(map(str, together.seeds))} (Student's t).\n"
    return "\n".join(markdown_table(header, lines)) + seeds


def _row_in(folder: Path, method: str) -> tuple[Any, Row] | None:
    for group in build_table(collect(folder)).groups:
        for row in (*group.rows, *group.pretraining):
            if row.method == method:
                return group.layout.all_columns, row
    return None


def _data(result: dict[str, Any]) -> str:
    counts = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in result.get("counts", {}).items())
    files = ", ".join(f"`{Path(name).name}`" for name in result.get("data", {}))
    return f"{result['dataset']}: {counts}.\n" + (f"\nFiles, with checksums in `{RESULT}`: {files}.\n" if files else "")


def _use(folder: Path, kind: str, repo: str) -> str:
    lines = ["import metapretrain", "from huggingface_hub import snapshot_download", ""]
    lines += [f'run = snapshot_download("{repo}")']
    if kind == "images":
        lines += [
            "model = metapretrain.load(run)",
            "z = model.encode(images)  # uint8 (N, C, H, W), or files of images",
        ]
    elif kind == "texts":
        lines += ["model = metapretrain.load(run)", 'z = model.encode(["a sentence"])']
        lines += ["# or, without metapretrain:", "from transformers import AutoModel"]
        lines += [f'encoder = AutoModel.from_pretrained("{repo}", subfolder="{ENCODER}")']
    else:
        names = sorted(path.name for path in (folder / PROMPTS).glob("*") if path.is_dir())
        lines += ["# metapretrain predict RUN --texts SET=FILE, or with peft, `model` being the language model:"]
        lines += ["from peft import PeftModel"]
        for more in [f', subfolder="{PROMPTS}/{name}"' for name in names] or [""]:
            lines.append(f'prompted = PeftModel.from_pretrained(model, "{repo}"{more})')
    return "```python\n" + "\n".join(lines) + "\n```\n"


def _limits(folder: Path, result: dict[str, Any]) -> str:
    told = ["Figures hold for the data above; nothing was measured on other data."] if result else []
    if "smoke" in str(result.get("recipe")):
        told.append("A smoke run: a few tiny steps, to see that everything works. It is of no use.")
    if result.get("kind") == "pretraining":
        told.append("A pretraining: it was not fine-tuned, and its figures are those of nearest prototypes.")
    if result.get("transductive"):
        told.append("Predictions of the images of one call depend on each other, through BatchNorm.")
    if not result:
        told.append("A prompt without a run: nothing was recorded of its training and nothing measured.")
    return (
        "\n".join(
            f"- {line}" for line in [*told, "Biases of the training data are in the model; none were looked for."]
        )
        + "\n"
    )


def push_to_hub(run: str | Path, repo: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a finished run, or a saved prompt, with its model card as one commit; return the address.

    Args:
        repo: OWNER/NAME; it is made if it is not there. token: by default that of `hf auth login` or `HF_TOKEN`.

    InputError: nothing finished is there, no token, or the hub cannot be reached or refuses.
    """
    folder = Path(run)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repo) is None:
        raise InputError(f"a repository of the hub is OWNER/NAME, not {repo!r}")
    names, card = pushed_files(folder), model_card(folder, repo)
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if token is None and get_token() is None:
        raise InputError("there is no token of the hub: run hf auth login, or set HF_TOKEN to one that may write")
    files = [CommitOperationAdd(name, folder / name) for name in names]
    files.append(CommitOperationAdd("README.md", card.encode()))
    api = HfApi(token=token)
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        done = api.create_commit(repo, files, commit_message=f"{folder.name}, by metapretrain")
    except Exception as error:  # the hub's, httpx's and those of the system
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"cannot push to {repo}: {reason}; is the network there, and may the token write?") from error
    return str(done.repo_url)
