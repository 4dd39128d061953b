# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings: OpenAI's shape and client, and the vectors beside the NumPy reference."""

import base64
import functools
import os
import struct
import sys

import gguf
import numpy
import openai
import pytest

from conftest import ROOT, Stream, eventually, post_bytes

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/reference")]
import slim_model  # noqa: E402
from reference.model import Model, rms_norm  # noqa: E402

ROUTE = "/v1/embeddings"
TEXTS = ["The keeper counted the ships.", "a", "Ein Türmer zählt die Schiffe 船 und schreibt ihre Zahl auf. " * 4]


class States(Model):
    """The reference, stopped at the states after the final norm."""

    def head(self, x):
        return rms_norm(x, self.weights["output_norm.weight"], self.config.eps)


@pytest.fixture(scope="module")
def states():
    model = States(os.environ["DISTILLCACHE_TEST_MODEL"])
    return functools.cache(lambda ids: model.prefill(ids)[0])


def embed(server, **body):
    reply = server.post(ROUTE, body)
    assert reply.status == 200, reply.body
    return reply.json


def vectors(server, **body):
    return numpy.array([entry["embedding"] for entry in embed(server, **body)["data"]])


def apart(vector, expected):
    """Their distance, as a part of the expected one's length."""
    return float(numpy.linalg.norm(vector - expected) / numpy.linalg.norm(expected))


def test_beside_the_reference(start_server, states):
    """Both poolings, normalised and not; the server's own policy, which would prune these texts, is not used on them, and
    nothing of them is left in the cache."""
    server = start_server("--precision", "f32", "--kv-format", "f32", "--kv-policy", "h2o,minimum=4,prefill_prune_every=16",
                          "--kv-ratio", "0.25")
    for text in TEXTS:
        expected = states(tuple(server.tokenize(text)))
        for pooling, vector in (("mean", expected.mean(axis=0)), ("last", expected[-1])):
            plain = vectors(server, input=text, pooling=pooling, normalize=False)[0]
            assert apart(plain, vector) < 2e-5, (text, pooling)
            unit = vectors(server, input=text, pooling=pooling)[0]
            assert apart(unit, vector / numpy.linalg.norm(vector)) < 2e-5, (text, pooling)
    assert server.metrics()["kv_cache_usage_perc"] == 0
    reply = server.complete(prompt=TEXTS[2], max_tokens=1, kv_cache={"policy": "full"})
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert vectors(server, input=TEXTS[2], pooling="last", normalize=False)[0].tolist() == plain.tolist()
    assert server.stop() == 0


@pytest.mark.speaks
def test_default_precision(server, states):
    """int8 activations: near the reference, as its README says of logits."""
    for text in TEXTS:
        expected = states(tuple(server.tokenize(text))).mean(axis=0)
        assert apart(vectors(server, input=text)[0], expected / numpy.linalg.norm(expected)) < 0.06, text


def test_same_alone_and_among_others(server):
    """Chunks, other texts and decoding sequences change no bit."""
    alone = [vectors(server, input=text, pooling=pooling)[0].tolist() for pooling in ("mean", "last") for text in TEXTS]
    streams = [Stream(server, "/v1/completions", prompt="Once", max_tokens=300, ignore_eos=True, seed=i).start() for i in range(3)]
    events = [iter(stream) for stream in streams]
    for event in events:
        next(event)
    together = [vector.tolist() for pooling in ("mean", "last") for vector in vectors(server, input=TEXTS, pooling=pooling)]
    assert together == alone
    for stream in streams:
        stream.close()


def test_pooling_of_the_file(start_server, tmp_path):
    """What the model's file asks for is what requests get that choose none; where it is another, they must choose."""
    path = tmp_path / "model.gguf"
    slim_model.main(os.environ["DISTILLCACHE_TEST_MODEL"], str(path), layers=1,
                    added=[("pooling_type", 0xABCDEF, gguf.GGUFValueType.UINT32)])
    file = path.read_bytes()
    for kind, default in ((gguf.PoolingType.MEAN, "mean"), (gguf.PoolingType.LAST, "last"), (gguf.PoolingType.CLS, None)):
        path.write_bytes(file.replace(struct.pack("<I", 0xABCDEF), struct.pack("<I", kind), 1))
        server = start_server("--model", path, "--kv-memory", "64M", "--context", "256")
        chosen = {pooling: vectors(server, input=TEXTS, pooling=pooling).tolist() for pooling in ("mean", "last")}
        assert chosen["mean"] != chosen["last"]
        for nothing in ({}, {"pooling": None}):
            if default is None:
                server.post(ROUTE, {"input": TEXTS, **nothing}).expect_error(400, param="pooling")
            else:
                assert vectors(server, input=TEXTS, **nothing).tolist() == chosen[default], kind
        assert server.stop() == 0


