"""Files that each node of a job without `output` wrote on its own disk, as `fetch` brings them; on real hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.errors import Unreachable
from cloudtrain.events import State
from cloudtrain.runs.submit import Submitter
from tests.backends.ssh.test_backend import options
from tests.conftest import WAIT_S
from tests.lab.connections import close_all
from tests.lab.network import Lab

# `same` is equal on all nodes, `mine` differs, `part-N` is one node's alone, and so is what it writes elsewhere.
WRITER = """
import os, pathlib
rank = os.environ["RANK"]
outputs, model = (pathlib.Path(os.environ[f"CLOUDTRAIN_{name}_DIR"]) for name in ("OUTPUT", "MODEL"))
(outputs / "deep").mkdir()
(outputs / "deep/same").write_text("of all")
(outputs / "mine").write_text(rank)
(outputs / f"part-{rank}").write_text(rank)
(model / f"shard-{rank}").write_text(rank)
(outputs / "either").mkdir() if rank == "0" else (outputs / "either").write_text("a file")
if rank == "0":
    (outputs / "either/inner").write_text("in a folder")
pathlib.Path("out").mkdir()
pathlib.Path("out/mine").write_text("kept of " + rank)
"""
OF_NODE_0 = {
    "outputs/deep/same": "of all",
    "outputs/mine": "0",
    "outputs/part-0": "0",
    "outputs/either/inner": "in a folder",
    "outputs/out/mine": "kept of 0",
    "model/shard-0": "0",
}
OF_NODE_1 = {
    "outputs/node-1/mine": "1",
    "outputs/part-1": "1",
    "outputs/node-1/either": "a file",
    "outputs/node-1/out/mine": "kept of 1",
    "model/shard-1": "1",
}


@pytest.fixture(autouse=True)
def _connections(lab: Lab, census: Path):
    yield
    close_all()


def files(folder: Path) -> dict[str, str]:
    found = [path for name in ("outputs", "model") for path in (folder / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_files_of_all_nodes_are_fetched_and_none_replaces_another(lab: Lab, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "script.py").write_text(WRITER)
    job = {"name": "files", "source": str(source), "entrypoint": "script.py", "num_nodes": 2, "keep": ["out"]}
    run = Submitter("ssh", **options(lab)).submit({**job, "environment": {"requirements": "none"}})
    assert run.wait(WAIT_S).state is State.SUCCEEDED, list(run.logs())
    into = run.fetch(tmp_path / "fetched")
    assert files(into) == OF_NODE_0 | OF_NODE_1
    before = {name: (into / name).stat().st_ino for name in files(into)}
    assert files(run.fetch(into)) == OF_NODE_0 | OF_NODE_1
    assert {name: (into / name).stat().st_ino for name in files(into)} == before  # nothing is copied twice
    close_all()
    lab.hosts[1].power_off()
    with pytest.raises(Unreachable, match=r"node 1 \(root@.*\) cannot be reached: .*/partly lacks its files"):
        run.fetch(tmp_path / "partly")
    assert files(tmp_path / "partly") == OF_NODE_0
