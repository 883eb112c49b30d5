"""Where a run's checkpoints are on a node, and that a run that has moved does not begin anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher.errors import Refused
from launcher.manifest import decode
from launcher.prepare.node import check_resumable, make_folders
from launcher.world.cluster import Cluster

from cloudtrain.backends.manifest import Manifest
from cloudtrain.job.job import Job

HERE, SAGEMAKER = Cluster(), Cluster("sagemaker")


def folder_on(cluster: Cluster, base: Path, checkpoint: dict) -> Path:
    """Return the folder of checkpoints of attempt 2 on a node; raises Refused where it may not begin."""
    manifest = decode(Manifest("run", 2, ("train.py",), 1, 1, checkpoint=checkpoint).encode())
    environ = {"CLOUDTRAIN_RUN_DIR": str(base)} if cluster is HERE else {"SAGEMAKER_BASE_DIR": str(base)}
    made = make_folders(manifest, cluster, environ, str(base / "source"))["checkpoints"]
    check_resumable(manifest, cluster, made)
    return Path(made).relative_to(base)


@pytest.mark.parametrize(
    ("cluster", "checkpoint", "expected"),
    [
        (HERE, {}, "checkpoints"),
        (HERE, {"folder": "checkpoints/checkpoint_dir"}, "checkpoints/checkpoint_dir"),
        (SAGEMAKER, {}, "checkpoints/checkpoint_dir"),
        (SAGEMAKER, {"folder": "checkpoints"}, "checkpoints"),
    ],
)
def test_the_folder_is_the_platforms_own_or_that_of_the_first_attempt(tmp_path, cluster, checkpoint, expected):
    assert folder_on(cluster, tmp_path, checkpoint) == Path(expected)


@pytest.mark.parametrize("cluster", [HERE, SAGEMAKER])
@pytest.mark.parametrize("folder", ["checkpoints", "checkpoints/checkpoint_dir"])
def test_a_history_alone_is_no_checkpoint(tmp_path, cluster, folder):
    """SageMaker copies the history with the checkpoints, and the launcher writes it before it looks for them."""
    checkpoint = {"required": True, "folder": folder}
    history = tmp_path / "checkpoints" / ".cloudtrain" / "history" / "run-a2"
    history.mkdir(parents=True)
    (history / "run.json").write_text("{}")
    with pytest.raises(Refused, match="has no checkpoint of an earlier attempt"):
        folder_on(cluster, tmp_path, checkpoint)
    (tmp_path / folder / "5.txt").write_text("5")
    assert folder_on(cluster, tmp_path, checkpoint) == Path(folder)


def test_a_service_has_the_secrets_of_its_role_and_its_launcher_those_of_the_job(tmp_path, monkeypatch):
    from launcher.log import PlainLog
    from launcher.output import store
    from launcher.prepare import node

    roles = {"trainer": {}, "server": {"run": "serve", "env": {"PORT": "1"}, "secrets": ["TOKEN"]}}
    secrets = {"TOKEN": "env:TOKEN", "AWS_SECRET_ACCESS_KEY": "env:KEY"}
    job = Job(
        entrypoint="train.py",
        roles=roles,
        secrets=secrets,
        env={"AWS_REGION": "eu"},
        inputs={"data": "s3://bucket/data"},
    )
    manifest = decode(Manifest.of(job, "run", 1).encode())
    manifest.take_role(1)
    lent: dict[str, str] = {}
    monkeypatch.setattr(store, "lend", lent.update)
    manifest.inputs["data"]["mode"] = "stream"
    given = {"env:TOKEN": "token-value", "env:KEY": "key-value"}
    environ = {"CLOUDTRAIN_RUN_DIR": str(tmp_path), "CLOUDTRAIN_NODE_DIR": str(tmp_path)}
    prepared = node.prepare_node(manifest, HERE, environ, given, str(tmp_path / "source"), PlainLog(1))
    assert lent == {"AWS_REGION": "eu", "TOKEN": "token-value", "AWS_SECRET_ACCESS_KEY": "key-value"}
    assert prepared.secrets == {"TOKEN": "token-value"} and manifest.env == {"PORT": "1"}
