# SPDX-License-Identifier: Apache-2.0
"""Random texts through the tokenizer and through the `tokenizers` package, which must give the same ids.

Both drop the bytes that the vocabulary has no token for before they merge, so that texts with such bytes agree too
(llama.cpp drops them after: the `disputed` cases of the fixture).
"""
import os
import sys
import unicodedata

import pytest
from gguf import GGUFReader
from random_texts import ROOT, encode_all, random_texts

sys.path.insert(0, str(ROOT / "tests" / "reference"))

from reference.tokenizer import ByteLevelTokenizer  # noqa: E402

@pytest.fixture(scope="module")
def model():
    path = os.environ.get("DISTILLCACHE_TEST_MODEL")
    assert path, "DISTILLCACHE_TEST_MODEL is not set: this test needs the real model"
    return path


@pytest.fixture(scope="module")
def reference(model):
    return ByteLevelTokenizer(GGUFReader(model))


@pytest.mark.parametrize("special", [False, True])
def test_random_texts(model, reference, special):
    texts = random_texts()
    ours = encode_all(model, texts, *(["--special"] if special else []))
    for text, ids in zip(texts, ours):
        assert ids == reference.encode(text, special), repr(text)


def test_every_code_point_between_letters(model, reference):
    texts = [f"a{chr(c)}b  {chr(c)}1" for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    for text, ids in zip(texts, encode_all(model, texts)):
        assert ids == reference.encode(text), repr(text)
