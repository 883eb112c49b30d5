"""Roles from a job file to the history: logs by role, metrics of the main role, outputs below the role's name."""

from __future__ import annotations

import subprocess
import sys

from cloudtrain.events import State
from cloudtrain.runs.submit import Submitter
from tests.conftest import WAIT_S, wait_for

JOB = """\
source: .
roles:
  judge:
    run: |
      echo "{'loss': 9.0}"; echo judged > "$CLOUDTRAIN_OUTPUT_DIR/score.txt"
      exec sleep 600
    ready: "line:loss"
  learner:
    main: true
    run: "echo \\"{'loss': 0.5}\\"; echo done > \\"$CLOUDTRAIN_OUTPUT_DIR/result.txt\\""
    after: [judge]
"""


def test_logs_metrics_and_outputs_by_role(tmp_path, home, census, cli):
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.yaml").write_text(JOB)
    run = Submitter(target="local").submit(project / "job.yaml")
    assert run.wait(WAIT_S).state is State.SUCCEEDED
    assert [point.value for point in run.metrics("loss")] == [0.5]
    fetched = run.fetch(tmp_path / "home")
    assert (fetched / "outputs/result.txt").read_text() == "done\n"
    assert (fetched / "outputs/judge/score.txt").read_text() == "judged\n"
    code, shown, _ = cli("logs", run.run_id, "--role", "judge")
    assert code == 0 and shown.splitlines()[0] == "[judge 1:0] {'loss': 9.0}" and "[learner" not in shown
    _, shown, _ = cli("show", run.run_id)
    assert shown.index("role learner waits for judge") < shown.index("role judge is ready")
    code, _, error = cli("logs", run.run_id, "--role", "jury")
    assert code == 2 and "the run has no role jury" in error and "choose from learner, judge" in error


WAITING = """\
source: .
roles:
  learner:
    main: true
    run: "exec sleep 600"
    after: [judge]
  judge:
    entrypoint: judge.py
    ready: "line:up"
"""


def test_exec_and_stack_by_role(tmp_path, home, census, cli):
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.yaml").write_text(WAITING)
    (project / "judge.py").write_text(
        "import time\ndef judge():\n    print('up', flush=True)\n    time.sleep(600)\njudge()\n"
    )
    run = Submitter(target="local").submit(project / "job.yaml")
    wait_for(lambda: "role judge is ready" in cli("logs", run.run_id)[1], "the service")
    words = ("exec", run.run_id, "--role", "judge", "--", "printenv", "CLOUDTRAIN_ROLE")
    done = subprocess.run([sys.executable, "-m", "cloudtrain", *words], capture_output=True, timeout=WAIT_S)
    assert done.stdout == b"judge\n", done.stderr
    code, shown, _ = cli("stack", run.run_id, "--role", "judge")
    assert code == 0 and shown.startswith("node 1  role judge  rank 0  ") and shown.count("in judge") == 1
    assert "node 0  role learner" in cli("stack", run.run_id)[1]
    cli("cancel", run.run_id)
