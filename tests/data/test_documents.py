"""Running text: documents, sentences, words, and their tokens."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from metapretrain.data.documents import (
    Documents,
    hold_out_documents,
    read_gutenberg,
    read_ptb_documents,
    read_wikitext2_documents,
    tokenize_documents,
    tokenize_words,
)
from metapretrain.data.made import made_documents
from metapretrain.errors import InputError
from metapretrain.models.language_models import tiny_tokenizer


def test_ptb_in_blocks(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "ptb.zip", "w") as archive:
        archive.writestr("ptb.train.txt", "".join(f" mr. <unk> has N {row} \n" for row in range(45)))
    found = read_ptb_documents(tmp_path)
    assert [len(document) for document in found.rows] == [20, 20, 5]
    assert found.rows[2][4] == ["mr.", "<unk>", "has", "N", "44"]
    with zipfile.ZipFile(tmp_path / "ptb.zip", "w") as archive:
        archive.writestr("ptb.valid.txt", "one line\n")
    with pytest.raises(InputError, match=r"it must hold ptb\.train\.txt"):
        read_ptb_documents(tmp_path)
    (tmp_path / "ptb.train.txt").write_text("one line\n")
    assert read_ptb_documents(tmp_path).rows == [[["one", "line"]]]


def test_damages_of_a_zip_are_told_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "ptb.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("ptb.train.txt"), "a line of it\n" * 40, zipfile.ZIP_DEFLATED)
    whole = file.read_bytes()
    words, refused = read_ptb_documents(tmp_path).rows, []
    for place in range(len(whole)):
        for value in {0, 9, 12, 14, 255, whole[place] ^ 1, whole[place] ^ 128}:
            file.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                assert read_ptb_documents(tmp_path).rows == words
            except InputError as error:
                refused.append(error)
    assert all(str(error).startswith(f"{file}: ") and "\n" not in str(error) for error in refused)
    told = {type(error.__cause__) for error in refused}
    assert {zipfile.BadZipFile, zlib.error, KeyError} <= told  # the other kinds are those of a Python version


def test_text_of_a_zip_is_decoded_as_that_of_a_file(tmp_path: Path) -> None:
    told = {b"\xef\xbb\xbfa line\n": "", b"a\n\xff\n": "line 2: not utf-8", b"a\n\0": "line 2: a NUL"}
    for content, refused in told.items():
        with zipfile.ZipFile(tmp_path / "ptb.zip", "w") as archive:
            archive.writestr("ptb.train.txt", content)
        if refused:
            with pytest.raises(InputError, match=rf"ptb\.zip, ptb\.train\.txt, {refused}"):
                read_ptb_documents(tmp_path)
        else:
            assert read_ptb_documents(tmp_path).rows == [[["a", "line"]]]


def test_missing_texts_are_named_with_their_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^{tmp_path} must hold wikitext-2/test\.txt"):
        read_wikitext2_documents(tmp_path, "test")
    with pytest.raises(InputError, match=r"does not exist: expected .* such as ptb/warandpeace\.txt"):
        read_gutenberg(tmp_path / "warandpeace.txt")


def test_wikitext_articles_and_sentences(tmp_path: Path) -> None:
    text = (
        " \n = Lobster = \n \n A lobster is 2 @.@ 5 m . It <unk> ? Yes \n \n = = Name = = \n \n It \n"
        " = Boat = \n \n Boats @-@ big . \n"
    )
    (tmp_path / "valid.txt").write_text(text)
    found = read_wikitext2_documents(tmp_path).rows
    assert found[0] == [["A", "lobster", "is", "2", ".", "5", "m", "."], ["It", "<unk>", "?"], ["Yes"], ["It"]]
    assert found[1] == [["Boats", "-", "big", "."]] and len(found) == 2
    (tmp_path / "valid.txt").write_text(text.replace(" = Lobster = ", ""))
    assert read_wikitext2_documents(tmp_path).rows == found
    (tmp_path / "test.txt").write_text("no heading\n")
    with pytest.raises(InputError, match="no article begins in it"):
        read_wikitext2_documents(tmp_path, "test")


def test_a_book_has_its_chapters_alone(tmp_path: Path) -> None:
    text = (
        "Header\n*** START OF THIS EBOOK ***\n    CONTENTS\n    CHAPTER I\n    CHAPTER II\n\nCHAPTER I\n\n"
        "“Well, Prince,” he said. “So it\nis.” She left! Mr\n\nEnd of it\n\nCHAPTER II\n\nA. B. C?\n"
        "*** END ***\nLicence.\n"
    )
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    first, second = read_gutenberg(tmp_path / "book.txt").rows
    shown = [" ".join(sentence) for sentence in first]
    assert shown == ["“ Well , Prince , ” he said .", "“ So it is .", "She left !", "Mr", "End of it"]
    assert second == [["A", "."], ["B", "."], ["C", "?"]]
    (tmp_path / "book.txt").write_text("no chapter")
    with pytest.raises(InputError, match="no chapter begins in it"):
        read_gutenberg(tmp_path / "book.txt")


def test_words_and_their_tokens() -> None:
    texts = Documents([[["Tiny", "<unk>", "a"], ["tests"]], [["A", "\u200d", "."]]])
    tokenizer = tiny_tokenizer()
    corpus = tokenize_documents(texts, tokenizer)
    shown = [tokenizer.decode(corpus.ids[a:b]) for a, b in zip(corpus.words[:-1], corpus.words[1:], strict=True)]
    assert shown == ["tiny", "[UNK]", "a", "tests", "a", "", "."]  # a word may have no token
    assert corpus.sentences.tolist() == [0, 3, 4, 7] and corpus.documents.tolist() == [0, 2, 3]
    assert corpus.capital.tolist() == [True, False, False, False, True, False, False]
    assert corpus.types[2] == corpus.types[4] and [corpus.names[i] for i in corpus.types[:2]] == ["tiny", "<unk>"]
    assert corpus.tokens(1, 2).tolist() == corpus.ids[corpus.words[3] : corpus.words[4]].tolist()


def test_words_of_a_byte_level_tokenizer() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    for text, wanted in ((["ab cde f"] * 9, [1, 1, 1]), ([], [3, 3, 1])):  # a space alone counts to the word before
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        inner.train_from_iterator(text, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="!", pad_token="!")
        assert tokenize_words([["ab", "cde"], ["f"]], tokenizer)[1].tolist() == wanted


def test_every_twentieth_document_is_held_out() -> None:
    train, validation = hold_out_documents(made_documents()["train"])
    whole = made_documents()["train"].rows
    assert validation.rows == [whole[19], whole[39], whole[59]] and len(train) == 61
    with pytest.raises(InputError, match=r"every must be in 2\.\.64"):
        hold_out_documents(made_documents()["train"], every=100)


def test_empty_documents_are_refused() -> None:
    with pytest.raises(InputError, match="document 1 has no sentence"):
        Documents([[["a"]], []])
    with pytest.raises(InputError, match="there is no document"):
        Documents([])
    assert tokenize_words([], tiny_tokenizer())[1].dtype == np.int64
