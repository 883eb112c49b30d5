"""Decode the manifest of an attempt from environment variables or SageMaker hyperparameters."""

from __future__ import annotations

import binascii
import json
import os
import zlib
from collections.abc import Mapping, Sequence

from .errors import Refused

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

    Role = dict[str, Any]

# 2: a form other than a script, placeholders, setup, or resume_args; 3: checkpoint.folder; 4: roles. Older launchers
# refuse them.
VERSIONS = (1, 2, 3, 4)
PREFIX = "CLOUDTRAIN_MANIFEST_"
OURS = ".cloudtrain/"  # begins the name of a script of ours, which writes checkpoints, and of no checkpoint
RAY = ".cloudtrain/launcher/ray_cluster.py"  # starts Ray around a script of the user's


class Manifest:
    """What one attempt does. The fields without a value here are required; cloudtrain.backends.manifest writes them all."""

    run_id: str
    attempt: int
    argv: list[str]
    nodes: int
    processes_per_node: int
    min_nodes: int | None
    env: dict[str, str]
    gpus_per_node: int
    parallelism: dict[str, object]
    inputs: dict[str, dict[str, str]]
    output: str | None
    secrets: dict[str, list[str]]
    requirements: str | None
    checkpoint: dict[str, object]
    max_runtime_s: float
    grace_s: float
    stall_s: float | None = None  # left out where there is no limit
    idle_s: float | None = None
    silence_s: float | None = None
    join_s: float | None = None  # how long nodes wait for each other; left out where it is the default
    form: str = "script"  # what argv is: a script, a "command" that runs once per node, or a "shell" text in argv[0]
    compat: str = (
        ""  # "skypilot" or "dstack": whose node variables a command gets too; "sbatch": one node runs the text
    )
    setup: str = ""  # shell text that every node runs before its ranks
    resume_args: Sequence[str] = ()  # added to argv on later attempts, where there is a checkpoint
    keep: Sequence[str] | None = (
        None  # files of the working directory that are brought into the outputs; None: all results
    )
    keep_limit: int = 20 * 10**9  # bytes of them, where no patterns are given
    framework: str = ""  # "tensorflow", "jax" or "keras": whose variables ranks get too
    restarts: int = 0  # how often the ranks are started again on the same nodes
    restart_on: str = "transient"  # or "any": after which ends of a rank
    rank_env: bool = True  # False: one process that gets no RANK, WORLD_SIZE or MASTER_ADDR, as under plain python
    hyperparameters: dict[str, object] | None = None  # of a job whose script gets SageMaker's variables; else None
    aip_env: bool = False  # whether the script gets Vertex AI's AIP_MODEL_DIR and the like
    health: str = "auto"  # whether nodes are checked before the ranks start: "auto", "off" or "strict"
    roles: Sequence[Role] = ()  # the main one first, whose program is this manifest's own
    about: dict[str, object] | None = None  # for those who attach to the run; the launcher itself needs nothing of it

    def __init__(self, fields: Mapping[str, object]) -> None:
        missing = [name for name in type(self).__annotations__ if not hasattr(self, name) and name not in fields]
        if missing:
            raise Refused(f"the manifest lacks {', '.join(missing)}")
        self.fields = dict(fields)
        vars(self).update(fields)
        self.job_env, self.job_secrets = self.env, self.secrets  # for the launcher itself: clients of stores, and pip
        self.role: Role | None = None  # this node's, from take_role on
        self.role_rank, self.is_service = 0, False

    @property
    def attempt_id(self) -> str:
        return f"{self.run_id}-a{self.attempt}"

    @property
    def is_ours(self) -> bool:
        """Whether the script is one of ours."""
        return self.argv[0].startswith(OURS) and self.argv[0] != RAY

    @property
    def main_nodes(self) -> int:
        """Nodes of the main role, which come first; all of a job without roles."""
        return self.roles[0]["nodes"] if self.roles else self.nodes

    def place(self, node: int) -> tuple[int, int]:
        """Return which role a node has, as an index, and its rank among the nodes of that role."""
        for index, role in enumerate(self.roles):
            if node < role["nodes"]:
                return index, node
            node -= role["nodes"]
        return 0, node

    def processes_of(self, node: int) -> int:
        """Return the processes of a node."""
        index, _ = self.place(node)
        return self.roles[index]["processes_per_node"] if index else self.processes_per_node

    def gpus_of(self, node: int) -> int:
        """Return the GPUs that a node asks for."""
        return self._role_gpus()[self.place(node)[0]]

    def _role_gpus(self) -> list[int]:
        """Return the GPUs that a node of each role asks for."""
        own: Any = self.fields["gpus_per_node"]
        return [int(role.get("gpus_per_node", own)) for role in self.roles] or [own]

    def shared_gpus(self, node: int) -> tuple[int, int, int]:
        """Return which GPUs of its machine a node has, where others of this attempt may be there, too.

        How many the nodes there have before its own; how many all have; which node of them is the first that asks for some.
        """
        index, rank = self.place(node)
        counts = self._role_gpus()
        if not self.roles:
            return 0, counts[0], node
        there = self._roles_beside(index)
        first = next((at for at in there if counts[at]), index)
        before = sum(counts[at] for at in there if at < index)
        return before, sum(counts[at] for at in there), sum(role["nodes"] for role in self.roles[:first]) + rank

    def _roles_beside(self, index: int) -> list[int]:
        """Return the roles that run on the nodes of a role, that one too, as indices."""
        host = self.roles[index].get("colocate") or self.roles[index]["name"]
        return [at for at, role in enumerate(self.roles) if host in (role["name"], role.get("colocate"))]

    def processes_beside(self, node: int, is_one_machine: bool) -> int:
        """Return the processes of all roles on the machine of a node, which may be one for all nodes of the attempt."""
        own: Any = self.fields["processes_per_node"]
        counts = [role.get("processes_per_node", own) for role in self.roles]
        if is_one_machine:
            return sum(counts[at] * role["nodes"] for at, role in enumerate(self.roles))
        return sum(counts[at] for at in self._roles_beside(self.place(node)[0]))

    def take_role(self, node: int) -> None:
        """Make this the manifest of one node: with its role, and for a service with the service's program."""
        if not self.roles:
            return
        index, self.role_rank = self.place(node)
        self.role = role = self.roles[index]
        if index:
            self.is_service = True
            vars(self).update(
                {name: role[name] for name in ("argv", "form", "processes_per_node", "rank_env", "env", "setup")}
            )
            vars(self).update(
                {name: role[name] for name in ("grace_s", "requirements", "gpus_per_node") if name in role}
            )
            self.secrets = {name: self.secrets[name] for name in role["secrets"]}
            self.resume_args, self.keep, self.hyperparameters, self.aip_env, self.framework = (), (), None, False, ""
            self.stall_s = self.idle_s = self.silence_s = None

    def outputs(self, folder: str) -> str:
        """Return where this node's role writes outputs, of the run's folder of outputs."""
        return os.path.join(folder, self.role["name"]) if self.is_service else folder

    @property
    def world_size(self) -> int:
        return (self.role or {"nodes": self.nodes})["nodes"] * self.processes_per_node

    @property
    def fewest_nodes(self) -> int:
        return self.min_nodes or self.nodes


