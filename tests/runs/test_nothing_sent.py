"""Submissions that nothing was sent of: a refused connection, no credentials."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.clock import SYSTEM
from cloudtrain.errors import CloudtrainError, NotReached, UnknownRun
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.clock import VirtualClock
from cloudtrain.testing.memory import MemoryBackend

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


@pytest.mark.parametrize(
    "address", ["http://console.example", "http://127.0.0.1.example/", "ftp://127.0.0.1", "console"]
)
def test_an_api_key_goes_to_an_encrypted_address_or_stays_here(address):
    from pydantic import ValidationError

    from cloudtrain.backends.akash.options import AkashOptions
    from cloudtrain.job.problems import explain

    for fit in ("https://console.example", "http://127.0.0.1:8080", "http://localhost/x", "http://[::1]:80"):
        AkashOptions(store="s3://bucket", console=fit)
    with pytest.raises(ValidationError) as caught:
        AkashOptions(store="s3://bucket", console=address)
    (problem,) = explain(caught.value, AkashOptions, prefix=("options", "akash"))
    assert str(problem).startswith("options.akash.console: ") and f'not the text "{address}"' in str(problem)


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
