"""Prepare this node for its ranks: secrets, requirements, inputs, folders, GPUs, network interface.

Every check raises Refused; it runs in a thread of its own while the supervisor handles messages and signals.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from .. import placeholders
from ..environment import Prepared
from ..errors import Refused
from ..log import Log
from ..manifest import Manifest
from ..output.keep import Keeper
from ..world.cluster import ALL_GPUS, LOOPBACK, SAGEMAKER, SAGEMAKER_OURS, Cluster, sagemaker_base
from . import declared

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from ..output.sync import Sync

INTERFACES = "/sys/class/net"


def prepare_node(
    manifest: Manifest,
    cluster: Cluster,
    environ: Mapping[str, str],
    given: Mapping[str, str],
    source: str,
    log: Log,
    folders_ready: Callable[[], None] = lambda: None,
    take_gpus: Callable[[], Cluster] | None = None,
) -> Prepared:
    """Do and check all that training needs on this node; blocking. Raises Refused.

    `take_gpus` waits for GPUs of a host that several jobs share, and returns the node's place with them.
    `folders_ready` is called when the run's folders are there and secrets are known: the run's history can be uploaded.
    """
    try:
        check_output(manifest.output)
        if manifest.form == "script":
            check_script(manifest.argv, source)
            declared.check(manifest.argv, manifest.parallelism, source)
        secrets: dict[str, str] = {}
        if manifest.job_secrets:
            from . import secrets as store_of_secrets

            secrets = store_of_secrets.resolve(manifest.job_secrets, given, manifest.secrets)
            log.masks.hide(*secrets.values())
        if take_gpus is not None:
            cluster = take_gpus()
        elif manifest.gpus_per_node:
            from . import gpus

            gpus.check(manifest.gpus_per_node, cluster.gpus, environ)
        elif environ.get("CLOUDTRAIN_GPUS") == ALL_GPUS:
            from . import gpus

            simulated = manifest.nodes if cluster.control_host == LOOPBACK else 1  # they share this machine
            manifest.gpus_per_node = gpus.take(manifest.processes_per_node * simulated, environ, log)
        interface = find_interface(manifest, cluster, environ)
        if is_remote(manifest.output) or any(is_remote(item["uri"]) for item in manifest.inputs.values()):
            from ..output import store

            store.lend({**manifest.job_env, **secrets})
        folders = make_folders(manifest, cluster, environ, source)
        folders_ready()
        # On SageMaker the checkpoints alone come back when it starts a job again.
        ours = os.path.join(sagemaker_base(environ), SAGEMAKER_OURS)
        safe = os.path.join(ours, "kept") if is_sagemaker(cluster, environ) else None
        has_others = safe and not manifest.is_ours and not cluster.launched
        records = os.path.join(os.path.dirname(safe or folders["outputs"]), "kept-files")
        keeper = Keeper(
            kept_patterns(manifest, cluster, environ, log),
            source,
            folders["outputs"],
            cluster.node_rank,
            log,
            safe,
            records,
            manifest.keep_limit,
            cluster.does.shares_source,
            [
                Keeper(
                    None, folders[name], os.path.join(ours, name), cluster.node_rank, log,
                    records=os.path.join(ours, f"{name}-files"), limit=manifest.keep_limit,
                    skips=lambda inner, name=name: name == "outputs" and keeper.is_kept_output(inner),  # type: ignore[misc]
                )
                for name in ("model", "outputs") if has_others
            ],
        )  # fmt: skip
        sync = open_output(manifest, cluster, environ, {**folders, "kept": records}, log, keeper)
        if keeper.is_active and (count := keeper.restore()):
            log.say(f"keep: restored {count} file{'s' * (count != 1)} of earlier attempts to the working directory")
        if not keeper.has_restored:
            check_resumable(manifest, cluster, folders["checkpoints"])
        inputs: dict[str, str] = {}
        if manifest.inputs:
            from . import inputs as job_inputs

            inputs = job_inputs.resolve(
                manifest.inputs,
                os.path.join(environ.get("CLOUDTRAIN_NODE_DIR") or os.path.dirname(source), "inputs"),
                log,
            )
        python, accelerate = sys.executable, {}
        if manifest.requirements:
            from . import requirements

            python = requirements.layer(
                os.path.join(source, manifest.requirements),
                requirements.for_pip(environ, {**manifest.job_env, **secrets}),
                log,
            )
        if declared.left_to_accelerate(manifest.argv, manifest.parallelism, source):
            from . import own_strategy

            accelerate = own_strategy.environment(python, manifest, source, environ)
        values = placeholders.values_of(manifest, folders, inputs)
        secrets = {name: secrets[name] for name in manifest.secrets}
        prepared = Prepared(python, secrets, inputs, folders, accelerate, interface, sync, values, keeper, None)
        if manifest.hyperparameters is not None or cluster.does.copies_folders:
            from .sagemaker_env import SageMakerEnv

            made = SageMakerEnv(manifest, cluster, environ, folders, inputs, interface, source, prepared.fill)
            prepared = prepared._replace(toolkit=made)
        if manifest.setup:
            from . import setup

            setup.run(manifest, cluster, environ, prepared, source, log)
        return prepared
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Refused(f"the disk is full: {error}") from None
        raise Refused(f"the node cannot be prepared: {error}") from None


def open_output(
    manifest: Manifest,
    cluster: Cluster,
    environ: Mapping[str, str],
    folders: dict[str, str],
    log: Log,
    keeper: Keeper,
) -> Sync | None:
    """Return what brings this node's folders to an output in an object store; None for a path, or where node 0 does.

    The node that uploads reports a script's checkpoints, when the store has them.
    """
    if not is_remote(manifest.output):
        return None
    shared = environ.get("CLOUDTRAIN_RUN_DIR_SHARED") == "1" or cluster.control_host == LOOPBACK
    if shared and cluster.node_rank > 0:
        keeper.report = lambda path, **data: None
        return None
    from ..output.sync import Sync
    from ..resume import checkpoint_folders

    whole = {**folders, "checkpoints": checkpoint_folders(folders)[-1]}
    sync = Sync(manifest, whole, log, keeper)
    keeper.report = sync.report
    sync.open(cluster.node_rank)
    return sync


def kept_patterns(manifest: Manifest, cluster: Cluster, environ: Mapping[str, str], log: Log) -> Sequence[str] | None:
    """Return the job's `keep`; none of it where each rank has a launcher of its own, as they share a working directory."""
    if manifest.keep is not None or not cluster.launched:
        return manifest.keep
    if environ.get("LOCAL_RANK") == "0":
        log.say(
            "keep: the ranks were started by another launcher (torchrun, srun or mpirun), so files of the script's folder are"
            " not kept: write results to {model_dir}, {output_dir} or {checkpoint_dir}, or set keep: [FOLDER]"
        )
    return ()


