"""ls, show, logs, metrics, wait, fetch: one finished run, read in every way."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

import cloudtrain
from cloudtrain.cli import ls
from cloudtrain.cli.view.terminal import clean
from tests.cli.conftest import CLI, SCRIPT
from tests.conftest import WAIT_S

NAMES = ["odd-3", "two-2", "bad-1"]  # of the runs below, the newest first
HOSTILE = "\\x1b[2J\\x1b]0;title\\x07red \\x1b[31mred\\x1b[0m\\ttab \\x9b1mC1 ü"


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A home with three runs: one that failed, one of two ranks, one (the newest) with hostile text."""
    base = tmp_path_factory.mktemp("reading")
    folder = base / "source"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "odd.py").write_text(f'import sys\nprint("{HOSTILE}")\nprint("second")\nprint("third", end="")\n')
    env = os.environ | {"CLOUDTRAIN_HOME": str(base / "home"), "XDG_CONFIG_HOME": str(folder / "config")}

    def submit(*words: str) -> str:
        done = subprocess.run(
            [*CLI, "submit", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=WAIT_S
        )
        return done.stdout.split()[0]

    ids = {
        "failed": submit("train.py", "--wait", "--set", "name=bad", "--", "--raise"),
        "two": submit("train.py", "--wait", "--processes", "2", "--set", "name=two"),
        "odd": submit("odd.py", "--wait", "--set", "name=odd"),
    }
    return base / "home", ids


@pytest.fixture
def ids(history, monkeypatch):
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(history[0]))
    return history[1]


def on_a_terminal(*words: str, env: dict[str, str] | None = None, columns: int = 0) -> str:
    """Return what a command writes to a terminal."""
    main, worker = pty.openpty()
    if columns:
        fcntl.ioctl(worker, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    told = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [*CLI, *words], stdout=worker, stderr=worker, env={**told, "TERM": "xterm", **(env or {})}
    )
    os.close(worker)
    written = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(main)
    process.wait(timeout=WAIT_S)
    return written.decode()


# -- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_lists_the_newest_first(cli, ids):
    shown = cli("ls")
    lines = shown.out.splitlines()
    assert lines[0].split() == ["run", "state", "gpus", "USD", "loss", "age", "target"]
    assert [line.split()[0] for line in lines[1:]] == NAMES
    assert lines[3].split()[:3] == ["bad-1", "FAILED", "1"] and lines[3].split()[-1] == "local"  # 1 is the last loss
    assert cli("show", "bad-1", "--json").json["run_id"] == ids["failed"]
    assert (cli("ls", "--json").json[2]["loss"], cli("ls", "--json").json[2]["step"]) == (1.0, 2)
    assert "\x1b" not in shown.out


def test_ls_chooses(cli, ids):
    assert [row["run_id"] for row in cli("ls", "--json", "-n", "2").json] == [ids["odd"], ids["two"]]
    assert [row["run_id"] for row in cli("ls", "--json", "--state", "failed").json] == [ids["failed"]]
    assert [row["name"] for row in cli("ls", "--json", "--name", "two").json] == ["two"]
    assert cli("ls", "--state", "LOST").out == "no run matches\n"


def test_a_key_of_all_hosts_inside_hosts_is_named_by_plan_and_doctor(cli, project):
    (project / "cloudtrain.toml").write_text(
        '[targets.pair]\nbackend = "ssh"\nhosts = [{address = "127.0.0.1", port = 9, directory = "~/ct"}]\n'
    )
    (project / "job.yaml").write_text("entrypoint: train.py\n")
    for command in (("plan", "-t", "pair"), ("doctor", "pair")):
        shown = cli(*command)
        said = " ".join((shown.out + shown.err).split())
        assert shown.code != 0 and "hosts[0].directory" in said and "move directory out of hosts" in said, said


def test_the_columns_that_the_help_names_are_taken(cli):
    text = " ".join(ls.command.help.split())
    columns = text.partition("take these columns: ")[2].partition(".")[0].split(", ")
    assert len(columns) > 15
    refused = {name: answer.err for name in columns if (answer := cli("ls", "--sort", name)).code}
    assert refused == {}
    assert cli("ls", "--columns", ",".join([*columns, "eta"])).code == 0