def test_openais_client(server):
    """Which asks for base64 unless told otherwise, and makes numbers of it."""
    client = server.client()
    whole = client.embeddings.create(model=server.model, input=TEXTS)
    plain = client.embeddings.create(model=server.model, input=TEXTS, encoding_format="float")
    assert whole.object == "list" and whole.model == server.model
    assert [entry.index for entry in whole.data] == [0, 1, 2] and {entry.object for entry in whole.data} == {"embedding"}
    for one, other in zip(whole.data, plain.data):
        assert one.embedding == numpy.array(other.embedding, numpy.float32).tolist()
        assert abs(numpy.linalg.norm(one.embedding) - 1) < 1e-6
    count = sum(len(server.tokenize(text)) for text in TEXTS)
    assert whole.usage.prompt_tokens == whole.usage.total_tokens == count
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=server.model, input="a", dimensions=16)
    assert refused.value.param == "dimensions"


# --- On the scheduler without a model: the state of token t is (t, 1, 0, 0) ---


def test_forms_of_input(fake):
    a, b = [97.0, 1.0, 0.0, 0.0], [98.0, 1.0, 0.0, 0.0]
    for given, expected in (("a", [a]), (["a", "b"], [a, b]), ([97], [a]), ([97, 98], [[97.5, 1, 0, 0]]), ([[97], [98, 98]], [a, b])):
        assert vectors(fake, input=given, normalize=False).tolist() == expected, given
    assert vectors(fake, input="ab", pooling="last", normalize=False).tolist() == [b]
    for field in ({}, {"normalize": True}, {"embd_normalize": 2}):
        assert numpy.allclose(vectors(fake, input=[3], **field), [[3 / 10**0.5, 1 / 10**0.5, 0, 0]], atol=1e-7)
    assert vectors(fake, input=[3], embd_normalize=-1).tolist() == [[3, 1, 0, 0]]
    data = embed(fake, input="a", encoding_format="base64", normalize=False)["data"][0]["embedding"]
    assert struct.unpack("<4f", base64.b64decode(data, validate=True)) == tuple(a)
    reply = embed(fake, input=["a", "bc"], dimensions=4, user="me")
    assert reply["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


@pytest.mark.parametrize("param, fields", [
    ("input", {"input": None}), ("input", {"input": ""}), ("input", {"input": []}), ("input", {"input": ["a", ""]}),
    ("input", {"input": [[]]}), ("input", {"input": ["a", 1]}), ("input", {"input": [1, "a"]}), ("input", {"input": [1.5]}),
    ("input", {"input": [259]}), ("input", {"input": [-1]}), ("input", {"input": {"a": 1}}), ("input", {"input": 1}),
    ("input", {"input": ["a"] * 2049}), ("encoding_format", {"encoding_format": "int8"}), ("encoding_format", {"encoding_format": 1}),
    ("dimensions", {"dimensions": 3}), ("dimensions", {"dimensions": 0}), ("dimensions", {"dimensions": "4"}),
    ("pooling", {"pooling": "cls"}), ("pooling", {"pooling": ["mean"]}), ("normalize", {"normalize": 2}),
    ("embd_normalize", {"embd_normalize": 1}), ("embd_normalize", {"embd_normalize": -1, "normalize": True}),
    ("kv_cache", {"kv_cache": {"policy": "h2o"}}), ("stream", {"stream": True}), ("messages", {"messages": []}),
])
def test_bad_values(fake, param, fields):
    fake.post(ROUTE, {"input": "a", **fields}).expect_error(400, param=param)


def test_other_faults(fake):
    fake.post(ROUTE, {"input": "a", "model": "b"}).expect_error(404, code="model_not_found", param="model")
    fake.post(ROUTE, {"input": "a" * 8193}).expect_error(400, code="context_length_exceeded", param="input")
    fake.post(ROUTE, "{").expect_error(400)
    fake.post(ROUTE, {"input": ["a", "!fail"]}).expect_error(500, type="server_error")
    assert fake.request("GET", ROUTE).status == 405


def test_context_exceeded(server):
    limit = server.get("/v1/models").json["data"][0]["max_model_len"]
    server.post(ROUTE, {"input": [1] * (limit + 1)}).expect_error(400, code="context_length_exceeded", param="input")


def test_many_texts(fake):
    """As many as are allowed, in order."""
    reply = embed(fake, input=[[i % 256] for i in range(2048)], normalize=False)
    assert [entry["embedding"][0] for entry in reply["data"]] == [i % 256 for i in range(2048)]
    assert [entry["index"] for entry in reply["data"]] == list(range(2048))


def test_departed_clients(fake):
    """Who leaves takes the request along."""
    connection = fake.connect()
    connection.sendall(post_bytes(ROUTE, {"input": "!never"}))
    eventually(lambda: fake.metrics()["num_requests_waiting"] == 1)
    connection.close()
    fake.idle()
