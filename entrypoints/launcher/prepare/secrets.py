"""Resolve the job's secrets on the node: standard input, files, Kubernetes, secret managers of AWS, Google and Azure."""

from __future__ import annotations

import importlib
import json
import os
import stat
from collections.abc import Container, Mapping, Sequence
from typing import Any

from ..errors import Refused, one_line
from ..masks import SHORTEST

KEY_VAULT = "https://{}.vault.azure.net"  # of Key Vault's REST reference, Get Secret 7.4 (2026-11-30)


def resolve(
    wanted: Mapping[str, Sequence[str]], env_values: Mapping[str, str], needed: Container[str] | None = None
) -> dict[str, str]:
    """Return name -> value for every secret; blocking (cloud stores are asked). Raises Refused with all that is wrong.

    Args:
        env_values: the values that came over standard input, by source ("env:NAME").
        needed: those of the node's role; others are left out where this node has none. None: all.
    """
    values, problems = {}, []
    for name, sources in wanted.items():
        tried = []
        for source in sources:
            value = None
            try:
                value = _read(source, env_values)
            except _Absent as reason:
                tried.append(f"{source}: {reason}")
            if value is not None:
                values[name] = value
                break
        else:
            if needed is not None and name not in needed:
                continue
            problems.append(f"the secret {name} was not found ({'; '.join(tried) or 'it has no source'})")
            continue
        if len(values[name].strip()) < SHORTEST:
            problems.append(f"the secret {name} has fewer than {SHORTEST} characters and cannot be masked in the log")
        elif "\0" in values[name]:
            problems.append(f"the secret {name} holds a NUL character, which no environment can")
    if problems:
        raise Refused("; ".join(problems))
    return values


class _Absent(Exception):
    """This source does not have it; the next one is tried."""


def _read(source: str, env_values: Mapping[str, str]) -> str:
    scheme, _, name = source.partition(":")
    if scheme == "env":
        if source not in env_values:
            raise _Absent("the client did not send it")
        return env_values[source]
    if scheme == "file":
        return _file(name)
    if scheme == "k8s":  # the kubelet has put it into our environment
        value = os.environ.get(f"CLOUDTRAIN_SECRET_{name.replace('/', '_')}")
        if value is None:
            raise _Absent("the cluster does not have this secret or key, or this process is not in a pod")
        return value
    if scheme == "aws-secretsmanager":
        return _aws(name)
    if scheme == "gcp-secretmanager":
        return _gcp(name)
    if scheme == "azure-keyvault":
        return _azure(name)
    raise _Absent("unknown kind of secret source")


def _file(path: str) -> str:
    path = os.path.expanduser(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _Absent(error.strerror or str(error)) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _Absent("not a file")
    with os.fdopen(descriptor, "rb") as file:
        # A secret that others can read is reported, not looked for elsewhere.
        if stat.S_IMODE(status.st_mode) & 0o177:
            mode = f"{stat.S_IMODE(status.st_mode):o}"
            raise Refused(f"the secret file {path} has mode {mode}; chmod 600 makes it private")
        if status.st_uid != os.geteuid():
            raise Refused(f"the secret file {path} belongs to another user (uid {status.st_uid})")
        try:
            return file.read().decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise Refused(f"the secret file {path} is not UTF-8 text") from None


def _aws(name: str) -> str:
    """Ask AWS Secrets Manager; `name#key` picks a key of a secret that is a JSON object."""
    boto3 = load("boto3", "boto3", f"aws-secretsmanager:{name}")
    name, _, key = name.partition("#")
    try:
        answer = boto3.client("secretsmanager").get_secret_value(SecretId=name)
    except Exception as error:
        raise _Absent(one_line(error)) from None
    return _pick(answer.get("SecretString") or answer["SecretBinary"].decode(), key)


def _gcp(name: str) -> str:
    """Ask Google Secret Manager: projects/P/secrets/S[/versions/V], or S in the default project."""
    service = load("google.cloud.secretmanager", "google-cloud-secret-manager", f"gcp-secretmanager:{name}")
    name, _, key = name.partition("#")
    try:
        if not name.startswith("projects/"):
            project = os.environ.get("GOOGLE_CLOUD_PROJECT") or importlib.import_module("google.auth").default()[1]
            name = f"projects/{project}/secrets/{name}"
        if "/versions/" not in name:
            name += "/versions/latest"
        answer = service.SecretManagerServiceClient().access_secret_version(name=name)
    except Exception as error:
        raise _Absent(one_line(error)) from None
    return _pick(answer.payload.data.decode(), key)


def _azure(name: str) -> str:
    """Ask Azure Key Vault as the node's identity, or as a service principal of the environment: VAULT/NAME."""
    import urllib.error
    import urllib.parse
    import urllib.request

    from ..output import blob, gcs

    name, _, key = name.partition("#")
    vault, _, name = name.partition("/")
    try:
        token = blob.node_token(os.environ, "https://vault.azure.net/", "Key Vault")[0]
        url = f"{KEY_VAULT.format(vault)}/secrets/{urllib.parse.quote(name, safe='')}?api-version=7.4"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with gcs.send(request) as answer:
            value = str(json.load(answer)["value"])
    except urllib.error.HTTPError as error:
        with error:
            text = " ".join(error.read(2000).decode("utf-8", "replace").split())
        raise _Absent(f"{error.code} {text[:300]}") from None
    except Exception as error:
        raise _Absent(one_line(error)) from None
    return _pick(value, key)


def _pick(text: str, key: str) -> str:
    if not key:
        return text
    try:
        return str(json.loads(text)[key])
    except (ValueError, KeyError, TypeError):
        raise _Absent(f"it has no key {key}") from None


def load(module: str, distribution: str, purpose: str) -> Any:
    """Import a client that only some jobs need; raises Refused with the pip line when it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Refused(f"{purpose} needs {distribution} on the node: pip install {distribution}") from None
