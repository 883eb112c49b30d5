"""diff RUN RUN, and what show says of a run's origin."""

from __future__ import annotations

import subprocess
from importlib import metadata

import pytest

from cloudtrain.events import Event, Row
from cloudtrain.history.store import Store


def git(*words, cwd):
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=cwd, check=True, capture_output=True
    )


@pytest.fixture
def two(shell, project, census):
    """Two finished runs of one tree: another argument, node count and patch."""
    git("init", "-q", cwd=project)
    git("add", ".", cwd=project)
    git("commit", "-qm", "first", cwd=project)
    one = shell("submit", "train.py", "--wait", "--json", "--set", "hyperparameters.lr=1e-3").json["run_id"]
    text = (project / "train.py").read_text()
    (project / "train.py").write_text(text.replace("2.0 - step / 2", "4.0 - step"))
    (project / "weights").write_bytes(b"\0")
    words = (
        "--set",
        "hyperparameters.lr=3e-4",
        "--set",
        "limits.max_runtime=2h",
        "--processes",
        "2",
        "--",
        "--exit",
        "3",
    )
    other = shell("submit", "train.py", "--wait", "--json", *words).json["run_id"]
    return one, other


def test_a_metric_with_a_results_name_and_one_that_is_not_a_number(cli, two, home):
    """The result stays a result, a metric that ended at nan is there, and two of them are equal."""
    store = Store(home)
    nan, inf = float("nan"), float("inf")
    for run_id, told in (
        (two[0], {"state": 1.0, "reason": 2.0, "ended": nan, "same": nan}),
        (two[1], {"state": 3.0, "reason": 2.0, "ended": inf, "same": nan}),
    ):
        row = Event(store.attempts(run_id)[-1].attempt_id, 0, 1 << 40, "2026-11-22T10:00:00Z", "metric")
        store.record(
            row.attempt, metrics=[Row(row.node, row.seq, row.at, 1, name, value) for name, value in told.items()]
        )
    shown = cli("diff", *two, "--json")
    found = {
        row["path"]: (row["first"], row["second"]) for row in shown.json["differences"] if row["section"] == "results"
    }
    assert found["state"] == ("SUCCEEDED", "FAILED") and found["metrics.state"] == (1.0, 3.0)
    assert found["ended"] == ("nan", "inf") and not {"same", "metrics.reason"} & set(found)
    assert "nan" in cli("diff", *two).out.split("ended")[1].splitlines()[0]


def test_sources_outside_git_are_compared_by_file_line_and_flag(cli, shell, project, home):
    (project / "old.txt").write_text("one\n")
    words = ("submit", "train.py", "--wait", "--json", "--")
    one = shell(*words, "--lr", "0.1", "--seed=1").json["run_id"]
    text = (project / "train.py").read_text()
    (project / "train.py").write_text(text.replace("2.0 - step / 2", "4.0 - step"))
    (project / "old.txt").unlink()
    other = shell(*words, "--lr", "0.2", "--seed", "1").json["run_id"]
    data = cli("diff", one, other, "--json").json
    found = {row["path"]: (row["first"], row["second"]) for row in data["differences"]}
    assert found["--lr"] == ("0.1", "0.2") and not {"args", "--seed"} & set(found)
    assert data["files"] == {"old.txt": "removed", "train.py": "changed"}
    shown = cli("diff", one, other).out
    assert "\npackages: the same (" in shown and "  changed  train.py\n" in shown
    assert "--- a/old.txt" in shown and "+++ /dev/null" in shown and "4.0 - step" in shown
    for package in (home / "bundles").glob("*.tar.gz"):
        package.unlink()
    gone = cli("diff", one, other)
    assert gone.code == 0 and f"only patches of git: the package of {one} is not stored here" in gone.out


def test_diff_and_the_origin_in_show(cli, shell, project, two, home):
    data = cli("diff", *two, "--json").json
    assert data["runs"] == list(two)
    found = {(row["section"], row["path"]): (row["first"], row["second"]) for row in data["differences"]}
    assert found["hyperparameters", "lr"] == ("1e-3", "3e-4")
    assert found["hyperparameters", "--exit"] == (None, "3")
    assert found["spec", "processes_per_node"][1] == 2 and found["spec", "limits.max_runtime"] == ("24h", "2h")
    assert found["source", "dirty"] == (False, True) and ("source", "commit") not in found
    assert found["source", "patch"][0] is None
    lacks = "weights: git does not track it, and it is not text"
    assert found["source", "not included in the patch"] == (None, [lacks])
    assert found["results", "state"] == ("SUCCEEDED", "FAILED") and found["results", "exit_code"] == (0, 3)
    assert found["results", "loss"] == (1.0, 2.0)
    assert "\n-    print" in data["patch"] and "\n+    print" in data["patch"] and "4.0 - step" in data["patch"]
    assert "++    print" not in data["patch"] and data["files"] == {"train.py": "changed", "weights": "added"}
    assert not any(one in str(row) for row in data["differences"] for one in two), "a run's own id is no difference"

    shown = cli("diff", *two).out
    assert shown.startswith(f"{two[0]}  ->  {two[1]}") and "\nhyperparameters\n" in shown and "3e-4" in shown
    assert cli("diff", two[0], two[0]).out.splitlines()[1] == "nothing differs"
    assert cli("diff", two[0], "no-such").code == 2

    packages = cli("show", two[1], "--json").json["requirements"]
    assert f"pytest=={pytest.__version__}" in packages and "requirements" not in {section for section, _ in found}
    assert cli("show", two[1], "--requirements").out.splitlines() == packages
    assert f"{len(packages)} (cloudtrain show {two[1]} --requirements)" in cli("show", two[1], "--verbose").out
    told = [line.replace(f"=={pytest.__version__}", "==0.1") for line in packages if not line.startswith("click==")]
    Store(home).record(
        f"{two[1]}-a1", events=[Event(f"{two[1]}-a1", 0, 1 << 40, "9", "requirements", {"part": 0, "packages": told})]
    )
    rows = [row for row in cli("diff", *two, "--json").json["differences"] if row["section"] == "requirements"]
    assert [(row["path"], row["first"], row["second"]) for row in rows] == [
        ("click", metadata.version("click"), None), ("pytest", pytest.__version__, "0.1")
    ]  # fmt: skip

    shown = cli("show", two[1], "--verbose").out
    assert "with changes" in shown and "1 file, " in shown and "node 0: " in shown and lacks in shown
    assert cli("show", two[1], "--json").json["provenance"]["dirty"] is True
    patch = shell("show", two[1], "--patch").out
    git("stash", cwd=project)
    subprocess.run(["git", "apply"], input=patch.encode(), cwd=project, check=True)
    assert "4.0 - step" in (project / "train.py").read_text()
    clean = shell("show", two[0], "--patch")
    assert (clean.code, clean.out) == (0, "") and "had no changes" in clean.err
