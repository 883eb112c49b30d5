"""What a job can run: a script, a module, a command, a shell text, the shared trainer; each through the command line."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from pathlib import Path

import pytest

from cloudtrain.cli import main

pytestmark = pytest.mark.usefixtures("census")
ECHO = """
import json, os, sys
print("ARGV", json.dumps(sys.argv[1:]))
print("ENV", json.dumps({k: v for k, v in os.environ.items() if "RANK" in k or k.startswith(("SKYPILOT", "DSTACK", "X_"))}))
"""
RESUMES = """
import os, sys
print("ARGV", sys.argv[1:])
base = os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]
print("HOLDS", sorted(os.listdir(base)))
for name in ("checkpoint-5", "checkpoint-10"):
    os.makedirs(f"{base}/{name}", exist_ok=True)
    open(f"{base}/{name}/trainer_state.json", "w").write("{}")
os.makedirs(f"{base}/checkpoint-15", exist_ok=True)  # cut off: it has no state
sys.exit(0 if os.environ["CLOUDTRAIN_ATTEMPT"] == "2" else 1)
"""


@pytest.fixture
def project(tmp_path: Path, home: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").touch()
    for name in ("echo.py", "pkg/mod.py"):
        (folder / name).write_text(ECHO)
    return folder


def run_cli(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(project), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def submit(project: Path, *words: str, job: str = "") -> tuple[int, str, str]:
    """Submit and follow; return the exit code, the log and what was written to standard error."""
    if job:
        (project / "job.yaml").write_text(job)
    done = run_cli(project, "submit", "-f", *words)
    return done.returncode, done.stdout, done.stderr


def argv(log: str) -> list[str]:
    return json.loads(next(line for line in log.splitlines() if "ARGV" in line).partition("ARGV ")[2])


def env(log: str) -> dict[str, str]:
    return json.loads(next(line for line in log.splitlines() if "ENV" in line).partition("ENV ")[2])


def test_placeholders_are_the_runs_folders(project: Path, home: Path):
    texts = ["{model_dir}", "{{model_dir}}", '{"a": "{epoch:02d}"}', "{run_id}/{attempt}"]
    code, log, said = submit(
        project, "echo.py", "--env", "X_OUT={output_dir}", "--env", 'X_JSON={"a": {}}', "--", *texts
    )
    assert code == 0, said
    run_id = next((home / "runs").iterdir()).name
    folder = f"{home}/runs/{run_id}"
    assert argv(log) == [f"{folder}/model", "{model_dir}", '{"a": "{epoch:02d}"}', f"{run_id}/1"]
    assert env(log)["X_OUT"] == f"{folder}/outputs" and env(log)["X_JSON"] == '{"a": {}}'
    plan = json.loads(run_cli(project, "show", "--json", run_id).stdout)["job"]["args"]
    assert plan == texts  # as written


def test_an_input_that_is_not_there_is_refused(project: Path):
    code, _, said = submit(project, "echo.py", "--", "{input:data}")
    assert code == 2 and "uses {input:data}, but the job has no such input" in said


def test_a_module(project: Path):
    code, log, said = submit(project, "-m", "pkg.mod", "--", "--lr", "1e-4")
    assert code == 0, said
    assert argv(log) == ["--lr", "1e-4"]


def test_a_command_runs_once_per_node_with_the_nodes_variables(project: Path):
    code, log, said = submit(project, "--nodes", "2", "--", "python", "echo.py", "a b")
    assert code == 0, said
    ranks = [json.loads(line.partition("ENV ")[2]) for line in log.splitlines() if "ENV" in line]
    assert sorted(each["CLOUDTRAIN_NODE_RANK"] for each in ranks) == ["0", "1"]
    assert all("RANK" not in each and "LOCAL_RANK" not in each for each in ranks)
    assert argv(log) == ["a b"]
    assert "only the number of nodes is checked" in run_cli(project, "plan", "--", "python", "x").stdout


@pytest.mark.train
def test_torchrun_makes_its_own_world(project: Path):
    (project / "world.py").write_text(
        "import os, torch.distributed as d\nd.init_process_group('gloo')\n"
        "os.write(1, b'WORLD %d %d\\n' % (d.get_rank(), d.get_world_size()))\n"
        "d.barrier()\nd.destroy_process_group()\n"  # a rank that leaves while another connects makes that one fail
    )
    code, log, said = submit(project, "--", "torchrun", "--nproc-per-node", "2", "world.py")
    assert code == 0, said + log
    assert {"WORLD 0 2", "WORLD 1 2"} <= {line.partition("] ")[2] or line for line in log.splitlines()}


@pytest.mark.parametrize(("compat", "variable"), [("skypilot", "SKYPILOT_NODE_RANK"), ("dstack", "DSTACK_NODE_RANK")])
def test_a_shell_text_after_its_setup(project: Path, compat: str, variable: str):
    job = f"setup: |\n  echo {{model_dir}} > made\nrun: |\n  cat made; echo rank ${variable}; python echo.py\ncompat: {compat}\n"
    code, log, said = submit(project, job=job)
    assert code == 0, said
    assert "{model_dir}" in log and "rank 0" in log and variable in env(log)
    plan = run_cli(project, "plan").stdout
    assert "cat made; echo rank" in plan.split("(run, once per node)")[0] and f"compat: {compat}: " in plan


def test_a_setup_that_fails_ends_the_job(project: Path):
    job = "setup: |\n  echo preparing\n  exit 3\nentrypoint: echo.py\n"
    code, log, said = submit(project, job=job)
    assert code == 78 and "setup: preparing" in log and "setup exited with code 3" in log and "ARGV" not in log


def test_what_a_setup_leaves_running_delays_nothing(project: Path):
    code, log, said = submit(project, job="setup: sleep 1000 &\nentrypoint: echo.py\n")
    assert code == 0 and argv(log) == [], said


def test_later_attempts_get_the_newest_whole_checkpoint(project: Path):
    (project / "resumes.py").write_text(RESUMES)
    job = "entrypoint: resumes.py\nargs: [--lr, '1']\nresume_args: [--resume_from_checkpoint, '{checkpoint}']\n"
    assert submit(project, job=job)[0] == 1
    run_id = json.loads(run_cli(project, "show", "--json").stdout)["run_id"]
    assert run_cli(project, "resume", run_id, "--wait").returncode == 0
    log = run_cli(project, "logs", run_id).stdout
    first, second = [line.partition("ARGV ")[2] for line in log.splitlines() if "ARGV" in line]
    assert first == "['--lr', '1']" and second.startswith("['--lr', '1', '--resume_from_checkpoint', '/")
    assert second.endswith("/checkpoint-10']")
    assert next(line for line in log.splitlines() if "HOLDS" in line).endswith(
        "HOLDS []"
    )  # the first start's folder is empty


@pytest.mark.parametrize("leaves", ["last.pt", ""])
def test_a_script_that_finds_its_checkpoint_itself_gets_resume_args_when_it_left_one(project: Path, leaves: str):
    script = f"import os, sys\nprint('ARGV', sys.argv[1:])\nname = {leaves!r}\n"
    script += "name and open(os.path.join(os.environ['CLOUDTRAIN_CHECKPOINT_DIR'], name), 'w').close()\n"
    (project / "resumes.py").write_text(script + "sys.exit(os.environ['CLOUDTRAIN_ATTEMPT'] == '1')\n")
    job = "entrypoint: resumes.py\nresume_args: [--resume, '{checkpoint_dir}/last.pt']\n"
    assert submit(project, job=job)[0] == 1
    run_id = json.loads(run_cli(project, "show", "--json").stdout)["run_id"]
    assert run_cli(project, "resume", run_id, "--wait").returncode == 0
    log = run_cli(project, "logs", run_id).stdout
    first, second = [line.partition("ARGV ")[2] for line in log.splitlines() if "ARGV" in line]
    assert first == "[]" and (second.endswith("/checkpoints/last.pt']") if leaves else second == "[]")


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("name: x", "entrypoint: is missing: the job does not say what to run"),
        ("entrypoint: ''", "entrypoint: is empty"),
        ("entrypoint: []", "entrypoint: is an empty command"),
        ("run: ' '", "run: is empty"),
        ("run: x\ntrainer: true", "trainer: cannot be combined with run"),
        ("run: x\nargs: [a]", "args: is not passed to a script"),
        ("entrypoint: [bash, x]\nprocesses_per_node: 2", "processes_per_node: is 2"),
        ("entrypoint: echo.py\ncompat: dstack", "compat: works only for a command or run, which run once per node"),
        ("trainer: true\nresume_args: [x]", "resume_args: is not needed"),
        ("entrypoint: echo.py\nresume_args: ['{input:x}']", "resume_args: uses {input:x}"),
        (
            "entrypoint: echo.py\nhyperparameters: {out: {model_dir}}",
            "hyperparameters.out: is a mapping where {model_dir} has no",
        ),
        ("entrypoint: echo.py\narg_style: hf\nhyperparameters: {out: {input:x}}", 'write "{input:x}"'),
        (
            "entrypoint: echo.py\nargs: [--out, {model_dir}]",
            'args[1]: must be text, not a mapping: write "{model_dir}"',
        ),
        (
            "entrypoint: echo.py\nresume_args: [{checkpoint}]",
            'resume_args[0]: must be text, not a mapping: write "{checkpoint}"',
        ),
        ("entrypoint: echo.py\nenv: {X: {output_dir}}", 'env.X: must be text, not a mapping: write "{output_dir}"'),
    ],
)
def test_entries_that_are_refused(project: Path, job: str, sentence: str):
    from cloudtrain.errors import BadJob
    from cloudtrain.job.job import Job

    with pytest.raises(BadJob) as refused:
        Job.load(f"{job}\n")
    assert any(sentence in f"{problem.path}: {problem.message}" for problem in refused.value.problems)


def test_a_mapping_that_no_placeholder_looks_like_stays_one():
    from cloudtrain.job.job import Job

    job = Job.load(
        "entrypoint: x.py\nhyperparameters: {a: {data: null, b: 1}, c: {lr: null}, model_dir: null, d: {model_dir: x}}\n"
    )
    assert job.argv() == ["x.py", "--a.b", "1", "--d.model_dir", "x"]


def test_the_plan_says_that_a_text_is_never_changed(project: Path):
    (project / "job.yaml").write_text("run: python echo.py {model_dir}\nsetup: echo {input:my-data} {{attempt}}\n")
    shown = run_cli(project, "plan").stdout
    assert "run is never changed: {model_dir} arrives as it is; write $CLOUDTRAIN_MODEL_DIR" in shown
    assert "setup is never changed: {input:my-data} arrives as it is; write $CLOUDTRAIN_INPUT_MY_DATA" in shown
    services = "  server: {run: 'serve {role.trainer.host}', setup: 'echo {run_id}'}"
    (project / "job.yaml").write_text(f"roles:\n  trainer: {{run: python echo.py}}\n{services}\n")
    shown = run_cli(project, "plan").stdout
    assert "roles.server.run is never changed: {role.trainer.host} arrives as it is; write $CLOUDTRAIN_ROLE_TR" in shown
    assert "roles.server.setup is never changed: {run_id} arrives as it is; write $CLOUDTRAIN_RUN_ID" in shown


def test_a_stored_job_without_an_entry_is_the_shared_trainers():
    from cloudtrain.job.job import Job

    stored = Job(name="x", trainer=True).to_dict()
    old = {
        key: value
        for key, value in stored.items()
        if key not in ("trainer", "roles", "run", "setup", "resume_args", "compat")
    }
    assert Job.from_dict(old) == Job(name="x", trainer=True)
    assert Job.from_dict(old).argv() == [".cloudtrain/train.py"]


KEEPS = """
import os, sys, time
attempt = os.environ["CLOUDTRAIN_ATTEMPT"]
print("FOUND", sorted(os.path.join(at, name) for at, _, names in os.walk("out") for name in names))
os.makedirs("out/deep", exist_ok=True)
for name in ("out/deep/model.bin", "out/log.txt", "runs.bin", "scratch.tmp", f"out/a{attempt}.txt"):
    open(name, "a").write(attempt * 1000)
