"""Start the ranks of this node, set their environment, read their output, collect their exit codes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import namedtuple
from collections.abc import Callable, Mapping

from . import processes
from .exit_order import ExitOrder
from .log import CHUNK, Log, Splitter
from .loop import Loop
from .manifest import Manifest
from .world.channel import World
from .world.cluster import LOOPBACK, Cluster

# What only the launcher needs, or what another launcher left behind: ranks do not see it.
HIDDEN = (
    "CLOUDTRAIN_NODE_RANK",
    "CLOUDTRAIN_HOST",
    "CLOUDTRAIN_CONTROL",
    "CLOUDTRAIN_GPUS",
    "CLOUDTRAIN_STDIN",
    "CLOUDTRAIN_JOIN_TIMEOUT_S",
    "CLOUDTRAIN_LEASE_S",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)
HIDDEN_PREFIXES = ("CLOUDTRAIN_MANIFEST_", "CLOUDTRAIN_SECRET_", "TORCHELASTIC_", "SM_HP_CT_MANIFEST_")

Prepared = namedtuple("Prepared", "python secrets inputs folders accelerate interface sync", defaults=("", None))
Prepared.__doc__ = """What was found before training.

python      interpreter of the ranks
secrets     name -> value
inputs      name -> path or URI
folders     checkpoints, outputs, model -> path
accelerate  environment that an Accelerate configuration file stands for
interface   network interface for the collectives, or ""
sync        what brings the folders to an object store, or None
"""


def environment(
    base: Mapping[str, str],
    manifest: Manifest,
    cluster: Cluster,
    world: World,
    prepared: Prepared,
    local_rank: int,
    source: str,
) -> dict[str, str]:
    """Return the environment of one rank. Weakest first: the node's, defaults, the job's, secrets, the world's."""
    count = manifest.processes_per_node
    rank = world.node_rank * count + local_rank
    sharing = count * (world.nodes if world.master_host == LOOPBACK else 1)  # simulated nodes share one machine
    env = {name: value for name, value in base.items() if name not in HIDDEN and not name.startswith(HIDDEN_PREFIXES)}
    env["PYTHONUNBUFFERED"] = "1"
    env["OMP_NUM_THREADS"] = base.get("OMP_NUM_THREADS") or str(max(1, _processors() // sharing))
    if cluster.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = cluster.gpus
    if not manifest.gpus_per_node:
        env["CUDA_VISIBLE_DEVICES"] = ""
        env["ACCELERATE_USE_CPU"] = "true"  # without it Accelerate starts independent single processes on CPU
    if prepared.interface:
        env["GLOO_SOCKET_IFNAME"] = prepared.interface
        if world.nodes > 1 and world.master_host != LOOPBACK:
            env["NCCL_SOCKET_IFNAME"] = prepared.interface
    env.update(prepared.accelerate)
    env.update(manifest.env)
    env.update(prepared.secrets)
    path = os.path.join(source, ".cloudtrain", "path")
    env["PYTHONPATH"] = path + (os.pathsep + env["PYTHONPATH"] if env.get("PYTHONPATH") else "")
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world.nodes * count),
        LOCAL_WORLD_SIZE=str(count),
        GROUP_RANK=str(world.node_rank),
        NODE_RANK=str(world.node_rank),
        MASTER_ADDR=world.master_host,
        MASTER_PORT=str(world.master_port),
        CLOUDTRAIN_NUM_NODES=str(world.nodes),
        CLOUDTRAIN_RUN_ID=manifest.run_id,
        CLOUDTRAIN_ATTEMPT=str(manifest.attempt),
        CLOUDTRAIN_ATTEMPT_ID=manifest.attempt_id,
        CLOUDTRAIN_CHECKPOINT_DIR=prepared.folders["checkpoints"],
        CLOUDTRAIN_OUTPUT_DIR=prepared.folders["outputs"],
        CLOUDTRAIN_MODEL_DIR=prepared.folders["model"],
        CLOUDTRAIN_PARALLELISM=json.dumps(manifest.parallelism),
    )
    if "CLOUDTRAIN_NODE_DIR" in base:
        env["CLOUDTRAIN_NODE_DIR"] = base["CLOUDTRAIN_NODE_DIR"]  # by this mark a stray process of the node is found
    if cluster.launched:
        # Another launcher made the world; only it knows the names in it.
        env.update(
            {
                name: base[name]
                for name in (
                    "RANK",
                    "LOCAL_RANK",
                    "WORLD_SIZE",
                    "LOCAL_WORLD_SIZE",
                    "GROUP_RANK",
                    "NODE_RANK",
                    "MASTER_ADDR",
                    "MASTER_PORT",
                )
                if name in base
            }
        )
    for name in ("every_s", "every_steps", "keep"):
        if manifest.checkpoint.get(name) is not None:
            env[f"CLOUDTRAIN_CHECKPOINT_{name.upper()}"] = str(manifest.checkpoint[name])
    if prepared.sync is not None and prepared.sync.epoch:
        env["CLOUDTRAIN_EPOCH"] = str(prepared.sync.epoch)
    env.update({input_variable(name): path for name, path in prepared.inputs.items()})
    return env


