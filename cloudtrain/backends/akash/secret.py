"""Read the Console API key from a variable or a private file; it goes into request headers and nowhere else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cloudtrain.errors import BackendError

HINT = (
    "create a key at console.akash.network (Settings, API keys), then export AKASH_API_KEY=..., "
    "or set options.akash.api_key: file:PATH"
)


def read_key(source: str) -> str:
    """Return the key of `env:NAME` or `file:PATH`; raises BackendError where it is missing or others can read it."""
    kind, _, name = source.partition(":")
    if kind == "env":
        if key := os.environ.get(name, "").strip():
            return key
        raise BackendError(f"the Akash API key is not known: environment variable {name} is not set", HINT)
    path = Path(name).expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise BackendError(f"the file of the Akash API key, {path}, can be read by others", f"chmod 600 {path}")
            key = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BackendError(f"the file of the Akash API key, {path}, cannot be read: {error}", HINT) from None
    if not key:
        raise BackendError(f"the file of the Akash API key, {path}, is empty", HINT)
    return key
