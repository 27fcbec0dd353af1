"""A finished run, or a saved prompt, on the Hugging Face Hub, with a model card that the run fills in."""

import re
from pathlib import Path
from typing import Any

from metapretrain.errors import InputError
from metapretrain.experiments.saved import PROMPTS, content_of, refuse_trial
from metapretrain.files import SUMS, check_sums, read_json
from metapretrain.prompts.soft_prompt import CONFIG, OURS
from metapretrain.report.markdown import figure_text, limits, markdown_table, printable
from metapretrain.report.results import collect
from metapretrain.report.rows import Row
from metapretrain.report.table import build_table

RESULT, REPO = "result.json", re.compile(r"\w[\w.-]*/\w[\w.-]*")


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
    """Return the card of a run for `repo`: method, data, figures with intervals, command, use and limits."""
    from huggingface_hub import ModelCard, ModelCardData

    if REPO.fullmatch(repo) is None:
        raise InputError(f"a repository of the hub is OWNER/NAME, not {repo!r}")
    folder, kind = Path(run), content_of(run)
    result, config = read_json(folder / RESULT) or {}, (read_json(folder / "config.json") or {}).get("config", {})
    base = config.get("choices", {}).get("model") if kind == "prompts" else None
    if (folder / OURS).is_file():
        base = (read_json(folder / CONFIG) or {}).get("base_model_name_or_path")
    base = base if isinstance(base, str) and REPO.fullmatch(base) else None
    title = f"{result['method']} on {result['dataset']}" if result else "a soft prompt"
    card: Any = ModelCard.from_template(
        ModelCardData(library_name="metapretrain", tags=["metapretrain", kind.rstrip("s")], base_model=base),
        template_path=str(Path(__file__).with_name("model_card.md")),
        repo=repo,
        name=repo.partition("/")[2],
        title=printable(title),
        result=result,
        kind=kind,
        figures=_figures(folder, result) if result else "",
        counts=", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in result.get("counts", {}).items()),
        files=", ".join(f"`{Path(name).name}`" for name in result.get("data", {})),
        prompts=sorted(f"{PROMPTS}/{path.name}" for path in (folder / PROMPTS).glob("*") if path.is_dir()),
    )
    return str(card)


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
    results = collect(folder).results
    for result in results:  # notes are of whole tables, and those of a benchmark are known in its script alone
        if "layout" in result:
            result["layout"] = {**result["layout"], "notes": []}
    rows = ((group, row) for group in build_table(results).groups for row in (*group.rows, *group.pretraining))
    return next(((group.layout.all_columns, row) for group, row in rows if row.method == method), None)


def push_to_hub(run: str | Path, repo: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a finished run, or a saved prompt, with its model card as one commit; return the address.

    Args:
        repo: OWNER/NAME; it is made if it is not there. token: by default that of `hf auth login` or `HF_TOKEN`.

    InputError: nothing finished is there, no token, or the hub cannot be reached or refuses.
    """
    folder = Path(run)
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
