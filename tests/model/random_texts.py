# SPDX-License-Identifier: Apache-2.0
"""Random texts of all sorts of characters, and their tokens by the tokenizer under test.

Code points are those that Python's Unicode tables know, since the other tables (PCRE2, Oniguruma) may be older or newer
about what was assigned since.
"""
import os
import random
import struct
import subprocess
import unicodedata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED = 20240229
TEXTS = 3000
SPACES = " \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u180e\u2003\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
WORDS = ("the model 's 're 'LL don't it's naïve Straße привет 你好世界 こんにちは 안녕하세요 العربية हिन्दी ไทย 👩‍👩‍👧 🇩🇪 e\u0301 "
         "x1y22 3.14 ½ ² Ⅷ ٣٤ 𝟘𝟙 www.a-b.c/?q=1&r=%20 foo_bar() {}; <|im_start|> <|im_end|> <|endoftext|> <repo_name> "
         "<|im_ <|im_end|").split(" ")


def binary(name):
    return Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build")) / "tests" / "model" / name


def any_character(rng, limit=0x110000):
    """An assigned code point; no surrogate, no private use."""
    while True:
        c = chr(rng.randrange(limit))
        if unicodedata.category(c) not in ("Cn", "Cs", "Co"):
            return c


def characters_of(rng, category):
    while True:
        c = any_character(rng, 0x20000)
        if unicodedata.category(c).startswith(category):
            return c


PARTS = [
    lambda rng: rng.choice(WORDS),
    lambda rng: rng.choice(SPACES) * rng.randrange(1, 5),
    lambda rng: "".join(rng.choice(SPACES) for _ in range(rng.randrange(1, 6))),
    lambda rng: any_character(rng),
    lambda rng: any_character(rng, 0x250),
    lambda rng: "".join(characters_of(rng, "L") for _ in range(rng.randrange(1, 4))),
    lambda rng: characters_of(rng, "N") * rng.randrange(1, 3),
    lambda rng: characters_of(rng, "M"),
    lambda rng: "".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(1, 8))),
    lambda rng: rng.choice("aeE!=-'\u4e00\U0001f600") * rng.randrange(1, 120),
    lambda rng: chr(rng.randrange(32)),
    lambda rng: "'" + rng.choice(["s", "t", "re", "ve", "m", "ll", "d", "S", "x", ""]),
]


def random_texts(count=TEXTS):
    rng = random.Random(SEED)
    return ["".join(rng.choice(PARTS)(rng) for _ in range(rng.randrange(30))) for _ in range(count)]


def encode_all(model, texts, *options):
    """Ids of each text, by the tokenizer under test."""
    encoded = [t.encode() for t in texts]
    data = b"".join(struct.pack("<I", len(t)) + t for t in encoded)
    run = subprocess.run([binary("encode_texts"), model, *options], input=data, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr.decode()
    lines = run.stdout.decode().split("\n")
    assert lines.pop() == "" and len(lines) == len(texts)
    return [[int(i) for i in line.split()] for line in lines]
