"""The options of the backend `ssh` (`options.ssh` in a job file), as a pydantic model."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Access(BaseModel):
    """How a machine is reached and what runs there; left out, ~/.ssh/config decides."""

    model_config = ConfigDict(extra="forbid")
    user: str | None = Field(None, description="login name")
    port: int | None = Field(None, ge=1, le=65535, description="port of sshd; 22 where nothing says otherwise")
    jump: str | None = Field(None, description="[user@]host[:port] to jump from; several are joined by commas")
    identity: str | None = Field(None, description="path of a private key; otherwise the agent's and the usual ones")
    known_hosts: str | None = Field(None, description="file of host keys; default ~/.ssh/known_hosts")
    python: str | None = Field(None, description="interpreter there, 3.9 or newer, that has torch; default python3")
    setup: list[str] | None = Field(None, description="shell lines before it: module load cuda, conda activate train")


class SshHost(Access):
    """One machine; what it leaves out is that of all."""

    address: str = Field(min_length=1, description="host name or address, or a Host of ~/.ssh/config")
    internal: str | None = Field(None, description="address by which the other nodes see it; default: address")


class SshOptions(Access):
    """Options of the backend `ssh`."""

    hosts: list[SshHost] = Field([], description="the machines; the first num_nodes that answer are taken")
    directory: str = Field("~/.cloudtrain", pattern=r"^(~/|/)", description="where runs lie on the machines")
    share: Literal["group"] | None = Field(
        None, description="group: the group of the folder may read runs; left out: only you may"
    )
    host_to_host: bool = Field(
        True, description="the machines copy the source from each other, over TLS; false: each gets it from here"
    )
    lease: Literal["supervisors", "client"] = Field(
        "supervisors", description="client: the job leaves, resumable, when no client has looked at it for lease_s"
    )
    lease_s: float = Field(120.0, ge=5, description="seconds, for lease: client")
    lost_after_s: float = Field(600.0, gt=0, description="seconds until machines that none of us reaches count as lost")

    @model_validator(mode="after")
    def _distinct(self) -> SshOptions:
        logins = [(host.address, host.port or self.port, host.user or self.user) for host in self.hosts]
        duplicates = sorted({address for address, port, user in logins if logins.count((address, port, user)) > 1})
        if duplicates:
            raise ValueError(f"a machine is named twice: {', '.join(duplicates)}")
        return self
