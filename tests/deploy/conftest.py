# SPDX-License-Identifier: Apache-2.0
"""Tests of docker/: replicas behind nginx, the dashboard beside Prometheus, manifests, the image's steps.

DISTILLCACHE_TEST_TOOLS  a folder that Debian's packages nginx and prometheus were unpacked in; else they are looked for in PATH
The servers are those of tests/api (its conftest.py has the other variables).
"""

import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests/api"))
from ports import free_port  # noqa: E402

_spec = importlib.util.spec_from_file_location("api_conftest", ROOT / "tests/api/conftest.py")
api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(api)
# What tests/api/admin.py looks for here, and the fixtures.
PATIENCE, Reply, eventually = api.PATIENCE, api.Reply, api.eventually
policies_folder, start_server = api.policies_folder, api.start_server


def tool(name):
    """The path of a program, or the test is skipped."""
    folder = os.environ.get("DISTILLCACHE_TEST_TOOLS")
    places = [f"{folder}/usr/sbin", f"{folder}/usr/bin"] if folder else [os.environ["PATH"], "/usr/sbin"]
    return shutil.which(name, path=os.pathsep.join(places)) or pytest.skip(f"there is no {name}")


class Proxy(api.Server):
    """nginx with docker/nginx/distillcache.conf as it is, but for its port."""

    def __init__(self, folder, replicas, options="max_fails=1 fail_timeout=1s", **changes):
        self.folder, self.log_path = folder, folder / "error.log"
        self.port = free_port()
        (folder / "distillcache").mkdir()
        (folder / "conf.d").mkdir()
        (folder / "distillcache/replicas.conf").write_text(
            "".join(f"server 127.0.0.1:{port} {options};\n" for port in replicas))
        site = (DOCKER / "nginx/distillcache.conf").read_text()
        for old, new in {"listen 8080;": f"listen 127.0.0.1:{self.port};", **changes}.items():
            assert site.count(old) == 1, old
            site = site.replace(old, new)
        (folder / "conf.d/distillcache.conf").write_text(site)
        paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in
                        ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        user = "user root;\n" if os.geteuid() == 0 else ""  # workers have to enter the folder
        (folder / "nginx.conf").write_text(
            f"{user}daemon off;\npid {folder}/pid;\nworker_processes 2;\nerror_log {folder}/error.log info;\n"
            f"events {{ worker_connections 512; }}\n"
            f"http {{\naccess_log {folder}/access.log;\n{paths}include conf.d/*.conf;\n}}\n")
        command = [tool("nginx"), "-p", folder, "-c", folder / "nginx.conf"]
        check = subprocess.run([*command, "-t"], capture_output=True, text=True)
        assert check.returncode == 0 and "[warn]" not in check.stderr, check.stderr
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        eventually(self._accepts, "nginx accepts")

    def _accepts(self):
        assert self.process.poll() is None, self.log
        try:
            self.connect().close()
            return True
        except ConnectionRefusedError:
            return False

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE) == 0, self.log
        assert "[alert]" not in self.log and "[emerg]" not in self.log and "exited on signal" not in self.log, self.log


@pytest.fixture
def start_proxy(tmp_path_factory):
    """start_proxy(*replicas, ...): nginx before these servers."""
    proxies = []

    def start(*replicas, **options):
        proxies.append(Proxy(tmp_path_factory.mktemp("nginx"), [replica.port for replica in replicas], **options))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.end()
