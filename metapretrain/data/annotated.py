"""Readers of annotated texts: CoNLL-2003, CoNLL04, SQuAD, DailyDialog++ and MuTual; what a row of each holds."""

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metapretrain.data.documents import plain_sentences
from metapretrain.data.images import file_record
from metapretrain.data.published import existing, find_folder, inside, untar_texts
from metapretrain.data.tables import check_json, parse_json, read_json, read_json_lines, read_utf8
from metapretrain.data.texts import Rows, TextSet
from metapretrain.errors import InputError

logger = logging.getLogger(__name__)

ENTITIES = ("PER", "ORG", "LOC", "MISC")
TAGS = ("O", *(f"{begin}-{kind}" for kind in ENTITIES for begin in "BI"))
PARTS = {"train": "eng.train", "validation": "eng.testa", "test": "eng.testb"}
RELATIONS = ("Kill", "Live_In", "Located_In", "OrgBased_In", "Work_For")
FOLDERS = {"small_train": "train", "all_val": "val"}
XQUAD = "xquad.en.json"
DAILY_PARTS = {"train": "data_positives.json", "validation": "dev.json", "test": "test.json"}
DAILY = ("data_positives.json", "train.json", "dev.json", "test.json")
LAYOUTS = {
    "conll2003": f"{', '.join(PARTS.values())}: a line `word POS chunk entity` a word, an empty line after each "
    "sentence",
    "conll04": "conll04.json: {train, dev, test}, each a list of {tokens, entities: [{type, start, end}], "
    "relations: [{type, head, tail}]}",
    "squad": "small_train/train.{context,question,answer,span} and all_val/val.{context,question,answer,span}, "
    f"parallel lines of words with the first and last word of the answer, and {XQUAD} (SQuAD v1.1 JSON)",
    "dailydialog": f"any of {', '.join(DAILY)}, JSON lines of {{context, positive_responses}}",
    "dailydialog-pp": f"{', '.join(DAILY_PARTS.values())}: JSON lines of {{context, positive_responses}}, the last two "
    "with adversarial_negative_responses and random_negative_responses",
    "mutual": "mutual.tar.gz, which holds data/mutual/{train,dev}/*.txt: JSON {article, options, answers}",
}
_SENTENCE = {
    "tokens": [str],
    "entities": [{"type": str, "start": int, "end": int}],
    "relations": [{"type": RELATIONS, "head": int, "tail": int}],
}


@dataclass(frozen=True)
class TaggedRow:
    """The words of a sentence, and the numbers of their tags in :data:`TAGS`; B begins every entity (IOB2)."""

    words: list[str]
    tags: list[int]


def load_conll2003(folder: str | Path) -> dict[str, Rows[TaggedRow]]:
    """Read ``train`` (14,041 sentences), ``validation`` (testa, 3,250) and ``test`` (testb, 3,453)."""
    root = inside(folder, "conll2003")
    return {split: _tagged(root / name, split) for split, name in PARTS.items()}


def begin_tags(tags: list[str]) -> list[str]:
    """Tags in which B begins every entity, from those in which it only parts two neighbours of one kind (IOB1).

    Example:
        >>> begin_tags(["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-ORG"])
        ['B-PER', 'I-PER', 'B-PER', 'O', 'B-LOC', 'B-ORG']
    """
    found = []
    for place, tag in enumerate(tags):
        before = tags[place - 1] if place else "O"
        starts = tag.startswith("I-") and before[2:] != tag[2:]
        found.append(f"B-{tag[2:]}" if starts else tag)
    return found


