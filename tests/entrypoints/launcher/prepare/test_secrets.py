"""Secrets come from their first source that has them, and from nowhere else."""

from __future__ import annotations

import json
import os
import sys
import types
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from launcher.errors import Refused
from launcher.output import blob
from launcher.prepare import secrets
from launcher.prepare.secrets import resolve

from cloudtrain.backends import fetch_program, http
from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job
from cloudtrain.simulators.http import Request, Response, Server


def private(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return f"file:{path}"


def test_sources_are_tried_in_order(tmp_path: Path):
    first = private(tmp_path / "a", "from file\n")
    wanted = {"A": ["env:A", first], "B": ["env:B", first], "C": [f"file:{tmp_path}/absent", "env:C"]}
    assert resolve(wanted, {"env:B": "given", "env:C": "given too"}) == {
        "A": "from file",
        "B": "given",
        "C": "given too",
    }


def test_our_own_environment_is_no_source(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOKEN", "leaked")
    assert resolve({"TOKEN": ["env:TOKEN"]}, {"env:TOKEN": "the client's"}) == {"TOKEN": "the client's"}
    with pytest.raises(Refused, match=r"the secret TOKEN was not found \(env:TOKEN: the client did not send it\)"):
        resolve({"TOKEN": ["env:TOKEN"]}, {})
    both = {"TOKEN": ["env:TOKEN"], "KEY": ["env:KEY"]}
    assert resolve(both, {"env:KEY": "the role's"}, ["KEY"]) == {"KEY": "the role's"}, "its node was given no other"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o700])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int):
    with pytest.raises(Refused, match=f"has mode {mode:o}; chmod 600 makes it private"):
        resolve({"A": [private(tmp_path / "a", "value", mode), "env:A"]}, {"env:A": "never used"})


def test_a_private_file_may_be_read_only(tmp_path: Path):
    assert resolve({"A": [private(tmp_path / "a", "one\ntwo\r\n", 0o400)]}, {}) == {"A": "one\ntwo"}


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = private(tmp_path / "a", "value")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(Refused, match="belongs to another user"):
        resolve({"A": [source]}, {})


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path):
    with pytest.raises(Refused) as refused:
        resolve(
            {"A": ["env:A"], "B": ["env:B"], "C": [f"file:{tmp_path}"], "D": ["vault:x"], "E": [], "F": ["env:F"]},
            {"env:B": "abc", "env:F": "a\0bcd"},
        )
    for part in (
        "A was not found",
        "B has fewer than 4 characters",
        "C was not found",
        "not a file",
        "unknown kind of secret source",
        "E was not found (it has no source)",
        "F holds a NUL",
    ):
        assert part in str(refused.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"\xff\xfe\xfd\xfc")
    (tmp_path / "a").chmod(0o600)
    with pytest.raises(Refused, match="is not UTF-8 text"):
        resolve({"A": [f"file:{tmp_path}/a"]}, {})


@pytest.mark.parametrize(
    ("source", "distribution"),
    [("aws-secretsmanager:a", "boto3"), ("gcp-secretmanager:a", "google-cloud-secret-manager")],
)
def test_a_client_that_is_absent_is_named_with_its_pip_line(
    source: str, distribution: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "google.cloud.secretmanager", None)
    with pytest.raises(Refused, match=f"needs {distribution} on the node: pip install {distribution}"):
        resolve({"A": [source]}, {})


class FakeStore:
    """Stands for the client of AWS Secrets Manager: only what is called."""

    def client(self, service: str) -> FakeStore:
        assert service == "secretsmanager"
        return self

    def get_secret_value(self, SecretId: str) -> dict:  # noqa: N803 - the name in AWS's API
        return {
            "plain": {"SecretString": "from aws"},
            "json": {"SecretString": '{"token": "inner"}'},
            "binary": {"SecretBinary": b"bytes"},
        }[SecretId]


