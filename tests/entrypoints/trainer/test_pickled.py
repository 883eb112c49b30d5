"""DistributedTraining's ranks: modules of the user's own, whatever they are called, and jobs of older versions."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from cloudtrain import DistributedTraining, Run, State
from cloudtrain.training import distributed

LIMIT = {"limits": {"max_runtime": "4m"}, "env": {"OMP_NUM_THREADS": "1"}}
NET = """
import torch
from trainer.sizes import WIDTH

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.only = torch.nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        return self.only(inputs) * scale()

def scale():
    return 1.0 if WIDTH == 4 else 0.0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package of the user's that is called `trainer`, as ours is on the ranks."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("")
    (tmp_path / "trainer" / "sizes.py").write_text("WIDTH = 4\n")
    (tmp_path / "trainer" / "net.py").write_text(NET)
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "trainer"}
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("trainer.net")
    for name in [name for name in sys.modules if name.partition(".")[0] == "trainer"]:
        del sys.modules[name]
    sys.modules.update(ours)


@pytest.mark.train
def test_a_package_of_the_users_that_is_called_trainer(census: Path, own):
    assert own.__file__ and "entrypoints" not in own.__file__
    data = [(torch.ones(4) * number, torch.ones(1)) for number in range(8)]
    result = DistributedTraining(target="local").train_distributed(
        own.Net(), data, nodes=2, batch_size=2, learning_rate=1e-2, logging_steps=1, **LIMIT
    )
    assert result["model_name"] == "Net" and Run.find(result["run_id"]).state is State.SUCCEEDED


@pytest.mark.train
def test_jobs_of_older_versions_name_another_path(census: Path, monkeypatch: pytest.MonkeyPatch):
    """`rerun` sends an older run's job with the files of this version."""
    monkeypatch.setattr(distributed, "ENTRYPOINT", ".cloudtrain/shipped.py")
    result = DistributedTraining(target="local").train_distributed(
        {"model_name": "net"}, {"samples": 64, "features": 4}, **LIMIT
    )
    assert Run.find(result["run_id"]).state is State.SUCCEEDED
