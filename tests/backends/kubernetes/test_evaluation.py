"""`cloudtrain eval` of a run of the simulated cluster, whose model is in Cloud Storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.evaluated import check_evaluation
from tests.backends.kubernetes.test_quickstart import place  # noqa: F401 - a fixture

pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]


def test_the_model_is_read_from_the_bucket(place, tmp_path: Path, home: Path):  # noqa: F811
    made = check_evaluation(tmp_path, home, "cluster", "gs://local/out/RUN/model/", "output=gs://local/out")
    assert len(made.record.job["inputs"]["model"]["sha256"]) == 64
