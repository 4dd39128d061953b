# SPDX-License-Identifier: Apache-2.0
"""Every kind of tokenizer against the package that it comes from, on the fixtures' texts and on random ones.

Vocabularies are small and trained here (vocabularies.py). With DISTILLCACHE_TEST_GEMMA, the GGUF file of a gemma model,
its real vocabulary is compared too.
"""
import os
import subprocess
import unicodedata

import pytest
from random_texts import binary, encode_all, random_texts
from tokenizers.normalizers import NFC
from vocabularies import PATTERNS, SPECIALS, ByteLevel, SentencePiece, fixture_texts, processor_of_file

RANDOM = 800
# What the pre-tokenizers differ in: contractions, cases, runs of digits, spaces and line breaks, slashes, marks.
CUTS = ["I'LL DON'T we'Re it'\u017f x'\u212a", "HTMLParser fooBAR ABCdef \u01c5\u02b0\u00aa a\u0301B\u0301c", "1234567 \u00bd12345 12\u00bd3456 1\u06f92",
        "a\r\n\r\n  b \n\t\n c\t\td   \n", "http://a/b//\n/ c/\r\n//d ?/\n", "\u0301\u0301a \u0301 \u0e33\u0e33", "x \u00a0\u3000 y\u2028z", "$+<=>^~|a $1 +1 ~~b.c",
        "\u00c5 A\u030a \u212b e\u0301\u0327 \u1100\u1161\u11a8 \u0915\u093c \u1e9b\u0323 q\u0307\u0323", "quicken the quickens " + "zq" * 9 + " " + "zq" * 10,
        "A" * 300 + "b" + "\u01c5" * 40 + "\u4e00" * 50 + "A" * 20, " " * 90 + "x" + "\n" * 40 + " " * 7]


def all_texts():
    return fixture_texts() + CUTS + random_texts(RANDOM)


@pytest.fixture(scope="module", params=list(PATTERNS))
def byte_level(request, tmp_path_factory):
    return ByteLevel(request.param, str(tmp_path_factory.mktemp("bpe") / "vocabulary.gguf"))


def test_byte_level(byte_level):
    texts = all_texts()
    if byte_level.name == "qwen2":  # the package's table of composition may be another version's
        texts = [t for t in texts if NFC().normalize_str(t) == unicodedata.normalize("NFC", t)]
        assert len(texts) > 1100 and any(unicodedata.normalize("NFC", t) != t for t in texts)
    for text, ids in zip(texts, encode_all(byte_level.path, texts)):
        assert ids == byte_level.encode(text), (byte_level.name, text)


def test_byte_level_specials(byte_level):
    texts = [f"a {SPECIALS[0]}b{SPECIALS[1]}{SPECIALS[2]} <|begi" + t + SPECIALS[0] for t in CUTS]
    for text, ids in zip(texts, encode_all(byte_level.path, texts, "--special")):
        assert ids == byte_level.encode(text, True), (byte_level.name, text)


def test_every_character(byte_level):
    """Which of letter, mark, number, space or other each is, by where it is cut off."""
    characters = [chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    if byte_level.name == "qwen2":  # tables of composition differ by their version of Unicode
        characters = [c for c in characters if unicodedata.normalize("NFC", c) == c]
    step = 5 if byte_level.name in ("tekken", "default") else 31  # classes are the same; these two have all of them
    texts = [f"a{c}B{c}{c}  {c}1{c}\n'{c}" for c in characters[::step]]
    for text, ids in zip(texts, encode_all(byte_level.path, texts)):
        assert ids == byte_level.encode(text), (byte_level.name, text)


KINDS = {
    "llama": {},
    "gemma": {"prefix": False},
    "without_bytes": {"byte_fallback": False},
    "stripped": {"strip": True},
    "pieces_across_words": {"split_by_whitespace": False},
    "few_characters": {"character_coverage": 0.98},
    "unigram": {"unigram": True},
    "unigram_stripped": {"unigram": True, "byte_fallback": False, "strip": True},
    "unigram_nmt_nfkc": {"unigram": True, "strip": True, "rule": "nmt_nfkc"},  # what most unigram models have
    "unigram_nfkc_cf": {"unigram": True, "byte_fallback": False, "rule": "nfkc_cf"},
    "nfkc": {"rule": "nfkc"},
}


@pytest.fixture(scope="module", params=list(KINDS))
def sentence_piece(request, tmp_path_factory):
    return SentencePiece(str(tmp_path_factory.mktemp("spm") / "vocabulary.gguf"), **KINDS[request.param])


def test_sentence_piece(sentence_piece):
    texts = [t for t in all_texts() if "\x00" not in t]  # the package's text ends there
    for text, ids in zip(texts, encode_all(sentence_piece.path, texts)):
        assert ids == sentence_piece.encode(text), text


def test_sentence_piece_specials(sentence_piece):
    """The text behind a special token is a text of its own."""
    end = sentence_piece.tokens.index("<end>")
    texts = ["a b<end> c  d<end><tool>e", "<end>", "x<end"]
    parts = [text.split("<end>") for text in texts]
    expected = []
    for text in parts:
        ids = sentence_piece.encode(text[0])
        for part in text[1:]:
            ids += [end] + sentence_piece.encode(part)
        expected.append(ids)
    assert encode_all(sentence_piece.path, texts, "--special") == expected
    assert end not in sum(encode_all(sentence_piece.path, texts), [])


def decode(path, ids):
    """The text of each list of ids, as a whole text."""
    lines = "".join(" ".join(str(i) for i in one) + "\n" for one in ids)
    run = subprocess.run([binary("encode_texts"), path, "--decode"], input=lines.encode(), capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr.decode()
    texts = run.stdout.split(b"\0")
    assert texts.pop() == b""
    return [t.decode() for t in texts]


def test_sentence_piece_gives_texts_back(sentence_piece):
    if sentence_piece.processor.piece_to_id("<0x41>") == sentence_piece.processor.unk_id():
        pytest.skip("characters that it does not know are lost")
    texts = [t for t in all_texts() if "\x00" not in t]
    ids = [sentence_piece.encode(t) for t in texts]
    for one, text in zip(ids, decode(sentence_piece.path, ids)):
        assert text == sentence_piece.processor.decode(one)


def test_gemma():
    path = os.environ.get("DISTILLCACHE_TEST_GEMMA")
    if not path:
        pytest.skip("DISTILLCACHE_TEST_GEMMA is not set")
    reference = processor_of_file(path, False)
    texts = [t for t in all_texts() if "\x00" not in t]
    for text, ids in zip(texts, encode_all(path, texts)):
        assert ids == reference.encode(text), text
