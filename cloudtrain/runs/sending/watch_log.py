"""The watcher's own log, `watch.log` in the home: its standard error, which it keeps short."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from cloudtrain.job.units import now

NAME = "watch.log"
MOST_BYTES = 4 << 20  # what is older is kept once, in watch.log.1


def write(text: object, home: Path | None = None) -> None:
    """Write a line with the time: to the log in `home`, where it can be written, else to this process's standard error."""
    line = f"{now()} {text}\n"
    if home is not None:
        with suppress(OSError), (home / NAME).open("a", encoding="utf-8") as log:
            log.write(line)
            log.flush()
            return
    print(line, end="", file=sys.stderr)  # noqa: T201 - the log itself


def bound() -> None:
    """Move what the log has to watch.log.1 where it has become long; other processes go on appending to the same file."""
    with suppress(OSError):
        path = Path("/proc/self/fd/2").readlink()
        if path.name == NAME and path.stat().st_size > MOST_BYTES:
            path.with_name(f"{NAME}.1").write_bytes(path.read_bytes())
            os.truncate(path, 0)
