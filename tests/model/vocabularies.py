# SPDX-License-Identifier: Apache-2.0
"""Small vocabularies of every kind of tokenizer, trained by the packages `tokenizers` and `sentencepiece` on the texts of
the fixtures, as GGUF files without tensors, each with the package's own tokenizer for comparison.
"""
import io
import json
import struct

import sentencepiece
from gguf import GGUFReader, GGUFWriter, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from random_texts import ROOT

# The patterns of the models' tokenizer.json, and the Sequence for `default` that stands for llama.cpp's rounds.
CLITICS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt-2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "smollm": [r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "llama-bpe": [CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + ENDS],
    "qwen2": [CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + ENDS],
    "tekken": [rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
               r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + ENDS],
    "o200k": [rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CLITICS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CLITICS}?"
              r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + ENDS],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
                r"\p{N}+", r"[0-9][0-9][0-9]"],
}
WHOLE_PIECES = ("llama-bpe", "tekken")
SPECIALS = ["<|begin|>", "<|end|>", "<|end|>>"]
NORMAL, CONTROL, USER_DEFINED = int(TokenType.NORMAL), int(TokenType.CONTROL), int(TokenType.USER_DEFINED)


def fixture_texts():
    return [case["text"] for case in json.loads((ROOT / "tests/data/tokenizer_smollm2.json").read_text())["encode"]]


def write(path, fields, architecture="llama"):
    """A GGUF file of tokenizer.ggml.* fields: lists of strings, integers or floats, bytes, strings, booleans and integers."""
    writer = GGUFWriter(path, architecture)
    for name, value in fields.items():
        key = "tokenizer.ggml." + name
        if isinstance(value, (list, bytes)):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class ByteLevel:
    """Byte-level BPE with the pre-tokenizer `name`, on all bytes."""

    def __init__(self, name, path):
        self.name, self.path = name, path
        self.tokenizer = Tokenizer(models.BPE(ignore_merges=name in WHOLE_PIECES))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[name]]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        self.tokenizer.decoder = decoders.ByteLevel()
        if name == "qwen2":
            self.tokenizer.normalizer = normalizers.NFC()
        trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer.train_from_iterator(fixture_texts() * 3, trainer)
        vocabulary = self.tokenizer.get_vocab()
        tokens = sorted(vocabulary, key=vocabulary.get)
        if name in WHOLE_PIECES:  # tokens that no merge makes, so that the rule for whole pieces shows
            tokens += ["Ġquicken", "Ġ" + "zq" * 9]
        merges = json.loads(self.tokenizer.to_str())["model"]["merges"]
        self.tokenizer.model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m) for m in merges],
                                          ignore_merges=name in WHOLE_PIECES)
        self.plain = Tokenizer.from_str(self.tokenizer.to_str())
        self.tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
        write(path, {"model": "gpt2", "pre": name, "tokens": tokens + SPECIALS,
                     "token_type": [NORMAL] * len(tokens) + [CONTROL] * len(SPECIALS),
                     "merges": [" ".join(m) for m in merges], "bos_token_id": len(tokens), "eos_token_id": len(tokens) + 1})

    def encode(self, text, special=False):
        return (self.tokenizer if special else self.plain).encode(text, add_special_tokens=False).ids


def field(number, value):
    """A field of a protocol buffer."""
    if isinstance(value, (bool, int)):
        return varint(number << 3) + varint(int(value))
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(n):
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes(out) + bytes([n])


def processor(tokens, scores, kinds, unigram, byte_fallback, prefix, strip):
    """sentencepiece's own program over the vocabulary of a GGUF file (sentencepiece_model.proto; kinds are the same)."""
    pieces = b"".join(field(1, field(1, t.encode()) + field(2, float(s)) + field(3, k))
                      for t, s, k in zip(tokens, scores, kinds))
    trainer = field(3, 1 if unigram else 2) + field(35, byte_fallback) + field(40, kinds.index(2))
    normalizer = field(1, b"identity") + field(3, prefix) + field(4, strip) + field(5, True)
    model = pieces + field(2, trainer) + field(3, normalizer)
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def fields_of(message):
    """The fields of a protocol buffer that have a length, as (number, content)."""
    at = 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
    while at < len(message):
        tag = number()
        if tag & 7 == 2:
            length = number()
            yield tag >> 3, message[at:at + length]
            at += length
        elif tag & 7 == 0:
            number()
        else:
            at += {1: 8, 5: 4}[tag & 7]


def character_map(model):
    """normalizer_spec.precompiled_charsmap of a SentencePiece model."""
    spec = dict(fields_of(model))[3]
    return dict(fields_of(spec)).get(2, b"")


class SentencePiece:
    """A SentencePiece model with the given options of the trainer, and of the text before it."""

    def __init__(self, path, unigram=False, byte_fallback=True, prefix=True, strip=False, rule="identity", **options):
        self.path = path
        out = io.BytesIO()
        # Ways of several such tokens through the same spaces tie in a unigram model, by rounding that differs.
        user_defined = ["<tool>", "0x"] + ([] if unigram else ["\u2581\u2581", "\u2581\u2581\u2581\u2581"])
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for t in fixture_texts() * 3 for line in t.split("\n") if line]), model_writer=out,
            model_type="unigram" if unigram else "bpe", vocab_size=900, byte_fallback=byte_fallback,
            add_dummy_prefix=prefix, remove_extra_whitespaces=strip, normalization_rule_name=rule,
            user_defined_symbols=user_defined, control_symbols=["<end>"],
            hard_vocab_limit=False, minloglevel=2, num_threads=1, **options)
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
        p = self.processor
        count = range(p.vocab_size())
        self.tokens = [p.id_to_piece(i) for i in count]
        kinds = [2 if p.is_unknown(i) else 3 if p.is_control(i) else 6 if p.is_byte(i)
                 else 4 if self.tokens[i] in user_defined else 1 for i in count]
        scores = [p.get_score(i) for i in count]
        charsmap = character_map(out.getvalue())
        write(path, {**({"precompiled_charsmap": charsmap} if charsmap else {}),
                     "model": "t5" if unigram else "llama", "tokens": self.tokens, "token_type": kinds, "scores": scores,
                     "bos_token_id": p.bos_id(), "eos_token_id": p.eos_id(), "add_space_prefix": prefix,
                     "remove_extra_whitespaces": strip})

    def encode(self, text):
        return self.processor.encode(text)


def processor_of_file(path, prefix):
    """The same over a real model's file."""
    fields = GGUFReader(path).fields
    get = lambda key: fields["tokenizer.ggml." + key].contents()
    # A converter writes spaces instead of marks into user-defined tokens.
    kinds = get("token_type")
    tokens = [t.replace(" ", "\u2581") if k == USER_DEFINED else t for t, k in zip(get("tokens"), kinds)]
    kinds[get("unknown_token_id")] = 2
    return processor(tokens, get("scores"), kinds, False, True, prefix, False)
