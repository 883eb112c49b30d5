"""The command line of OpenSSH's client for a Host: for programs with the user's terminal, or a stream of their own."""

from __future__ import annotations

import os
import pwd
import shlex
from collections.abc import Sequence
from pathlib import Path

from cloudtrain.nodes.ssh import Host

ALIVE_S, ALIVE_COUNT = 5, 3  # a connection that is cut is noticed after 15 s


def client_argv(host: Host, command: str, *, stdin: bool, terminal: bool) -> tuple[str, ...]:
    """Return the argv of `ssh` that runs a shell command on a host; host keys must be known, as for all connections."""
    streams = ["-t"] if terminal else ["-T", *([] if stdin else ["-n"])]
    settings = [
        "-o",
        f"ServerAliveInterval={ALIVE_S}",
        "-o",
        f"ServerAliveCountMax={ALIVE_COUNT}",
        "-o",
        "LogLevel=ERROR",
    ]
    return (*_argv(host), *streams, *settings, "--", host.address, command)


def _argv(host: Host) -> list[str]:
    argv = ["ssh", "-o", "StrictHostKeyChecking=yes"]
    own_home = os.environ.get("HOME") or ""
    if own_home and own_home != pwd.getpwuid(os.getuid()).pw_dir:  # ssh itself does not look at HOME
        config = Path(own_home, ".ssh", "config")
        argv += ["-F", str(config) if config.exists() else "none"]
    if host.known_hosts:
        argv += ["-o", f'UserKnownHostsFile="{Path(host.known_hosts).expanduser()}"', "-o", "GlobalKnownHostsFile=none"]
    if host.identity:
        argv += ["-i", str(Path(host.identity).expanduser()), "-o", "IdentitiesOnly=yes"]
    if host.port:
        argv += ["-p", str(host.port)]
    if host.user:
        argv += ["-l", host.user]
    if jump := host.jump_host:  # with the same keys, which -J would not use
        proxy = shlex.join([*_argv(jump), "-W", "[TARGET]", "--", jump.address])
        argv += ["-o", "ProxyCommand=" + proxy.replace("%", "%%").replace("'[TARGET]'", "[%h]:%p")]
    return argv


def python_line(python: str, words: Sequence[str], setup: Sequence[str] = ()) -> str:
    """Return the shell line that starts a Python on a machine, after setup lines (module load) whose output is not its own."""
    line = "exec " + shlex.join([python, *words])
    if setup:
        lines = "\n".join(setup)
        return "exec bash -lc " + shlex.quote(f"{{ {lines}\n}} </dev/null >&2\n{line}")
    return line
