"""Keeps credentials out of bundles and job files: names and contents that are refused by default.

entrypoints/launcher/credentials.py has the list, which a job's kept files pass too. A refusal names file, line and kind,
never the credential.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

from cloudtrain.errors import BadSource
from cloudtrain.source import limits
from cloudtrain.source.files import SHOWN, shown
from cloudtrain.source.ignore import matches
from cloudtrain.source.node_code import module

_SECRET_NAME = re.compile(
    r"(?i)(?:^|_)(?:token|secret|passwd|password|credentials?|(?:api|access|secret|private|auth)_?key)$"
)
_PASSWORD_NAME = re.compile(r"(?i)passw(?:d|ord)$")
_WORD = re.compile(r"[A-Za-z0-9_+/=.~!#%^&*:-]+")
_PLACEHOLDER = re.compile(r"(?i)example|x{4}|\*{3}|change_?me|placeholder|dummy|^your|^my[-_]|^test")
# An address that may get a credential: http only on this machine, behind a tunnel for instance
SAFE_ADDRESS = r"^(https://|http://(127(\.\d+){3}|localhost|\[::1\])(:\d+)?(/|$))"
TOKEN_LENGTH, PASSWORD_LENGTH = 16, 8  # shorter values are taken for settings


class Finding(NamedTuple):
    """A place that looks like a credential; line 0 means that the file's name does."""

    path: str
    line: int
    kind: str


def suspicious_name(path: str) -> str:
    """Return the kind of credential that files of this name hold, or an empty string."""
    return str(credentials().suspicious_name(path))


def search(data: bytes) -> list[tuple[int, str]]:
    """Return line and kind of whatever looks like a credential in a whole file."""
    return list(credentials().search(data))


def rules() -> str:
    """Return a digest of everything that decides what `search` finds: another one means that files are read again."""
    return str(credentials().rules())


def credentials() -> ModuleType:
    """Return the module with the list."""
    return module("launcher.credentials")


def refuse(findings: Iterable[Finding], allow_secrets: Sequence[str] = (), allow_pointers: Sequence[str] = ()) -> None:
    """Raise BadSource for every finding in a file that no pattern (as in .gitignore) allows, in one screen."""
    secrets, pointers = refused(findings, allow_secrets, allow_pointers)
    parts: list[str] = []
    hints: list[str] = []
    if secrets:
        parts += _part("what looks like credentials", secrets)
        hints.append("exclude the files in .cloudtrainignore and use secrets: in the job; allow_secrets: lists the "
                     "files to package anyway")  # fmt: skip
    if pointers:
        parts += _part("Git-LFS pointers instead of the files", pointers)
        hints.append("run git lfs pull to download the files; allow_pointers: lists pointers to package anyway")
    if parts:
        raise BadSource("the source has " + "\nand ".join(parts), "; ".join(hints))


def refused(
    findings: Iterable[Finding], allow_secrets: Sequence[str] = (), allow_pointers: Sequence[str] = ()
) -> tuple[list[Finding], list[Finding]]:
    """Return the credentials and the Git-LFS pointers among the findings that no pattern allows."""
    every = list(findings)
    secrets = [finding for finding in every if finding.kind != limits.POINTER]
    return _left(secrets, allow_secrets), _left(
        [finding for finding in every if finding.kind == limits.POINTER], allow_pointers
    )


def _left(findings: Sequence[Finding], allowed: Sequence[str]) -> list[Finding]:
    return [finding for finding in findings if not matches(allowed, finding.path)]


def _part(noun: str, findings: Sequence[Finding]) -> list[str]:
    files = len({finding.path for finding in findings})
    locations = [f"{shown(path)}{f':{line}' * bool(line)}  {kind}{' (by its name)' * (not line)}"
              for path, line, kind in findings]  # fmt: skip
    more = [f"and {len(locations) - SHOWN} more"] if len(locations) > SHOWN else []
    head = f"{noun} in {files} file{'s' * (files != 1)}:"
    return ["\n  ".join([head, *locations[:SHOWN], *more])]


def url_password(text: str) -> str:
    """Return the kind of credential where a text has a URL with a user's password, or an empty string."""
    return "a password in a URL" if credentials().has_url_password(text) else ""


def named_value(name: str, value: str) -> str:
    """Return the kind of credential where a name ends as secrets do and the value may be one, or an empty string.

    Settings pass: short values, words without digits, paths, URLs, placeholders.
    """
    if not _SECRET_NAME.search(name) or not _WORD.fullmatch(value) or _PLACEHOLDER.search(value):
        return ""
    shortest = PASSWORD_LENGTH if _PASSWORD_NAME.search(name) else TOKEN_LENGTH
    varied = re.search(r"[0-9]", value) and re.search(r"[A-Za-z]", value) and len(set(value)) > shortest // 2
    is_path = value.startswith(("/", "~", ".", "s3:", "gs:")) or "://" in value
    is_pointer = re.match(r"(?:env|file|k8s|aws-secretsmanager|gcp-secretmanager|azure-keyvault):", value)
    if len(value) < shortest or not varied or is_path or is_pointer:
        return ""
    return f"a value under the name {name}"
