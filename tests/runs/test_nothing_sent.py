"""Submissions that nothing was sent of: a refused connection, no credentials."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.backends.azure import LOGIN, Tokens
from cloudtrain.backends.azureml.client import AzureError, Workspace
from cloudtrain.backends.google import GoogleApi
from cloudtrain.backends.http import Answer
from cloudtrain.backends.sagemaker import submission
from cloudtrain.backends.store.blob import Blob
from cloudtrain.backends.store.gcs import Gcs
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BackendError, CloudtrainError, MissingExtra, NoService, NotReached, UnknownRun
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.clock import VirtualClock
from cloudtrain.testing.memory import MemoryBackend
from tests.stores import S3

NOWHERE = "http://127.0.0.1:1"


def job(tmp_path: Path, **keys: object) -> dict[str, object]:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "train.py").write_text("")
    return {"name": "tiny", "source": str(source), "entrypoint": "train.py", "resources": {"cpus": 1, "memory": "1Gi"},
            "environment": {"requirements": "none"}, **keys}  # fmt: skip


def on_cluster(tmp_path: Path, server: str = NOWHERE, **options: object) -> dict[str, object]:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    named = {"kubeconfig": str(tmp_path / "kubeconfig"), "context": "c", **options}
    return job(tmp_path, image="python:3.11", options={"kubernetes": named})


def submit(target: str, document: dict[str, object]) -> None:
    Submitter(target, watch=False, clock=VirtualClock(SYSTEM.now() + 60)).submit(document)


def test_kubernetes_at_a_wrong_address_leaves_no_open_run(tmp_path, home):
    with pytest.raises(NotReached, match="Connection refused; nothing was sent"):
        submit("kubernetes", on_cluster(tmp_path))
    (run,) = Store(home).runs()
    assert run.status.state is State.FAILED
    (attempt,) = Store(home).attempts(run.run_id)
    assert attempt.unanswered_since is None and attempt.handle is None


def test_vertex_and_its_store_at_a_wrong_address_leave_no_open_run(tmp_path, home):
    options = {"project": "p", "bucket": "bucket", "endpoint": NOWHERE}
    document = job(tmp_path, image="python:3.11", output="gs://bucket/out", options={"vertex": options})
    with pytest.raises(NotReached, match="nothing was sent"):
        submit("vertex", {**document, "resources": {}})
    assert [run.status.state for run in Store(home).runs()] == [State.FAILED]


def test_a_submit_without_a_kubeconfig_stores_nothing(tmp_path, home):
    document = on_cluster(tmp_path)
    (tmp_path / "kubeconfig").unlink()
    with pytest.raises(CloudtrainError, match="there is no kubeconfig"):
        submit("kubernetes", document)
    assert Store(home).runs() == []


def test_a_submit_without_credentials_of_aws_stores_nothing(tmp_path, home, monkeypatch):
    pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    options = {"role": "arn:aws:iam::123456789012:role/r", "region": "eu-west-1", "bucket": "bucket"}
    document = job(tmp_path, image="python:3.11", output="s3://bucket/out", options={"sagemaker": options})
    with pytest.raises(CloudtrainError, match="there are no AWS credentials"):
        submit("sagemaker", {**document, "resources": {"instance_type": "ml.m5.large"}})
    assert Store(home).runs() == []


AZURE = {"subscription": "0" * 36, "resource_group": "group", "workspace": "place", "store": "az://jobs@account"}
AKASH = {"store": "s3://bucket/ct", "image": "python:3.11", "max_usd_per_hour": 1.0}
HOST = {"address": "127.0.0.1", "port": 1, "user": "u"}
PLACES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {  # backend -> its library, options, keys of the job
    "akash": ("boto3", AKASH, {}),
    "azureml": ("azure.identity", AZURE, {"resources": {}, "image": "python:3.11"}),
    "sagemaker": ("boto3", {"role": "arn:aws:iam::123456789012:role/r", "region": "eu-west-1", "bucket": "bucket"},
                  {"resources": {"instance_type": "ml.m5.large"}, "output": "s3://bucket/out", "image": "python:3.11"}),
    "slurm": ("asyncssh", {"folder": "/shared", "login": HOST}, {}),
    "ssh": ("asyncssh", {"hosts": [HOST]}, {}),
    "vertex": ("google.auth", {"project": "p", "bucket": "bucket"},
               {"resources": {}, "output": "gs://bucket/out", "image": "python:3.11"}),
}  # fmt: skip


def planned(tmp_path: Path, name: str, **more: object) -> dict[str, object]:
    _, options, keys = PLACES[name]
    return job(tmp_path, options={name: {**options, **more}}, **keys)


def test_the_places_are_all_backends_with_a_library():
    assert {kind.name for kind in registry.loaded(set(registry.names()) & {*PLACES})} == {*PLACES}
    assert {kind.name for kind in registry.loaded() if kind.traits.client} - {*PLACES} <= {"vertex-local"}


def in_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the keys that submits look for, and let no try wait for the next one."""
    from botocore.retries import standard

    for name in ("AKASH_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    monkeypatch.setattr(Tokens, "token", lambda self, scope: ("token", 3600.0))
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0.0)


