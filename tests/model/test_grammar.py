# SPDX-License-Identifier: Apache-2.0
"""Grammars against Python: every text that one allows is JSON that `jsonschema` validates, values that satisfy a schema are
allowed, and masks hold for every token of the real vocabulary (grammar_tool tries each one alone).

DISTILLCACHE_TEST_FULL=1: 3,000 schemas in place of 200, and the masks of 300 in place of 30.
"""

import datetime
import json
import os
import pathlib
import random
import re
import subprocess

import jsonschema
import pytest

import schemas

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = pathlib.Path(os.environ.get("DISTILLCACHE_TEST_BUILD", ROOT / "build")) / "tests/model/grammar_tool"
MODEL = os.environ.get("DISTILLCACHE_TEST_MODEL", "")
FULL = os.environ.get("DISTILLCACHE_TEST_FULL", "") == "1"
SEED = 20240607

FORMATS = jsonschema.FormatChecker()


# Those that `jsonschema` leaves to packages that are not there.
@FORMATS.checks("date-time")
def _is_date_time(text):
    return not isinstance(text, str) or bool(datetime.datetime.fromisoformat(text).tzinfo)


@FORMATS.checks("time")
def _is_time(text):
    return not isinstance(text, str) or bool(datetime.time.fromisoformat(text).tzinfo)


@FORMATS.checks("hostname")
def _is_hostname(text):
    return not isinstance(text, str) or (len(text) < 254 and all(
        re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)", label) for label in text.split(".")))


@FORMATS.checks("duration")
def _is_duration(text):
    return not isinstance(text, str) or bool(
        re.fullmatch(r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)", text))


def run_tool(requests, *options):
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run([TOOL, *options], input=lines.encode(), capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return [json.loads(line) for line in done.stdout.splitlines()]


def accept(schema, *texts):
    [reply] = run_tool([{"schema": schema, "accept": texts}])
    assert "error" not in reply, reply
    return reply["accepted"]


def refusal(schema):
    [reply] = run_tool([{"schema": schema}])
    return reply["error"]


def validate(schema, text):
    """The text is one JSON value without duplicate names, and satisfies the schema."""
    def no_duplicates(pairs):
        assert len({name for name, _ in pairs}) == len(pairs), text
        return dict(pairs)
    value = json.loads(text, object_pairs_hook=no_duplicates)
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)


def check_texts(documents, *options, texts):
    replies = run_tool([{"schema": schema, "seed": i, "texts": texts} for i, schema in enumerate(documents)], *options)
    written = compared = 0
    for schema, reply in zip(documents, replies, strict=True):
        if "error" in reply:  # nothing may satisfy what was drawn; all else is in the subset
            assert "nothing that satisfies" in reply["error"], (schema, reply)
            continue
        compared += reply["compared"]
        for text in filter(None, reply["texts"]):
            validate(schema, text)
            written += 1
    return written, compared


def test_random_bytes_satisfy_random_schemas():
    draw = random.Random(SEED)
    documents = [schemas.document(draw) for _ in range(3000 if FULL else 200)]
    written, _ = check_texts(documents, texts=4)
    assert written > 3 * len(documents)


@pytest.mark.skipif(not MODEL, reason="DISTILLCACHE_TEST_MODEL names no model")
def test_random_tokens_satisfy_random_schemas_and_masks_are_exact():
    draw = random.Random(SEED + 1)
    documents = [schemas.document(draw) for _ in range(300 if FULL else 30)]
    written, compared = check_texts(documents, MODEL, texts=3)
    assert written > 2 * len(documents) and compared > len(documents)


# Runs of a set of bytes: with and without a limit, beyond the longest tokens, behind other bytes, one in another, several at
# once, of characters that are not ASCII, and more sets than a walk keeps.
RUNS = ("^[A-Za-z0-9 .,]+$", "^[a-z]{1,3}[a-z0-9 ]{1,4}$", "^[a-z ]{5,40}$", "^([a-z]{1,12} ){1,4}[A-Z ]*$", "^[^0-9]{1,300}$",
        "^([a-p]{2}[i-z]{0,5})+$", "^(a|[b-z])*-[ -/0-9A-Za-z]{0,6}$", "^\\w+( \\w+)*$", "^([a-z]{1,20}|[a-z ]{1,3}!)$", "^[a-z=-]{18,60}$",
        "^(" + "|".join(f"[{chr(97 + i)}-z{chr(65 + i)}-Z ]{{1,{i + 2}}}{i}" for i in range(10)) + ")$")


@pytest.mark.skipif(not MODEL, reason="DISTILLCACHE_TEST_MODEL names no model")
@pytest.mark.parametrize("quoted", [False, True])
def test_masks_of_runs_are_exact(quoted):
    requests = [{"schema": {"type": "string", "pattern": pattern}} if quoted else {"pattern": pattern} for pattern in RUNS]
    replies = run_tool([{**request, "seed": i, "texts": 5} for i, request in enumerate(requests)], MODEL)
    assert sum(reply["compared"] for reply in replies) > 4 * len(RUNS)
    for pattern, reply in zip(RUNS, replies, strict=True):
        for text in filter(None, reply["texts"]):
            assert re.search(pattern, json.loads(text) if quoted else text), (pattern, text)


def test_texts_that_satisfy_a_schema_are_allowed_again():
    """What one grammar writes, parsed and written by Python without white space, is a text of the same grammar."""
    draw = random.Random(SEED + 2)
    documents = [schemas.document(draw) for _ in range(100)]
    replies = run_tool([{"schema": schema, "seed": i, "texts": 3} for i, schema in enumerate(documents)])
    requests = []
    for schema, reply in zip(documents, replies, strict=True):
        texts = [schemas.written(json.loads(text)) for text in reply.get("texts", ()) if text and not re.search(r"\.|[eE][-+0-9]|-0", text)]
        if texts:
            requests.append({"schema": schema, "accept": texts})
    for request, reply in zip(requests, run_tool(requests), strict=True):
        assert all(reply["accepted"]), (request, reply)


def test_a_changed_byte_is_allowed_only_if_the_schema_is_still_satisfied():
    draw = random.Random(SEED + 3)
    documents = [schemas.document(draw) for _ in range(100)]
    replies = run_tool([{"schema": schema, "seed": i, "texts": 1} for i, schema in enumerate(documents)])
    requests = []
    for schema, reply in zip(documents, replies, strict=True):
        for text in filter(None, reply.get("texts", ())):
            changed = []
            for _ in range(20):
                at = draw.randrange(len(text))
                changed.append(text[:at] + draw.choice(["", "0", "9", "\"", "}", "]", ",", "x", "é", "-", " "]) + text[at + 1:])
            requests.append({"schema": schema, "accept": changed})
    allowed = 0
    for request, reply in zip(requests, run_tool(requests), strict=True):
        for text, accepted in zip(request["accept"], reply["accepted"], strict=True):
            if accepted:
                validate(request["schema"], text)
                allowed += 1
    assert allowed > 0


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {
    "type": "array", "items": {"type": "string"}}}, "required": ["name", "age"]}


