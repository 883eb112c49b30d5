"""What a node says of the files that it keeps and does not keep."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import islice

from .script_files import files

SHOWN = 3  # folders in one line
MOST = 100_000  # files that are looked at when what is not kept is counted


def largest(sizes: Mapping[str, int]) -> list[str]:
    """Return what lies at the top of the working directory, the largest first."""
    totals = _totals(sizes)
    return sorted(totals, key=lambda top: -totals[top])


def _totals(sizes: Mapping[str, int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        top = name.partition("/")[0] + ("/" if "/" in name else "")
        totals[top] = totals.get(top, 0) + size
    return totals


def describe(sizes: Mapping[str, int]) -> str:
    """Return the sizes of the largest files and folders: 1.2 GB in out/, 3 KB in log.txt and 2 more."""
    from .store import format_bytes  # only here: it costs every job some milliseconds

    tops, totals = largest(sizes), _totals(sizes)
    more = f" and {len(tops) - SHOWN} more" if len(tops) > SHOWN else ""
    return ", ".join(f"{format_bytes(totals[top])} in {top}" for top in tops[:SHOWN]) + more


def measure(source: str, is_counted: Callable[[str, os.stat_result], bool]) -> dict[str, int]:
    """Return the sizes of some files of a working directory, by name."""
    sizes: dict[str, int] = {}
    for name in islice(files(source, [""]), MOST):
        try:
            status = os.stat(os.path.join(source, name))
        except OSError:
            continue
        if is_counted(name, status):
            sizes[name] = status.st_size
    return sizes


def explain_links(links: Mapping[str, str], folder: str) -> tuple[str, str]:
    """Return that links to folders are not kept: of those that lead out of a folder, and of those within; "" for none."""
    top = os.path.join(os.path.realpath(folder), "")
    inner = {name for name in links if os.path.realpath(os.path.join(folder, name)).startswith(top)}
    outside, inside = (
        _list({name: links[name] for name in links if (name in inner) is within}) for within in (False, True)
    )
    hint = "write into a folder, or name the link in keep"
    return (
        outside and f"links to folders are not kept: {outside}; {hint}",
        inside and f"the links are not kept, only their folders: {inside}",
    )


def _list(links: Mapping[str, str]) -> str:
    more = f" and {len(links) - SHOWN} more" if len(links) > SHOWN else ""
    return ", ".join(f"{name} -> {to}" for name, to in islice(links.items(), SHOWN)) + more


def explain_limit(over: Mapping[str, int], limit: int) -> str:
    """Return which files the limit leaves out, "" for none."""
    if not over:
        return ""
    from .store import format_bytes  # only here: it costs every job some milliseconds

    return (
        f"{describe(over)} are over keep_limit ({format_bytes(limit)}), so they are not kept: set a larger"
        " keep_limit in the job file, or let the script delete older checkpoints"
    )
