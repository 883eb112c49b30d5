"""What OpenSSH's configuration says of a host, asked of `ssh -G`: Include, Match and defaults hold as they do for ssh."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cloudtrain.errors import BackendError

if TYPE_CHECKING:
    from asyncssh import SSHKey

CONFIG_S = 10.0  # `Match exec` runs programs
# Of this process's variables ssh gets these: a secret among the others must be in no other process.
_VARIABLES = ("HOME", "PATH", "USER", "LOGNAME", "SHELL", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR")
_OFF = ("no", "off", "false")


class Host(Protocol):
    """A host as the options of a target have it (ssh.Host)."""

    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int | None: ...
    @property
    def user(self) -> str | None: ...
    @property
    def known_hosts(self) -> str | None: ...


class HostConfig(NamedTuple):
    """The configuration of one host, as far as a connection of ours needs it."""

    hostname: str
    port: int
    user: str
    identities: tuple[str, ...]  # private keys that exist
    known_hosts: tuple[str, ...]  # files that exist; () where none does
    no_files: bool  # it names no file of host keys at all: `none`
    checking: str  # StrictHostKeyChecking
    key_alias: str | None
    jump: str | None
    proxy_command: str | None
    agent: str | None  # path of a socket; "" for none, None for $SSH_AUTH_SOCK
    identities_only: bool

    @property
    def checks(self) -> bool:
        """Whether the user's configuration wants host keys to be compared with known ones."""
        return self.checking not in _OFF

    def options(self) -> dict[str, Any]:
        """Return the arguments of asyncssh for it."""
        options: dict[str, Any] = {
            "host": self.hostname,
            "port": self.port,
            "username": self.user,
            "config": None,
            "client_keys": list(self.identities) or (),
            "ignore_encrypted": True,  # an agent may have it
            "known_hosts": (list(self.known_hosts) or b"\n") if self.checks else None,
        }
        if self.identities_only and self.identities:
            options["agent_identities"] = list(self.identities)
        if self.agent is not None:
            options["agent_path"] = self.agent or None
        if self.key_alias:
            options["host_key_alias"] = self.key_alias
        if self.proxy_command:
            options["proxy_command"] = ["/bin/sh", "-c", f"exec {self.proxy_command}"]
        return options


def read(address: str, port: int | None, user: str | None, known: str | None) -> HostConfig | None:
    """Return what ssh would do for a host; None where there is no ssh. Blocking. What is given outweighs the files.

    Raises BackendError where ssh does not understand the configuration.
    """
    given = [*(("-p", str(port)) if port else ()), *(("-l", user) if user else ())]
    given += [f'-oUserKnownHostsFile="{Path(known).expanduser()}"', "-oGlobalKnownHostsFile=none"] if known else []
    home, own_home = pwd.getpwuid(os.getuid()).pw_dir, os.environ.get("HOME") or ""
    if own_home and own_home != home:  # ssh itself does not look at HOME
        config = Path(own_home, ".ssh", "config")
        given += ["-F", str(config) if config.exists() else "none"]
    try:
        env = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        argv = ["ssh", "-G", *given, "--", address]
        asked = subprocess.run(argv, capture_output=True, text=True, timeout=CONFIG_S, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode != 0:
        lines = asked.stderr.strip().splitlines()
        raise BackendError(
            f"{address}: ssh does not read its configuration: {lines[-1] if lines else asked.returncode}"
        )
    return parse(asked.stdout.replace(f" {home}/.ssh/", f" {own_home}/.ssh/") if own_home else asked.stdout)


def parse(text: str) -> HostConfig:
    """Return what `ssh -G` has printed."""
    pairs = [line.partition(" ")[::2] for line in text.splitlines()]
    values: dict[str, str] = dict(reversed(pairs))

    def one(name: str) -> str | None:
        value = values.get(name, "")
        return value if value and value != "none" else None

    files = " ".join(values.get(name, "") for name in ("userknownhostsfile", "globalknownhostsfile")).split()
    agent = values.get("identityagent")
    tokens = {"h": values["hostname"], "p": values["port"], "r": values["user"], "n": values.get("host", ""), "%": "%"}
    command = one("proxycommand")
    return HostConfig(
        values["hostname"],
        int(values["port"]),
        values["user"],
        tuple(_existing([value for name, value in pairs if name == "identityfile"])),
        tuple(_existing(files)),
        set(files) <= {"none"},
        values.get("stricthostkeychecking", "ask"),
        one("hostkeyalias"),
        one("proxyjump"),
        re.sub("%([hprn%])", lambda found: tokens[found[1]], command) if command else None,
        None if agent in (None, "SSH_AUTH_SOCK") else "" if agent == "none" else str(Path(agent or "").expanduser()),
        values.get("identitiesonly") == "yes",
    )


def _existing(names: Sequence[str]) -> list[str]:
    paths = [Path(name).expanduser() for name in names if name != "none"]
    return [str(path) for path in paths if path.is_file() and os.access(path, os.R_OK)]


def plain_options(host: Host) -> dict[str, Any]:
    """Return the arguments of asyncssh where this machine has no ssh: asyncssh reads ~/.ssh/config itself."""
    known = str(Path(host.known_hosts).expanduser()) if host.known_hosts is not None else None
    options = {"port": host.port, "username": host.user, "known_hosts": known}
    given = {name: value for name, value in options.items() if value is not None}
    return {"host": host.address, "config": (), **given}


class HostKeys:
    """What a connection is to do with a host key that is not known: refuse it, or learn it where the user wants that.

    Attributes:
        file: the file that is to hold the key.
        differs: whether the host has shown another key than a known one of the same kind.
    """

    def __init__(self, config: HostConfig | None, named: str | None) -> None:
        self._config, self.differs = config, False
        self.files = list(config.known_hosts) if config else [str(Path(named or "~/.ssh/known_hosts").expanduser())]
        self.file = named if named and named != os.devnull else self.files[0] if self.files else "~/.ssh/known_hosts"
        self.identities = config.identities if config else ()

    def client_factory(self) -> Any:
        """Return the class whose method asyncssh calls for a key that is not known."""
        import asyncssh

        keys = self

        class Client(asyncssh.SSHClient):
            def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
                return keys.accept(host, addr, port, key)

        return Client

    def accept(self, host: str, addr: str, port: int, key: SSHKey) -> bool:
        """Return whether a key that is not known is accepted; with StrictHostKeyChecking accept-new it is written down."""
        import asyncssh

        name = (self._config and self._config.key_alias) or host
        known: Sequence[Any] = ()
        with suppress(OSError, ValueError):
            known = asyncssh.match_known_hosts(self.files or b"\n", name, addr, None if port == 22 else port)[0]
        self.differs = any(other.algorithm == key.algorithm for other in known)
        if known or self._config is None or self._config.checking != "accept-new" or not self.files:
            return False
        words = key.export_public_key().decode().split()[:2]
        with open(self.files[0], "a", encoding="utf-8") as file:
            file.write(" ".join([name if port == 22 else f"[{name}]:{port}", *words]) + "\n")
        return True


def encrypted_key(identities: Sequence[str]) -> str | None:
    """Return the first private key that nobody can use without its passphrase; None if there is none."""
    import asyncssh

    for path in identities:
        try:
            asyncssh.read_private_key(path)
        except asyncssh.KeyImportError as error:
            if "passphrase" in str(error).lower():
                return path
        except (OSError, asyncssh.Error):
            continue
    return None
