"""Every data set that is read from files: a few rows in its publisher's format, and what a reader makes of them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from metapretrain.data.annotated import load_conll04, load_conll2003, load_dailydialog_pp, load_mutual, load_squad
from metapretrain.data.cs224n import load_cs224n, load_qqp
from metapretrain.data.documents import Documents, load_book, read_ptb_documents, read_wikitext2_documents
from metapretrain.data.glue import load_copa, load_glue, load_wic
from metapretrain.data.image_folder import load_image_folder
from metapretrain.data.images import ImageSet
from metapretrain.data.omniglot import load_omniglot
from metapretrain.data.registry import load_plain, load_sentiment
from metapretrain.data.stl10 import load_stl10
from metapretrain.data.tables import read_texts
from metapretrain.data.texts import TextSet, TextTask

Files = dict[str, bytes]
ROWS = 24


@dataclass(frozen=True)
class SmallSet:
    """Files, how they are read, and how many rows a change in one place may touch."""

    files: Files
    load: Callable[[Path], Any]
    touched: int = 1


def rows_of(found: Any) -> Counter[str]:
    """All rows of what a reader returned, whatever part they are in."""
    return Counter(_rows(found))


def _rows(found: Any) -> Iterator[str]:
    if isinstance(found, TextSet):
        labels = [None] * len(found) if found.labels is None else found.labels.tolist()
        yield from map(repr, zip(found.first, found.second or labels, labels, strict=True))
    elif isinstance(found, TextTask):
        for part in filter(None, (found.train, found.validation, found.dev, found.test)):
            yield from _rows(part)
    elif isinstance(found, ImageSet):
        for image, label in zip(found.images, found.labels.tolist(), strict=True):
            yield f"{found.classes[label]} {image.numpy().tobytes()!r}"
    elif isinstance(found, Documents):
        yield from (repr(sentence) for document in found.rows for sentence in document)
    elif isinstance(found, dict | list | tuple):
        for part in found.values() if isinstance(found, dict) else found:
            yield from _rows(part)
    elif hasattr(found, "train"):
        yield from _rows([found.train, found.test])
    else:
        yield from map(repr, found.rows)


def sentences(word: str, count: int = ROWS) -> list[str]:
    """Different sentences, some with letters beyond ASCII."""
    return [f"{word} café number {n}" if n % 3 else f"{word} plain number {n}" for n in range(count)]


def table(header: str, rows: list[tuple[Any, ...]]) -> bytes:
    """Columns between tabs."""
    lines = [*([header] if header else []), *("\t".join(map(str, row)) for row in rows)]
    return ("\n".join(lines) + "\n").encode()


def as_json(value: Any) -> bytes:
    """JSON as most publishers have it."""
    return json.dumps(value, ensure_ascii=False, indent=1).encode()


def cs224n() -> Files:
    """SST, Quora's pairs and STS."""
    files: Files = {}
    for split in ("train", "dev"):
        sst = [(n, f"{split}{n}", text, n % 5) for n, text in enumerate(sentences(f"{split} film"))]
        sts = [(n, f"{split}{n}", text, f"b {text}", n % 11 / 2) for n, text in enumerate(sentences(f"{split} cat"))]
        para = [(n, f"{split}{n}", t, f"why {t}", f"{n % 2}.0") for n, t in enumerate(sentences(f"{split} how"))]
        files[f"ids-sst-{split}.csv"] = table("\tid\tsentence\tsentiment", sst)
        files[f"sts-{split}.csv"] = table("\tid\tsentence1\tsentence2\tsimilarity", sts)
        files[f"quora-{split}.csv"] = table("\tid\tsentence1\tsentence2\tis_duplicate", para)
    return files


def qqp() -> Files:
    """GLUE's pairs without a header."""
    return {"dev.tsv": table("", [(n % 2, text, f"b {text}", n) for n, text in enumerate(sentences("how"))])}


def glue(name: str) -> Files:
    """RTE, MRPC, CoLA or QNLI."""
    train, test = (list(enumerate(sentences(split))) for split in ("train", "test"))
    if name == "rte":
        told = ("entailment", "not_entailment")
        parts = [[(n, text, f"b {text}", told[n % 2]) for n, text in rows] for rows in (train, test)]
        return {
            f"glue/RTE/{f}.tsv": table("index\tsentence1\tsentence2\tlabel", p)
            for f, p in zip(("train", "dev"), parts, strict=True)
        }
    if name == "mrpc":
        parts = [[(n % 2, n, n, text, f"b {text}") for n, text in rows] for rows in (train, test)]
        return {
            f"MRPC/msr_paraphrase_{f}.txt": table("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", p)
            for f, p in zip(("train", "test"), parts, strict=True)
        }
    if name == "cola":
        parts = [[("gj04", n % 2, "*" * (n % 2), text) for n, text in rows] for rows in (train, test, train[:2])]
        names = ("in_domain_train", "in_domain_dev", "out_of_domain_dev")
        return {f"CoLA/{f}.tsv": table("", p) for f, p in zip(names, parts, strict=True)}
    told = ("entailment", "not_entailment")
    records = [
        {str(n): {"text_a": text, "text_b": f"b {text}", "label": told[n % 2]} for n, text in rows}
        for rows in (train, test)
    ]
    return {f"QNLI_subset/{f}.json": as_json(r) for f, r in zip(("train", "dev"), records, strict=True)}