def test_ls_filters_sorts_groups_and_keeps_a_view(cli, ids):
    wanted = ("metric.loss<5", "--sort", "state", "--columns", "metric.loss,took")
    shown = cli("ls", *wanted, "--save-view", "mine").out.splitlines()
    assert shown[0].split() == ["run", "state", "metric.loss", "took"]
    assert [line.split()[:3] for line in shown[1:]] == [[ids["failed"], "FAILED", "1"], [ids["two"], "SUCCEEDED", "1"]]
    assert cli("ls", "--view", "mine").out.splitlines() == shown
    heads = cli("ls", "--columns", "took,state,run,target").out.splitlines()[0].split()
    assert heads == ["run", "state", "took", "target"], "each column once"
    assert [row["metric.loss"] for row in cli("ls", "--columns", "metric.loss", "--json").json] == [None, 1.0, 1.0]
    groups = cli("ls", "--group", "state", "--columns", "metric.loss", "--json").json
    extremes = {"mean": 1.0, "min": 1.0, "max": 1.0}
    assert groups[0] == {"state": "SUCCEEDED", "runs": 2, "metric.loss": extremes} and groups[1]["runs"] == 1
    assert cli("ls", "--group", "state").out.splitlines()[1].split() == ["SUCCEEDED", "2"]
    wrong = cli("ls", "words", "sate:failed")
    assert wrong.code == 2 and "filter, character 7: unknown field 'sate'" in wrong.err and "state" in wrong.err
    assert cli("ls", "--view", "no-such").code == 2


def test_mark_writes_to_runs(cli, ids):
    lines = cli("mark", ids["two"], "--title", "second", "--tag", "best", "--star").out.splitlines()
    assert [line.split() for line in lines] == [[ids["two"]], ["title", "second"], ["tags", "best"], ["is", "starred"]]
    assert [row["run_id"] for row in cli("ls", "tag:best", "is:starred", "--json").json] == [ids["two"]]
    assert cli("mark", ids["odd"], "--archive", "--json").json["archived"] is True
    assert "odd-3" not in cli("ls").out and "odd-3" in cli("ls", "is:archived").out
    assert [run.run_id for run in cloudtrain.runs("second", sort="-created")] == [ids["two"]]
    run = cloudtrain.Run.find(ids["odd"])
    assert run.mark(archive=False, note="odd one").note == "odd one"
    assert "odd-3" in cli("ls", "note~odd").out


def test_ls_of_nothing_says_what_to_do(cli):
    assert "there are no runs yet" in cli("ls").out
    assert cli("ls", "--json").json == []


def test_ls_on_a_terminal_is_coloured_unless_told_otherwise(ids):
    assert "\x1b[32mSUCCEEDED" in on_a_terminal("ls")
    assert "\x1b[3" not in on_a_terminal("ls", env={"NO_COLOR": "1"})
    assert "\x1b[31m" in on_a_terminal("show", "nothing") and "\x1b" not in on_a_terminal(
        "show", "x", env={"NO_COLOR": "1"}
    )


@pytest.mark.parametrize("columns", [24, 40, 80, 200])
def test_ls_on_a_narrow_terminal_leaves_columns_out_and_wraps_none(ids, columns):
    lines = [clean(line) for line in on_a_terminal("ls", columns=columns).splitlines()]
    whole = columns >= 80
    assert max(map(len, lines[:4])) <= columns
    assert [line.split()[:2] for line in lines[2:4]] == [["two-2", "SUCCEEDED"], ["bad-1", "FAILED"]]
    assert ("loss" in lines[0]) == (columns >= 40) and ("target" in lines[0]) == whole
    assert [line.startswith("left out of a narrow terminal: ") for line in lines[4:]] == [True] * (not whole)


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_json_has_the_shape_that_was_promised(cli, ids):
    data = cli("show", ids["failed"], "--json").json
    assert {"run_id", "backend", "handle", "state", "exit_code", "reason", "attempts"} <= data.keys()
    assert (data["run_id"], data["state"], data["exit_code"]) == (ids["failed"], "FAILED", 1)
    assert data["reason"]
    (attempt,) = data["attempts"]
    assert (attempt["attempt_id"], attempt["state"]) == (f"{ids['failed']}-a1", "FAILED")
    assert attempt["handle"] == data["handle"]
    assert data["job"]["args"] == ["--raise"]
    assert "result" in [event["kind"] for event in data["events"]]