def test_aws_gives_text_bytes_and_keys(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("boto3")
    module.client = FakeStore().client
    monkeypatch.setitem(sys.modules, "boto3", module)
    wanted = {
        "A": ["aws-secretsmanager:plain"],
        "B": ["aws-secretsmanager:json#token"],
        "C": ["aws-secretsmanager:binary"],
        "D": ["aws-secretsmanager:absent", "env:D"],
    }
    assert resolve(wanted, {"env:D": "fallback"}) == {"A": "from aws", "B": "inner", "C": "bytes", "D": "fallback"}
    with pytest.raises(Refused, match="it has no key nope"):
        resolve({"B": ["aws-secretsmanager:json#nope"]}, {})


def test_a_key_vault_is_asked_as_the_nodes_identity(monkeypatch: pytest.MonkeyPatch):
    asked: list[Request] = []

    def answer(request: Request, *_: str) -> Response:
        asked.append(request)
        if "/msi" in request.path:
            return Response({"access_token": "abc", "expires_on": "99999999999"})
        found = "plain" in request.path or "json" in request.path
        return Response(
            {"value": "from azure" if "plain" in request.path else '{"token": "inner"}'}, 200 if found else 404
        )

    server = Server([("GET", "/.*", answer)])
    monkeypatch.setattr(secrets, "KEY_VAULT", server.url + "/{}")
    monkeypatch.setenv("MSI_ENDPOINT", f"{server.url}/msi")
    monkeypatch.setenv("MSI_SECRET", "s")
    monkeypatch.delenv("AZURE_CLIENT_ID", raising=False)
    wanted = {"A": ["azure-keyvault:mine/plain"], "B": ["azure-keyvault:mine/json#token"]}
    try:
        assert resolve(wanted, {}) == {"A": "from azure", "B": "inner"}
        assert asked[0].query["resource"] == "https://vault.azure.net/"
        assert asked[1].path == "/mine/secrets/plain?api-version=7.4"
        assert asked[1].headers["authorization"] == "Bearer abc"
        with pytest.raises(Refused, match="azure-keyvault:mine/none: 404"):
            resolve({"A": ["azure-keyvault:mine/none"]}, {})
    finally:
        server.close()
    with pytest.raises(Refused, match="no credentials for Key Vault"):
        resolve({"A": ["azure-keyvault:mine/plain"]}, {})


def test_a_token_goes_to_no_other_host(monkeypatch: pytest.MonkeyPatch):
    """Of a key vault, of a store, of the machine's identity: what redirects a request does not pass its credentials on."""
    asked: list[Request] = []
    with closing(
        Server([("GET", "/.*", lambda request: asked.append(request) or Response({"value": "stolen"}))])
    ) as other:
        away = closing(
            Server([("GET", "/.*", lambda request: Response(None, 302, {"Location": f"{other.url}{request.path}"}))])
        )
        with away as server:
            monkeypatch.setattr(secrets, "KEY_VAULT", server.url + "/{}")
            monkeypatch.setattr(blob, "node_token", lambda *_: ("abc", 60.0))
            with pytest.raises(Refused, match="azure-keyvault:mine/plain: 302"):
                resolve({"A": ["azure-keyvault:mine/plain"]}, {})
            access = f"BlobEndpoint={server.url}/a;AccountName=a;SharedAccessSignature=sig=x"
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", access)
            with pytest.raises(PermissionError, match="302"):
                blob.Files("c@a").cat_file("c/x")
            monkeypatch.undo()
            monkeypatch.setenv("MSI_ENDPOINT", f"{server.url}/msi")
            monkeypatch.setenv("MSI_SECRET", "s")
            with pytest.raises(PermissionError, match="no token for Blob Storage: 302"):
                blob.node_token({**os.environ})
            answer = http.ask("GET", f"{server.url}/x", None, {"Authorization": "Bearer abc"}, 60.0)
            own: dict[str, Any] = {}
            exec(fetch_program.FETCH, own)  # of a container's first program
            assert json.load(own["get"](f"{server.url}/x", Authorization="Bearer abc")) == {"value": "stolen"}
    assert answer.status == 200 and [request.headers.get("authorization") for request in asked] == [None, None]


@pytest.mark.parametrize(
    "source", ["a/b/c", "vault", "ab/name", "a.b.c/name", "vault/na_me", "vault.evil.org#/x", "vault/"]
)
def test_a_key_vault_that_cannot_be_is_refused_in_the_job(source: str):
    with pytest.raises(BadJob):
        Job.from_dict({"name": "a", "source": ".", "entrypoint": "a.py", "secrets": {"A": f"azure-keyvault:{source}"}})
