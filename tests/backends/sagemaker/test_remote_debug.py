"""The command that opens a shell in a training job, and what must be switched on before."""

from __future__ import annotations

import pytest

from cloudtrain.backends.sagemaker.remote_debug import shell
from cloudtrain.errors import BackendError

JOB = {
    "TrainingJobName": "run-x-a1",
    "SecondaryStatus": "Training",
    "ResourceConfig": {"InstanceCount": 2, "InstanceType": "ml.g5.xlarge"},
    "RemoteDebugConfig": {"EnableRemoteDebug": True},
}


def test_the_address_of_each_node():
    found = shell(JOB, 1, "eu-west-1", None)
    assert found.address == "aws ssm start-session --target sagemaker-training-job:run-x-a1_algo-2 --region eu-west-1"
    assert "session-manager-plugin" in found.note and not found.argv and found.stream is None
    assert shell(JOB, 0, "eu-west-1", "my team").address.endswith(" --profile 'my team'")
    with pytest.raises(BackendError, match="there is no node 2"):
        shell(JOB, 2, "eu-west-1", None)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"RemoteDebugConfig": {}}, "options.sagemaker.remote_debug: true"),
        ({"SecondaryStatus": "Downloading"}, "only in the phase Training"),
    ],
)
def test_what_must_be_there_first(change: dict, note: str):
    found = shell({**JOB, **change}, 0, "eu-west-1", None)
    assert not found.address and note in found.note
