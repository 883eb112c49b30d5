"""A node that fails the check before the ranks start is left out by the next start, which then trains."""

from __future__ import annotations

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.planning import bad_nodes
from cloudtrain.runs.submit import Submitter
from tests.backends.results.places import open_place
from tests.conftest import WAIT_S

# On the first node that asks, the matrix product ends with a hardware error; the others have no torch.
TORCH = """\
import os, socket
own, bad = socket.gethostname(), os.path.join(os.path.dirname(__file__), "bad")
try:
    with open(bad, "x") as file:
        file.write(own)
except FileExistsError:
    pass
if open(bad).read() != own:
    raise ImportError("there is none")
__version__ = "2"
class version:
    cuda = None
class cuda:
    is_available = lambda: False
class device:
    def __init__(self, kind):
        self.type = kind
def set_num_threads(count):
    raise RuntimeError("uncorrectable ECC error encountered")
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["ssh", "slurm"])
def test_the_next_start_is_on_another_node(place: str, tmp_path, home, request: pytest.FixtureRequest):
    lab = request.getfixturevalue(place if place == "slurm" else "lab")
    tools = lab.shared / f"tools-{place}"
    tools.mkdir()
    (tools / "torch.py").write_text(TORCH)
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print('trains', flush=True)\n")
    with open_place(place, request) as at:
        options = {**at.options}
        if place == "ssh":
            options["hosts"] = [{"address": host.address} for host in lab.hosts]
        job = {"name": "bad", "source": str(source), "entrypoint": "train.py", "health": "strict"}
        job |= {"env": {"PYTHONPATH": str(tools)}, "retry": {"max_attempts": 2, "on_events": ["lost"]}}
        submitter = Submitter(at.backend, home=home, **options)
        run = submitter.submit(job)
        status = run.wait(4 * WAIT_S)
        lines = [line.text for line in run.logs()]
        if place == "slurm":  # it starts the job again itself: one attempt
            assert status.state is State.SUCCEEDED and "trains" in lines, (status, lines)
        else:  # the disks of the lab's hosts are small, which `strict` refuses too
            assert [attempt.handle.partition(":")[0] for attempt in run.attempts] == [
                f"root@{host.address}" for host in lab.hosts[:2]
            ], (status, lines)
        bad = (tools / "bad").read_text()
        known = bad if place == "slurm" else f"root@{lab[bad].address}"
        assert known in [node.name for node in bad_nodes.bad_nodes(Store(home))], lines
        following = submitter.submit(job | {"name": "next", "health": "off"})
        assert following.wait(4 * WAIT_S).state is State.SUCCEEDED
        [world] = [event.data for event in following.store.events(following.run_id, "world")]
        assert world["hostname"] != bad, "a new run begins on another node"
        assert any("whose hardware failed" in note for note in following.attempts[0].plan.notes)
