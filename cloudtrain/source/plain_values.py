"""Recognise credentials that have no form of their own: a password in a URL, a value under a name such as ACME_TOKEN."""

from __future__ import annotations

import re

from cloudtrain.source.secrets import credentials

_SECRET_NAME = re.compile(
    r"(?i)(?:^|_)(?:token|secret|passwd|password|credentials?|(?:api|access|secret|private|auth)_?key)$"
)
_PASSWORD_NAME = re.compile(r"(?i)passw(?:d|ord)$")
_WORD = re.compile(r"[A-Za-z0-9_+/=.~!#%^&*:-]+")
_PLACEHOLDER = re.compile(r"(?i)example|x{4}|\*{3}|change_?me|placeholder|dummy|^your|^my[-_]|^test")
TOKEN_LENGTH, PASSWORD_LENGTH = 16, 8  # shorter values are taken for settings


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
    is_pointer = re.match(r"(?:env|file|k8s|aws-secretsmanager|gcp-secretmanager):", value)
    if len(value) < shortest or not varied or is_path or is_pointer:
        return ""
    return f"a value under the name {name}"
