"""`cloudtrain eval` of a run of the simulated Vertex AI, whose model is in Cloud Storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.evaluated import check_evaluation
from tests.backends.vertex.test_quickstart import simulator  # noqa: F401 - a fixture

pytestmark = [pytest.mark.train, pytest.mark.timeout(900), pytest.mark.usefixtures("census")]


def test_the_model_is_read_from_the_bucket(simulator: str, tmp_path: Path, home: Path, monkeypatch) -> None:  # noqa: F811
    config = tmp_path / "configuration"
    config.mkdir()
    options = {"project": "local", "bucket": "local", "image": "any:1", "endpoint": simulator, "client": "rest"}
    lines = [
        "[targets.prod]",
        'backend = "vertex"',
        "settle_s = 1",
        *(f'{n} = "{text}"' for n, text in options.items()),
    ]
    (config / "cloudtrain.toml").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(config))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", simulator)
    check_evaluation(tmp_path, home, "prod", "gs://local/.*RUN/model/")
