"""Keeps credentials out of bundles: names and contents that are refused by default.

Thin on purpose: what has a form of its own, documented by its issuer, and is hardly ever found by chance. A refusal
names file, line and kind, never the credential. Not searched are files over MAX_BYTES and binary ones (a zero byte
among the first 8,192); passed over are the issuers' own example values (EXAMPLE) and placeholders (xxxx).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from cloudtrain import sizes
from cloudtrain.errors import BadSource
from cloudtrain.source import SHOWN, shown

MAX_BYTES = 4 << 20  # a larger file is judged by its name alone
VERSION = 1  # of how `search` works, beside the patterns
_BINARY = 8192  # bytes in which a zero marks a file as binary
_PLACEHOLDER = rb"EXAMPLE|x{8}|X{8}"


class Finding(NamedTuple):
    """A place that looks like a credential; line 0 means that the file's name does."""

    path: str
    line: int
    kind: str


class Pattern(NamedTuple):
    """A kind of credential: every one contains one of `needles`, `form` decides, `source` documents it."""

    kind: str
    needles: tuple[bytes, ...]  # found at memory speed, so that the form is hardly ever tried
    form: bytes  # a regular expression, compiled when a needle is met
    source: str


def _pattern(kind: str, needles: str, form: bytes, source: str) -> Pattern:
    return Pattern(kind, tuple(needle.encode() for needle in needles.split("|")), form, source)


