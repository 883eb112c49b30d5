"""Files that are too large to be sent by default, and Git-LFS pointers, which stand in for files that are not there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cloudtrain.errors import BadSource
from cloudtrain.job.units import format_size
from cloudtrain.source.files import IGNORE_FILE, File, refusal, shown
from cloudtrain.source.ignore import matches

MAX_FILE = 500_000_000
MAX_TREE = 2_000_000_000
SHOWN = 10  # the biggest files of a source that is too large
POINTER = "Git-LFS pointer"
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md: under 1024 bytes, `version` first, then sorted keys
_POINTER = re.compile(
    rb"version https?://(?:git-lfs\.github\.com|hawser\.github\.com)/spec/v\d+\r?\n(?:\S+ .*\n)*?oid \w+:"
)


def is_pointer(data: bytes) -> bool:
    """Return whether a whole file is a Git-LFS pointer."""
    return len(data) < 1024 and _POINTER.match(data) is not None


def check(files: Sequence[File], allowed: Sequence[str] = ()) -> None:
    """Raise BadSource when a file, or all together, are too large; files that `allowed` matches do not count."""
    counted = [file for file in files if not matches(allowed, file.path)]
    total = sum(file.size for file in counted)
    hint = f"exclude them in {IGNORE_FILE} and use inputs: in the job; allow_large: lists files to package anyway"
    if over := [file for file in counted if file.size > MAX_FILE]:
        head = f"the source has {_count(len(over))} over {format_size(MAX_FILE)}"
        raise refusal(head, _lines(over), hint, SHOWN)
    if total > MAX_TREE:
        head = f"the source has {format_size(total)} in {_count(len(counted))}"
        head += f", which is over {format_size(MAX_TREE)}; the biggest"
        raise BadSource("\n  ".join([f"{head}:", *_lines(counted)[:SHOWN]]), hint)


def _lines(files: Sequence[File]) -> list[str]:
    return [f"{format_size(file.size):>9}  {shown(file.path)}" for file in sorted(files, key=lambda file: -file.size)]


def _count(number: int) -> str:
    return f"{number:,} file{'s' * (number != 1)}"
