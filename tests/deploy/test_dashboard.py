# SPDX-License-Identifier: Apache-2.0
"""Grafana's dashboard: Prometheus (Debian's) reads servers by docker/prometheus.yml and answers every query of it."""

import json
import os
import re
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from admin import Admin
from conftest import DOCKER, PATIENCE, api, eventually, free_port, tool

DASHBOARD = json.loads((DOCKER / "grafana/dashboards/distillcache.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def without_variables(query):
    query = query.replace("$__rate_interval", "10s").replace("$instance", ".+")
    assert "$" not in query
    return query


class Prometheus:
    def __init__(self, folder, targets):
        config = (DOCKER / "prometheus.yml").read_text()
        for old, new in ((r"scrape_interval: \d+s", "scrape_interval: 1s"), (r"targets: \[.*\]", f"targets: {targets}")):
            config, count = re.subn(old, new, config)
            assert count == 1
        (folder / "prometheus.yml").write_text(config.replace("'", '"'))
        self.port = free_port()
        self.log = folder / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [tool("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address=127.0.0.1:{self.port}"], stderr=log, env={**os.environ, "GOMAXPROCS": "1"})

    def query(self, expression):
        """The result of an instant query: a list of samples, empty while Prometheus starts. An invalid query fails."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as reply:
                return json.load(reply)["data"]["result"]
        except urllib.error.HTTPError as error:
            assert error.code == 503, (expression, error.read())
        except urllib.error.URLError:
            assert self.process.poll() is None, self.log.read_text()
        time.sleep(0.2)  # it starts
        return []


@pytest.fixture(scope="module")
def prometheus(start_server, tmp_path_factory):
    """Prometheus beside two servers with something to show: requests that end, one that is pruned and runs, a job."""
    own = Admin(start_server, tmp_path_factory.mktemp("state"))
    own.wait(own.create())
    servers = [own.server, start_server(fake=True)]
    ending = threading.Event()

    def ask(server):
        while not ending.wait(0.2):
            server.complete(prompt="a prompt of some length", max_tokens=5)

    threads = [threading.Thread(target=ask, args=(server,)) for server in servers]
    running = [api.Stream(server, "/v1/completions", prompt="!slow" + "x" * 200, max_tokens=8000,
                          kv_cache={"policy": "h2o", "ratio": 0.25}) for server in servers]
    for thread in threads:
        thread.start()
    process = Prometheus(tmp_path_factory.mktemp("prometheus"), [f"127.0.0.1:{server.port}" for server in servers])
    yield process
    process.process.terminate()
    process.process.wait(PATIENCE)
    ending.set()
    for thread in threads:
        thread.join(PATIENCE)
    for stream in running:
        stream.close()


def test_every_query_has_an_answer(prometheus):
    """Its syntax is right, its metrics and labels exist, and what comes is a number."""
    answers = {}

    def all_answered():
        for title, query in QUERIES:
            samples = [] if query in answers else prometheus.query(without_variables(query))
            if samples and all(sample["value"][1] != "NaN" for sample in samples):
                answers[query] = samples
        time.sleep(0.3)
        return len(answers) == len({query for _, query in QUERIES})

    try:
        eventually(all_answered, "all are answered")
    except AssertionError as error:
        raise AssertionError([query for _, query in QUERIES if query not in answers]) from error
    up, = [query for title, query in QUERIES if title == "Replicas that answer"]
    eventually(lambda: prometheus.query(without_variables(up))[0]["value"][1] == "2", "both are there")


def test_kept_is_less_than_full(prometheus):
    """The panel shows what servers say: a pruned sequence keeps less than it has seen."""
    query, = [query for title, query in QUERIES if title == "Part that is kept" and "kv_tokens_kept" in query]
    samples = eventually(lambda: prometheus.query(without_variables(query)), "a part")
    assert 0.2 < float(samples[0]["value"][1]) < 0.9, samples


def test_metrics_exist_in_the_real_server(start_server):
    """The other servers here have a fake scheduler. Those of training come with a job."""
    server = start_server("--kv-memory", "32M", "--threads", 1)
    server.complete(prompt="x", max_tokens=1)
    text = server.get("/metrics").body.decode()
    names = {name for _, query in QUERIES for name in re.findall(r"distillcache:\w+", query)}
    assert len(names) > 25
    for name in names:
        assert f"\n{name}{{" in text or name.startswith("distillcache:training_"), name


def test_metrics_are_well_formed(start_server):
    """As promtool reads them; it dislikes the colon, by which vLLM's dashboards are taken over, and one old name."""
    text = start_server(fake=True).get("/metrics").body
    result = subprocess.run([tool("promtool"), "check", "metrics"], input=text, capture_output=True)
    words = [line for line in result.stderr.decode().splitlines() if "should not contain ':'" not in line]
    assert words == ['distillcache:policy_seconds counter metrics should have "_total" suffix'], words
    broken = subprocess.run([tool("promtool"), "check", "metrics"], input=text + b"x{ 1\n", capture_output=True)
    assert b"error while linting" in broken.stderr


def test_configuration():
    result = subprocess.run([tool("promtool"), "check", "config", DOCKER / "prometheus.yml"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_dashboard_hangs_together():
    """Grafana is not here to ask: ids, places, units and sources by hand."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) > 20
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Load", "Latency", "Cache: kept against full", "Training"]
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "prometheus" and panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables and "instance" in used, target["expr"]
    assert 'uid: prometheus' in (DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text()
