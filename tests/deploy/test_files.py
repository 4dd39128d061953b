# SPDX-License-Identifier: Apache-2.0
"""docker/: the files are valid for their programs, agree with each other, and name options that the program has."""

import os
import pathlib
import re
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from conftest import DOCKER, ROOT, api

COMPOSE = pathlib.Path(sys.executable).with_name("docker-compose")
HADOLINT = pathlib.Path(sys.executable).with_name("hadolint")
SECRETS = {"DISTILLCACHE_ADMIN_KEY": "a-key", "GRAFANA_PASSWORD": "a-password"}
MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))


def compose(*files, env=SECRETS):
    """What `docker compose config` makes of the files."""
    command = [COMPOSE, "--env-file", "/dev/null", *(part for file in files for part in ("-f", DOCKER / file)), "config"]
    result = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"], **env})
    return yaml.safe_load(result.stdout) if result.returncode == 0 else result.stderr


@pytest.fixture(scope="module")
def services():
    return compose("compose.yaml")["services"]


@pytest.fixture(scope="module")
def objects():
    """The manifests' objects by kind and name."""
    documents = [document for file in MANIFESTS for document in yaml.safe_load_all(file.read_text())]
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def upstreams(file):
    return re.findall(r"^server (\S+?):8080 ", (DOCKER / file).read_text(), re.M)


def check_options(environment):
    """The program takes these variables."""
    own = {name: value or "" for name, value in environment.items() if name.startswith("DISTILLCACHE_")}
    assert own
    result = subprocess.run([api.SERVER, "serve", "--print-config"], capture_output=True, text=True,
                            env={"DISTILLCACHE_MODEL": "x", **own})
    assert result.returncode == 0, result.stderr
    values = yaml.safe_load(result.stdout)
    for name in own:
        assert name.removeprefix("DISTILLCACHE_").lower() in values, name


def image_environment():
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", "")
    return dict(re.findall(r"(DISTILLCACHE_\w+)=(\S+)", text))


# --- Dockerfile ---