def sentiment(name: str) -> Files:
    """The sets of the prompts benchmark."""
    train, test = (list(enumerate(sentences(split))) for split in ("train", "test"))
    if name == "amazon5-kindle":
        return {"amazon5/kindle15k.tsv": table("\tsentence\tsentiment", [(n, t, n % 2) for n, t in train])}
    if name == "sst5":
        return {f"cs224n/{file}": data for file, data in cs224n().items() if "sst" in file}
    if name == "yelp5":
        return {
            f"{f}.csv": "".join(f'"{n % 5 + 1}","{text}"\n' for n, text in rows).encode()
            for f, rows in (("train", train), ("test", test))
        }
    if name == "amazon5":
        return {
            f"amazon5/amazon_review/{f}.json": as_json({str(n): {"ori": t, "label": str(n % 5)} for n, t in rows})
            for f, rows in (("dev", train), ("test", test))
        }
    if name == "amazon2":
        return {
            f"amazon2/{domain}/review_{label}": "".join(f"{domain} {label} {t}\n" for _, t in train).encode()
            for domain in ("books", "dvd")
            for label in ("negative", "positive")
        }
    if name == "sst2":
        return {
            f"sst2/stsa.binary.{f}": "".join(f"{n % 2} {text}\n" for n, text in rows).encode()
            for f, rows in (("train", train), ("dev", test))
        }
    if name == "sentihood":
        told = ("Positive", "Negative")
        items = {
            f: [
                {"id": n, "text": f"{f} {t}", "opinions": [{"sentiment": told[n % 2], "aspect": "x"}]} for n, t in train
            ]
            for f in ("train", "dev", "test")
        }
        return {f"sentihood-{f}.json": as_json(rows) for f, rows in items.items()}
    told = ("positive", "negative", "neutral")
    start = '<?xml version="1.0" encoding="UTF-8"?>\n<Reviews><Review rid="1"><sentences>'
    texts = [
        start
        + "".join(
            f'<sentence id="{n}">\n<text>{text}</text>'
            f'<Opinions><Opinion category="A#B" polarity="{told[n % 3]}"/></Opinions></sentence>\n'
            for n, text in rows
        )
        + "</sentences></Review></Reviews>"
        for rows in (train, test)
    ]
    names = {
        "semeval-laptop": ("ABSA16_Laptops_Train_SB1_v2.xml", "EN_LAPT_SB1_TEST_.xml.gold"),
        "semeval-restaurant": ("ABSA16_Restaurants_Train_SB1_v2.xml", "EN_REST_SB1_TEST.xml.gold"),
    }[name]
    return {f: text.encode() for f, text in zip(names, texts, strict=True)}


def conll2003() -> Files:
    """Words in lines of four columns."""
    words = "".join(
        f"{text.split()[0]} NNP I-NP I-PER\nsaid VB O O\n{text.split()[-1]} CD O I-LOC\n\n" for text in sentences("Ann")
    )
    return {f"eng.{part}": ("-DOCSTART- -X- O O\n\n" + words).encode() for part in ("train", "testa", "testb")}


def conll04() -> Files:
    """One JSON file of three parts."""
    entities = [{"type": "Peop", "start": 0, "end": 1}, {"type": "Loc", "start": 2, "end": 4}]
    relations = [{"type": "Live_In", "head": 0, "tail": 1}]
    rows = [{"tokens": t.split(), "entities": entities, "relations": relations} for t in sentences("Ann")]
    return {"conll04/conll04.json": as_json(dict.fromkeys(("train", "dev", "test"), rows))}


def squad() -> Files:
    """Four files of as many lines, and a JSON file."""
    parts = {"context": "{} .", "question": "What of {} ?", "answer": "number", "span": "2 2"}
    files = {
        f"{folder}/{stem}.{part}": "".join(form.format(t) + "\n" for t in sentences("Ann")).encode()
        for folder, stem in (("small_train", "train"), ("all_val", "val"))
        for part, form in parts.items()
    }
    qas = [{"question": f"{t} ?", "answers": [{"answer_start": 3, "text": "don't"}]} for t in sentences("What", 6)]
    files["xquad.en.json"] = as_json({"data": [{"paragraphs": [{"context": "We don't.", "qas": qas}]}]})
    return files


