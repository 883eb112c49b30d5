"""Traits: what planning, history, policy, forecast, console and commands must know of a backend without asking it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

# What `Traits.keys` says of a key, beside the name of the platform's own field that it becomes.
HONOURED = ""  # it means what the job file's page says
NO_EFFECT = "no effect"  # it changes nothing; a plan says so
HERE_FIXES = {  # `Traits.fixes` of a backend whose machine is this one
    "host-memory": "hold less in memory at once (a smaller batch, data read in pieces), or choose another target with more "
    "memory: cloudtrain rerun RUN -t TARGET",
    "worker-killed": "lower num_workers of the data loader, or hold less in memory in each worker",
    "disk-full": "free space on this computer (df -h), where the run ran, or keep fewer checkpoints",
}


class Paths(StrEnum):
    """Whose files the paths of a job name."""

    HERE = "this machine"
    OUTPUT_HERE = "this machine, in `output` alone"
    NODES = "the nodes"
    NONE = "no machine's: a job names objects of a store"


@dataclass(frozen=True)
class Traits:
    """What is always true of a backend; the defaults are those of a platform in a cloud of which nothing is known.

    Attributes:
        paths: whose files the paths of a job name.
        keys: the platform keys of a job (`cloudtrain.job.rules`) that it takes: HONOURED, NO_EFFECT, or the field
            of the platform's request that the key becomes. A job with another one is refused. Of the keys that cloudtrain
            carries out itself, those that the platform does.
        own_machines: its machines are this one, or others of your own: without accounts, regions, rented machines and
            images of a registry.
        in_place: its ranks are plain processes of this machine: what they write anywhere stays where it is, and
            `<home>/runs/<run>` has the results of a run without `output`.
        workdir: `fetch` copies the working directory of the ranks, when it is asked for.
        shared_files: all nodes and attempts of a target see the same files.
        packs: the platform packs `model` and `outputs`, and its copy of the checkpoints is as
            cloudtrain.backends.checkpoints describes.
        script_variables: the key of the job that asks for such variables, "sm_env" or "aip_env", where the platform
            sets them itself; "" elsewhere.
        client: what pip installs beside cloudtrain for a submission, "" where nothing is needed.
        ci: the file with the lines by which a job of GitHub or GitLab logs in, as cloudtrain/cli/view/ci.py reads it.
        account: its option that names who pays.
        prices: the region of the prices in its table of machines; "" where its machines have none. `Backend.machine` names
            them as price lists do: NAME/REGION/MACHINE.
        machines: its table of machines, a CSV file as cloudtrain.backends.machines describes; None without.
        rents: another provider of price lists whose machines that table describes too.
        fixes: failure class -> what to change, where it is not what cloudtrain/diagnosis/classes.toml says.
        machine_prefix: what its names of machines have before those of `rents`.
        shell: `Backend.shell` can start a program beside a rank, or names an address where a person can.
    """

    paths: Paths = Paths.NONE
    keys: Mapping[str, str] = field(default_factory=dict)
    own_machines: bool = False
    in_place: bool = False
    workdir: bool = False
    shared_files: bool = False
    packs: bool = False
    script_variables: str = ""
    client: str = ""
    ci: Path | None = None
    account: str = "account"
    prices: str = ""
    machines: Path | None = None
    rents: str = ""
    fixes: Mapping[str, str] = field(default_factory=dict)
    machine_prefix: str = ""
    shell: bool = False

    @property
    def writes_here(self) -> bool:
        """Whether a path in `output` is one of this machine."""
        return self.paths in (Paths.HERE, Paths.OUTPUT_HERE)