_EDGE = rb"(?<![A-Za-z0-9_-])"
SOURCES_READ = "2026-11-20"
_GITHUB = "https://github.blog/changelog/2021-03-31-authentication-token-format-updates-are-generally-available/"
_IAM = "https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html"
_PLUGINS = "https://github.com/Yelp/detect-secrets/tree/master/detect_secrets/plugins"  # as of its release 1.5.0
_REGEXES = "https://github.com/dxa4481/truffleHogRegexes/blob/master/truffleHogRegexes/regexes.json"
_SCANNED = "https://docs.github.com/en/code-security/reference/secret-security/supported-secret-scanning-patterns"
# First come, first named: a line is reported once.
PATTERNS = (
    _pattern("key of a Google service account", '"private_key"', rb'"private_key"\s*:\s*"-----BEGIN',
             "https://cloud.google.com/iam/docs/keys-create-delete"),
    _pattern("private key", "PRIVATE KEY", rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?![\"'`])", _PLUGINS),
    _pattern("AWS access key", "AKIA|ASIA", rb"(?<![A-Z0-9])A(?:KI|SI)A[A-Z0-9]{16}(?![A-Z0-9])", _IAM),
    _pattern("AWS secret access key", "ecret_access_key|SECRET_ACCESS_KEY|ecretAccessKey",
             rb"(?i)secret_?access_?key[\"']?\s*[:=]\s*[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])", _IAM),
    _pattern("GitHub token", "ghp_|gho_|ghu_|ghs_|ghr_|github_pat_",
             _EDGE + rb"(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40})", _GITHUB),
    _pattern("GitLab token", "glpat-", rb"glpat-[A-Za-z0-9_-]{20}",
             "https://gitlab.com/gitlab-org/gitlab/-/issues/342327"),
    _pattern("Hugging Face token", "hf_", _EDGE + rb"hf_[A-Za-z0-9]{30}", _SCANNED),
    _pattern("OpenAI or Anthropic key", "sk-", _EDGE + rb"sk-(?=[\w-]*\d)[\w-]*[A-Za-z0-9]{20}", _PLUGINS),
    _pattern("Google API key", "AIza", _EDGE + rb"AIza[A-Za-z0-9_-]{35}", _REGEXES),
    _pattern("Slack token", "xox|xapp-", _EDGE + rb"(?:xox[abeoprs]|xapp)-\d[A-Za-z0-9-]{10}", _PLUGINS),
    _pattern("Slack webhook", "hooks.slack.com/services/T", rb"hooks\.slack\.com/services/T\w+/B\w+/\w+", _PLUGINS),
    _pattern("Azure storage key", "AccountKey=", rb"AccountKey=[A-Za-z0-9+/]{86}==", _PLUGINS),
    _pattern("npm token", "npm_", _EDGE + rb"npm_[A-Za-z0-9]{36}", _SCANNED),
    _pattern("PyPI token", "pypi-AgE", rb"pypi-AgE[A-Za-z0-9_-]{50}", _PLUGINS),
    _pattern("Stripe key", "k_live_", _EDGE + rb"[rs]k_live_[A-Za-z0-9]{24}", _PLUGINS),
    _pattern("Databricks token", "dapi", _EDGE + rb"dapi[0-9a-f]{32}", _SCANNED),
)  # fmt: skip

# pattern of the whole path, or of the name alone when it has no slash -> what such files hold
NAMES = {
    ".env": "environment file", ".env.*": "environment file", ".envrc": "environment file",
    "id_rsa": "private SSH key", "id_dsa": "private SSH key", "id_ecdsa": "private SSH key",
    "id_ecdsa_sk": "private SSH key", "id_ed25519": "private SSH key", "id_ed25519_sk": "private SSH key",
    "*.ppk": "private SSH key", "*.p12": "key store", "*.pfx": "key store", "*.jks": "key store",
    "*.kdbx": "password store", ".netrc": "passwords of hosts", "_netrc": "passwords of hosts",
    ".pgpass": "database passwords", ".git-credentials": "git credentials", ".pypirc": "PyPI credentials",
    ".vault-token": "Vault token", ".s3cfg": "AWS credentials", ".boto": "cloud credentials",
    "*/.aws/credentials": "AWS credentials", "application_default_credentials.json": "Google credentials",
    "client_secret*.json": "Google credentials", "*/gcloud/credentials.db": "Google credentials",
    "*/.azure/accessTokens.json": "Azure credentials", "*/.azure/msal_token_cache.*": "Azure credentials",
    "*/.kube/config": "Kubernetes credentials", "kubeconfig": "Kubernetes credentials",
    "*.kubeconfig": "Kubernetes credentials", "*/.docker/config.json": "registry credentials",
    ".dockercfg": "registry credentials", "kaggle.json": "Kaggle credentials",
    "*/huggingface/token": "Hugging Face token", "*/.huggingface/token": "Hugging Face token",
}  # fmt: skip
HARMLESS = (".env.example", ".env.sample", ".env.template", ".env.dist", ".env.*.example")


def suspicious_name(path: str) -> str:
    """Return the kind of credential that files of this name hold, or an empty string."""
    name = path.rpartition("/")[2]
    if any(fnmatchcase(name, harmless) for harmless in HARMLESS):
        return ""
    if name in NAMES:
        return NAMES[name]
    for pattern, kind in NAMES.items():
        if fnmatchcase(f"/{path}" if "/" in pattern else name, pattern):
            return kind
    return ""


def search(data: bytes) -> list[tuple[int, str]]:
    """Return line and kind of whatever looks like a credential in a whole file."""
    found: dict[int, str] = {}
    if b"\0" in data[:_BINARY]:
        return []
    for kind, needles, form, _ in PATTERNS:
        if any(needle in data for needle in needles):
            for match in re.finditer(form, data):
                if not re.search(_PLACEHOLDER, match[0]):
                    found.setdefault(data.count(b"\n", 0, match.start()) + 1, kind)
    return sorted(found.items())


def rules() -> str:
    """Return a digest of everything that decides what `search` finds: another one means that files are read again."""
    return hashlib.sha256(repr((VERSION, PATTERNS, MAX_BYTES, _BINARY, _PLACEHOLDER)).encode()).hexdigest()


def refuse(findings: Iterable[Finding], allow_secrets: Sequence[str] = (), allow_pointers: Sequence[str] = ()) -> None:
    """Raise BadSource for every finding in a file that no pattern (as in .gitignore) allows, in one screen."""
    every = list(findings)
    secrets = _left([finding for finding in every if finding.kind != sizes.POINTER], allow_secrets)
    pointers = _left([finding for finding in every if finding.kind == sizes.POINTER], allow_pointers)
    parts: list[str] = []
    hints: list[str] = []
    if secrets:
        parts += _part("what looks like credentials", secrets)
        hints.append("leave the files out in .cloudtrainignore and use secrets: in the job; allow_secrets: lists the "
                     "files in which they are meant")  # fmt: skip
    if pointers:
        parts += _part("Git-LFS pointers instead of the files", pointers)
        hints.append("git lfs pull fetches the files; allow_pointers: lists those that are meant")
    if parts:
        raise BadSource("the source holds " + "\nand ".join(parts), "; ".join(hints))


def _left(findings: Sequence[Finding], allowed: Sequence[str]) -> list[Finding]:
    if not findings or not allowed:
        return list(findings)
    from pathspec import GitIgnoreSpec

    spec = GitIgnoreSpec.from_lines(allowed)
    return [finding for finding in findings if not spec.match_file(finding.path)]


def _part(what: str, findings: Sequence[Finding]) -> list[str]:
    files = len({finding.path for finding in findings})
    places = [f"{shown(path)}{f':{line}' * bool(line)}  {kind}{' (by its name)' * (not line)}"
              for path, line, kind in findings]  # fmt: skip
    more = [f"and {len(places) - SHOWN} more"] if len(places) > SHOWN else []
    head = f"{what} in {files} file{'s' * (files != 1)}:"
    return ["\n  ".join([head, *places[:SHOWN], *more])]