@pytest.mark.parametrize("schema, allowed, refused", [
    (PERSON, ['{"name": "Ada", "age": 36}', '{"name":"","age":-1,"tags":[]}', '{\n  "name": "a",\n  "age": 1,\n  "tags": [ "x", "y" ]\n}'],
     ['{"age": 36, "name": "Ada"}', '{"name": "Ada"}', '{"name": "Ada", "age": 36, "x": 1}', '{"name": "Ada", "age": 3.5}',
      ' {"name":"a","age":1}', '{"name":"a","age":1} ', '{"name":"a"  ,"age":1}', '{"name": "a\n", "age": 1}']),
    ({"type": "string"}, ['"\\u00e9\\ud83d\\ude00\\n"', '"é😀"', '""'], ['"\\ud83d"', '"\\x"', '"\t"', '"a', "a"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"äöü"', '"😀\\ud83d\\ude00x"'], ['"a"', '"abcd"']),
    ({"type": "integer", "minimum": -5, "maximum": 123}, ["-5", "-1", "0", "9", "10", "99", "100", "123"],
     ["-6", "124", "01", "-0", "1.0", "1e1", "-10"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1", "1.0", "0.00001"], ["0", "0.0", "1.01", "-0.5", "2"]),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, ["[true]", "[ true, false]"],
     ["[]", "[true,false,true]", "[true,]", "[1]"]),
    ({"type": "array", "prefixItems": [{"type": "null"}, {"type": "integer"}], "items": False}, ["[]", "[null]", "[null, 1]"],
     ["[1]", "[null,1,2]"]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
     ['{}', '{"a": 1}', '{"b": "x", "ab": "y"}', '{"a":1,"":"z"}'], ['{"a": "x"}', '{"b": 1}', '{"\\u0061": "x"}']),
    ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/list"}], "$defs": {"list": {"type": "array", "items": {"$ref": "#"}}}},
     ['"x"', '[["a"], "b", []]'], ["1", "[1]"]),
    ({"enum": ["a", 1, None, {"k": [1]}]}, ['"a"', "1", "null", '{"k":[1]}'], ['"b"', "2", '{"k": [1] }']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"'],
     ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"', '"2023-13-01"', '"0000-01-01"']),
    ({"type": "string", "format": "ipv6"}, ['"::"', '"::1"', '"1:2:3:4:5:6:7:8"', '"fe80::1"', '"1::"'], ['"1:2"', '"1::2::3"', '":::"']),
    ({"type": "string", "pattern": "b+"}, ['"abc"', '"b"', '"a\\nb"'], ['"ac"']),
    ({"properties": {"a": True}, "required": ["a", "z"]}, ['{"a": [{}], "z": 1}'], ['{"a": 1}']),
    (True, ["1", '{"a": [null, 1e5, "x"]}'], ["", "nul", "[1,]"]),
])
def test_single_texts(schema, allowed, refused):
    results = accept(schema, *allowed, *refused)
    assert results == [True] * len(allowed) + [False] * len(refused), list(zip(allowed + refused, results))
    for text in allowed:
        validate(schema, text)


@pytest.mark.parametrize("schema, message", [
    ({"type": "object", "properties": {"a": {"not": {}}}}, "'not' is not supported at #/properties/a "),
    ({"items": {"type": "array", "uniqueItems": True}}, "'uniqueItems' is not supported at #/items "),
    ({"anyOf": [{"type": "null"}, {"patternProperties": {}}]}, "'patternProperties' is not supported at #/anyOf/1 "),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"if": True}}}, "'if' is not supported at #/$defs/a "),
    ({"type": "string", "format": "iri"}, "'format' with 'iri' is not supported at # "),
    ({"type": "string", "pattern": "(?=a)b"}, "keyword 'pattern': the kind of group is not supported"),
    ({"type": "string", "pattern": "(a"}, "keyword 'pattern': ) is missing"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "'pattern' beside minLength or maxLength"),
    ({"type": "integer", "multipleOf": 3}, "'multipleOf'"),
    ({"type": "number", "minimum": 0.5}, "'minimum' of a number"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
    ({"$ref": "#/nowhere"}, "$ref '#/nowhere' points to nothing"),
    ({"$ref": "https://example.com/x"}, "points to nothing inside the schema"),
    ({"type": "text"}, "type 'text' does not exist"),
    ({"properties": []}, "properties must be an object"),
    ({"required": "a"}, "required"),
    ({"minItems": -1}, "minItems must be"),
    ([], "a schema must be an object or a boolean"),
    ({"$ref": "#"}, "nothing that satisfies"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "nothing that satisfies"),
    ({"enum": []}, "nothing that satisfies"),
    (False, "nothing that satisfies"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "nothing that satisfies"),
])
def test_refusals_name_keyword_and_place(schema, message):
    assert message in refusal(schema)


