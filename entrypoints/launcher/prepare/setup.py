"""Run the job's `setup`, a shell text, once on a node before its ranks."""

from __future__ import annotations

import select
import subprocess
from collections.abc import Mapping

from .. import shell
from ..environment import Prepared, setup_environment
from ..errors import Refused
from ..log import CHUNK, LAUNCHER, Log, Splitter
from ..manifest import Manifest
from ..world.cluster import Cluster


def run(
    manifest: Manifest, cluster: Cluster, base: Mapping[str, str], prepared: Prepared, source: str, log: Log
) -> None:
    """Run the text with bash in the source's folder and log its output; blocking. Raises Refused when it fails."""
    env = setup_environment(base, manifest, cluster, prepared, source)
    started = subprocess.Popen(
        shell.command(manifest.setup, "setup", manifest.compat, log),
        env=env,
        cwd=source,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
    )
    assert started.stdout is not None
    splitter = Splitter(log)
    while True:
        readable, _, _ = select.select([started.stdout], [], [], 0.2)
        if readable and (data := started.stdout.read(CHUNK)):
            _show(log, splitter.feed(data))
        elif readable or started.poll() is not None:  # what it left running may keep the pipe open
            break
    _show(log, splitter.end())
    code = started.wait()
    if code:
        raise Refused(f"setup was killed by signal {-code}" if code < 0 else f"setup exited with code {code}")


def _show(log: Log, lines: list[bytes]) -> None:
    """Log lines of the setup. Behind their prefix none of them is taken for an event."""
    log.lines(LAUNCHER, [b"setup: " + line for line in lines])