os.path.exists("out/gone.txt") and os.unlink("out/gone.txt")
sys.exit(0 if attempt == "2" else 1)
"""


def test_what_the_script_wrote_in_its_folder_comes_home(project: Path, tmp_path: Path):
    (project / "keeps.py").write_text(KEEPS)
    (project / "out").mkdir()
    (project / "out" / "given.txt").write_text("of the source\n")
    code, log, _ = submit(project, job='entrypoint: keeps.py\nkeep: [out, "*.bin"]\n')
    assert code == 1 and "FOUND ['out/given.txt']" in log
    assert (
        "1000 bytes in scratch.tmp are not kept, and the next attempt will not find them: set keep: [scratch.tmp]"
        in log.replace("1.0 KB", "1000 bytes")
    )
    run_id = json.loads(run_cli(project, "show", "--json").stdout)["run_id"]
    assert run_cli(project, "resume", run_id, "--wait").returncode == 0
    log = run_cli(project, "logs", run_id).stdout
    assert "FOUND ['out/a1.txt', 'out/deep/model.bin', 'out/given.txt', 'out/log.txt']" in log
    fetched = run_cli(project, "fetch", run_id, "-o", str(tmp_path / "home-of-it"))
    assert fetched.returncode == 0, fetched.stderr
    outputs = tmp_path / "home-of-it" / "outputs"
    files = {str(path.relative_to(outputs)): path.read_text() for path in outputs.rglob("*") if path.is_file()}
    assert set(files) == {"out/deep/model.bin", "out/log.txt", "runs.bin", "out/a1.txt", "out/a2.txt"}
    assert files["out/log.txt"] == "1" * 1000 + "2" * 1000 and files["runs.bin"] == "1" * 1000 + "2" * 1000
    assert run_cli(project, "fetch", run_id, "-o", str(tmp_path / "all"), "--what", "workdir").returncode == 0
    workdir = tmp_path / "all" / "workdir" / "node-0"
    assert (workdir / "scratch.tmp").read_text() == "2" * 1000 and not (workdir / ".cloudtrain").exists()


def test_nodes_keep_files_of_the_same_name(project: Path, tmp_path: Path):
    (project / "write.py").write_text("import os\nopen('out.txt', 'w').write(os.environ['RANK'])\n")
    assert submit(project, job="entrypoint: write.py\nkeep: [out.txt]\nnum_nodes: 2\n")[0] == 0
    assert run_cli(project, "fetch", "-o", str(tmp_path / "home-of-it")).returncode == 0
    outputs = tmp_path / "home-of-it" / "outputs"
    assert (outputs / "out.txt").read_text() == "0" and (outputs / "node-1" / "out.txt").read_text() == "1"


def test_a_run_that_left_nothing_is_said_so(project: Path, tmp_path: Path):
    (project / "leaves.py").write_text("open('model.bin', 'w').write('x' * 700)\n")
    assert submit(project, job="entrypoint: leaves.py\nkeep: none\n")[0] == 0
    fetched = run_cli(project, "fetch", "-o", str(tmp_path / "nothing"))
    assert fetched.returncode == 1 and "has stored no model or outputs or checkpoints" in fetched.stderr
    assert (
        "700 bytes in model.bin are not kept, and the next attempt will not find them: set keep: [model.bin]"
        in fetched.stderr
    )
