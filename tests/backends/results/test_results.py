"""A script's machine is lost between two of its checkpoints: at which step it resumes, what comes home, how it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from tests.backends.results.places import open_place
from tests.backends.sagemaker.test_backend import simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_local_docker import docker  # noqa: F401 - a fixture
from tests.conftest import WAIT_S, wait_for

SCRIPTS = Path(__file__).parent / "scripts"
PLACES = ("local", "ssh", "slurm", "kubernetes", "sagemaker", "sagemaker-local", "vertex-local", "akash")
# What a script is given as its folder -> where fetch puts its files.
FOLDERS = {
    "out": "outputs/out/",
    "{model_dir}": "model/",
    "{output_dir}": "outputs/",
    "{checkpoint_dir}": "checkpoints/",
}


class Script(NamedTuple):
    """What a script is called in the table, its arguments, its checkpoints' last file and what it leaves at its end."""

    title: str
    args: tuple[str, ...]
    saved: str
    left: frozenset[str]
    resume_args: tuple[str, ...] = ()


TRAINER = ("--output_dir", "FOLDER", "--max_steps", "8", "--save_steps", "4", "--per_device_train_batch_size", "1",
           "--use_cpu", "true", "--report_to", "none", "--disable_tqdm", "true")  # fmt: skip
GIVEN = ("--resume_from_checkpoint", "{checkpoint}")
CHECKPOINT = (
    "config.json generation_config.json model.safetensors optimizer.pt rng_state.pth scheduler.pt trainer_state.json"
    " training_args.bin"
)
OF_TRAINER = frozenset(
    {f"checkpoint-{step}/{name}" for step in (4, 8) for name in CHECKPOINT.split()}
    | {"config.json", "generation_config.json", "model.safetensors", "training_args.bin"}
)
OF_ACCELERATE = frozenset(
    f"step_{step}/{name}" for step in (4, 8) for name in ("model.safetensors", "optimizer.bin", "random_states_0.pkl")
)
OF_LIGHTNING = frozenset({"epoch=0-step=4.ckpt", "epoch=0-step=8.ckpt", "last.ckpt"})
OTHERS = {"last-v1.ckpt"}  # Lightning writes no file over that it has found at another path
TO_FOLDER = ("--output_dir", "FOLDER")
CASES = {
    "loop": Script("a plain loop", TO_FOLDER, "state.pkl", frozenset({"state.pkl"})),
    "out_dir": Script("nanoGPT's `out_dir`", ("--out_dir=FOLDER",), "ckpt.pt", frozenset({"ckpt.pt"}),
                      ("--init_from=resume",)),
    "torch_loop": Script("a loop with `torch.save`", TO_FOLDER, "step_4.pt",
                         frozenset({"step_4.pt", "step_8.pt", "model.pt"})),
    "trainer_last": Script("Trainer, `get_last_checkpoint`", TRAINER, "checkpoint-4/trainer_state.json", OF_TRAINER),
    "trainer_given": Script("Trainer, `--resume_from_checkpoint`", TRAINER, "checkpoint-4/trainer_state.json", OF_TRAINER,
                            GIVEN),
    "checkpointing": Script("Accelerate", TO_FOLDER, "step_4/random_states_0.pkl", OF_ACCELERATE, GIVEN),
    "lit": Script("Lightning", TO_FOLDER, "last.ckpt", OF_LIGHTNING),
}  # fmt: skip
SAMPLE = {  # runs with every change; the others are `long`
    ("local", "loop", "{model_dir}"),
    ("kubernetes", "loop", "out"),
    ("sagemaker", "loop", "{model_dir}"),
}


NOT_IN_IMAGE = {("sagemaker-local", "lit")}  # images/Dockerfile has no Lightning
ALL = [
    pytest.param(
        place,
        script,
        folder,
        id=f"{place}-{script}-{folder}",
        marks=() if (place, script, folder) in SAMPLE else pytest.mark.long,
    )
    for place in PLACES
    for script in CASES
    for folder in FOLDERS
    if (place, script) not in NOT_IN_IMAGE
]


def lines(run: Run, word: str) -> list[str]:
    return [line.text for line in run.logs() if line.text.startswith(word)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("place", "script", "folder"), ALL)
