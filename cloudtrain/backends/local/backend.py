"""The local backend: runs jobs on this machine as N simulated nodes, each with a folder and a detached supervisor.

The handle is the attempt's folder. No daemon runs besides the job: status and logs are read from the supervisors' files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import cloudtrain.nodes.supervisor as supervisor
from cloudtrain.backends import manifest as manifests
from cloudtrain.backends.api import FETCHABLE, WORKDIR, Paths, Plan, Shell, TimeLimit, Traits
from cloudtrain.backends.folder import FolderBackend
from cloudtrain.backends.traits import HERE_FIXES, HONOURED, NO_EFFECT
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, BadJob, Problem, StoreError
from cloudtrain.job import roles
from cloudtrain.nodes.files import MOST_REQUEST, write
from cloudtrain.nodes.files import token as shared_token
from cloudtrain.source import untrusted
from cloudtrain.source.bundle import runtime_files
from cloudtrain.source.files import RESERVED

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.nodes.agents import Agent, Node
    from cloudtrain.source.bundle import Bundle


JOIN_S = 60.0  # timeout for node 0 to listen, before the other nodes are started


KEYS = dict.fromkeys(("num_nodes", "min_nodes", "resources.accelerators", "secrets.env", "secrets.file"), HONOURED)
KEYS |= dict.fromkeys(("roles.resources", "roles.colocate"), HONOURED)
KEYS |= dict.fromkeys(("resources.cpus", "resources.memory", "resources.disk_gb"), NO_EFFECT)


class LocalBackend(FolderBackend):
    """Runs jobs as processes of this machine."""

    name = "local"
    traits = Traits(Paths.HERE, KEYS, in_place=True, workdir=True, own_machines=True, shell=True, fixes=HERE_FIXES)
    poll_s = 0.25  # a status call takes 1.5 ms; a new run is polled more often (attempts.pause)
    variables: tuple[str, ...] = ()

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self.python = str(options.get("python") or sys.executable)
        self.workdir, self.runs = workdir, str(workdir)

    @classmethod
    def options(cls) -> type[BaseModel]:
        from pydantic import BaseModel, ConfigDict, Field

        class LocalOptions(BaseModel):
            """Options of the backend `local`."""

            model_config = ConfigDict(extra="forbid")
            python: str | None = Field(
                None, description="Python interpreter of the ranks; default: the one that runs cloudtrain"
            )

        return LocalOptions

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        about = None
        if job.output:
            from cloudtrain.source import provenance

            about = provenance.about(self.name, job, bundle)
        manifest = manifests.Manifest.of(job, run_id, attempt, about)
        output: str | None = None
        problems = [*roles.find_shared_ports(job), *roles.find_taken_gpus(job)] if job.roles else []
        if job.output or job.inputs:
            from cloudtrain.nodes import paths

            output, wrong = paths.output_path(job.output)
            problems += wrong + paths.check_inputs(job)
        if problems:
            raise BadJob(problems)
        folder, gpus = self.workdir / run_id / f"a{attempt}", manifests.gpus_of_nodes(job)
        common_env = manifest.environment() | {
            "CLOUDTRAIN_HOST": "127.0.0.1",
            "CLOUDTRAIN_RUN_DIR": str(Path(output or self.workdir) / run_id),
            "CLOUDTRAIN_STDIN": "1",
        }
        processes = [
            {
                "folder": str(folder / f"node-{rank}"),
                "argv": [self.python, ".cloudtrain/launch.py"],
                "env": common_env
                | {
                    "CLOUDTRAIN_NODE_RANK": str(rank),
                    "CLOUDTRAIN_NODE_DIR": str(folder / f"node-{rank}"),
                    "CLOUDTRAIN_GPUS": manifests.chosen_gpus(gpus[rank], gpus[:rank]),
                },
            }
            for rank in range(manifest.nodes)
        ]
        notes = manifests.gpu_notes(job, "this machine")
        if manifest.nodes > 1:
            notes.append(f"{manifest.nodes} nodes run as groups of processes on this machine")
        return Plan.of(self.name, job, bundle, manifest.to_dict(), {"nodes": processes}, notes)

    def time_limit(self, plan: Plan) -> TimeLimit:
        return TimeLimit.of_launcher(plan)

    def preflight(self, plan: Plan) -> None:
        manifests.check_gpus(plan)

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        requested = plan.request["nodes"]
        folder = Path(requested[0]["folder"]).parent
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write(folder / "request.json", json.dumps(plan.request).encode())
            write(folder / "labels.json", json.dumps(plan.job["labels"]).encode())
            for node in requested:
                self._extract_bundle(bundle, Path(node["folder"]))
        except OSError as error:
            raise BackendError(
                f"{folder} cannot be prepared: {error.strerror or error}", "free some disk space"
            ) from None
        try:
            self._start(plan)
        except OSError as error:
            self.cancel(str(folder))  # node 0 may run
            raise BackendError(f"the launcher cannot be started on this machine: {error.strerror or error}") from None
        return str(folder)

    def _start(self, plan: Plan) -> None:
        """Start the supervisors of all nodes; raises OSError."""
        requested = plan.request["nodes"]
        secrets = _stdin_data(plan)
        base = _base_environment(plan)
        for rank, node in enumerate(requested):
            node_folder = Path(node["folder"])
            env = base | dict(node["env"])
            if rank > 0 and not (node_folder / "started").exists():
                control = self._wait_for_control(Path(requested[0]["folder"]))
                if control is None:
                    break  # node 0 ended before it listened: its own state says why
                env["CLOUDTRAIN_CONTROL"] = control
            supervisor.start(node_folder, node["argv"], env, secrets)

    def _extract_bundle(self, bundle: Bundle, node: Path) -> None:
        """Extract the bundle into a node's folder, once and atomically."""
        source = node / "source"
        try:
            bundle.extract(source)
        except StoreError:
            if not source.exists():
                raise
            return  # an earlier submit of this attempt, or one that was faster, has done it
        if self.python == sys.executable:
            link_bytecode(source, bundle.path.parent / ".bytecode", bundle.sha256, bundle.extra)

    def _wait_for_control(self, first: Path) -> str | None:
        """Wait until node 0 listens and return its address, or None if it ended instead."""
        deadline = self._clock.monotonic() + JOIN_S
        while self._clock.monotonic() < deadline:
            status = supervisor.read_status(first)
            if status and (control := status.get("control")):
                return f"{control['host']}:{control['port']}"
            state = supervisor.read_state(first)
            if state is not None and state["state"] in supervisor.FINAL:
                return None
            self._clock.sleep(0.005)
        return None

    def find(self, attempt_id: str) -> str | None:
        folder = self.attempt_folder(attempt_id)
        nodes = _node_folders(Path(folder))
        return folder if nodes and all(supervisor.has_begun(node) for node in nodes) else None

    def discard(self, attempt_id: str) -> None:
        self.end(self.attempt_folder(attempt_id))

    def nodes(self, handle: str) -> list[Node]:
        from cloudtrain.nodes.agents import LocalAgent, Node

        folder, machine = self._folder(handle), LocalAgent()
        return [Node(machine, rank, str(folder)) for rank, _ in enumerate(_node_folders(folder))]

    def reports(self, nodes: Sequence[Node]) -> list[Any]:
        return [node.ask("report", folder=node.attempt, rank=node.rank).value for node in nodes]  # no threads for files

    def run_folders(self, handle: str) -> dict[str, tuple[Agent, str]]:
        from cloudtrain.nodes.agents import LocalAgent

        # In this home: the folder that the handle names is another home's where this is a copy.
        folder = str(self.workdir / Path(handle).parent.name)
        return {folder: (LocalAgent(), folder)}

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        self.node(handle, node)
        return Shell((self.python, *words))

    def cancel(self, handle: str) -> None:
        if not self.status(handle).state.final:
            super().cancel(handle)
            return
        for node in self.nodes(handle):  # what its supervisor left, if that was killed
            node.ask("reap", node=node.folder)

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        from cloudtrain.source.folder_writer import copy_tree

        folder = self._folder(handle)
        request = json.loads(untrusted.read_file(folder, "request.json", MOST_REQUEST))
        run_dir = Path(request["nodes"][0]["env"]["CLOUDTRAIN_RUN_DIR"])
        if run_dir == Path(handle).parent:  # the job names no output
            run_dir = folder.parent
        into.mkdir(parents=True, exist_ok=True)
        if WORKDIR in what:
            for node in _node_folders(self._folder(handle)):
                copy_tree(node / "source", into / WORKDIR / node.name, leave_out=[".cloudtrain"])
        for name in what:
            if (run_dir / name).is_dir():
                copy_tree(run_dir / name, into / name)
        return into

    def _folder(self, handle: str) -> Path:
        """Return an attempt's folder. After the home was moved it is below the home of now."""
        folder = Path(handle)
        moved = self.workdir / folder.parent.name / folder.name
        return moved if not folder.is_dir() and moved.is_dir() else folder

    def check(self) -> list[Problem]:
        problems = []
        if not shutil.which(self.python):
            problems.append(Problem(f"the interpreter {self.python} does not exist", "options.local.python"))
        parent = next(folder for folder in (self.workdir, *self.workdir.parents) if folder.exists())
        if not os.access(parent, os.W_OK):
            problems.append(Problem(f"{parent} cannot be written", hint="set CLOUDTRAIN_HOME"))
        elif shutil.disk_usage(parent).free < 1 << 30:
            problems.append(Problem(f"less than 1 GiB is free below {parent}", hint="set CLOUDTRAIN_HOME"))
        return problems