def _tagged(file: Path, split: str) -> Rows[TaggedRow]:
    text = read_utf8(file, f"expected {LAYOUTS['conll2003']}")
    sentences: list[list[list[str]]] = [[]]  # of each word its four columns
    for number, line in enumerate(text.split("\n"), 1):
        parts = line.split()
        if not parts or parts[0] == "-DOCSTART-":
            if sentences[-1]:
                sentences.append([])
            continue
        if len(parts) != 4 or parts[3] not in TAGS or "-DOCSTART-" in parts:
            raise InputError(f"{file}, line {number}: expected `word POS chunk entity`, got {line.strip()!r}")
        sentences[-1].append(parts)
    rows = [
        TaggedRow([parts[0] for parts in row], [TAGS.index(tag) for tag in begin_tags([parts[3] for parts in row])])
        for row in sentences
        if row
    ]
    return Rows(rows, split, files={file.name: file_record(file, None)})


@dataclass(frozen=True)
class RelationRow:
    """The words of a sentence, its entities (type, first word, word after the last), and relations by (head, tail)."""

    words: list[str]
    entities: list[tuple[str, int, int]]
    relations: dict[tuple[int, int], str]


def load_conll04(folder: str | Path) -> dict[str, Rows[RelationRow]]:
    """Read ``train`` (922 sentences), ``validation`` (231) and ``test`` (288)."""
    file = inside(folder, "conll04") / "conll04.json"
    names = {"train": "train", "validation": "dev", "test": "test"}
    parts = read_json(file, {part: [_SENTENCE] for part in names.values()}, LAYOUTS["conll04"])
    files = {file.name: file_record(file, None)}
    found = {}
    for split, part in names.items():
        rows = [_related(item, f"{file}, {part} row {number}") for number, item in enumerate(parts[part])]
        if not rows:
            raise InputError(f"{file} has no sentence in {part!r}; it must be {LAYOUTS['conll04']}")
        found[split] = Rows(rows, split, files=files)
    return found


def _related(item: dict[str, Any], where: str) -> RelationRow:
    words = item["tokens"]
    entities = [(about["type"], about["start"], about["end"]) for about in item["entities"]]
    relations = {(about["head"], about["tail"]): about["type"] for about in item["relations"]}
    for kind, start, end in entities:
        if not 0 <= start < end <= len(words):
            raise InputError(f"{where}: the {kind} {start}..{end} is outside of its {len(words)} words")
    for (head, tail), kind in relations.items():
        if not (0 <= head < len(entities) and 0 <= tail < len(entities)) or head == tail:
            told = f"relation {kind!r} of entities {head} and {tail}"
            raise InputError(f"{where}: {told}; there are {len(entities)} entities")
    if not words:
        raise InputError(f"{where}: a sentence without words")
    return RelationRow(words, entities, relations)


_ANSWER = {"answer_start": int, "text": str}
_XQUAD = {"data": [{"paragraphs": [{"context": str, "qas": [{"question": str, "answers": [_ANSWER]}]}]}]}
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Question:
    """A question, the words of its passage, and the words begin..end of it, both included, that answer it."""

    question: str
    words: list[str]
    begin: int
    end: int
    answer: str


def load_squad(folder: str | Path, *, every: int = 10) -> dict[str, Rows[Question]]:
    """Read the questions of both folders for training, and XQuAD's as the test; no passage of it is in the folders.

    Questions of each `every`-th passage of ``all_val`` are for validation, the same in every run. Counts:
    ``unaligned``, answers left out, since they do not begin and end with a word.
    """
    root = inside(folder, "squad")
    if not root.is_dir():
        raise InputError(f"no folder {root}: it must hold {LAYOUTS['squad']}")
    kept: list[Question] = []
    held: list[Question] = []
    files: dict[str, dict[str, Any]] = {}
    lost = 0
    for place, stem in FOLDERS.items():
        rows, records, backward = _parallel(root / place, stem)
        files |= records
        lost += backward
        if place == "small_train":
            kept += rows
            continue
        numbers: dict[str, int] = {}
        for row in rows:
            number = numbers.setdefault(" ".join(row.words), len(numbers))
            (held if number % every == every - 1 else kept).append(row)
    return {
        "train": Rows(kept, "train", {"unaligned": lost} if lost else {}, files),
        "validation": Rows(held, "validation", {}, files),
        "test": _xquad(root / XQUAD),
    }