@pytest.mark.parametrize("name", ["akash", "azureml", "sagemaker", "vertex"])
def test_a_platform_that_refuses_the_connection_of_the_job_itself_leaves_no_open_run(tmp_path, home, monkeypatch, name):
    """The store, and what is asked before, have answered."""
    in_cloud(monkeypatch)
    store = S3()
    monkeypatch.setattr(submission, "upload", lambda *_: None)
    monkeypatch.setattr(Blob, "add", lambda *_: True)
    monkeypatch.setattr(Gcs, "add", lambda *_: True)

    def call(self: object, method: str, *words: str, **_: object) -> Answer:
        if method == "GET" and any("/jobs/" in word for word in words):
            raise AzureError("none", "", Answer(404, {}))
        if method == "PUT" and any("/jobs/" in word for word in words) or method == "POST":
            raise NoService("Connection refused")
        return Answer(200, {}, b"{}")

    monkeypatch.setattr(Workspace, "call", call)
    monkeypatch.setattr(GoogleApi, "call", call)
    more = {"sagemaker": {"endpoint": NOWHERE}, "vertex": {"endpoint": NOWHERE, "client": "rest"}, "azureml": {},
            "akash": {"console": NOWHERE, "store_endpoint": store.url}}  # fmt: skip
    with pytest.raises(NotReached, match="nothing was sent"):
        submit(name, planned(tmp_path, name, **more[name]))
    store.close()
    (run,) = Store(home).runs()
    (attempt,) = Store(home).attempts(run.run_id)
    assert run.status.state is State.FAILED and attempt.unanswered_since is None and attempt.handle is None


@pytest.mark.parametrize("name", ["akash", "azureml", "kubernetes", "sagemaker"])
def test_a_store_that_refuses_connections_leaves_no_open_run(tmp_path, home, monkeypatch, name):
    in_cloud(monkeypatch)
    monkeypatch.setattr("cloudtrain.backends.kubernetes.request.MAX_INLINE_BYTES", 10)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", NOWHERE)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=account;AccountKey=a2V5;BlobEndpoint={NOWHERE}")
    cluster = on_cluster(tmp_path) | {"output": "gs://bucket/out"}
    more = {"akash": {"store_endpoint": NOWHERE}, "azureml": {}, "sagemaker": {"endpoint": NOWHERE}}
    with pytest.raises(NotReached, match="Connection refused.*nothing was sent|Could not connect.*nothing was sent"):
        submit(name, cluster if name == "kubernetes" else planned(tmp_path, name, **more[name]))
    (run,) = Store(home).runs()
    assert run.status.state is State.FAILED and Store(home).attempts(run.run_id)[0].unanswered_since is None


