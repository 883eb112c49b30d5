"""Which files differ between the stored packages of two runs, and how their lines do."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.source import differences
from cloudtrain.source.bundle import Bundle

if TYPE_CHECKING:
    from cloudtrain.history.store import Store

LARGEST_FILE = 1 << 20  # bytes of a text file whose lines are compared
LARGEST_PACKAGE = 512 << 20  # unpacked bytes of a package that is compared
MOST_LINES = 5000  # of the whole diff


@dataclass(frozen=True)
class SourceDiff:
    """What differs between two packages: paths with `added`, `removed` or `changed`, and a unified diff of the text files.

    `unknown` says why they could not be compared; it is "" where they were.
    """

    files: dict[str, str]
    text: str = ""
    unknown: str = ""


def diff(store: Store, first: str, second: str) -> SourceDiff:
    """Return what differs between the stored packages of two runs' newest attempts; blocking, unpacks both.

    Raises StoreError where a package is damaged.
    """
    bundles = []
    facts = [store.attempts(run_id)[-1].plan.bundle for run_id in (first, second)]
    if facts[0].get("source_sha256") and facts[0].get("source_sha256") == facts[1].get("source_sha256"):
        return SourceDiff({})
    for run_id, each in zip((first, second), facts, strict=True):
        bundle = Bundle.stored(store.home / "bundles", str(each.get("sha256")))
        if bundle is None:
            return SourceDiff({}, unknown=f"the package of {run_id} is not stored here")
        if sum(file.size for file in bundle.files) > LARGEST_PACKAGE:
            return SourceDiff({}, unknown=f"the package of {run_id} is larger than {LARGEST_PACKAGE >> 20} MiB")
        bundles.append(bundle)
    files = differences.find(*bundles)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, name) for name in ("first", "second")]
        for bundle, folder in zip(bundles, folders, strict=True):
            bundle.extract(folder)
        lines: list[str] = []
        for path in sorted(files, key=lambda path: (files[path] != "changed", path)):
            lines += _diff_file(path, *(folder / path for folder in folders))
            if len(lines) > MOST_LINES:
                lines = [*lines[:MOST_LINES], f"... cut after {MOST_LINES} lines"]
                break
    return SourceDiff(files, "\n".join(lines))


def _diff_file(path: str, old: Path, new: Path) -> list[str]:
    """Return the unified diff of a file; one line that says so where it is not text, or too large."""
    texts = [_read(file) for file in (old, new)]
    if None in texts:
        return [f"{path}: not compared by line (a link, not text, or larger than {LARGEST_FILE >> 20} MiB)"]
    before, after = (text.splitlines() for text in texts if text is not None)
    of_old, of_new = f"a/{path}" if old.exists() else "/dev/null", f"b/{path}" if new.exists() else "/dev/null"
    return list(unified_diff(before, after, of_old, of_new, lineterm=""))


def _read(file: Path) -> str | None:
    """Return the text of a file, "" where it does not exist; None where it has no text to compare."""
    if file.is_symlink() or (file.exists() and file.stat().st_size > LARGEST_FILE):
        return None
    data = file.read_bytes() if file.exists() else b""
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None
