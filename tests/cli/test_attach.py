"""cloudtrain attach, and what the other commands say of an attached run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("census")


def test_attach_shows_a_colleagues_run(project: Path, cli, shell, tmp_path: Path, monkeypatch):
    done = shell("submit", "train.py", "--set", f"output={tmp_path / 'out'}", "--wait", "--json", "--", "--exit", "3")
    run_id = done.rows[-1]["run_id"]
    uri = str(tmp_path / "out" / run_id)
    shown, metrics, log = (cli(*words).out for words in (("show",), ("metrics",), ("logs",)))
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "colleague"))
    assert cli("ls").out.startswith("there are no runs yet")
    attached = cli("attach", uri)
    assert attached.code == 0 and attached.out.splitlines()[0] == f"{run_id}  attached from {uri}"
    assert "  state     FAILED with exit code 3 after" in attached.out
    assert (cli("metrics").out, cli("logs").out) == (metrics, log)
    again = cli("attach", uri, "--json").json
    assert (again["state"], again["attached"], again["exit_code"]) == ("FAILED", uri, 3)
    assert cli("ls").out.splitlines()[1].endswith("attached") and cli("ls", "--json").json[0]["attached"] == uri
    now = cli("show").out
    assert f"  attached   from {uri}" in now.splitlines()
    told = ("why", "log", "world", "runs", "source", "model", "reason", "commit", "bundle")
    for line in shown.splitlines():
        if line.strip() and line.split()[0] in told:
            assert line in now.splitlines()
    for words in (("rerun", run_id), ("wait", "--foreground", run_id)):
        refused = cli(*words)
        assert refused.code == 2 and f"attached from {uri}" in refused.err, words
    assert cli("fetch", "-o", str(tmp_path / "got")).code == 0
    assert (tmp_path / "got" / "model" / "weights").read_text() == "12345"


def test_attach_says_what_is_wrong(cli, tmp_path: Path):
    nowhere = cli("attach", str(tmp_path / "nowhere"))
    assert nowhere.code == 2 and "no run history found at" in nowhere.err and "<output>/<run id>" in nowhere.err
    assert cli("attach", "ftp://host/run").code == 2