def wic() -> Files:
    """Two forms of JSON lines."""
    rows = [
        {"label": n % 2, "text": f"Word: go. Sentence 1: I go {t} . Sentence 2: It went {n} !"}
        for n, t in enumerate(sentences("to"))
    ]
    usual = {"word": "go", "sentence2": "I go.", "label": True, "idx": 0}
    test = [{**usual, "sentence1": f"went {t}"} for t in sentences("by", 3)]
    lines = ["".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part).encode() for part in (rows, test)]
    return {"WiC/train.jsonl": lines[0], "WiC/FewGLUE_32dev/val.jsonl": lines[1]}


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    """A record a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def cb() -> Files:
    """A premise and a hypothesis a line."""
    told = ("entailment", "contradiction", "neutral")
    return {
        f"superglue/CB/{part}.jsonl": json_lines(
            [
                {"premise": t, "hypothesis": f"b {t}", "label": told[n % 3], "idx": n}
                for n, t in enumerate(sentences(part))
            ]
        )
        for part in ("train", "val")
    }


def copa() -> Files:
    """A premise and two choices a line."""
    told = ("cause", "effect")
    return {
        f"superglue/COPA/{part}.jsonl": json_lines(
            [
                {"premise": t, "choice1": f"a {t}", "choice2": f"b {t}", "question": told[n % 2], "label": n // 2 % 2}
                for n, t in enumerate(sentences(part))
            ]
        )
        for part in ("train", "val")
    }


def dialogues() -> Files:
    """DailyDialog++: no wrong responses in the training part."""
    files: Files = {}
    for part in ("data_positives", "dev", "test"):
        rows = [
            {"context": [f"{t} you said ?", f"I said {t} ."], "positive_responses": [f"And {t} it is ."]}
            for t in sentences(part)
        ]
        wrong = {f"{kind}_negative_responses": [f"No {kind} thing ."] for kind in ("adversarial", "random")}
        files[f"dailydialog_pp/{part}.json"] = json_lines(
            [row | (wrong if part != "data_positives" else {}) for row in rows]
        )
    return files


def mutual() -> Files:
    """A dialogue a file of an archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for part in ("train", "dev"):
            for n, text in enumerate(sentences("Ann", 6)):
                row = {"answers": "ABCD"[n % 4], "options": [f"f : {c} {n}" for c in "wxyz"], "article": f"m : {text}"}
                about, content = tarfile.TarInfo(f"data/mutual/{part}/{part}_{n}.txt"), as_json(row)
                about.size = len(content)
                archive.addfile(about, io.BytesIO(content))
    return {"mutual/mutual.tar.gz": gzip.compress(packed.getvalue(), mtime=0)}


def ptb() -> Files:
    """A sentence a line."""
    return {"ptb/ptb.train.txt": "".join(f" {text} of the n.y. bank \n" for text in sentences("mr. ann")).encode()}


def zipped(files: Files, name: str) -> Files:
    """The same in one archive."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in files.items():
            archive.writestr(zipfile.ZipInfo(Path(file).name), data, zipfile.ZIP_DEFLATED)
    return {name: packed.getvalue()}


def wikitext() -> Files:
    """Articles of two sentences a paragraph."""
    files: Files = {}
    for part in ("valid", "test"):
        texts = [f"{text} is in it . It is @-@ so {text} ! " for text in sentences(part.title())]
        articles = [
            f" \n = Title {n} = \n \n {text}\n \n = = Part = = \n \n {more}\n"
            for n, (text, more) in enumerate(zip(texts[::2], texts[1::2], strict=True))
        ]
        files[f"wikitext-2/{part}.txt"] = "".join(articles).encode()
    return files


def book() -> Files:
    """Two chapters after a table of contents."""
    start, end = (f"*** {word} OF THE PROJECT GUTENBERG EBOOK ***\n" for word in ("START", "END"))
    chapters = [
        f"CHAPTER {n}\n\n" + "".join(f"{text} or so.\n\n" for text in sentences(f"Ann {n}", 12)) for n in ("I", "II")
    ]
    contents = "    CONTENTS\n    CHAPTER I\n    CHAPTER II\n\n"
    return {"ptb/warandpeace.txt": f"Header\n{start}{contents}{''.join(chapters)}{end}Licence.\n".encode()}


def own_texts(suffix: str) -> Files:
    """A table, or JSON lines, with columns of one's own."""
    rows = list(enumerate(sentences("my")))
    if suffix == "jsonl":
        return {"reviews.jsonl": json_lines([{"review": text, "stars": n % 2} for n, text in rows])}
    return {"reviews.csv": ("review,stars\n" + "".join(f'"{text}, I say",{n % 2}\n' for n, text in rows)).encode()}


