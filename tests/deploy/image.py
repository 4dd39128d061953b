# SPDX-License-Identifier: Apache-2.0
"""Does what a Dockerfile says, without Docker: each stage is a folder that commands run in by chroot. As root.

Covers what docker/Dockerfile uses: ARG, FROM ... AS, SHELL, WORKDIR, COPY [--from], RUN, ENV, USER, and for the end
HEALTHCHECK CMD, ENTRYPOINT, CMD. Anything else is an error. The images that FROM names are one folder, which the caller
gives. Layers, caches and the engine's isolation are not imitated.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess

from dockerfile_parse import DockerfileParser

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Stage:
    def __init__(self, root, parent=None):
        self.root = root
        self.env = dict(parent.env) if parent else {"PATH": PATH}
        self.shell = list(parent.shell) if parent else ["/bin/sh", "-c"]
        self.folder = parent.folder if parent else "/"
        self.user = parent.user if parent else "0:0"
        self.health = parent.health if parent else None
        self.entrypoint = list(parent.entrypoint) if parent else []
        self.command = list(parent.command) if parent else []
        self.arguments = {}

    def popen(self, command, env=None, **options):
        """Runs a command in it as its user."""
        environment = {"HOME": "/root" if self.user.startswith("0") else "/", **self.env, **(env or {})}
        chroot = ["chroot", f"--userspec={self.user}", self.root, "/bin/sh", "-c", 'cd "$0" && exec "$@"', self.folder]
        return subprocess.Popen([*chroot, *command], env=environment, **options)

    def run(self, command, env=None, **options):
        process = self.popen(command, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
        output = process.communicate()[0]
        assert process.returncode == 0, f"{command}: {output[-4000:]}"
        return output


class Build:
    """The stages that a target needs, made in order.

    base       folder: what `FROM debian:...` stands for
    context    folder of the files that COPY takes
    prepare    prepare(root): called with each copy of base
    network    variables of RUN by which this machine reaches the network
    """

    def __init__(self, dockerfile, folder, base, context, prepare, network, arguments):
        self.instructions = DockerfileParser(fileobj=open(dockerfile, "rb")).structure
        self.folder, self.base, self.context, self.prepare = folder, base, context, prepare
        self.network, self.given = network, arguments
        self.stages = {}
        self.mounted = []

    def needs(self):
        """Of each stage: the others that it is made from."""
        needs, name = {}, None
        for step in self.instructions:
            words = step["value"].split()
            if step["instruction"] == "FROM":
                name = words[2] if len(words) == 3 else str(len(needs))
                needs[name] = {words[0]} & set(needs)
            elif step["instruction"] == "COPY":
                needs[name] |= {word.removeprefix("--from=") for word in words if word.startswith("--from=")}
        return needs

    def target(self, name):
        needs, wanted = self.needs(), {name}
        while more := set().union(*(needs[stage] for stage in wanted)) - wanted:
            wanted |= more
        outer, stage = {}, None  # ARG before the first FROM
        for step in self.instructions:
            instruction, value = step["instruction"], step["value"]
            if instruction == "COMMENT":
                continue
            if instruction == "FROM":
                words = self.expand(value, outer).split()
                stage = self.begin(words) if words[2] in wanted else None
            elif instruction == "ARG" and not self.stages:
                key, default = value.split("=", 1)
                outer[key] = self.given.get(key, default)
            elif stage is not None:
                getattr(self, "do_" + instruction.lower())(stage, value)
        return self.stages[name]

    @staticmethod
    def expand(text, values):
        return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)

    def begin(self, words):
        parent = self.stages.get(words[0])
        root = self.folder / words[2]
        subprocess.run(["cp", "-a", "--one-file-system", parent.root if parent else self.base, root], check=True)
        if parent is None:
            assert words[0].startswith("debian:"), words
            self.prepare(root)
        (root / "proc").mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], check=True)
        self.mounted.append(root / "proc")
        self.stages[words[2]] = Stage(root, parent)
        return self.stages[words[2]]

    def end(self):
        for path in reversed(self.mounted):
            subprocess.run(["umount", "-l", path], check=False)

    def do_arg(self, stage, value):
        key, default = value.split("=", 1)
        stage.arguments[key] = self.given.get(key, default)

    def do_shell(self, stage, value):
        stage.shell = json.loads(value)

    def do_workdir(self, stage, value):
        stage.folder = value
        (stage.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def do_run(self, stage, value):
        stage.run([*stage.shell, value], {**self.network, **stage.arguments})

    def do_env(self, stage, value):
        stage.env.update(word.split("=", 1) for word in shlex.split(value))

    def do_user(self, stage, value):
        assert re.fullmatch(r"\d+:\d+", value), value
        stage.user = value

    def do_copy(self, stage, value):
        words = value.split()
        source = self.context
        if words[0].startswith("--from="):
            source = self.stages[words.pop(0).removeprefix("--from=")].root
        *files, target = words
        place = stage.root / os.path.join(stage.folder, target).lstrip("/")
        for name in files:
            path = source / name.lstrip("/")
            if path.is_dir():
                shutil.copytree(path, place, symlinks=True, dirs_exist_ok=True)
            elif target.endswith("/"):
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)

    def do_expose(self, stage, value):
        assert value.isdigit()

    def do_healthcheck(self, stage, value):
        stage.health = json.loads(value[value.index("CMD") + 3:])

    def do_entrypoint(self, stage, value):
        stage.entrypoint = json.loads(value)
        stage.command = []

    def do_cmd(self, stage, value):
        stage.command = json.loads(value)


def context_of(root, folder):
    """What `docker build` would be given of a clone: its files, less what .dockerignore names at the top."""
    left_out = {line for line in (root / ".dockerignore").read_text().splitlines() if line and line[0] not in "#*"}
    names = subprocess.check_output(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "-z"]).decode().split("\0")
    for name in filter(None, names):
        path = pathlib.Path(name)
        if path.parts[0] not in left_out and (root / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, folder / path)
    return folder
