"""The environment and the command of the ranks, and of what runs once per node."""

from __future__ import annotations

import json
import os
from collections import namedtuple
from collections.abc import Mapping, Sequence

from .log import Log
from .manifest import Manifest
from .world.channel import World
from .world.cluster import LOOPBACK, SHARED_GPUS, Cluster

# What only the launcher needs, or what another launcher left behind: ranks do not see it.
HIDDEN = (
    "CLOUDTRAIN_NODE_RANK",
    "CLOUDTRAIN_NODE_NAME",
    "CLOUDTRAIN_HOST",
    "CLOUDTRAIN_CONTROL",
    "CLOUDTRAIN_GPUS",
    "CLOUDTRAIN_LAUNCHERS",
    SHARED_GPUS,
    "CLOUDTRAIN_GPU_WAIT_S",
    "CLOUDTRAIN_CLOCK_OFFSET_S",
    "CLOUDTRAIN_STDIN",
    "CLOUDTRAIN_JOIN_TIMEOUT_S",
    "CLOUDTRAIN_LEASE_S",
    "CLOUDTRAIN_SLICE",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)
HIDDEN_PREFIXES = ("CLOUDTRAIN_MANIFEST_", "CLOUDTRAIN_SECRET_", "TORCHELASTIC_", "SM_HP_CT_MANIFEST_")
WORLD = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
TRIAL = "SWEEP_TRIAL"  # the parameters of a sweep's trial as JSON (cloudtrain/sweeps/send.py)


class Prepared(
    namedtuple("Prepared", "python secrets inputs folders accelerate interface sync placeholders keeper toolkit")
):
    """What was found before training.

    python        interpreter of the ranks
    secrets       name -> value
    inputs        name -> path or URI
    folders       checkpoints, outputs, model -> path
    accelerate    environment that an Accelerate configuration file stands for
    interface     network interface for the collectives, or ""
    sync          what brings the folders to an object store, or None
    placeholders  placeholder -> value
    keeper        what brings the script's own files into the outputs
    toolkit       makes the variables of SageMaker's toolkit, or None where the script does not get them
    """

    def fill(self, text: str) -> str:
        """Return a text with its placeholders replaced."""
        if "{" not in text:
            return text
        from .placeholders import fill  # only here: it costs every job some milliseconds

        return fill(text, self.placeholders)