@pytest.mark.parametrize("schema", [
    {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x", "type": "object"}, {"$ref": "#/$defs/x", "type": "object"}]}}, "$ref": "#/$defs/x"},
    {"type": "string", "pattern": "^" + "((((((a{1000}){1000}){1000}){1000}){1000}){1000})" + "$"},
    {"type": "string", "pattern": "^" + "(a|b)*a" + "(a|b)" * 200 + "$"},
    {"type": "string", "pattern": "(" * 500 + ")" * 500},
    {"type": "string", "pattern": "^(((a?){1000}){1000}){1000}$"},
    {"type": "string", "pattern": "^" + "[a-zé-ü]?" * 3000 + "$"},
    {"type": "object", "properties": {f"p{i}": {} for i in range(4000)}},
    {"enum": [str(i) * 30 for i in range(20000)]},
    {"type": "array", "minItems": 10**9},
    {"type": "object", "properties": {"x" * 256: {}}, "additionalProperties": True},
    {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}, "$ref": "#/$defs/d0"},
], ids=range(11))
def test_hostile_schemas_are_refused_or_bounded(schema):
    """Within a second of processor time and 256 MiB: refused, or still followed. The tool prints one reply or says why not."""
    code = "import resource, os, sys; resource.setrlimit(resource.RLIMIT_CPU, (20, 20)); " \
           "resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20)); os.execv(sys.argv[1], sys.argv[1:])"
    command = ["python3", "-c", code, str(TOOL)] if "asan" not in str(TOOL) else [str(TOOL)]
    request = json.dumps({"schema": schema, "texts": 1, "accept": ["{}", '"' + "a" * 300 + '"']}) + "\n"
    done = subprocess.run(command, input=request.encode(), capture_output=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    assert done.returncode == 0 or b"too ambiguous" in done.stderr, done.stderr


@pytest.mark.parametrize("request_, allowed, refused", [
    ({"choices": ["red", "green", "redder"]}, ["red", "redder", "green"], ["re", "blue", "redgreen", ""]),
    ({"pattern": "[a-c]{2}|x"}, ["ab", "x"], ["a", "abx", "xab"]),
    ({"pattern": "^\\d+\\n\"?$"}, ["12\n", "1\n\""], ["12", "\n"]),
])
def test_choices_and_patterns(request_, allowed, refused):
    [reply] = run_tool([{**request_, "accept": allowed + refused, "texts": 5}])
    assert reply["accepted"] == [True] * len(allowed) + [False] * len(refused)
    if "choices" in request_:
        assert set(filter(None, reply["texts"])) <= set(request_["choices"])