def _parallel(folder: Path, stem: str) -> tuple[list[Question], dict[str, dict[str, Any]], int]:
    names = [f"{stem}.{part}" for part in ("context", "question", "answer", "span")]
    lines = []
    for name in names:
        text = read_utf8(folder / name, f"expected {LAYOUTS['squad']}")
        lines.append([line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")])
    counts = {name: len(part) for name, part in zip(names, lines, strict=True)}
    if len(set(counts.values())) > 1:
        raise InputError(f"{folder}: its files must have as many lines as each other, got {counts}")
    rows = []
    for number, (context, question, answer, span) in enumerate(zip(*lines, strict=True), 1):
        where = f"{folder / names[3]}, line {number}"
        words, ends = context.split(), span.split()
        if len(ends) != 2 or not all(re.fullmatch("[0-9]{1,9}", end) for end in ends):
            raise InputError(f"{where}: expected the numbers of two words, got {span!r}")
        begin, end = (int(place) for place in ends)
        if end == begin - 1:  # how the publisher's aligner marks an answer that it did not find whole
            logger.warning("%s: the answer ends at word %d, before it begins; left out", where, end)
            continue
        if not begin <= end < len(words):
            raise InputError(f"{where}: words {begin}..{end} are not in the {len(words)} of its context")
        if not question.strip():
            raise InputError(f"{folder / names[1]}, line {number}: an empty question")
        rows.append(Question(question.strip(), words, begin, end, answer.strip()))
    files = {f"{folder.name}/{name}": file_record(folder / name, None) for name in names}
    return rows, files, counts[names[0]] - len(rows)


def _xquad(file: Path) -> Rows[Question]:
    whole = read_json(file, _XQUAD, LAYOUTS["squad"])
    rows, lost = [], 0
    for number, paragraph in enumerate(paragraph for article in whole["data"] for paragraph in article["paragraphs"]):
        where, context = f"{file}, paragraph {number}", paragraph["context"]
        found = list(_WORD.finditer(context))
        begins = {match.start(): place for place, match in enumerate(found)}
        ends = {match.end(): place for place, match in enumerate(found)}
        words = [match.group() for match in found]
        for item in paragraph["qas"]:
            if not item["answers"]:
                raise InputError(f"{where}: a question without an answer")
            begin, text = item["answers"][0]["answer_start"], item["answers"][0]["text"]
            if context[begin : begin + len(text)] != text:
                raise InputError(f"{where}: the answer {text!r} does not stand at letter {begin}")
            if begin not in begins or begin + len(text) not in ends:
                lost += 1
                continue
            rows.append(Question(item["question"], words, begins[begin], ends[begin + len(text)], text))
    if lost:
        logger.info("%s: %d answers do not begin and end with a word; left out", file, lost)
    return Rows(rows, "test", {"unaligned": lost} if lost else {}, {file.name: file_record(file, None)})


@dataclass(frozen=True)
class Dialogue:
    """The turns of a context in order, the responses that belong to it (one or more), and those that do not."""

    context: list[str]
    right: list[str]
    wrong: list[str] = field(default_factory=list)


_RIGHT = {"context": [str | None], "positive_responses": [str | None]}
_WRONG = {"adversarial_negative_responses": [str | None], "random_negative_responses": [str | None]}
_MUTUAL = {"article": str, "options": [str], "answers": str}
_TURN = re.compile(r"\s+(?=[mf] : )")


def load_dailydialog_pp(folder: str | Path) -> dict[str, Rows[Dialogue]]:
    """Read DailyDialog++; of the training dialogues those whose context is in dev or test are left out.

    ``train`` has right responses only; half of the wrong ones of the other parts share words with the context.
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
    parts = {part: [row for _, row in sorted(rows, key=lambda row: row[0])] for part, rows in found.items()}
    return {split: Rows(parts[part], split, files=files) for split, part in (("train", "train"), ("validation", "dev"))}


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
