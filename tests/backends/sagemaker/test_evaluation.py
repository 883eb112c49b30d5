"""`cloudtrain eval` of a run of the simulated SageMaker, whose model is the archive that the service has made."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.simulators.sagemaker.server import Simulator
from tests.backends.evaluated import check_evaluation
from tests.backends.sagemaker.test_backend import simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_quickstart import target  # noqa: F401 - a fixture

pytestmark = [pytest.mark.train, pytest.mark.timeout(900), pytest.mark.usefixtures("census")]


def test_the_archive_is_read_and_unpacked_by_the_job(
    target: str,  # noqa: F811
    simulator: Simulator,  # noqa: F811
    tmp_path: Path,
    home: Path,
) -> None:
    made = check_evaluation(tmp_path, home, target, "s3://.*/RUN-a1/output/model.tar.gz")
    name = made.attempts[-1].attempt_id
    job = simulator.call("sagemaker", "describe_training_job", TrainingJobName=name)
    channels = {each["ChannelName"]: each["DataSource"]["S3DataSource"]["S3Uri"] for each in job["InputDataConfig"]}
    assert channels["model"] == made.record.job["inputs"]["model"]["uri"]
    assert len(made.record.job["inputs"]["model"]["sha256"]) == 64