def input_variable(name: str) -> str:
    """Return the variable that holds the path of an input: my-data is CLOUDTRAIN_INPUT_MY_DATA."""
    return "CLOUDTRAIN_INPUT_" + "".join(letter if letter.isalnum() else "_" for letter in name).upper()


def command(python: str, argv: list[str]) -> list[str]:
    """Return what is executed: a script's own interpreter, then the arguments as they were written."""
    if argv[0].endswith(".sh"):
        return ["bash", *argv]
    if argv[0].startswith("-") and argv[0] != "-m":
        return [python, f"./{argv[0]}", *argv[1:]]
    return [python, *argv]


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


class _Rank:
    def __init__(self, rank: int, pid: int, pipe: int, splitter: Splitter, is_shell: bool) -> None:
        self.rank, self.pid, self.pipe, self.splitter, self.is_shell = rank, pid, pipe, splitter, is_shell
        self.code: int | None = None


class Ranks:
    """All ranks of this node. `ended(rank, code, at)` is called once for each; output goes to the log."""

    def __init__(self, loop: Loop, log: Log, ended: Callable[[int, int, float], None]) -> None:
        self._loop, self._log, self._ended = loop, log, ended
        self._ranks: list[_Rank] = []
        self._by_pid: dict[int, _Rank] = {}
        self._deaths = ExitOrder()

    def start(self, rank: int, argv: list[str], env: dict[str, str], cwd: str) -> None:
        """Start one rank; raises OSError when its command cannot be executed."""
        read, write = os.pipe()
        try:
            pid = processes.spawn(argv, env, cwd, write)
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
        os.set_blocking(read, False)
        _widen(read)
        started = _Rank(rank, pid, read, Splitter(self._log), argv[0] == "bash")
        self._ranks.append(started)
        self._by_pid[pid] = started
        self._deaths.watch(pid)
        self._loop.watch(read, lambda: self._read(started), output=True)

    @property
    def running(self) -> list[int]:
        """The pids of ranks that have not ended."""
        return [rank.pid for rank in self._ranks if rank.code is None]

    @property
    def groups(self) -> tuple[int, ...]:
        """The process groups that were started: each rank leads one."""
        return tuple(rank.pid for rank in self._ranks)

    def reap(self, ended: list[tuple[int, int]]) -> None:
        """Take note of children that have ended, the first first; those that are no rank of ours were orphans."""
        at = time.time()
        for pid, code in self._deaths.sorted(ended):
            rank = self._by_pid.get(pid)
            if rank is not None and rank.code is None:
                rank.code = code
                self._ended(rank.rank, code, at)

    def signal(self, number: int) -> None:
        """Send a signal to every rank, and not to its children: a data loader's worker that is terminated takes the
        rank down with an exception before it can save. A shell passes nothing on, so its whole group gets it."""
        for rank in self._ranks:
            if rank.code is None:
                if rank.is_shell:
                    processes.kill_group(rank.pid, number)
                else:
                    processes.kill(rank.pid, number)

    def kill(self) -> None:
        """Kill every rank with its process group."""
        for rank in self._ranks:
            if rank.code is None:
                processes.kill_group(rank.pid, signal.SIGKILL)

    def drain(self) -> None:
        """Read what is left in the pipes, the last lines without an end too, and close them."""
        for rank in self._ranks:
            while rank.pipe >= 0 and self._read(rank):
                pass
            self._close(rank)

    def _read(self, rank: _Rank) -> bool:
        """Read once; False when nothing is there for now or for ever."""
        try:
            data = os.read(rank.pipe, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close(rank)
            return False
        self._log.lines(rank.rank, rank.splitter.feed(data))
        return True

    def _close(self, rank: _Rank) -> None:
        if rank.pipe >= 0:
            self._loop.unwatch(rank.pipe)
            os.close(rank.pipe)
            rank.pipe = -1
            self._log.lines(rank.rank, rank.splitter.end())


def _widen(pipe: int) -> None:
    """Let a pipe hold a mebibyte, so that a rank that prints much seldom waits for us (Linux)."""
    try:
        import fcntl

        fcntl.fcntl(pipe, 1031, CHUNK)  # F_SETPIPE_SZ, which has a name from Python 3.10 on
    except OSError:
        pass  # the user's limit of pipe pages, or another system: it stays as it is
