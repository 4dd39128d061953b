# SPDX-License-Identifier: Apache-2.0
"""The CPU image: the steps of docker/Dockerfile, done in a fresh Debian (debootstrap), and a server that runs in what they
leave. With DISTILLCACHE_TEST_FULL=1 (scripts/test.sh --full), as root: several minutes, and the network for packages.

The machine's own package settings (apt's, pip's, certificates) are copied in, so that its mirrors are used.
"""

import glob
import http.client
import json
import os
import pathlib
import shutil
import signal
import subprocess

import pytest

from conftest import DOCKER, PATIENCE, ROOT, Reply, eventually, free_port
from image import Build, context_of

pytestmark = [
    pytest.mark.skipif(os.environ.get("DISTILLCACHE_TEST_FULL") != "1", reason="only with --full"),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root"),
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="there is no debootstrap"),
]

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
SETTINGS = ["/etc/apt/sources.list", "/etc/apt/sources.list.d/*", "/etc/apt/apt.conf.d/99*", "/usr/share/keyrings/*", "/etc/resolv.conf",
            "/etc/hosts", "/etc/pip.conf", CERTIFICATES]


def mirror():
    """The first one that this machine's apt uses."""
    lines = subprocess.check_output(["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)"], text=True).splitlines()
    return next(line.split()[0] for line in lines if line.endswith(" bookworm"))


def take_settings(root):
    for pattern in SETTINGS:
        for path in glob.glob(pattern):
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    if pathlib.Path(CERTIFICATES).exists():  # where the package ca-certificates does not replace them
        shutil.copy(CERTIFICATES, root / "etc/machine.crt")
    if any((root / "etc/apt/sources.list.d").glob("*")) and not pathlib.Path("/etc/apt/sources.list").exists():
        (root / "etc/apt/sources.list").unlink(missing_ok=True)  # debootstrap's
    for home in (".config/pip/pip.conf", ".pip/pip.conf"):
        if (pathlib.Path.home() / home).exists():
            shutil.copy(pathlib.Path.home() / home, root / "etc/pip.conf")


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    base = folder / "base"
    with open(folder / "debootstrap.log", "wb") as log:
        code = subprocess.run(["debootstrap", "--variant=minbase", "bookworm", base, mirror()], stdout=log, stderr=log).returncode
    assert code == 0, (folder / "debootstrap.log").read_text()[-2000:]
    network = {name: value for name, value in os.environ.items()
               if name.lower().startswith(("http_proxy", "https_proxy", "no_proxy", "pip_"))}
    if pathlib.Path(CERTIFICATES).exists():
        network["PIP_CERT"] = "/etc/machine.crt"
    build = Build(DOCKER / "Dockerfile", folder, base, context_of(ROOT, folder / "context"), take_settings, network,
                  {"FETCH_MODEL": "yes"})
    try:
        stage = build.target("cpu")
        stage.size = int(subprocess.check_output(["du", "-sxm", "--exclude=proc", stage.root], text=True).split()[0])
        stage.base_size = int(subprocess.check_output(["du", "-sxm", base], text=True).split()[0])
        yield stage
    finally:
        build.end()
        shutil.rmtree(folder, ignore_errors=True)


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        return Reply(connection.getresponse())
    finally:
        connection.close()


def test_image_has_what_runs_and_no_more(image):
    for name in ("gcc", "cc", "meson", "ninja", "pkg-config", "python3", "pip", "git", "curl", "wget"):
        assert not [place for place in ("usr/bin", "usr/local/bin", "bin") if (image.root / place / name).exists()], name
    assert not (image.root / "src").exists() and not (image.root / "build").exists()
    assert not list((image.root / "usr/include").glob("*.h"))
    assert "not found" not in image.run(["ldd", "/usr/bin/distillcache"])
    print(f"image: {image.size} MB, of which {image.base_size} are Debian's and 98 the model")
    assert image.run(["id", "-u"]).strip() == "10001"


def test_image_serves_and_drains(image):
    port = free_port()
    own = {"DISTILLCACHE_PORT": str(port), "DISTILLCACHE_THREADS": "1", "DISTILLCACHE_STATE_DIR": "/state",
           "DISTILLCACHE_KV_POLICY": "distillcache", "DISTILLCACHE_KV_RATIO": "0.25"}
    assert image.popen(image.health, own, stderr=subprocess.DEVNULL).wait() != 0, "healthy without a server"
    log = open(image.root / "tmp/log", "wb+")
    server = image.popen([*image.entrypoint, *image.command], own, stderr=log)
    try:
        eventually(lambda: server.poll() is not None or image.popen(image.health, own, stderr=subprocess.DEVNULL).wait() == 0, "healthy")
        assert server.poll() is None, (image.root / "tmp/log").read_text()
        status = pathlib.Path(f"/proc/{server.pid}/status").read_text()
        assert "\nUid:\t10001\t10001\t10001\t10001\n" in status and "\nCapEff:\t0000000000000000\n" in status
        prompt = "The keeper counted the ships. " * 30 + "The capital of France is"
        reply = ask(port, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0})
        assert reply.status == 200, reply.body
        usage = reply.json["usage"]
        assert reply.json["choices"][0]["text"] and usage["completion_tokens"] == 8
        # The network that is trained for this model came with the program.
        assert usage["kv_tokens_kept"] < usage["kv_tokens_seen"] / 2
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0, (image.root / "tmp/log").read_text()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
        log.close()
