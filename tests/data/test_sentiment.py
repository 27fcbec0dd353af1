"""Readers of the prompts benchmark's data on small files in the publishers' formats, sentences made here."""

from __future__ import annotations

import csv
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from metapretrain.data.images import file_record
from metapretrain.data.registry import DATASETS, PLAIN, load_plain, load_sentiment, names_giving
from metapretrain.data.sentiment import amazon2_domains
from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError


def write(file: Path, content: str | bytes | Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        content = content.encode()
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def write_csv(file: Path, rows: list[list[str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)


def labels(rows: TextSet) -> list[int]:
    return rows.require_labels().tolist()


def reviews(*pairs: tuple[str, str]) -> dict[str, dict[str, str]]:
    return {str(number): {"ori": text, "label": label} for number, (text, label) in enumerate(pairs)}


def test_yelp_forms_are_joined_and_reviews_of_two_forms_stand_once(tmp_path: Path) -> None:
    root = tmp_path / "yelp5"
    augpe = [["text", "label1", "label2"], ['He said "no", again', "Business Category: Bars", "Review Stars: 1.0"]]
    write_csv(root / "augpe" / "dev.csv", augpe)
    header = ["", "review_id", "user_id", "business_id", "stars", "useful", "funny", "cool", "text", "date"]
    lines = "First line\n\nsecond, line"
    write_csv(root / "yelp_review.csv", [header, *[["0", "r", "u", "b", "3.0", *"000", lines, "2018"]]])
    write(root / "yelp_review" / "dev.json", reviews((r"First line\n\nsecond, line", "2"), (r'Very \""good\""', "4")))
    write(root / "yelp_review" / "test.json", reviews(("worst", "0"), ("so so", "2")))
    write(root / "16-shot" / "16-13" / "train.tsv", 'sentence\tlabel\nFine \\"wine\t3\nWorst!\t0\n')
    data = load_sentiment("yelp5", tmp_path)
    assert data.train.first == ['He said "no", again', lines, 'Very "good"', 'Fine "wine']
    assert labels(data.train) == [0, 2, 4, 3] and labels(data.test) == [0, 2]
    counts = data.train.counts
    assert (counts["duplicates"], counts["in_test"], counts["rows 16-shot/*/*.tsv"]) == (1, 1, 2)
    assert data.train.ids[-1] == "16-shot/16-13/train.tsv:0" and "yelp_review/dev.json" in data.train.files
    write(root / "16-shot" / "16-13" / "dev.tsv", "sentence\tlabel\nfine\t3\nnone\t7\n")
    with pytest.raises(InputError, match=r"dev\.tsv: 1 of 2 rows .* line 3: label '7' is not one of 0\.\.4"):
        load_sentiment("yelp5", root)


def test_yelp_as_its_publisher_has_it(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [["5", r"great\nplace"], ["1", "bad"]])
    write_csv(tmp_path / "test.csv", [["1", 'no ""thanks""']])
    data = load_sentiment("yelp5", tmp_path)
    assert labels(data.train) == [4, 0] and data.train.first[0] == "great\nplace" and labels(data.test) == [0]
    (tmp_path / "test.csv").unlink()
    with pytest.raises(InputError, match="no test file of Yelp's reviews"):
        load_sentiment("yelp5", tmp_path)


def test_amazon_in_five_classes_and_by_domain(tmp_path: Path) -> None:
    write(
        tmp_path / "amazon5/amazon_review/dev.json",
        reviews(('A ""fine"" &quot;read&quot;', "3"), ("bad", "0"), ("poor", "0")),
    )
    write(tmp_path / "amazon5/amazon_review/test.json", reviews(("BAD", "0")))
    five = load_sentiment("amazon5", tmp_path)
    assert five.train.first == ['A "fine" "read"', "poor"] and five.train.counts["in_test"] == 1
    kindle = "".join(f'{n}\tu{n}\t"Book ""{n}"", long"\t{n % 5}\n' for n in range(30))
    write(tmp_path / "amazon5/kindle15k.tsv", "\tid\tsentence\tsentiment\n" + kindle)
    books = load_sentiment("amazon5-kindle", tmp_path)
    assert len(books.train) == 25 and sorted(labels(books.test)) == [0, 1, 2, 3, 4]
    assert re.fullmatch(r'Book "\d+", long', books.test.first[0])
    for domain in ("books", "dvd"):
        for label in ("negative", "positive"):
            lines = [f"{label} {domain} R&amp;D {n}\x85" for n in range(6)]
            write(tmp_path / "amazon2" / domain / f"review_{label}", "\n".join(lines) + "\n")
    two = load_sentiment("amazon2", tmp_path)
    assert len(two.train) == 20 and sorted(amazon2_domains(two.test)) == ["books", "books", "dvd", "dvd"]
    assert sorted(labels(two.test)) == [0, 0, 1, 1] and "R&D" in two.train.first[0]
    assert "not the Amazon-2" in two.note
    for name, text in zip(two.train.ids, two.train.first, strict=True):
        file, line = name.split(":")
        assert text == f"{file.split('_')[1]} {file.split('/')[0]} R&D {int(line) - 1}"
    write(tmp_path / "amazon2/dvd/review_negative", "one\n\nthree\n")
    with pytest.raises(InputError, match=r"dvd/review_negative: 1 of 3 rows .* line 2: text is empty"):
        load_sentiment("amazon2", tmp_path)
    (tmp_path / "amazon2/dvd/review_positive").unlink()
    with pytest.raises(InputError, match=r"lacks dvd/review_positive"):
        load_sentiment("amazon2", tmp_path)


def test_treebank_in_two_and_five_classes(tmp_path: Path) -> None:
    write(tmp_path / "sst2/stsa.binary.train", "1 a béart film\n0 weak \x85 film\n0 weak film\n")
    write(tmp_path / "sst2/stsa.binary.dev", "1 caf\xe9 of joy\n".encode("latin-1"))
    two = load_sentiment("sst2", tmp_path)
    assert two.train.first == ["a béart film", "weak \x85 film"] and two.test.first == ["café of joy"]
    assert labels(two.train) == [1, 0] and two.train.counts["duplicates"] == 1
    write(tmp_path / "sst2/stsa.binary.dev", "1 good\n2 bad\n\n0\n")
    with pytest.raises(InputError, match=r"stsa\.binary\.dev: 3 of 4 rows .* line 2: label '2'.* line 3: .* line 4: "):
        load_sentiment("sst2", tmp_path)
    for split in ("train", "dev"):
        lines = [f"{n}\t{split}{n}\t {split} film {n}\t{n}" for n in range(5)]
        write(tmp_path / f"ids-sst-{split}.csv", "\n".join(["\tid\tsentence\tsentiment", *lines]) + "\n")
    five = load_sentiment("sst5", tmp_path)
    assert labels(five.test) == [0, 1, 2, 3, 4] and five.test.first[4] == "dev film 4"
    with pytest.raises(InputError, match="unknown sentence data set 'sst3'; did you mean 'sst"):
        load_sentiment("sst3", tmp_path)


def test_sentihood_keeps_sentences_whose_opinions_agree(tmp_path: Path) -> None:
    def item(name: int, text: str, *sentiments: str) -> dict[str, Any]:
        return {"id": name, "text": text, "opinions": [{"sentiment": s, "aspect": "price"} for s in sentiments]}

    agree = [item(1, " LOCATION1 is cheap", "Positive", "Positive"), item(2, "dear", "Negative")]
    write(tmp_path / "sentihood-train.json", [*agree, item(3, "mixed", "Positive", "Negative"), item(4, "none")])
    write(tmp_path / "sentihood-dev.json", [item(5, "safe", "Positive"), item(8, "Rough!", "Negative")])
    write(tmp_path / "sentihood-test.json", [item(6, "loud", "Negative"), item(7, "rough", "Negative")])
    data = load_sentiment("sentihood", tmp_path)
    assert data.train.first == ["LOCATION1 is cheap", "dear", "safe"] and labels(data.train) == [1, 0, 1]
    counts = data.train.counts
    assert (counts["opinions_differ"], counts["no_opinion"], counts["in_test"]) == (1, 1, 1)
    assert labels(data.test) == [0, 0] and data.test.ids[0] == "sentihood-test.json:6"
    for wrong, told in (
        (item(9, "sunny", "Great"), r"record 0 \(id 9\): label 'great'"),
        ({"id": 9}, r"\[0\] has no 'text'"),
        (item(9, " ", "Positive"), r"\[0\]\.text must be a text that is not blank"),
    ):
        write(tmp_path / "sentihood-test.json", [wrong])
        with pytest.raises(InputError, match=r"sentihood-test\.json.*" + told):
            load_sentiment("sentihood", tmp_path)


SEMEVAL = """<?xml version="1.0" encoding="UTF-8"?>
<Reviews><Review rid="1"><sentences>{}</sentences></Review></Reviews>
"""


def sentence(name: str, text: str, *polarities: str) -> str:
    opinions = "".join(f'<Opinion category="FOOD#PRICES" polarity="{polarity}"/>' for polarity in polarities)
    return f'<sentence id="{name}">\n<text>{text}</text><Opinions>{opinions}</Opinions></sentence>'


def test_semeval_with_and_without_neutral_sentences(tmp_path: Path) -> None:
    train, gold = tmp_path / "ABSA16_Laptops_Train_SB1_v2.xml", tmp_path / "EN_LAPT_SB1_TEST_.xml.gold"
    kept = [sentence("a:0", "Fast &amp; light", "positive", "positive"), sentence("a:1", "loud", "negative")]
    dropped = [sentence("a:3", "fast but loud", "positive", "negative"), sentence("a:4", "I have it")]
    dropped.append('<sentence id="o" OutOfScope="TRUE"><text>hm</text></sentence>')
    write(train, SEMEVAL.format("".join([*kept, sentence("a:2", "average", "neutral"), *dropped])))
    write(gold, SEMEVAL.format(sentence("b:0", "superb", "positive")))
    data = load_sentiment("semeval-laptop", tmp_path)
    assert data.train.first == ["Fast & light", "loud", "average"] and labels(data.train) == [2, 0, 1]
    assert data.train.counts == {"no_opinion": 2, "opinions_differ": 1, "duplicates": 0, "conflicting": 0, "in_test": 0}
    two = load_sentiment("semeval-laptop", tmp_path, neutral=False)
    assert labels(two.train) == [1, 0] and two.train.counts["neutral"] == 1 and two.classes == ("negative", "positive")
    assert data.train.ids[0] == "ABSA16_Laptops_Train_SB1_v2.xml:a:0"
    write(gold, SEMEVAL.format(sentence("b:0", "superb", "conflict")))
    with pytest.raises(InputError, match=r"gold: 1 of 1 rows .* sentence b:0: label 'conflict'"):
        load_sentiment("semeval-laptop", tmp_path)
    write(gold, "<Reviews>\n<Review>\n</Reviews>")
    with pytest.raises(InputError, match=r"gold, line 3: malformed XML"):
        load_sentiment("semeval-laptop", tmp_path)
    for encoding in ("UDF-8", "UTF-7"):
        write(gold, f'<?xml version="1.0" encoding="{encoding}"?>\n<Reviews/>')
        with pytest.raises(InputError, match="gold: the encoding that its first line names cannot be read"):
            load_sentiment("semeval-laptop", tmp_path)
    with pytest.raises(InputError, match="lacks ABSA16_Restaurants_Train"):
        load_sentiment("semeval-restaurant", tmp_path)


def test_pairs_with_quotes_that_do_not_quote(tmp_path: Path) -> None:
    header = "index\tsentence1\tsentence2\tlabel\n"
    write(tmp_path / "glue/RTE/train.tsv", header + '0\t"A dog\tA "cat\tentailment\n1\tno\tyes\tnot_entailment\n')
    write(tmp_path / "glue/RTE/dev.tsv", header + "0\tYES\tno\tnot_entailment\n1\tx\ty\tentailment\n")
    with pytest.raises(InputError, match="no training row has class 'not_entailment'"):  # it is a test row
        load_sentiment("rte", tmp_path)
    write(tmp_path / "glue/RTE/dev.tsv", header + "0\tw\tno\tnot_entailment\n")
    rte = load_sentiment("rte", tmp_path)
    assert (rte.train.first[0], rte.train.second) == ('"A dog', ['A "cat', "yes"]) and labels(rte.train) == [1, 0]
    for split in ("train", "test"):
        table = 'Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t1\t2\t"{0} a\tb\r\n0\t3\t4\t{0} c\td"\r\n'
        write(tmp_path / f"MRPC/msr_paraphrase_{split}.txt", b"\xef\xbb\xbf" + table.format(split).encode())
    mrpc = load_sentiment("mrpc", tmp_path)
    assert mrpc.train.first == ['"train a', "train c"] and mrpc.test.second == ["b", 'd"']
    assert labels(mrpc.test) == [1, 0]


def test_plain_sentences(tmp_path: Path) -> None:
    ptb = " it 's the n.y. bank , is n't it \n a <unk> sentence of six words \n too short \n"
    ptb += " It 's the n.y. bank , is n't it ! \n"
    (tmp_path / "ptb").mkdir()
    with zipfile.ZipFile(tmp_path / "ptb" / "ptb.zip", "w") as archive:
        archive.writestr("ptb.train.txt", ptb)
    assert load_plain("ptb", tmp_path).first == ["it's the n.y. bank, isn't it"]
    found = load_plain("ptb", tmp_path)
    assert found.counts == {"unknown_words": 1, "length": 1, "duplicates": 1}
    assert found.files == {"ptb/ptb.zip": file_record(tmp_path / "ptb" / "ptb.zip", None)}
    write(tmp_path / "flat" / "ptb.train.txt", "another file that is not zipped\n")
    assert load_plain("ptb", tmp_path / "flat").first == ["another file that is not zipped"]
    wiki = " \n = The Heading of it all = \n \n A well @-@ known play ran . It had 2 @,@ 000 ( dear ) seats ! \n"
    write(tmp_path / "wikitext-2" / "valid.txt", wiki)
    assert load_plain("wikitext-2", tmp_path).first == ["A well-known play ran.", "It had 2,000 (dear) seats!"]
    said = {"context": ["How are you doing today?"], "positive_responses": ["I am doing very well.", "Fine."]}
    write(tmp_path / "dailydialog_pp" / "dev.json", json.dumps(said) + "\n" + json.dumps(said) + "\n")
    assert load_plain("dailydialog", tmp_path).first == ["How are you doing today?", "I am doing very well."]
    names = [name for kind in PLAIN for name in load_plain(kind, tmp_path).files]
    assert names == ["ptb/ptb.zip", "wikitext-2/valid.txt", "dailydialog/dev.json"]
    assert DATASETS["dailydialog"].check(tmp_path) == "dailydialog: 2 sentences"
    write(tmp_path / "dailydialog_pp" / "dev.json", json.dumps(said) + '\n{"context": "no list"}\n')
    with pytest.raises(InputError, match=r"dev\.json, line 2: context must be a list, got"):
        load_plain("dailydialog", tmp_path)
    write(tmp_path / "wikitext-2" / "valid.txt", "= only =\n")
    with pytest.raises(InputError, match="no sentence of 5 to 60"):
        load_plain("wikitext-2", tmp_path)
    (tmp_path / "ptb" / "ptb.zip").write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"ptb\.zip: .*must hold ptb\.train\.txt"):
        load_plain("ptb", tmp_path)


def test_every_set_is_in_the_registry_and_says_what_a_folder_lacks(tmp_path: Path) -> None:
    for name in (*names_giving("sentences"), *PLAIN):
        with pytest.raises(InputError, match="hold"):
            DATASETS[name].check(tmp_path)
    write(tmp_path / "stsa.binary.train", "1 good\n0 bad\n1 good\n")
    write(tmp_path / "stsa.binary.dev", "1 fine\n")
    told = "sst2: 2 train [1, 1] (left out: duplicates 1), 1 test [0, 1]; test: dev part"
    assert DATASETS["sst2"].check(tmp_path) == told