def decode(pieces: list[str]) -> Manifest:
    """Return the manifest that the pieces hold; raises Refused when they are damaged or of another version."""
    if not pieces:
        raise Refused(f"there is no manifest: {PREFIX}0 is not set")
    try:
        packed = "".join(pieces).encode("ascii").translate(bytes.maketrans(b"-_", b"+/"))
        fields = json.loads(zlib.decompress(binascii.a2b_base64(packed)))
        version = fields.get("version")
    except (ValueError, AttributeError, binascii.Error, zlib.error) as error:
        raise Refused(f"the manifest is damaged: {error}") from None
    if version not in VERSIONS:
        raise Refused(f"the manifest has version {version}, this launcher reads versions up to {VERSIONS[-1]}")
    return Manifest(fields)


def pieces(environ: Mapping[str, str], hyperparameters: str = "", whole: str = "") -> list[str]:
    """Return the manifest's pieces in order, from the environment or from SageMaker's hyperparameters (JSON text).

    `whole` is the manifest that SageMaker has brought as a file, where it is too long for either.
    """
    if whole:
        return [whole]
    by_number = {name[len(PREFIX) :]: value for name, value in environ.items() if name.startswith(PREFIX)}
    if not by_number and hyperparameters:
        values = json.loads(hyperparameters)
        # The SDK writes every value as JSON, so that a text comes in quotes.
        by_number = {
            name[len("ct_manifest_") :]: text.strip('"')
            for name, text in values.items()
            if name.startswith("ct_manifest_")
        }
    ordered: list[str] = []
    while str(len(ordered)) in by_number:
        ordered.append(by_number[str(len(ordered))])
    if len(ordered) < len(by_number):
        raise Refused(f"the manifest is damaged: piece {len(ordered)} is missing")
    return ordered