def test_dockerfile():
    result = subprocess.run([HADOLINT, DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    check_options(image_environment())


def test_ignored_files_are_not_in_images():
    """What git ignores here cannot be meant to be copied."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    left_out = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    assert ignored <= left_out, ignored - left_out
    assert ".git" in left_out


# --- Compose ---


def test_compose_is_valid_and_pinned(services):
    for name, service in services.items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), (name, service["image"])
        for volume in service.get("volumes", []):
            assert volume["type"] != "bind" or pathlib.Path(volume["source"]).exists(), volume
        for port in service.get("ports", []):
            assert name == "proxy" or port["host_ip"] == "127.0.0.1", (name, port)


@pytest.mark.parametrize("missing", SECRETS)
def test_compose_wants_its_secrets(missing):
    for value in ({}, {missing: ""}):
        answer = compose("compose.yaml", env={**{name: "x" for name in SECRETS if name != missing}, **value})
        assert isinstance(answer, str) and missing in answer


def test_compose_replicas_agree(services):
    replicas = sorted(name for name in services if name.startswith("replica-"))
    assert upstreams("nginx/replicas.conf") == replicas
    scrape = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == [f"{name}:8080" for name in replicas]
    states = set()
    for name in replicas:
        environment = services[name]["environment"]
        check_options({**image_environment(), **environment})
        minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(\d+)s", services[name]["stop_grace_period"]).groups("0")
        assert int(minutes) * 60 + int(seconds) > int(environment["DISTILLCACHE_DRAIN_TIMEOUT"])
        states |= {volume["source"] for volume in services[name]["volumes"] if volume["target"] == "/state"}
        assert services[name]["networks"]["serving"]["ipv4_address"]
    assert len(states) == len(replicas), "a state directory is for one server"
    mounted = {volume["target"]: pathlib.Path(volume["source"]).name for volume in services["proxy"]["volumes"]}
    assert mounted == {"/etc/nginx/conf.d/default.conf": "distillcache.conf",
                       "/etc/nginx/distillcache/replicas.conf": "replicas.conf"}


def test_compose_on_gpus():
    """One GPU for each replica, and nothing else is changed."""
    plain, gpus = compose("compose.yaml")["services"], compose("compose.yaml", "compose.gpu.yaml")["services"]
    assert set(plain) == set(gpus)
    taken = []
    for name in ("replica-0", "replica-1"):
        device, = gpus[name]["deploy"]["resources"]["reservations"]["devices"]
        taken += device["device_ids"]
        assert gpus[name]["build"]["target"] == "cuda" and gpus[name]["image"].endswith("-cuda")
        check_options(gpus[name]["environment"])
        assert {**gpus[name]["environment"], **plain[name]["environment"]} == gpus[name]["environment"]
    assert taken == ["0", "1"]


def test_settings_of_the_example_are_used(services):
    """Each line of example.env is a variable that compose.yaml reads."""
    text = (DOCKER / "compose.yaml").read_text()
    names = re.findall(r"^#?(\w+)=", (DOCKER / "example.env").read_text(), re.M)
    assert set(names) == set(re.findall(r"\$\{(\w+)", text)), names


def test_grafana_finds_its_files(services):
    mounts = {volume["target"]: pathlib.Path(volume["source"]) for volume in services["grafana"]["volumes"]
              if volume["type"] == "bind"}
    provider = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/distillcache.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] in mounts
    home = pathlib.Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounts[str(home.parent)] / home.name).exists()
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


# --- Kubernetes ---


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
def test_manifests_fit_their_schemas(objects, version):
    for document in objects.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_schemas_refuse_what_is_wrong(objects):
    document = dict(objects["PodDisruptionBudget", "distillcache"], spec={"minAvailabel": 1})
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.33", strict=True)


def pods(objects):
    return {key: document for key, document in objects.items() if key[0] in ("StatefulSet", "Deployment")}


def test_pods_are_probed_limited_and_unprivileged(objects):
    budgets = [document["spec"] for (kind, _), document in objects.items() if kind == "PodDisruptionBudget"]
    for key, document in pods(objects).items():
        template = document["spec"]["template"]
        labels = template["metadata"]["labels"]
        assert document["spec"]["selector"]["matchLabels"].items() <= labels.items(), key
        budget, = [spec for spec in budgets if spec["selector"]["matchLabels"].items() <= labels.items()]
        assert budget["minAvailable"] < document["spec"]["replicas"], "nothing could ever be moved"
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in template["spec"]["containers"]:
            assert re.search(r":v?\d+\.\d+\.\d+$", container["image"])
            assert {"readinessProbe", "livenessProbe"} <= set(container)
            assert set(container["resources"]["requests"]) == set(container["resources"]["limits"]) == {"cpu", "memory"}
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            volumes = {volume["name"] for volume in template["spec"]["volumes"]}
            volumes |= {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", [])}
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_replicas_of_the_proxy_are_there(objects):
    """One Service and one line of nginx's for each pod."""
    spec = objects["StatefulSet", "distillcache"]["spec"]
    assert upstreams("kubernetes/replicas.conf") == [f"distillcache-{i}" for i in range(spec["replicas"])]
    for name in upstreams("kubernetes/replicas.conf"):
        service = objects["Service", name]["spec"]
        assert service["selector"] == {"statefulset.kubernetes.io/pod-name": name}
        assert service["ports"][0]["port"] == 8080
    ports = {port["name"] for key in pods(objects) for container in
             objects[key]["spec"]["template"]["spec"]["containers"] for port in container["ports"]}
    assert ports == {"http"}
    assert all(port["targetPort"] in ports for (kind, _), document in objects.items() if kind == "Service"
               for port in document["spec"]["ports"])


def test_server_of_the_manifests(objects):
    spec = objects["StatefulSet", "distillcache"]["spec"]["template"]["spec"]
    container, = spec["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    check_options({**image_environment(), **environment})
    assert spec["terminationGracePeriodSeconds"] > int(environment["DISTILLCACHE_DRAIN_TIMEOUT"])
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health", "a server that drains is not to be killed"
    user = re.findall(r"^USER (\d+):", (DOCKER / "Dockerfile").read_text(), re.M)[-1]
    assert spec["securityContext"]["runAsUser"] == int(user)


def test_kustomization_names_everything(objects):
    text = yaml.safe_load((DOCKER / "kustomization.yaml").read_text())
    assert {DOCKER / name for name in text["resources"]} == set(MANIFESTS)
    generated, = text["configMapGenerator"]
    files = dict(entry.split("=") for entry in generated["files"])
    assert all((DOCKER / path).exists() for path in files.values())
    proxy = objects["Deployment", "distillcache-proxy"]["spec"]["template"]["spec"]
    assert proxy["volumes"][0]["configMap"]["name"] == generated["name"]
    mounted = {mount.get("subPath") for mount in proxy["containers"][0]["volumeMounts"]} - {None}
    assert mounted == set(files)
    images = {container["image"].split(":")[0] for key in pods(objects)
              for container in objects[key]["spec"]["template"]["spec"]["containers"]}
    assert {image["name"] for image in text["images"]} <= images