def _stdin_data(plan: Plan) -> dict[str, Any]:
    """Return the secrets and the token that the supervisor reads from standard input."""
    single_node = len(plan.request["nodes"]) == 1
    folder = Path(plan.request["nodes"][0]["folder"]).parent
    token = os.urandom(16).hex() if single_node else shared_token(folder)
    return {"secrets": manifests.env_secrets(plan), "token": token}


def _base_environment(plan: Plan) -> dict[str, str]:
    """Return this process's environment without the job's secrets and without an outer launcher's variables."""
    hidden = manifests.secret_names(plan)
    return {name: value for name, value in supervisor.clean_environment(os.environ).items() if name not in hidden}


def _node_folders(folder: Path) -> list[Path]:
    """Return the folders of the nodes of an attempt."""
    try:
        request = json.loads(untrusted.read_file(folder, "request.json", MOST_REQUEST))
    except (OSError, ValueError, RecursionError):
        return []
    return [folder / Path(node["folder"]).name for node in request["nodes"]]  # the home may have been moved


_FOUND: dict[tuple[Path, str], tuple[Path, list[Path]]] = {}  # a cache, the digest of a bundle -> its bytecode, folders


def link_bytecode(
    source: Path, cache: Path, sha256: str = "", extra: Mapping[str, Path] = MappingProxyType({})
) -> None:
    """Link cached bytecode for this interpreter into the runtime of an extracted source; compiles it if necessary.

    `sha256` is that of the bundle, where one is known: many calls of a function have the same. `extra` are its files beside
    the source, as of `Bundle.make`.

    Each folder of the runtime gets a `__pycache__` link into the cache. The interpreter checks every file there against
    the hash of its source, so it never uses stale bytecode.
    """
    runtime = source / RESERVED
    try:
        cached, folders = _FOUND.get((cache, sha256), (None, []))
        if cached is None or not cached.is_dir():
            files = sorted(runtime.rglob("*.py"))
            cached = cache / f"{sys.implementation.cache_tag}-{_digest(runtime, files)}"
            if not cached.is_dir():
                _compile(runtime, files, cached, dict(runtime_files()) | dict(extra))
            folders = [*{file.parent.relative_to(runtime) for file in files}]
            if sha256:
                _FOUND[cache, sha256] = cached, folders
        for folder in folders:
            (runtime / folder / "__pycache__").symlink_to(cached / folder)
    except (OSError, ValueError):
        return  # for example a full disk: the job runs without the cache