def node_environment(
    base: Mapping[str, str],
    manifest: Manifest,
    cluster: Cluster,
    prepared: Prepared,
    source: str,
    defaults: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return what all processes of a node have. Weakest first: the node's, `defaults`, the job's, secrets, the run's."""
    hidden = (*HIDDEN_PREFIXES, "SM_") if prepared.toolkit is not None else HIDDEN_PREFIXES
    env = {name: value for name, value in base.items() if name not in HIDDEN and not name.startswith(hidden)}
    env["PYTHONUNBUFFERED"] = "1"
    # Open MPI's mpirun waits so long before it passes SIGTERM on, and so long again before it kills its ranks.
    for tool in ("OMPI", "PRTE"):
        env.setdefault(f"{tool}_MCA_odls_base_sigkill_timeout", str(max(1, int(manifest.grace_s / 3))))
    env.update(defaults or {})
    if cluster.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = cluster.gpus
    if not manifest.gpus_per_node and manifest.compat != "sbatch":
        env["CUDA_VISIBLE_DEVICES"] = ""
    if manifest.aip_env and not cluster.does.sets_aip:
        env.update(vertex_variables(prepared.folders))
    env.update(prepared.accelerate)
    env.update({name: prepared.fill(value) for name, value in manifest.env.items()})
    env.update(prepared.secrets)
    if base.get(SHARED_GPUS):  # a job that chose for itself would use the GPUs of others
        env.update(CUDA_VISIBLE_DEVICES=cluster.gpus, CUDA_DEVICE_ORDER="PCI_BUS_ID")  # nvidia-smi counts like that
    path = os.path.join(source, ".cloudtrain", "path")
    env["PYTHONPATH"] = path + (os.pathsep + env["PYTHONPATH"] if env.get("PYTHONPATH") else "")
    env.update(
        CLOUDTRAIN_RUN_ID=manifest.run_id,
        CLOUDTRAIN_ATTEMPT=str(manifest.attempt),
        CLOUDTRAIN_ATTEMPT_ID=manifest.attempt_id,
        CLOUDTRAIN_CHECKPOINT_DIR=prepared.folders["checkpoints"],
        CLOUDTRAIN_OUTPUT_DIR=manifest.outputs(prepared.folders["outputs"]),
        CLOUDTRAIN_MODEL_DIR=prepared.folders["model"],
        CLOUDTRAIN_PARALLELISM=json.dumps(manifest.parallelism),
    )
    if manifest.role:
        env["CLOUDTRAIN_ROLE"] = manifest.role["name"]
    if "CLOUDTRAIN_NODE_DIR" in base:
        env["CLOUDTRAIN_NODE_DIR"] = base["CLOUDTRAIN_NODE_DIR"]  # by this mark a stray process of the node is found
    for name in ("every_s", "every_steps", "keep", "engine"):
        if manifest.checkpoint.get(name) is not None:
            env[f"CLOUDTRAIN_CHECKPOINT_{name.upper()}"] = str(manifest.checkpoint[name])
    if TRIAL in manifest.env:
        env["WANDB_SWEEP_PARAM_PATH"] = write_trial(source, manifest.env[TRIAL])
    if prepared.sync is not None and prepared.sync.epoch:
        env["CLOUDTRAIN_EPOCH"] = str(prepared.sync.epoch)
    env.update({input_variable(name): path for name, path in prepared.inputs.items()})
    return env


def write_trial(source: str, text: str) -> str:
    """Write a trial's parameters where W&B reads them for `wandb.config`, and return the path.

    The form is that of wandb.sdk.lib.config_util.dict_from_config_file of wandb 0.31 (2026-11-23); JSON is YAML.
    """
    path = os.path.join(source, ".cloudtrain", "trial.json")
    config = {"wandb_version": 1, **{name: {"value": value} for name, value in json.loads(text).items()}}
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(config, file)
    os.replace(path + ".new", path)
    return path


def rank_environment(
    base: Mapping[str, str],
    manifest: Manifest,
    cluster: Cluster,
    world: World,
    prepared: Prepared,
    local_rank: int,
    source: str,
) -> dict[str, str]:
    """Return the environment of one rank: that of its node, and its rank in the world unless it runs as under plain python."""
    count = manifest.processes_per_node
    sharing = count * (world.nodes if world.master_host == LOOPBACK else 1)  # simulated nodes share one machine
    if manifest.roles:  # as roles do that run on the same nodes
        sharing = manifest.processes_beside(cluster.node_rank, cluster.control_host == LOOPBACK)
    defaults = {"OMP_NUM_THREADS": base.get("OMP_NUM_THREADS") or str(max(1, _processors() // sharing))}
    if manifest.rank_env and not manifest.gpus_per_node:
        defaults["ACCELERATE_USE_CPU"] = "true"  # without it Accelerate starts independent single processes on CPU
    if prepared.interface:
        defaults["GLOO_SOCKET_IFNAME"] = prepared.interface
        if world.nodes > 1 and world.master_host != LOOPBACK:
            defaults["NCCL_SOCKET_IFNAME"] = prepared.interface
    if prepared.toolkit is not None:
        defaults.update(prepared.toolkit.variables(world))
    env = node_environment(base, manifest, cluster, prepared, source, defaults)
    env["CLOUDTRAIN_NUM_NODES"] = str(world.nodes)
    if not manifest.rank_env:
        for name in WORLD:
            env.pop(name, None)
        return env
    env.update(
        RANK=str(world.node_rank * count + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world.nodes * count),
        LOCAL_WORLD_SIZE=str(count),
        GROUP_RANK=str(world.node_rank),
        NODE_RANK=str(world.node_rank),
        MASTER_ADDR=world.master_host,
        MASTER_PORT=str(world.master_port),
    )
    if manifest.restarts:  # as torchrun; its TORCHELASTIC_RUN_ID would switch torch's elastic mode on
        env["TORCHELASTIC_RESTART_COUNT"] = str(world.restarts)
        env["TORCHELASTIC_MAX_RESTARTS"] = str(manifest.restarts)
    if manifest.framework:
        from .world import frameworks

        env.update(frameworks.variables(manifest, world, local_rank, env))
    if cluster.launched:  # another launcher made the world; only it knows the names in it
        env.update({name: base[name] for name in base if name in WORLD or name.startswith("TORCHELASTIC_")})
        env["CLOUDTRAIN_NUM_NODES"] = str(cluster.nodes or world.nodes)
    return env


def setup_environment(
    base: Mapping[str, str],
    manifest: Manifest,
    cluster: Cluster,
    prepared: Prepared,
    source: str,
    defaults: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of what runs once per node: no rank's variables, for it may start ranks of its own."""
    env = node_environment(base, manifest, cluster, prepared, source, defaults)
    for name in WORLD:
        env.pop(name, None)
    env["PATH"] = os.path.dirname(prepared.python) + os.pathsep + env.get("PATH", os.defpath)
    env["CLOUDTRAIN_NODE_RANK"] = str(manifest.role_rank if manifest.role else cluster.node_rank)
    return env


def command_environment(
    base: Mapping[str, str], manifest: Manifest, cluster: Cluster, world: World, prepared: Prepared, source: str
) -> dict[str, str]:
    """Return the environment of what runs once per node when the world is known."""
    defaults = prepared.toolkit.variables(world) if prepared.toolkit is not None else {}
    env = setup_environment(base, manifest, cluster, prepared, source, defaults)
    if manifest.compat == "sbatch":  # its steps on other nodes inherit this: no address or rank of this node
        return {name: env[name] for name in env if name not in ("CLOUDTRAIN_NODE_RANK", "CLOUDTRAIN_NUM_NODES")}
    env.update(
        NODE_RANK=str(world.node_rank),
        MASTER_ADDR=world.master_host,
        MASTER_PORT=str(world.master_port),
        CLOUDTRAIN_NUM_NODES=str(world.nodes),
        CLOUDTRAIN_NODE_RANK=str(world.node_rank),
        CLOUDTRAIN_NODE_ADDRESSES=",".join(world.addresses),
        CLOUDTRAIN_GPUS_PER_NODE=str(manifest.gpus_per_node),
    )
    if manifest.compat:
        from . import compat

        env.update(compat.variables(manifest, world))
    return env


def program_environments(
    environ: Mapping[str, str], manifest: Manifest, cluster: Cluster, world: World, prepared: Prepared, source: str
) -> tuple[int, dict[int, dict[str, str]]]:
    """Return the world's size, and the environment of each program that this node starts, by its (first) rank."""
    environments = [
        rank_environment(environ, manifest, cluster, world, prepared, local, source)
        for local in range(manifest.processes_per_node)
    ]
    first, world_size = int(environments[0].get("RANK", 0)), int(environments[0].get("WORLD_SIZE", 1))
    if manifest.form != "script":
        environments = [command_environment(environ, manifest, cluster, world, prepared, source)]
    return world_size, {first + local: each for local, each in enumerate(environments)}


def measuring_environment(
    base: Mapping[str, str], manifest: Manifest, cluster: Cluster, world: World, prepared: Prepared, source: str
) -> dict[str, str]:
    """Return the environment of what measures a node: a rank's without secrets, in a world of one process a node."""
    env = rank_environment(base, manifest, cluster, world, prepared, 0, source)
    env = {name: value for name, value in env.items() if name not in prepared.secrets}
    env.update(
        RANK=str(world.node_rank),
        WORLD_SIZE="1" if manifest.roles else str(world.nodes),  # roles may have different interpreters
        MASTER_ADDR=world.master_host,
        MASTER_PORT=str(world.master_port),
    )
    return env


def input_variable(name: str) -> str:
    """Return the variable that holds the path of an input: my-data is CLOUDTRAIN_INPUT_MY_DATA."""
    return "CLOUDTRAIN_INPUT_" + "".join(letter if letter.isalnum() else "_" for letter in name).upper()


def vertex_variables(folders: Mapping[str, str]) -> dict[str, str]:
    """Return Vertex AI's variables for folders of this node; each ends with a slash, as there.

    https://docs.cloud.google.com/vertex-ai/docs/training/code-requirements (2026-11-23).
    """
    return {
        "AIP_MODEL_DIR": os.path.join(folders["model"], ""),
        "AIP_CHECKPOINT_DIR": os.path.join(folders["checkpoints"], ""),
        "AIP_TENSORBOARD_LOG_DIR": os.path.join(folders["outputs"], "logs", ""),
    }


def command(prepared: Prepared, manifest: Manifest, log: Log, more: Sequence[str] = ()) -> list[str]:
    """Return what is executed: a script's interpreter, its arguments with their placeholders replaced, and `more`."""
    argv = manifest.argv
    if manifest.form == "shell":
        from . import shell

        return shell.command(argv[0], "run", manifest.compat, log)
    filled = [argv[0], *map(prepared.fill, argv[1:]), *more]
    if manifest.form == "command":
        return filled
    if argv[0].endswith(".sh"):
        return ["bash", *filled]
    if argv[0].startswith("-") and argv[0] != "-m":
        return [prepared.python, f"./{argv[0]}", *filled[1:]]
    return [prepared.python, *filled]


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
