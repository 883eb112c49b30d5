"""The options of the backend `ssh` (`options.ssh` in a job file), as a pydantic model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cloudtrain.job.problems import wrong


class Access(BaseModel):
    """How a machine is reached and what runs there; left out, ~/.ssh/config decides."""

    model_config = ConfigDict(extra="forbid")
    user: str | None = Field(None, description="login name")
    port: int | None = Field(None, ge=1, le=65535, description="port of sshd; default: as in ~/.ssh/config, else 22")
    jump: str | None = Field(None, description="jump hosts, [user@]host[:port], separated by commas")
    identity: str | None = Field(
        None, description="path of a private key; default: keys of the SSH agent and of ~/.ssh"
    )
    known_hosts: str | None = Field(None, description="file of host keys; default ~/.ssh/known_hosts")
    python: str | None = Field(
        None, description="Python interpreter on that machine, 3.9 or newer, with torch; default python3"
    )
    setup: list[str] | None = Field(
        None, description="shell lines to run before it: module load cuda, conda activate train"
    )


class SshHost(Access):
    """One machine; what it leaves out is that of all."""

    address: str = Field(min_length=1, description="host name or address, or a Host of ~/.ssh/config")
    internal: str | None = Field(
        None, description="address that the other nodes use for it; default: address, or its HostName in ~/.ssh/config"
    )


class SshOptions(Access):
    """Options of the backend `ssh`."""

    hosts: list[SshHost] = Field([], description="the machines; a run uses the first num_nodes that answer")
    directory: str = Field("~/.cloudtrain", pattern=r"^(~/|/)", description="folder for runs on the machines")
    share: Literal["group"] | None = Field(
        None, description="group: the folder's group may read runs; default: only you"
    )
    lease: Literal["supervisors", "client"] = Field(
        "supervisors",
        description="client: the job saves and ends, and can be resumed, when no cloudtrain process has contacted it for lease_s",
    )
    lease_s: float = Field(120.0, ge=5, le=864_000, description="seconds, used with lease: client")
    lost_after_s: float = Field(
        600.0, gt=0, le=864_000, description="seconds until a machine that cannot be reached counts as lost"
    )

    @field_validator("hosts", mode="before")
    @classmethod
    def _are_tables(cls, value: Any) -> Any:
        for text in value if isinstance(value, list) else ():
            if isinstance(text, str):
                user, _, address = text.rpartition("@")
                table = f'{{address = "{address}"' + (f', user = "{user}"}}' if user else "}")
                raise wrong(f'must hold tables, not the text "{text}"', f"write {table}")
        return value

    @model_validator(mode="after")
    def _distinct(self) -> SshOptions:
        logins = [(host.address, host.port or self.port, host.user or self.user) for host in self.hosts]
        duplicates = sorted({address for address, port, user in logins if logins.count((address, port, user)) > 1})
        if duplicates:
            raise ValueError(f"a machine is listed twice: {', '.join(duplicates)}")
        return self
