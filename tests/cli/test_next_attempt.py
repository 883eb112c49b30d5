"""What `resume` says of the attempt that it starts, and what `show` and the end of a run offer next."""

from __future__ import annotations

import pytest

from tests.conftest import wait_for

SCRIPT = """
import os, pathlib, signal, sys
pathlib.Path("out").mkdir(exist_ok=True)
pathlib.Path("out/weights").write_text("1")
folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
if "--save" in sys.argv:
    (folder / "state.json").write_text("{}")
for step in range(5, 20, 5) if "--steps" in sys.argv else ():
    import cloudtrain_runtime as runtime
    (folder / f"step-{step}").mkdir()
    (folder / f"step-{step}" / "state.json").write_text("{}")
    runtime.complete_checkpoint(folder / f"step-{step}", step=step)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("census")
@pytest.mark.parametrize(
    ("words", "says", "checkpoints"),
    [
        ([], "attempt 2 begins from the start: no checkpoint was saved", 0),
        (["--", "--save"], "attempt 2 resumes from the newest checkpoint in the run's folder on local: state.json", 1),
        (
            ["--", "--steps"],
            "attempt 2 resumes from step 15, the newest checkpoint that was reported, in the run's folder on local: step-15",
            3,
        ),
    ],
)
def test_resume_says_where_the_attempt_begins(shell, project, words, says, checkpoints):
    (project / "train.py").write_text(SCRIPT)
    ended = shell("submit", "train.py", "--wait", "--set", "keep=none", *words)
    run_id = ended.out.split()[0]
    assert "--set 'keep=[out]'" in " ".join(ended.out.split()) and "output_dir" not in ended.out
    shown = shell("show", run_id).out
    for text in (ended.out, shown):
        assert f"cloudtrain fetch {run_id} --what workdir" in " ".join(text.split())
        assert (f"cloudtrain resume {run_id}" in text) is bool(words)
    assert shown.count("  checkpoint ") == checkpoints and "written=" not in shown
    assert ("state.json was written into the checkpoint folder" in shown) is (checkpoints == 1)
    resumed = shell("resume", run_id)
    assert resumed.code == 0 and f"note: {says}\n" in resumed.err, resumed
    assert "attempt 2 (retry.max_attempts is 1)" in resumed.out + resumed.err
    shell("wait", run_id)


@pytest.mark.parametrize("saved", [False, True])
def test_cancel_names_resume_and_says_where_it_begins(shell, project, saved):
    script = "import os, pathlib, time\n"
    if saved:
        script += "(pathlib.Path(os.environ['CLOUDTRAIN_CHECKPOINT_DIR']) / 'state').write_text('1')\n"
    (project / "train.py").write_text(script + "print('ready', flush=True)\ntime.sleep(60)\n")
    run_id = shell("submit", "train.py", "--json").json["run_id"]
    wait_for(lambda: "ready" in shell("logs", run_id).out, "the script")
    out = shell("cancel", run_id).out
    assert f"CANCELLED; cloudtrain resume {run_id} " in out
    assert ("from its newest checkpoint" in out) is saved and ("from the beginning" in out) is not saved