def test_the_next_attempt_resumes_and_all_comes_home(
    place, script, folder, tmp_path, home, request, figure, monkeypatch
):
    case = CASES[script]
    cell = {"script": case.title, "folder": folder, "place": place}
    figure("results", cell)  # has failed, unless it is noted once more
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = tmp_path / "source"
    shutil.copytree(SCRIPTS, source)
    with open_place(place, request) as at:
        job = {"name": "results", "source": str(source), "entrypoint": f"{script}.py"}
        job |= {"args": [word.replace("FOLDER", folder) for word in case.args], "resume_args": list(case.resume_args)}
        job |= {"environment": {"requirements": "none"}, "output": at.output}
        run = Submitter(at.backend, home=home, watch=False, **at.options).submit(job)
        wait_for(lambda: lines(run, "waiting"), "the step at which the machine is lost", 2 * WAIT_S)
        wait_for(lambda: any(name.endswith(case.saved) for name in at.copies(run)), f"a copy of {case.saved}")
        wait_for(lambda: (run.refresh(), run.store.events(run.run_id, "checkpoint"))[1], "word of the checkpoint")
        at.lose(run)
        lost = run.wait(WAIT_S)
        assert lost.state.name != "SUCCEEDED"
        run.resume()
        last = run.wait(2 * WAIT_S)
        resumed = [int(line.split()[2]) for line in lines(run, "resumes at")]
        into = run.fetch(tmp_path / "fetched")
    files = {str(path.relative_to(into)) for path in into.rglob("*") if path.is_file()}
    assert (resumed, last.exit_code) == ([0, 4], 0), [line.text for line in run.logs()]
    found = {name.removeprefix(FOLDERS[folder]) for name in files if not name.startswith(".")}
    assert found >= case.left and found - case.left <= OTHERS
    assert "step 4" in run.notes[0] or case.saved in run.notes[0], run.notes[0]
    came = {"step": resumed[1], "files": len(found), "to": FOLDERS[folder], "exit_code": last.exit_code}
    figure("results", cell | came)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("vertex-local", marks=pytest.mark.long),
        pytest.param("kubernetes", marks=pytest.mark.long),
        pytest.param("sagemaker-local", marks=pytest.mark.docker),
    ],
)
def test_a_new_users_trainer_script_resumes_and_comes_home(name, tmp_path, home, request, monkeypatch, cli):
    """With `--output_dir out` and no key of a job file: submit, the machine is lost, resume, wait, fetch."""
    source = tmp_path / "source"
    shutil.copytree(SCRIPTS, source)
    monkeypatch.chdir(source)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with open_place(name, request) as at:
        if at.options:
            options = [f"{key} = {json.dumps(value)}" for key, value in at.options.items()]
            target = [
                "[targets.mine]",
                f'backend = "{name}"',
                *options,
                "[targets.mine.defaults]",
                f'output = "{at.output}"',
            ]
            (source / "cloudtrain.toml").write_text("\n".join(target))
        arguments = [word.replace("FOLDER", "out") for word in TRAINER]
        code, shown, _ = cli("submit", "trainer_last.py", "-t", "mine" if at.options else name, "--", *arguments)
        assert code == 0
        run = Run(shown.split()[0], Store(home))
        wait_for(lambda: lines(run, "waiting"), "the step at which the machine is lost", 2 * WAIT_S)
        wait_for(lambda: any(name.endswith("checkpoint-4/trainer_state.json") for name in at.copies(run)), "its copy")
        wait_for(lambda: "checkpoint out/checkpoint-4" in cli("show", run.run_id)[1], "word of the checkpoint")
        at.lose(run)
        assert cli("wait", run.run_id)[0] != 0
        assert "finds step 4 in the script's folder: out/checkpoint-4" in "".join(cli("resume", run.run_id)[1:])
        assert cli("wait", run.run_id)[0] == 0
        assert [line.split()[2] for line in lines(run, "resumes at")] == ["0", "4"]
        assert cli("fetch", run.run_id, "-o", str(tmp_path / "fetched"))[0] == 0
    got = {
        str(path.relative_to(tmp_path / "fetched/outputs/out")) for path in tmp_path.glob("fetched/outputs/out/**/*")
    }
    assert got >= OF_TRAINER
