"""A home whose disk is full while a run ends there."""

from __future__ import annotations

import pytest

import cloudtrain
from cloudtrain.cli import main
from cloudtrain.errors import StoreError
from cloudtrain.history.file import full_disk
from cloudtrain.history.store import Store
from cloudtrain.nodes.supervisor import read_status
from tests import disks
from tests.conftest import wait_for

SCRIPT = """
import os, time
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.01)
with open(os.environ["FILL"], "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
for n in range(60000):
    print(f"line {n} of sixty thousand lines that are logged while the disk is full")
"""


def test_a_full_home_shows_what_it_has_and_then_the_end_and_the_gap(tmp_path, monkeypatch, capsys, figure):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(SCRIPT)
    with disks.small_disk(tmp_path / "disk", "10m") as disk:
        home, fill = disk / "home", disk / "fill"
        monkeypatch.setenv("CLOUDTRAIN_HOME", str(home))
        job = {"name": "full", "source": str(source), "entrypoint": "train.py",
               "env": {"FILL": str(fill), "GATE": str(tmp_path / "gate")},
               "environment": {"requirements": "none"}}  # fmt: skip
        run = cloudtrain.Submitter("local", home=home, watch=False).submit(job)
        (tmp_path / "gate").touch()  # the submit is stored: only now the disk fills up
        node = home / "runs" / run.run_id / "a1" / "node-0"
        wait_for(lambda: (read_status(node) or {}).get("state") == "SUCCEEDED", "the end of the run")
        run.store.database.close()
        for words in (["ls"], ["show", run.run_id, "--json"], ["logs", run.run_id]):  # nothing but what is known
            assert main(words) in (0, 2)
            said = capsys.readouterr()
            assert "internal error" not in said.err and "run the command again" not in said.err
        fill.unlink()
        assert main(["show", run.run_id]) == 0
        shown = capsys.readouterr().out
        assert "SUCCEEDED" in shown and "log incomplete: disk full, " in shown
        assert main(["logs", run.run_id]) == 0
        logged = capsys.readouterr().out
        assert "[launcher] log incomplete: disk full, " in logged and "line 59999 of" in logged
    figure("disks full until the end of a run, its result and state are known", 1)


def test_a_full_home_is_named(tmp_path, monkeypatch, capsys):
    with disks.small_disk(tmp_path / "disk", "4m") as disk:
        store = Store(disk / "home")
        store.names()
        store.database.close()
        with pytest.raises(OSError), (disk / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for is_open in (False, True):
            with pytest.raises(StoreError) as refused:
                store.offer("run")
            assert refused.value.message.endswith(f"cannot be used: the disk at {disk} is full"), is_open
            assert refused.value.hint == f"free some space below {disk}, or set CLOUDTRAIN_HOME"
            with (disk / "fill").open("r+b") as file:
                file.truncate(1 << 20)
            assert full_disk(disk) == "", "there is room now"
            store.names()
            with pytest.raises(OSError), (disk / "fill").open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
