"""Conformance tests that every backend must pass. Subclass BackendContract in a test file and give one fixture:

    class TestMine(BackendContract):
        @pytest.fixture
        def connect(self, tmp_path):
            return lambda: MineBackend({"option": "value"}, tmp_path / "work")

Each call of `connect()` returns a new backend object for the same account or folder: an attempt that one object submits
is visible to the next one, in another process too. Override `leftovers()` to list containers, pods or processes of other
machines that an attempt left behind, and `folders()` to name more folders in which no secret may be. The scripts need
Python only, except that `test_a_collective_over_two_nodes` needs torch where the job runs.
"""

from __future__ import annotations

from cloudtrain.testing.fixtures import WAIT_S
from cloudtrain.testing.suite.arguments import ArgumentsContract
from cloudtrain.testing.suite.cancel import CancelContract
from cloudtrain.testing.suite.ends import EndsContract
from cloudtrain.testing.suite.fetch import FetchContract
from cloudtrain.testing.suite.inside import InsideContract
from cloudtrain.testing.suite.logs import LogsContract
from cloudtrain.testing.suite.nodes import NodesContract
from cloudtrain.testing.suite.plan import PlanContract
from cloudtrain.testing.suite.processes import ProcessesContract
from cloudtrain.testing.suite.secrets import SecretsContract
from cloudtrain.testing.suite.submit import SubmitContract

__all__ = ["WAIT_S", "BackendContract"]


class BackendContract(
    PlanContract,
    ArgumentsContract,
    SecretsContract,
    EndsContract,
    LogsContract,
    SubmitContract,
    ProcessesContract,
    CancelContract,
    FetchContract,
    NodesContract,
    InsideContract,
):
    """Tests of what every backend promises."""