def check_resumable(manifest: Manifest, cluster: Cluster, folder: str) -> None:
    """Refuse a later attempt whose job requires a checkpoint where there is none, for the folder may be another one."""
    if not manifest.checkpoint.get("required") or manifest.attempt == 1 or cluster.node_rank > 0:
        return
    from .. import resume

    if not resume.has_files(folder):
        raise Refused(f"{folder} has no checkpoint of an earlier attempt, which checkpoint.required asks for")


def is_remote(uri: str | None) -> bool:
    return bool(uri) and "://" in str(uri) and not str(uri).startswith("file://")


def check_output(output: str | None) -> None:
    """Refuse an output in a store that no client is known for."""
    if not is_remote(output):
        return
    from ..output.store import CLIENTS, scheme  # only here: it costs every job some milliseconds

    if scheme(str(output)) not in CLIENTS:
        raise Refused(f"output {output} cannot be reached from this node; use s3://, gs:// or az://")


def check_script(argv: list[str], source: str) -> None:
    """Refuse a command whose script is not in the source."""
    if not argv:
        raise Refused("the manifest has no script to run")
    if argv[0] != "-m" and not os.path.isfile(os.path.join(source, argv[0])):
        raise Refused(f"the source has no file {argv[0]}")


def find_interface(manifest: Manifest, cluster: Cluster, environ: Mapping[str, str]) -> str:
    """Return the network interface to use, "" for the libraries' own choice; refuse one that does not exist."""
    asked = manifest.env.get("GLOO_SOCKET_IFNAME") or environ.get("GLOO_SOCKET_IFNAME")
    if not os.path.isdir(INTERFACES):
        return ""
    present = os.listdir(INTERFACES)
    if asked:
        absent = [name for name in asked.split(",") if name not in present]
        if absent:
            raise Refused(f"GLOO_SOCKET_IFNAME names {', '.join(absent)}; this node has {', '.join(sorted(present))}")
        return ""  # it reaches the ranks as it is
    if cluster.interface in present:  # SageMaker's local mode names one that does not exist
        return str(cluster.interface)
    if manifest.nodes > 1 and cluster.does.has_routes and cluster.master_host != LOOPBACK:
        from ..world.interface import towards

        return towards(cluster.master_host)
    alone = cluster.master_host == LOOPBACK and not cluster.launched
    return "lo" if alone and "lo" in present else ""


def is_sagemaker(cluster: Cluster, environ: Mapping[str, str]) -> bool:
    """Return whether the run's folders are SageMaker's, below /opt/ml."""
    return bool(cluster.does.copies_folders and not environ.get("CLOUDTRAIN_RUN_DIR"))


def make_folders(manifest: Manifest, cluster: Cluster, environ: Mapping[str, str], source: str) -> dict[str, str]:
    """Make and return the run's folders on this node; they belong to the run, not to the attempt.

    Checkpoints of a run that moved to or from SageMaker stay in the folder in which they were.
    """
    base, inner = sagemaker_base(environ), dict(SAGEMAKER)
    if not is_sagemaker(cluster, environ):
        base = environ.get("CLOUDTRAIN_RUN_DIR") or os.path.join(os.path.dirname(source), "run")
        inner = {name: name for name in SAGEMAKER}
    inner["checkpoints"] = str(manifest.checkpoint.get("folder") or inner["checkpoints"])
    folders = {name: os.path.join(base, at) for name, at in inner.items()}
    for folder in (*folders.values(), manifest.outputs(folders["outputs"])):
        os.makedirs(folder, exist_ok=True)
    return folders
