"""Which variables of a shell the calls of its runs need, and which of them may be stored.

The watcher gets the whole environment of the shell that submitted a run and keeps it in memory. The next attempt is sent
with all of it; calls that only read use the variables that `select` returns; the history gets `pointers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache

from cloudtrain.backends import registry
from cloudtrain.source import secrets

# What the interpreter and every program need; it holds no credential, and a process may begin with it.
BASE = (
    "HOME", "PATH", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LC_*", "XDG_*", "PYTHON*", "LD_LIBRARY_PATH",
    "DYLD_*", "VIRTUAL_ENV", "CLOUDTRAIN_HOME", "CLOUDTRAIN_CACHE", "CLOUDTRAIN_CONFIG_HOME",
)  # fmt: skip
# What boto3, google-auth, kubectl's plugins, ssh, Docker and clients of schedulers read: credentials, pointers, the way out.
CREDENTIALS = (
    "AWS_*", "BOTO_*", "GOOGLE_*", "GCLOUD_*", "CLOUDSDK_*", "GCE_*", "STORAGE_EMULATOR_HOST", "KUBECONFIG", "KUBERNETES_*",
    "SSH_AUTH_SOCK", "SLURM_CONF", "SLURM_CLUSTERS", "DOCKER_*", "*_PROXY", "*_proxy", "*_CA_BUNDLE", "SSL_CERT_*", "AZURE_*",
    "AKASH_*",
)  # fmt: skip
CALLS = (*CREDENTIALS, "HOME", "PATH")  # what a backend may read that does not say which (Backend.variables)
# Of these the value is a path or a name, and may be stored.
POINTERS = (
    "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_ENDPOINT_URL*", "AWS_CA_BUNDLE", "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_SDK_LOAD_CONFIG", "AWS_USE_*", "AWS_STS_REGIONAL_ENDPOINTS", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT",
    "GCLOUD_PROJECT", "CLOUDSDK_CONFIG", "CLOUDSDK_ACTIVE_CONFIG_NAME", "CLOUDSDK_CORE_PROJECT", "CLOUDSDK_AI_REGION",
    "CLOUDSDK_COMPUTE_REGION", "STORAGE_EMULATOR_HOST", "KUBECONFIG", "KUBERNETES_SERVICE_*", "SSH_AUTH_SOCK", "SLURM_CONF",
    "SLURM_CLUSTERS", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "*_PROXY", "*_proxy", "*_CA_BUNDLE", "SSL_CERT_*",
    *BASE,
)  # fmt: skip
_SPECIAL = frozenset("*?[")


@cache
def credentials() -> tuple[str, ...]:
    """Return CREDENTIALS, and what the calls of installed backends read; imports these. One that does not load reads nothing."""
    patterns = list(CREDENTIALS)
    for name in set(registry.names()) - registry.BUILT_IN.keys():
        with suppress(Exception):  # it is a package of others
            patterns += registry.backend_class(name).variables or ()
    return tuple(patterns)


def patterns_of(backend: str) -> tuple[str, ...]:
    """Return the patterns of the variables that a backend's calls read."""
    patterns = registry.backend_class(backend).variables
    return CALLS if patterns is None else patterns


def select(environ: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Return the variables whose names match a pattern; NAME, NAME* and *NAME need no regular expression."""
    names = {*patterns}
    special = {each for each in names if _SPECIAL.intersection(each)}
    starts = tuple(each[:-1] for each in special if each[-1] == "*" and not _SPECIAL.intersection(each[:-1]))
    ends = tuple(each[1:] for each in special if each[0] == "*" and not _SPECIAL.intersection(each[1:]))
    rest = [each for each in special if each[:-1] not in starts and each[1:] not in ends]

    def matches(name: str) -> bool:
        ours = name in names or name.startswith(starts) or name.endswith(ends)
        return ours or any(fnmatchcase(name, each) for each in rest)

    return {name: value for name, value in environ.items() if matches(name)}


def pointers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may be stored: paths and names, no value that holds a password or looks like one."""
    return {
        name: value
        for name, value in select(environ, POINTERS).items()
        if not ("://" in value and "@" in value) and not secrets.search(value.encode("utf-8", "surrogateescape"))
    }


def hidden(environ: Mapping[str, str], sources: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the credentials, and of the sources of the job's secrets, whose values are not stored."""
    names = {*select(environ, credentials()), *(name for name in sources if name in environ)}
    return tuple(sorted(names - pointers(environ).keys()))


def restore(stored: Mapping[str, str], names: Iterable[str], shell: Mapping[str, str]) -> dict[str, str]:
    """Return a run's environment as far as it is known after the watcher that had it has died.

    Args:
        stored: the run's pointers.
        names: the variables whose values were not stored; the shell's are taken where it has them.
        shell: the environment of the shell that started this watcher; its own credentials are left out.
    """
    own = select(shell, credentials()).keys()
    rest = {name: value for name, value in shell.items() if name not in own}
    return rest | dict(stored) | {name: shell[name] for name in names if name in shell}