def _digest(runtime: Path, files: list[Path]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for file in files:
        text = file.read_bytes()
        digest.update(f"\0{file.relative_to(runtime)}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()[:32]


def _compile(runtime: Path, files: list[Path], target: Path, installed: Mapping[str, Path]) -> None:
    """Fill the cache; `installed` are the same files here, by their paths in a bundle, which may be compiled already.

    Raises OSError, and ValueError for a module that this interpreter cannot compile.
    """
    import shutil
    from py_compile import PycInvalidationMode, PyCompileError, compile

    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        for folder in {file.parent.relative_to(runtime) for file in files}:
            (partial / folder).mkdir(parents=True, exist_ok=True)
        for file in files:
            relative = file.relative_to(runtime)
            compiled = partial / relative.parent / f"{relative.stem}.{sys.implementation.cache_tag}.pyc"
            if known := _installed(file, installed.get(f"{RESERVED}/{relative.as_posix()}")):
                compiled.write_bytes(known)
                continue
            compile(str(file), str(compiled), doraise=True, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        partial.rename(target)
    except PyCompileError as error:
        raise ValueError(error.msg) from None
    except OSError:
        if not target.is_dir():  # otherwise another submit was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _installed(file: Path, installed: Path | None) -> bytes | None:
    """Return the bytecode that pip or an import made of the same file of this installation; None where that is not current.

    Its header has the time and size of the installed file; it becomes the hash of the source (PEP 552).
    """
    from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash

    try:
        if installed is None or (text := file.read_bytes()) != installed.read_bytes():
            return None
        stat, data = installed.stat(), Path(cache_from_source(str(installed))).read_bytes()
    except (OSError, NotImplementedError):
        return None
    made_of = (0, int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF)
    if data[:16] != MAGIC_NUMBER + struct.pack("<3I", *made_of):
        return None
    flags = struct.pack("<I", 0b11)  # checked against the source's hash
    return MAGIC_NUMBER + flags + source_hash(text) + data[16:]
