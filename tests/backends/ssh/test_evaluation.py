"""`cloudtrain eval` of a run of a real host: the model stays on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.evaluated import check_evaluation
from tests.backends.ssh.test_inside import target  # noqa: F401 - a fixture

pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]


def test_the_model_is_read_in_its_folder_on_the_host(target: str, tmp_path: Path, home: Path):  # noqa: F811
    check_evaluation(tmp_path, home, target, ".*/runs/RUN/model")
