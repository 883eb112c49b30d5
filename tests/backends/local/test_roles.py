"""Roles from a job file to the history: logs by role, metrics of the main role, outputs below the role's name."""

from __future__ import annotations

from cloudtrain.events import State
from cloudtrain.runs.submit import Submitter
from tests.conftest import WAIT_S

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
    code, _, error = cli("logs", run.run_id, "--role", "jury")
    assert code == 2 and "the run has no role jury" in error and "choose from learner, judge" in error
