"""Recognises credentials by the names of files and by what they hold: the list of bundles and of what a job keeps.

Thin on purpose: what has a form of its own, documented by its issuer, and is hardly ever found by chance. Binary files (a
zero byte among the first 8,192) are not searched; the issuers' own example values (EXAMPLE) and placeholders (xxxx) are
passed over. Most of what a file holds has no run of characters as long as a token: only the lines that have one are looked
at closely. Standard library only: it runs on nodes, and cloudtrain/source/secrets.py uses it too.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import namedtuple
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase, translate
from functools import lru_cache

MAX_BYTES = 4 << 20  # a larger file is judged by its name alone
VERSION = 1  # of how `search` works, beside the patterns
_BINARY = 8192  # bytes in which a zero marks a file as binary
RUN = 20
_LONG = b"t" * RUN
_TOKEN = bytes(
    116 if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "_-+/") else 32 for byte in range(256)
)
_PLACEHOLDER = rb"EXAMPLE|x{8}|X{8}"
URL = r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s/:@\"'`<>{}$*%]*:"  # bounded: a search stays linear in the text
# What stands for a password in an example, or is filled in later: ${TOKEN}, <token>, {token}, ****.
DUMMIES = r"(?i:pass|passwd|password|pwd|token|secret|key|api_?key|changeme|x+|\.+|your[-_a-z]*|my[-_][-_a-z]*)"
PASSWORD = rf"(?!{DUMMIES}@)[^\s/@\"'`<>{{}}$*]+@"

Pattern = namedtuple("Pattern", "kind needles form source")
Pattern.__doc__ = """A kind of credential: every one contains one of `needles`, which are found at memory speed. `form` decides,
a regular expression that is compiled when a needle is met, and `source` documents it."""


def _pattern(kind: str, needles: str, form: bytes, source: str) -> Pattern:
    return Pattern(kind, tuple(needle.encode() for needle in needles.split("|")), form, source)


_EDGE = rb"(?<![A-Za-z0-9_-])"
SOURCES_READ = "2026-11-20"
_GITHUB = "https://github.blog/changelog/2021-03-31-authentication-token-format-updates-are-generally-available/"
_IAM = "https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html"
_PLUGINS = "https://github.com/Yelp/detect-secrets/tree/master/detect_secrets/plugins"  # as of its release 1.5.0
_REGEXES = "https://github.com/dxa4481/truffleHogRegexes/blob/master/truffleHogRegexes/regexes.json"
_SCANNED = "https://docs.github.com/en/code-security/reference/secret-security/supported-secret-scanning-patterns"
_PIP_AUTH = "https://pip.pypa.io/en/stable/topics/authentication/"
# First come, first named: a line is reported once.
HEADS = (
    _pattern("key of a Google service account", '"private_key"', rb'"private_key"\s*:\s*"-----BEGIN',
             "https://cloud.google.com/iam/docs/keys-create-delete"),
    _pattern("private key", "PRIVATE KEY|PuTTY-User-Key-File",
             rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?![\"'`])|---- BEGIN SSH2 "
             rb"ENCRYPTED PRIVATE KEY ----"
             rb"|PuTTY-User-Key-File-\d: ", _PLUGINS),
    _pattern("password in the URL of a package index", "index-url|index_url|INDEX_URL|find-links|FIND_LINKS|git+http",
             rb"(?:(?i:index[-_]url|find[-_]links)[\"']?[ \t=:]+[\"']?|git\+)"
             + (URL + PASSWORD).encode(), _PIP_AUTH),
)  # fmt: skip
# Each holds a run of at least RUN characters, in one line.
PATTERNS = (
    _pattern("AWS access key", "AKIA|ASIA|ABIA|ACCA|A3T",
             rb"A(?<![A-Z0-9]A)(?:KIA|SIA|BIA|CCA|3T[A-Z0-9])[A-Z0-9]{16}(?![A-Z0-9])", _IAM),
    _pattern("AWS secret access key", "ecret_access_key|SECRET_ACCESS_KEY|ecretAccessKey",
             rb"(?i)secret_?access_?key[\"']?[ \t]*[:=][ \t]*[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])", _IAM),
    _pattern("AWS secret access key", "aws|AWS|Aws",
             rb"(?i)aws.{0,20}?(?:key|pwd|pw|password|pass|token).{0,20}?[\"'][0-9a-z/+]{40}[\"']", _PLUGINS),
    _pattern("GitHub token", "gh", rb"gh(?<![A-Za-z0-9_-]gh)[pousr]_[A-Za-z0-9]{36}", _GITHUB),
    _pattern("GitHub token", "github_pat_", _EDGE + rb"github_pat_[A-Za-z0-9_]{40}", _GITHUB),
    _pattern("GitLab token", "gl",
             rb"gl(?<![A-Za-z0-9]gl)(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-[A-Za-z0-9_-]{20}", _PLUGINS),
    _pattern("GitLab token", "GR1348941", _EDGE + rb"GR1348941[A-Za-z0-9_-]{20}", _PLUGINS),
    _pattern("Hugging Face token", "hf_", _EDGE + rb"hf_[A-Za-z0-9]{30}", _SCANNED),
    _pattern("OpenAI or Anthropic key", "sk-", _EDGE + rb"sk-(?=[\w-]*\d)[\w-]*[A-Za-z0-9]{20}", _PLUGINS),
    _pattern("Google API key", "AIza", _EDGE + rb"AIza[A-Za-z0-9_-]{35}", _REGEXES),
    _pattern("Slack token", "xox|xapp-", _EDGE + rb"(?:xox[abeoprs]|xapp)-\d[A-Za-z0-9-]{14}", _PLUGINS),
    _pattern("Slack webhook", "hooks.slack.com/services/T", rb"hooks\.slack\.com/services/T\w+/B\w+/\w+", _PLUGINS),
    _pattern("Azure storage key", "AccountKey=", rb"AccountKey=[A-Za-z0-9+/]{86}==", _PLUGINS),
    _pattern("npm token", "npm_", _EDGE + rb"npm_[A-Za-z0-9]{36}", _SCANNED),
    _pattern("npm token", ":_authToken=", rb":_authToken=[ \t]*(?:npm_[A-Za-z0-9]{20}|[A-Fa-f0-9-]{36})", _PLUGINS),
    _pattern("PyPI token", "pypi-AgE", rb"pypi-AgE[A-Za-z0-9_-]{50}", _PLUGINS),
    _pattern("Stripe key", "k_live_", _EDGE + rb"[rs]k_live_[A-Za-z0-9]{24}", _PLUGINS),
    _pattern("Databricks token", "dapi", _EDGE + rb"dapi[0-9a-f]{32}", _SCANNED),
    _pattern("JSON web token", "eyJ", rb"eyJ(?<![\w-]eyJ)[\w-]{17,}=*\.e[\w-]{3,}=*\.?[\w-]*", _PLUGINS),
    _pattern("SendGrid key", "SG.", rb"SG\.(?<![\w-]SG\.)[\w-]{22}\.[\w-]{43}", _PLUGINS),
    _pattern("Square secret", "sq0", rb"sq0(?:csp|atp)-[\w-]{22}", _PLUGINS),
    _pattern("Twilio key", "SK", rb"SK(?<![A-Za-z0-9_-]SK)[a-z0-9]{32}(?![A-Za-z0-9])", _PLUGINS),
    _pattern("Twilio account", "AC", rb"AC(?<![A-Za-z0-9_-]AC)[a-z0-9]{32}(?![A-Za-z0-9])", _PLUGINS),
    _pattern("Mailchimp key", "-us", rb"-us(?<=[0-9a-z]{32}-us)[0-9]{1,2}(?![\w-])", _PLUGINS),
    _pattern("Telegram bot token", ":A", rb":A(?<=[0-9]{8}:A)[\w-]{34}(?![\w-])", _PLUGINS),
    # without an issuer's mark in the token itself, the file has to speak of the issuer
    _pattern("Discord bot token", "discord|Discord|DISCORD",
             rb"[MNO][A-Za-z0-9_-]{23,25}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27}", _PLUGINS),
    _pattern("Artifactory key", "AKC", rb"AKC(?<![\w-]AKC)[A-Za-z0-9]{30,}", _PLUGINS),
)  # fmt: skip

# pattern of the whole path, or of the name alone when it has no slash -> what such files hold
NAMES = {
    ".env": "environment file", ".env.*": "environment file", ".envrc": "environment file",
    "id_rsa": "private SSH key", "id_dsa": "private SSH key", "id_ecdsa": "private SSH key",
    "id_ecdsa_sk": "private SSH key", "id_ed25519": "private SSH key", "id_ed25519_sk": "private SSH key",
    "*.ppk": "private SSH key", "*.p12": "key store", "*.pfx": "key store", "*.jks": "key store",
    "*.kdbx": "password store", ".netrc": "passwords for hosts", "_netrc": "passwords for hosts",
    ".pgpass": "database passwords", ".git-credentials": "git credentials", ".pypirc": "PyPI credentials",
    ".vault-token": "Vault token", ".s3cfg": "AWS credentials", ".boto": "cloud credentials",
    "*/.aws/credentials": "AWS credentials", "application_default_credentials.json": "Google credentials",
    "client_secret*.json": "Google credentials", "*/gcloud/credentials.db": "Google credentials",
    "*/.azure/accessTokens.json": "Azure credentials", "*/.azure/msal_token_cache.*": "Azure credentials",
    "*/.kube/config": "Kubernetes credentials", "kubeconfig": "Kubernetes credentials",
    "*.kubeconfig": "Kubernetes credentials", "*/.docker/config.json": "registry credentials",
    ".dockercfg": "registry credentials", "kaggle.json": "Kaggle credentials",
    "*/huggingface/token": "Hugging Face token", "*/huggingface/stored_tokens": "Hugging Face token",
    "*/.huggingface/token": "Hugging Face token",
}  # fmt: skip
HARMLESS = (".env.example", ".env.sample", ".env.template", ".env.dist", ".env.*.example")


def suspicious_name(path: str) -> str:
    """Return the kind of credential that files of this name hold, or an empty string."""
    name = path.rpartition("/")[2]
    if not _any_name().match(name):
        return ""
    if any(fnmatchcase(name, harmless) for harmless in HARMLESS):
        return ""
    if name in NAMES:
        return NAMES[name]
    for pattern, kind in NAMES.items():
        if fnmatchcase(f"/{path}" if "/" in pattern else name, pattern):
            return kind
    return ""


@lru_cache(maxsize=None)
def _any_name() -> re.Pattern[str]:
    """Return one expression for the names of all files in question: nearly every other is told apart at once."""
    return re.compile("|".join(translate(pattern.rpartition("/")[2]) for pattern in NAMES))


def search(data: bytes) -> list[tuple[int, str]]:
    """Return line and kind of whatever looks like a credential in a whole file."""
    kinds_by_line: dict[int, str] = {}
    if is_binary(data):
        return []
    for kind, at in _matches(HEADS, data):
        kinds_by_line.setdefault(data.count(b"\n", 0, at) + 1, kind)
    text, starts = _with_runs(data)
    for kind, at in _matches(PATTERNS, text):
        index = bisect_right(starts, (at, len(data))) - 1
        kinds_by_line.setdefault(data.count(b"\n", 0, starts[index][1]) + 1, kind)
    return sorted(kinds_by_line.items())


def is_binary(data: bytes) -> bool:
    """Return whether a file is not searched, for it holds no text."""
    return b"\0" in data[:_BINARY]


def _matches(patterns: Iterable[Pattern], data: bytes) -> Iterator[tuple[str, int]]:
    for kind, needles, form, _ in patterns:
        if any(needle in data for needle in needles):
            for match in re.finditer(form, data):
                if not re.search(_PLACEHOLDER, match[0]):
                    yield kind, match.start()


def _with_runs(data: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the lines that hold a run long enough for a token, and where each begins, here and in the file."""
    runs = data.translate(_TOKEN)
    lines: list[bytes] = []
    starts: list[tuple[int, int]] = []
    length, at = 0, runs.find(_LONG)
    while at >= 0:
        start = data.rfind(b"\n", 0, at) + 1
        end = data.find(b"\n", at) + 1 or len(data)
        lines.append(data[start:end])
        starts.append((length, start))
        length += end - start
        at = runs.find(_LONG, end)
    return b"".join(lines), starts


def rules() -> str:
    """Return a digest of everything that decides what `search` finds: another one means that files are read again."""
    import hashlib  # only here: it costs every job some milliseconds

    return hashlib.sha256(repr((VERSION, HEADS, PATTERNS, MAX_BYTES, _BINARY, _PLACEHOLDER)).encode()).hexdigest()


def has_url_password(text: str) -> bool:
    """Return whether a text has a URL with a user's password."""
    return bool(re.search(URL + PASSWORD, text))
