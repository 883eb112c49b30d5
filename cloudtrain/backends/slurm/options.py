"""The options of the backend `slurm` (`options.slurm` in a job file), as a pydantic model."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cloudtrain.backends.slurm.request import RESERVED_OPTIONS, SRUN_OPTIONS, arguments_problem
from cloudtrain.job.fields import Duration


class Login(BaseModel):
    """The login node, where it is another machine; left out, ~/.ssh/config decides."""

    model_config = ConfigDict(extra="forbid")
    address: str = Field(min_length=1, description="host name or address, or a Host of ~/.ssh/config")
    user: str | None = Field(None, description="login name")
    port: int | None = Field(None, ge=1, le=65535, description="port of sshd; default: as in ~/.ssh/config, else 22")
    jump: str | None = Field(None, description="jump hosts, [user@]host[:port], separated by commas")
    identity: str | None = Field(
        None, description="path of a private key; default: keys of the SSH agent and of ~/.ssh"
    )
    known_hosts: str | None = Field(None, description="file of host keys; default ~/.ssh/known_hosts")


class SlurmOptions(BaseModel):
    """Options of the backend `slurm`."""

    model_config = ConfigDict(extra="forbid")
    folder: str = Field(description="absolute path of a folder that the login node and every node see")
    share: Literal["group"] | None = Field(
        None, description="group: the folder's group may read runs; default: only you"
    )
    login: Login | None = Field(
        None, description="login node to connect to with SSH; default: this machine is the login node"
    )
    partition: str | None = Field(None, description="partition; default: the cluster's")
    account: str | None = Field(None, description="account to charge")
    qos: str | None = Field(None, description="quality of service")
    constraint: str | None = Field(None, description="features that the nodes must have")
    reservation: str | None = Field(None, description="reservation to use")
    slice: Duration | None = Field(
        None,
        description="longest time that ranks run in one slice: 11h; a longer run is split into several; --time is some minutes "
        "more; default: the partition's limit as seen by doctor",
    )
    exclusive: bool = Field(False, description="request whole nodes (--exclusive)")
    spot_partition: str | None = Field(None, description="partition of jobs with resources.use_spot")
    spot_qos: str | None = Field(None, description="quality of service of jobs with resources.use_spot")
    gpu_type: str | None = Field(None, description="Slurm's name for the GPUs: --gpus-per-node=<type>:<count>")
    gres: str | None = Field(None, description="use --gres instead of --gpus-per-node: gpu:a100:8")
    directives: list[str] = Field([], description="further arguments of sbatch: --mem-per-gpu=64G")
    srun_args: list[str] = Field([], description="further arguments of srun: --mpi=pmix, --container-image=...")
    modules: list[str] = Field([], description="environment modules to load before the launcher starts")
    conda: str | None = Field(None, description="conda environment to activate")
    setup: list[str] = Field([], description="shell lines that run once, on the first node, before the launcher")
    python: str = Field("python3", description="Python interpreter of launcher and ranks, 3.9 or newer")
    apptainer: str | None = Field(None, description="image to run in: a .sif file or docker://...")
    binds: list[str] = Field([], description="further folders mounted into the image: /scratch or /a:/b")

    @field_validator("folder")
    @classmethod
    def _folder(cls, value: str) -> str:
        if not value.startswith("/") or "\n" in value:
            raise ValueError(f"must be an absolute path, not {value!r}")
        if re.search(r"\$[A-Za-z_{]", value):  # the cluster would make a folder of that name
            raise ValueError(
                f"is {value!r}: variables are not replaced; write each user's path into their own cloudtrain.toml"
            )
        return str(PurePosixPath(value))

    @field_validator("directives")
    @classmethod
    def _directives(cls, value: list[str]) -> list[str]:
        if problem := arguments_problem(value, "sbatch", RESERVED_OPTIONS):
            raise ValueError(problem)
        return value

    @field_validator("srun_args")
    @classmethod
    def _srun_args(cls, value: list[str]) -> list[str]:
        if problem := arguments_problem(value, "srun", SRUN_OPTIONS):
            raise ValueError(problem)
        return value