def read_own(suffix: str, folder: Path) -> TextSet:
    """As `docs/own-text-tasks.md` has it."""
    return read_texts(folder / f"reviews.{suffix}", text="review", label="stars", classes=("bad", "good"))


def read_wikitext(folder: Path) -> list[Any]:
    """By both readers."""
    parts = [read_wikitext2_documents(folder, part) for part in ("valid", "test")]
    return [load_plain("wikitext-2", folder), *parts]


def stl10() -> Files:
    """Two binary files."""
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 96, 96), dtype=np.uint8)
    return {"train_X.bin": images.tobytes(), "train_y.bin": bytes([1, 10, 3, 3])}


def picture(seed: int, size: int, mode: str) -> bytes:
    """A PNG of noise."""
    drawn, file = np.random.default_rng(seed), io.BytesIO()
    shape = (size, size) if mode == "1" else (size, size, 3)
    pixels = drawn.integers(0, 256, shape, dtype=np.uint8)
    (Image.fromarray(pixels > 128) if mode == "1" else Image.fromarray(pixels)).save(file, "PNG")
    return file.getvalue()


def omniglot() -> Files:
    """Characters in folders, and a split file."""
    files = {
        f"omniglot-py/{part}/{name}/0001_{n + 1:02}.png": picture(n, 105, "1")
        for part, name in (("images_background", "Greek/character01"), ("images_evaluation", "Tifinagh/character07"))
        for n in range(20)
    }
    lines = "".join(f"Greek/character01/rot{angle:03}\n" for angle in (0, 90, 180, 270))
    return {**files, "omniglot-splits/train.txt": lines.encode()}


def image_folder() -> Files:
    """A folder a class."""
    return {f"train/{name}/{n}.png": picture(n, 12, "RGB") for name in ("cat", "dog") for n in range(3)}


SETS: dict[str, SmallSet] = {
    "cs224n": SmallSet(cs224n(), lambda folder: load_cs224n(folder, validation=6)),
    "qqp": SmallSet(qqp(), load_qqp),
    **{name: SmallSet(glue(name), lambda f, n=name: load_glue(n, f)) for name in ("rte", "mrpc", "cola", "qnli")},
    **{
        name: SmallSet(sentiment(name), lambda f, n=name: load_sentiment(n, f))
        for name in (
            "yelp5",
            "amazon5",
            "amazon2",
            "amazon5-kindle",
            "sst5",
            "sst2",
            "sentihood",
            "semeval-laptop",
            "semeval-restaurant",
        )
    },
    "conll2003": SmallSet(conll2003(), load_conll2003, 2),  # two sentences become one, or one two
    "conll04": SmallSet(conll04(), load_conll04),
    "squad": SmallSet(squad(), load_squad, 6),  # questions of one context
    "wic": SmallSet(wic(), load_wic),
    "cb": SmallSet(cb(), partial(load_glue, "cb")),
    "copa": SmallSet(copa(), load_copa),
    "dailydialog": SmallSet(dialogues(), lambda folder: load_plain("dailydialog", folder), 3),  # utterances of a line
    "dailydialog-pp": SmallSet(dialogues(), load_dailydialog_pp),
    "mutual": SmallSet(mutual(), load_mutual),
    "ptb": SmallSet(ptb(), lambda folder: [load_plain("ptb", folder), read_ptb_documents(folder)], 2),
    "ptb-zip": SmallSet(
        zipped(ptb(), "ptb/ptb.zip"), lambda folder: [load_plain("ptb", folder), read_ptb_documents(folder)], 2
    ),
    "wikitext-2": SmallSet(wikitext(), read_wikitext, 4),  # two sentences a line, twice
    "gutenberg": SmallSet(book(), load_book, 2),  # without its mark of the end a book has the licence, too
    **{f"own-{suffix}": SmallSet(own_texts(suffix), partial(read_own, suffix)) for suffix in ("csv", "jsonl")},
    "stl10": SmallSet(stl10(), lambda folder: load_stl10(folder, "train")),
    "omniglot": SmallSet(omniglot(), lambda folder: load_omniglot(folder, "train", workers=1), 4),  # turned four ways
    "image-folder": SmallSet(image_folder(), lambda folder: load_image_folder(folder, "train", 8, workers=1)),
}