def test_show_for_people(cli, ids):
    shown = cli("show", ids["failed"]).out
    assert shown.startswith(f"{ids['failed']}  FAILED with exit code 1")
    for text in (
        "reason",
        "timeline",
        "state RUNNING",
        "attempts",
        "at most 24h",
        "train.py --raise",
    ):
        assert text in shown
    asked = [line.split()[0] for line in shown.splitlines()[1:] if line.startswith("  ")][:7]
    assert asked == ["reason", "why", "log", "at", "exit", "metrics", "model"], "what is asked first"
    assert shown.index("  next") < shown.index("  backend") and "loss 1" in shown
    assert re.search(r"^  ended +\d\S* ago \(20\d\d-\d\d-\d\dT[\d:]{8}Z\)$", shown, re.MULTILINE)
    assert "provenance" not in shown and "\njob\n" not in shown
    verbose = cli("show", ids["failed"], "--verbose").out
    job, _, manifest = verbose.partition("\njob\n")[2].partition("encoded):\n")
    assert "provenance\n" in verbose and "max_runtime: 24h" in job and json.loads(manifest)["run_id"] == ids["failed"]


def test_show_fits_on_a_terminal(ids):
    lines = [clean(line) for line in on_a_terminal("show", ids["failed"], columns=80).splitlines()]
    too_long = [line for line in lines if len(line) > 80]
    assert [line for line in too_long if len(line.split()) > 2] == [], "a path or an address alone is never cut"


@pytest.mark.parametrize("text", ["failed", "prefix", "nothing"])
def test_run_is_an_id_a_prefix_or_the_newest(cli, ids, text):
    words = {"failed": [ids["failed"]], "prefix": ["bad-"], "nothing": []}[text]
    assert cli("show", *words, "--json").json["run_id"] == ids["odd" if text == "nothing" else "failed"]


def test_an_ambiguous_prefix_lists_the_runs(cli, ids):
    shown = cli("show", "")
    assert shown.code == 2
    assert all(run_id in shown.err for run_id in ids.values())


def test_origin_names_the_source_of_every_value(cli, project):
    (project / "cloudtrain.toml").write_text('[targets.near]\nbackend = "local"\npython = "/usr/bin/python3"\n')
    (project / "job.yaml").write_text("name: x\nentrypoint: train.py\nhyperparameters:\n  lr: 3.0e-4\n")
    shown = cli("show", "job.yaml", "--origin", "-t", "near", "--set", "num_nodes=2", "--json")
    rows = {row["path"]: (row["value"], row["origin"]) for row in shown.json}
    assert rows["hyperparameters.lr"] == ("3.0e-4", "job.yaml:4")
    assert rows["num_nodes"] == (2, "--set")
    assert rows["limits.max_runtime"] == ("24h", "default")
    assert rows["options.local.python"][0] == "/usr/bin/python3"
    assert "cloudtrain.toml" in rows["options.local.python"][1]
    assert "job.yaml:4" in cli("show", "job.yaml", "--origin").out
    assert {row["origin"] for row in cli("show", "train.py", "--origin", "--json").json} == {"the script", "default"}


# -- logs -------------------------------------------------------------------------------------------------------------


def test_logs_leave_marked_lines_out_and_keep_the_rest(cli, ids):
    shown = cli("logs", ids["failed"]).out
    assert shown.splitlines()[:2] == ["args ['--raise']", "rank 0 of 1"]
    assert "ValueError: boom" in shown
    assert "::cloudtrain::" not in shown
    assert '::cloudtrain::{"kind": "metric", "step": 0, "loss": 2.000000}' in cli("logs", ids["failed"], "--raw").out


def test_logs_of_one_rank(cli, ids):
    both = cli("logs", ids["two"]).out
    assert "[0:0] args []" in both and "[0:1] args []" in both
    one = cli("logs", ids["two"], "--rank", "1").out
    assert one.splitlines() == ["[0:1] args []", "[0:1] rank 1 of 2", "[0:1] done"]
    missing = cli("logs", ids["two"], "--node", "1")
    assert (missing.code, missing.out) == (2, "") and "has no node 1" in missing.err
    missing = cli("logs", ids["two"], "--rank", "2")
    assert (missing.code, missing.out) == (2, "") and "has no rank 2" in missing.err and "0 to 1" in missing.err
    assert cli("logs", ids["failed"], "--rank", "7").err.count("it has rank 0") == 1
    assert cli("logs", ids["two"], "--node", "0").out == both