@pytest.mark.parametrize("name", PLACES)
def test_a_submit_without_the_library_stores_nothing(tmp_path, home, monkeypatch, name):
    token = Tokens.token
    in_cloud(monkeypatch)
    monkeypatch.setattr(Tokens, "token", token)
    monkeypatch.setitem(sys.modules, PLACES[name][0], None)
    with pytest.raises(MissingExtra):
        submit(name, planned(tmp_path, name))
    assert Store(home).runs() == []


@pytest.mark.parametrize("store", ["s3://bucket/x", "gs://bucket/x", "az://jobs@account/x"])
def test_a_cluster_without_the_library_of_its_store_stores_nothing(tmp_path, home, monkeypatch, store):
    for library in ("boto3", "google.auth", "azure.identity"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr("cloudtrain.backends.kubernetes.request.MAX_INLINE_BYTES", 10)
    with pytest.raises(MissingExtra):
        submit("kubernetes", on_cluster(tmp_path) | {"output": store})
    assert Store(home).runs() == []


def test_a_submit_without_a_login_at_azure_or_a_key_of_akash_stores_nothing(tmp_path, home, monkeypatch):
    def token(self: Tokens, scope: str) -> None:
        raise BackendError("no credentials for Azure were found", LOGIN)

    in_cloud(monkeypatch)
    monkeypatch.setattr(Tokens, "token", token)
    monkeypatch.delenv("AKASH_API_KEY", raising=False)
    for name, said in (("azureml", "no credentials for Azure"), ("akash", "AKASH_API_KEY is not set")):
        with pytest.raises(BackendError, match=said):
            submit(name, planned(tmp_path, name))
    assert Store(home).runs() == []


@pytest.mark.usefixtures("memory")
def test_a_refused_run_is_not_the_one_that_logs_and_fetch_mean(tmp_path, home):
    run = Submitter("memory", watch=False).submit(job(tmp_path))
    MemoryBackend.finish(run.attempts[0].handle, State.FAILED, 1)
    run.refresh()
    with pytest.raises(NotReached):
        submit("kubernetes", on_cluster(tmp_path))
    store = Store(home)
    assert [each.backend for each in store.runs()] == ["kubernetes", "memory"]
    assert store.find(None).run_id == run.run_id
    store.delete(run.run_id)
    assert store.find(None).backend == "kubernetes"  # where there is no other
    store.delete(store.find(None).run_id)
    with pytest.raises(UnknownRun):
        store.find(None)


@pytest.mark.parametrize("option", ["console", "store_endpoint"])
@pytest.mark.parametrize(
    "address", ["http://console.example", "http://127.0.0.1.example/", "ftp://127.0.0.1", "console"]
)
def test_keys_and_secrets_go_to_an_encrypted_address_or_stay_here(address, option):
    from pydantic import ValidationError

    from cloudtrain.backends.akash.options import AkashOptions
    from cloudtrain.job.problems import explain

    for fit in ("https://console.example", "http://127.0.0.1:8080", "http://localhost/x", "http://[::1]:80"):
        AkashOptions(store="s3://bucket", **{option: fit})
    with pytest.raises(ValidationError) as caught:
        AkashOptions(store="s3://bucket", **{option: address})
    (problem,) = explain(caught.value, AkashOptions, prefix=("options", "akash"))
    assert str(problem).startswith(f"options.akash.{option}: ") and f'not the text "{address}"' in str(problem)


def test_a_value_of_an_option_for_a_key_is_not_repeated():
    from pydantic import ValidationError

    from cloudtrain.backends.akash.options import AkashOptions
    from cloudtrain.job.problems import explain

    with pytest.raises(ValidationError) as caught:
        AkashOptions(store="s3://bucket", api_key="ac.sk.0123")
    (problem,) = explain(caught.value, AkashOptions, prefix=("options", "akash"))
    assert "0123" not in str(problem) and str(problem).startswith("options.akash.api_key: ")


def test_a_token_is_not_sent_to_a_cluster_without_encryption(tmp_path, home):
    with pytest.raises(CloudtrainError, match="would send credentials to http://10.0.0.7:8080 without encryption"):
        submit("kubernetes", on_cluster(tmp_path, "http://10.0.0.7:8080"))
    assert Store(home).runs() == []
