"""Dialogues with right and wrong responses to a context: DailyDialog++ and MuTual."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from metapretrain.data.documents import plain_sentences
from metapretrain.data.images import file_record
from metapretrain.data.published import existing, find_folder, inside, untar_texts
from metapretrain.data.tables import check_json, parse_json, read_json_lines
from metapretrain.data.texts import Rows, TextSet
from metapretrain.errors import InputError


@dataclass(frozen=True)
class Dialogue:
    """The turns of a context in order, the responses that belong to it (one or more), and those that do not."""

    context: list[str]
    right: list[str]
    wrong: list[str] = field(default_factory=list)


DAILY_PARTS = {"train": "data_positives.json", "validation": "dev.json", "test": "test.json"}
DAILY = ("data_positives.json", "train.json", "dev.json", "test.json")
LAYOUTS = {
    "dailydialog": f"any of {', '.join(DAILY)}, JSON lines of {{context, positive_responses}}",
    "dailydialog-pp": f"{', '.join(DAILY_PARTS.values())}: JSON lines of {{context, positive_responses}}, the last two "
    "with adversarial_negative_responses and random_negative_responses",
    "mutual": "mutual.tar.gz, which holds data/mutual/{train,dev}/*.txt: JSON {article, options, answers}",
}
_RIGHT = {"context": [str | None], "positive_responses": [str | None]}
_WRONG = {"adversarial_negative_responses": [str | None], "random_negative_responses": [str | None]}
_MUTUAL = {"article": str, "options": [str], "answers": str}
_TURN = re.compile(r"\s+(?=[mf] : )")


def load_dailydialog_pp(folder: str | Path) -> dict[str, Rows[Dialogue]]:
    """Read DailyDialog++; of the training dialogues those whose context is in dev or test are left out.

    ``train`` has right responses only, ``validation`` and ``test`` also wrong ones, half of which share words with the
    context.
    """
    root = inside(folder, "dailydialog_pp")
    parts = {
        split: Rows(_daily(root / name, split != "train"), split, files={name: file_record(root / name, None)})
        for split, name in DAILY_PARTS.items()
    }
    held = {tuple(row.context) for split in ("validation", "test") for row in parts[split].rows}
    kept = [row for row in parts["train"].rows if tuple(row.context) not in held]
    return parts | {"train": Rows(kept, "train", {"in_test": len(parts["train"]) - len(kept)}, parts["train"].files)}


def dailydialog_sentences(folder: str | Path) -> TextSet:
    """Return the plain sentences of DailyDialog++: contexts and the responses that belong to them."""
    layout = LAYOUTS["dailydialog"]
    found = existing(find_folder(folder, ("dailydialog_pp", "dailydialog"), (), layout), DAILY, layout)
    rows = (row for file in found for row in _daily(file, wrong=False))
    return plain_sentences("dailydialog", (text for row in rows for text in (*row.context, *row.right)), found)


def load_mutual(folder: str | Path) -> dict[str, Rows[Dialogue]]:
    """Read MuTual's ``train`` (7,088 dialogues) and ``validation`` (886); the answers of its test are hidden."""
    file = inside(folder, "mutual") / "mutual.tar.gz"
    if not file.is_file():
        raise InputError(f"{file} does not exist; expected {LAYOUTS['mutual']}")
    found: dict[str, list[tuple[str, Dialogue]]] = {"train": [], "dev": []}
    for name, text in untar_texts(file, LAYOUTS["mutual"]):
        names = Path(name).parts
        if len(names) == 4 and names[2] in found:
            found[names[2]].append((names[3], _mutual(text, f"{file}, {name}")))
    if not all(found.values()):
        raise InputError(f"{file} must hold dialogues of train and dev; expected {LAYOUTS['mutual']}")
    files = {file.name: file_record(file, None)}
    splits = (("train", "train"), ("validation", "dev"))
    return {
        split: Rows([row for _, row in sorted(found[part], key=lambda row: row[0])], split, files=files)
        for split, part in splits
    }


def _daily(file: Path, wrong: bool) -> list[Dialogue]:
    """The dialogues of a file of DailyDialog++, with `wrong` also the wrong responses, which training has not."""
    schema = _RIGHT | _WRONG if wrong else _RIGHT
    rows = []
    for where, item in read_json_lines(file, schema, LAYOUTS["dailydialog-pp"]):
        context, right, *others = ([text for text in item[name] if text and text.strip()] for name in schema)
        if not context or not right:
            raise InputError(f"{where}: a dialogue needs a context and a response")
        rows.append(Dialogue(context, right, [text for column in others for text in column]))
    return rows


def _mutual(text: str, where: str) -> Dialogue:
    item = check_json(parse_json(text, where), _MUTUAL, where, LAYOUTS["mutual"])
    options, article, answer = item["options"], item["article"], item["answers"]
    place = "ABCD".find(answer) if len(answer) == 1 else -1
    if not 0 <= place < len(options):
        raise InputError(f"{where}: the answer must be a letter of one of {len(options)} options, got {answer!r}")
    wrong = [option for number, option in enumerate(options) if number != place]
    return Dialogue(_TURN.split(article.strip()), [options[place]], wrong)