def test_logs_json_has_every_line_once_and_in_order(cli, ids):
    rows = cli("logs", ids["two"], "--json").rows
    assert [row["seq"] for row in rows] == list(range(len(rows)))
    assert all({"at", "node", "rank", "seq", "text", "cursor"} == row.keys() for row in rows)
    for at in (0, len(rows) // 2, len(rows) - 1):
        assert cli("logs", ids["two"], "--json", "--after", rows[at]["cursor"]).rows == rows[at + 1 :]


def test_logs_tail(cli, ids):
    whole = cli("logs", ids["odd"]).out.splitlines()
    assert whole[-1] == "third"  # which had no newline
    assert cli("logs", ids["odd"], "--tail", "2").out.splitlines() == ["second", "third"]
    assert cli("logs", ids["odd"], "--tail", "2", "-f").out.splitlines() == ["second", "third"]
    assert cli("logs", ids["odd"], "--tail", "0").out == ""
    assert cli("logs", ids["odd"], "--tail", "99").out.splitlines() == whole


def test_logs_that_are_piped_are_what_the_job_wrote(cli, ids):
    assert cli("logs", ids["odd"]).out.splitlines()[0] == eval(f'"{HOSTILE}"')


def test_a_terminal_obeys_nothing_in_a_log(ids):
    assert on_a_terminal("logs", ids["odd"]).split("\r\n")[0] == "red red\ttab C1 ü"
    assert "\x1b[2J" in on_a_terminal("logs", ids["odd"], "--raw")


@pytest.mark.parametrize("cursor", ["nonsense", "1/x", "1/1,2,3,x", "x/1"])
def test_a_cursor_that_is_none(cli, ids, cursor):
    shown = cli("logs", "--after", cursor)
    assert shown.code == 2 and "is not a log cursor" in shown.err


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_json_is_a_row_a_point(cli, ids):
    rows = cli("metrics", ids["failed"], "--json").rows
    assert [(row["step"], row["name"], row["value"]) for row in rows] == [
        (0, "loss", 2.0),
        (1, "loss", 1.5),
        (2, "loss", 1.0),
    ]
    assert all(row["at"].endswith("Z") for row in rows)
    assert cli("metrics", ids["failed"], "--name", "loss", "--json").rows == rows


def test_metrics_csv(cli, ids):
    rows = list(csv.DictReader(io.StringIO(cli("metrics", ids["failed"], "--csv").out)))
    assert [(row["step"], row["name"], float(row["value"])) for row in rows] == [
        ("0", "loss", 2),
        ("1", "loss", 1.5),
        ("2", "loss", 1),
    ]


def test_metrics_for_people(cli, ids):
    head, line = cli("metrics", ids["failed"]).out.splitlines()
    assert head.split() == ["metric", "points", "first", "last", "min", "max", "last", "step"]
    assert line.split() == ["loss", "3", "2", "1", "1", "2", "2"]
    assert [line.split()[:2] for line in cli("metrics", ids["failed"], "--name", "loss").out.splitlines()[1:]] == [
        ["0", "2"], ["1", "1.5"], ["2", "1"],
    ]  # fmt: skip


def test_metrics_of_several_runs(cli, ids):
    both = [ids["failed"], ids["two"]]
    rows = cli("metrics", *both, "--json").rows
    assert [row["run_id"] for row in rows] == [both[0]] * 3 + [both[1]] * 3  # rank 0 of each
    rows = cli("metrics", *both, "--json", "--rank", "all").rows
    ranks = [row["rank"] for row in rows if row["run_id"] == both[1] and row["step"] == 2]
    assert sorted(ranks) == [0, 1], "in the order of the log, which two processes write"
    assert len(rows) == 9  # two ranks log in the second
    assert cli("metrics", *both, "--csv").out.splitlines()[0] == "run_id,step,name,value,at,attempt,rank,epoch"
    head, *lines = cli("metrics", *both).out.splitlines()
    assert head.split()[:2] == ["run", "metric"] and [line.split()[:3] for line in lines] == [
        [both[0], "loss", "3"], [both[1], "loss", "3"],
    ]  # fmt: skip


def test_metrics_are_drawn(cli, ids):
    lines = cli("metrics", ids["failed"], "--plot").out.splitlines()
    assert lines[0] == "loss" and lines[1].split()[0] == "2" and lines[14].split()[0] == "1"
    assert lines[15].split()[-1] == "2" and max(map(len, lines)) <= 80
    several = cli("metrics", ids["failed"], ids["two"], "--plot", "--name", "loss").out
    assert several.splitlines()[-2:] == [f"       * {ids['failed']}", f"       o {ids['two']}"]
    assert cli("metrics", "--plot", "--csv").code == 2
    assert "did you mean loss?" in cli("metrics", ids["failed"], "--plot", "--name", "los").err


def test_metrics_that_are_not_there(cli, ids):
    shown = cli("metrics", ids["odd"])
    assert (shown.code, shown.out) == (
        0,
        "",
    ) and "no metrics were found: no line of the log looks like one" in shown.err
    shown = cli("metrics", ids["failed"], "--name", "los")
    assert shown.code == 1 and "did you mean loss?" in shown.err
    assert cli("metrics", ids["odd"], "--json").rows == []


def test_a_value_that_is_no_number_is_null(shell, project, census):
    (project / "nan.py").write_text(
        """print('::cloudtrain::{"kind": "metric", "step": 1, "loss": NaN, "big": Infinity}')"""
    )
    assert shell("submit", "nan.py", "--wait").code == 0
    rows = shell("metrics", "--json").rows
    assert {row["name"]: row["value"] for row in rows} == {"loss": None, "big": None}
    assert "nan" in shell("metrics").out


# -- wait and fetch ---------------------------------------------------------------------------------------------------


def test_wait_for_a_run_that_has_ended(cli, ids):
    shown = cli("wait", ids["failed"])
    assert shown.code == 1
    assert "ValueError: boom" in shown.out and "FAILED with exit code 1" in shown.out
    assert cli("wait", ids["two"]).code == 0


def test_fetch_puts_the_model_below_the_folder(cli, ids, tmp_path):
    shown = cli("fetch", ids["two"], "-o", tmp_path / "out dir")
    assert shown.code == 0
    assert (tmp_path / "out dir" / "model" / "weights").read_text() == "12345"
    assert "1 file, 5 B" in shown.out
    data = cli("fetch", ids["two"], "-o", tmp_path / "out dir", "--what", "model", "--json").json
    assert data["model"] == {"files": 1, "size_bytes": 5} and "outputs" not in data


def test_fetch_makes_a_folder_of_the_runs_name(cli, ids, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("fetch", ids["two"][:-1]).code == 0
    assert (tmp_path / ids["two"] / "model" / "weights").read_text() == "12345"


def test_fetch_of_nothing_says_so(cli, ids, tmp_path):
    shown = cli("fetch", ids["odd"], "-o", tmp_path / "out")
    assert shown.code == 1
    assert "has stored no model" in shown.err


def test_python_of_the_tests_is_that_of_the_commands():
    assert CLI[0] == sys.executable


def test_ls_asks_a_place_that_does_not_answer_once(cli, home, project, monkeypatch):
    """Each question may take seconds, and runs of years ago may stand there."""
    from cloudtrain import Submitter
    from cloudtrain.backends import registry
    from cloudtrain.errors import BackendError, Unreachable
    from cloudtrain.runs.sending import handover
    from cloudtrain.testing.memory import MemoryBackend

    asked, started = [], []
    with monkeypatch.context() as patch:
        patch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
        MemoryBackend.install()
        ids = [Submitter("memory", home=home, watch=False).submit({"entrypoint": "train.py", "name": f"far-{n}"}, new=True).run_id
               for n in range(3)]  # fmt: skip

        def status(self, handle):
            asked.append(handle)
            raise (Unreachable if len(asked) > 3 else BackendError)("nobody answers")

        patch.setattr(MemoryBackend, "status", status)
        patch.setattr(handover, "start", lambda *_, **__: started.append(1))
        each = cli("ls")
        assert len(asked) == 3 and "not checked" not in each.err, "a refusal may be of one run alone"
        shown = cli("ls")
    assert shown.code == 0 and all(f"far-{number}-" in shown.out for number in range(3))
    assert len(asked) == 4, asked
    assert shown.err.splitlines() == [
        f"warning: {ids[2]} shows the last known state: nobody answers",
        f"  2 more runs at memory not checked: {ids[1]}, {ids[0]}",
    ]
