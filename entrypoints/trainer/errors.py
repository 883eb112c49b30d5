"""Unsupported: the error for what the trainer cannot do; ends the process with exit code 78."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

EXIT_REFUSED = 78
NEEDED = {"torch": "2.13.0", "accelerate": "1.15.0", "transformers": "5.23.0"}


class Unsupported(Exception):
    """The training cannot start, or not go on; str() is one sentence, with a hint where there is one."""


@contextmanager
def exit_when_unsupported() -> Iterator[None]:
    """Print the reason and exit with 78 when the body raises Unsupported."""
    try:
        yield
    except Unsupported as error:
        print(f"train.py: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_REFUSED) from None


def check_versions() -> None:
    """Raise Unsupported where a library is absent or too old; imports none of them."""
    for name, oldest in NEEDED.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise Unsupported(f"{name} is not installed (pip install 'cloudtrain[train]')") from None
        if _number(installed) < _number(oldest):
            raise Unsupported(f"the shared trainer needs {name} {oldest} or newer, here is {installed}")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
