"""The plan of a Slurm job: pure, golden, and what is refused before anything is sent. No Slurm is needed here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.slurm import arrays, request
from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.backends.slurm.client import HIDDEN_VARIABLES, QueueEntry, find_job, query_job, query_jobs
from cloudtrain.backends.slurm.step import find_node
from cloudtrain.cli import main
from cloudtrain.errors import BackendError, BadJob, Unreachable
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.runs.submit import Submitter
from cloudtrain.source.bundle import Bundle

GOLDEN = Path(__file__).parents[2] / "golden" / "slurm"
HARDWARE = {
    "resources": {"accelerators": "H100:8", "cpus": 64},
    "roles": {
        "trainer": {"num_nodes": 2},
        "judge": {"run": "judge"},
        "server": {"run": "serve", "num_nodes": 3, "resources": {"accelerators": "H100:2", "memory": "8GB"}},
        "proxy": {"run": "proxy", "resources": {"cpus": 2}},
    },
}
CASES = {
    "two_nodes": (
        {"folder": "/shared/ml", "partition": "gpu", "account": "nlp"},
        {"num_nodes": 2, "processes_per_node": 2, "resources": {"accelerators": "A100-80GB:2"}},
    ),
    "everything": (
        {
            "folder": "/shared/it's 100%j a folder",
            "login": {"address": "login.cluster", "user": "ml"},
            "qos": "long",
            "constraint": "a100&ib",
            "reservation": "course",
            "exclusive": True,
            "spot_partition": "preemptible",
            "gpu_type": "a100",
            "account": "nlp",
            "directives": ["--exclude=node7", "--mail-type=END", "--time-min=60", "--wait-all-nodes=1"],
            "srun_args": ["--mpi=pmix", "--container-image=/images/a b.sqsh", "--cpu-bind=cores"],
            "modules": ["cuda/12.8", "python/3.12"],
            "conda": "/shared/envs/my env",
            "setup": ["export NCCL_DEBUG=INFO", "ulimit -l unlimited"],
            "python": "/opt/py/bin/python3",
            "apptainer": "/shared/images/train.sif",
            "binds": ["/scratch", "/data:/data:ro"],
        },
        {
            "num_nodes": 4,
            "min_nodes": 2,
            "resources": {"accelerators": "A100:8", "use_spot": True, "cpus": 64, "memory": "256GB"},
            "limits": {"max_runtime": "90m"},
            "output": "/shared/results",
        },
    ),
    "gres": (
        {"folder": "/s", "gres": "gpu:h100:4"},
        {"resources": {"accelerators": "H100:4"}, "retry": {"max_attempts": 2}},
    ),
    "heterogeneous": ({"folder": "/s", "gpu_type": "h100", "srun_args": ["--mpi=pmix", "--label={x}"]}, HARDWARE),
}


@pytest.fixture
def planned(tmp_path: Path):
    def planned(options, changes):
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        (source / "train.py").write_text("print(1)\n")
        model = SlurmBackend.options().model_validate(options)
        job = Job.from_dict(
            {
                "name": "golden",
                "source": str(source),
                "entrypoint": "train.py",
                "hyperparameters": {"learning_rate": "3.0e-4", "name": "a 'b' $c\nd"},
                **changes,
            }
        )
        bundle = Bundle.make(source, tmp_path / "bundles")
        given = model.model_dump(exclude_unset=True)
        return SlurmBackend(given, tmp_path / "runs").plan(job, bundle, "golden-run")

    return planned


@pytest.mark.parametrize("case", CASES)
def test_golden_plans(planned, case: str, tmp_path: Path) -> None:
    plan = planned(*CASES[case])
    sent = json.loads(json.dumps(plan.request))
    script = sent.pop("script")
    pieces = re.findall(r"^export CLOUDTRAIN_MANIFEST_\d+=(\S+)$", script, re.M)
    assert Manifest.decode(pieces).to_dict() == plan.manifest
    for piece in pieces:
        script = script.replace(piece, "${manifest}")
    found = {"request": sent, "script": script.splitlines(), "notes": plan.notes}
    text = json.dumps(found, indent=2) + "\n"
    golden = GOLDEN / f"{case}.json"
    if os.environ.get("CLOUDTRAIN_WRITE_GOLDEN"):
        GOLDEN.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    checked = subprocess.run(["bash", "-n"], input=str(plan.request["script"]), text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-S", "error", "-"], input=str(plan.request["script"]), text=True, check=True)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"folder": "relative"}, "absolute path"),
        ({"folder": "~/cloudtrain"}, "absolute path"),
        ({"folder": "/scratch/$USER/cloudtrain"}, "variables are not replaced"),
        ({"folder": "/s", "directives": ["--output=x"]}, "cloudtrain sets --output itself"),
        ({"folder": "/s", "directives": ["-N4"]}, "cloudtrain sets --nodes itself"),
        ({"folder": "/s", "directives": ["-t", "9"]}, "cloudtrain sets --time itself"),
        ({"folder": "/s", "directives": ["mem=3"]}, "is not an argument of sbatch"),
        *(
            ({"folder": "/s", "directives": [text]}, "cloudtrain sets --array itself")
            for text in ("--array=1-3", "--arra=1-3", "--arr=1", "--ar=1", "-a1-3", "-a")
        ),
        ({"folder": "/s", "srun_args": ["--kill=1"]}, "cloudtrain sets --kill-on-bad-exit itself"),
        ({"folder": "/s", "srun_args": ["-n4"]}, "cloudtrain sets --ntasks itself"),
        ({"folder": "/s", "srun_args": ["mpi=pmix"]}, "is not an argument of srun"),
        ({"folder": "/s", "login": {"user": "x"}}, "address"),
        ({"folder": "/s", "partitoin": "x"}, "partitoin"),
        ({}, "folder"),
    ],
)
def test_options_that_are_refused(options, word: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SlurmBackend.options().model_validate(options)
    assert word in str(caught.value)


def test_only_a_body_of_sbatch_chooses_its_tasks(planned) -> None:
    given = {"folder": "/s", "directives": ["--ntasks-per-nod=2", "--mem=3G"]}
    with pytest.raises(BadJob, match="cloudtrain sets --ntasks-per-node itself"):
        planned(given, {})
    body = {"entrypoint": None, "hyperparameters": {}, "compat": "sbatch", "run": "#!/bin/bash\nsrun hostname\n"}
    given["directives"][0] = "--ntasks=3"
    argv = planned(given, {**body, "resources": {"cpus": 4, "memory": "3GiB"}}).request["sbatch"]
    assert [text for text in argv if text.startswith(("--n", "--cpus", "--mem"))] == [
        "--no-requeue",
        "--cpus-per-task=4",
        "--ntasks=3",
        "--mem=3G",
    ], "Slurm chooses the nodes of --ntasks, and what the file says is said once"


def test_jobs_that_are_refused(planned, tmp_path: Path, home: Path) -> None:
    with pytest.raises(BadJob) as caught:
        planned({"folder": "/s"}, {"resources": {"use_spot": True}, "output": "https://x"})
    assert {problem.path for problem in caught.value.problems} == {"resources.use_spot", "output"}
    source = tmp_path / "source"
    job = {"name": "x", "source": str(source), "entrypoint": "train.py", "secrets": {"TOKEN": ["env:TOKEN"]}}
    with pytest.raises(BadJob, match="does not offer secrets from the client's environment") as caught:
        Submitter("slurm", home=home, folder="/s").plan(job)
    assert "file:PATH" in caught.value.problems[0].hint
    job["secrets"] = {"TOKEN": ["file:~/token"]}
    plan = Submitter("slurm", home=home, folder="/s").plan(job)
    assert plan.manifest["secrets"] == {"TOKEN": ["file:~/token"]}


def test_a_role_with_its_own_image_is_refused_at_its_key(planned, tmp_path, home) -> None:
    planned({"folder": "/s"}, {"resources": {"cpus": 4}})  # writes the source
    roles = {"trainer": {}, "judge": {"run": "judge"}, "server": {"run": "serve", "image": "serve:1"}}
    job = {"source": str(tmp_path / "source"), "entrypoint": "train.py", "resources": {"cpus": 4}, "roles": roles}
    with pytest.raises(BadJob) as caught:
        Submitter("slurm", home=home, folder="/s").plan(job)
    [problem] = caught.value.problems
    assert problem.path == "roles.server.image" and "write one image for all roles at the top" in problem.hint
    del roles["server"]["image"]
    plan = Submitter("slurm", home=home, folder="/s").plan(job)
    assert plan.manifest["nodes"] == 3 and ":" not in plan.request["sbatch"], "roles that are alike are one allocation"


def test_roles_with_their_own_hardware_are_a_heterogeneous_job(planned) -> None:
    plan = planned(
        {"folder": "/s", "gpu_type": "h100", "partition": "gpu", "directives": ["--mem-per-gpu=9G"]}, HARDWARE
    )
    whole = " ".join(plan.request["sbatch"]).split(" : ")
    placed = "--partition=gpu --mem-per-gpu=9G"
    assert [part.partition("--nodes=")[2] for part in whole[1:]] == [
        f"1 --ntasks-per-node=1 --gpus-per-node=h100:8 --cpus-per-task=64 {placed}",
        f"3 --ntasks-per-node=1 --gpus-per-node=h100:2 --mem=7630M {placed}",
        f"1 --ntasks-per-node=1 --cpus-per-task=2 {placed} {plan.request['folder']}/job.sh",
    ]
    assert "--nodes=2 " in whole[0] and "--cpus-per-task=64" in whole[0] and "--time=" in whole[0]
    assert not any("--time=" in part or "--output=" in part for part in whole[1:]), "they are of the whole job"
    script = str(plan.request["script"])
    assert re.findall(r"--nodes=(\d) --ntasks=\d --ntasks-per-node=1 \\\n  (\S*) --export", script) == [
        ("2", "--cpus-per-task=64"),
        ("1", "--cpus-per-task=64"),
        ("3", ""),
        ("1", "--cpus-per-task=2"),
    ]
    assert "rank < 7;" in script and "say STARTED - 7" in script and "node-$SLURM_PROCID" in script
    assert plan.request["nodes"] == 7 and "heterogeneous job of 4 components" in " ".join(plan.notes)
    assert request.count_gpus(plan.request["sbatch"], 1) == 2 * 8 + 8 + 3 * 2
    assert not arrays.may_hold(plan)
    avoiding = SlurmBackend({"folder": "/s"}, Path("/none")).avoid(plan, ["n7"]).request["sbatch"]
    assert avoiding[avoiding.index(":") - 1] == "--exclude=n7" and len(avoiding) == len(plan.request["sbatch"]) + 1


def test_roles_that_share_nodes_are_tasks_of_one_allocation_with_the_sum_of_their_hardware(planned) -> None:
    server = {
        "run": "serve",
        "colocate": "trainer",
        "resources": {"accelerators": "H100:2", "cpus": 7, "memory": "1GiB"},
    }
    hardware = {"accelerators": "H100:6", "cpus": 8, "memory": "3GiB"}
    job = {"resources": hardware, "roles": {"trainer": {"num_nodes": 2}, "server": server}}
    plan = planned({"folder": "/s"}, job)
    argv = [*plan.request["sbatch"]]
    wanted = {"--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=8", "--cpus-per-task=8", "--mem=4096M"}
    assert wanted <= {*argv} and ":" not in argv and plan.request["machines"] == [0, 1, 0, 1]
    script = str(plan.request["script"])
    assert "srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --distribution=cyclic" in script
    assert "export CLOUDTRAIN_LAUNCHERS=2\n" in script and "node-$SLURM_PROCID" in script and "STARTED - 4" in script
    assert request.count_gpus(argv, 1) == 16 and plan.requested_gpus == 16
    assert "--gres=gpu:h100:8" in planned({"folder": "/s", "gres": "gpu:h100:6"}, job).request["sbatch"]
    job["roles"]["judge"] = {"run": "judge", "resources": {"cpus": 2}}
    plan = planned({"folder": "/s"}, job)
    script, (first, last) = str(plan.request["script"]), " ".join(plan.request["sbatch"]).split(" : ")
    assert "--ntasks-per-node=2 " in first and last.startswith("--nodes=1 --ntasks-per-node=1 --cpus-per-task=2 ")
    assert "export CLOUDTRAIN_LAUNCHERS=2,1\n" in script and "2 components" in " ".join(plan.notes)
    assert re.findall(r"--nodes=(\d) --ntasks=(\d)", script) == [("2", "4"), ("1", "1")]
    assert plan.request["machines"] == [0, 1, 0, 1, 2]
    job["roles"]["critic"] = {"run": "critic", "colocate": "judge"}
    last = " ".join(planned({"folder": "/s"}, job).request["sbatch"]).split(" : ")[1]
    assert last.startswith("--nodes=1 --ntasks-per-node=2 ")
    alike = {"roles": {"trainer": {"num_nodes": 2}, "server": {"run": "serve", "colocate": "trainer"}}}
    assert "--ntasks-per-node=2" in planned({"folder": "/s"}, alike).request["sbatch"]


def test_the_option_gres_counts_the_gpus_of_each_component(planned) -> None:
    argv = planned({"folder": "/s", "gres": "gpu:h100:8"}, HARDWARE).request["sbatch"]
    assert [text for text in argv if text.startswith("--g")] == ["--gres=gpu:h100:8"] * 2 + ["--gres=gpu:h100:2"]


def test_what_slurm_says_is_understood() -> None:
    def site(**answers):
        def run(argv):
            code, out, err = answers.get(argv[0], (None, "", f"{argv[0]}: No such file or directory"))
            return {"code": code, "out": out, "err": err}

        return run

    gone = (1, "", "slurm_load_jobs error: Invalid job id specified\n")
    off = (1, "", "Slurm accounting storage is disabled\n")
    parts = "9+1|RUNNING|None\n9+0|PENDING|Resources\n9+2|PENDING|None\n"
    lines = "JobId=9 HetJobId=9 HetJobOffset=0 JobName=x JobState=PENDING Reason=Resources Dependency=(null)\n"
    lines += "JobId=10 HetJobId=9 HetJobOffset=1 JobName=x JobState=RUNNING Reason=None Dependency=(null)\n"
    for answers in ({"squeue": (0, parts, "")}, {"scontrol": (0, lines, "")}):
        for found in (query_job(site(**answers), "9"), find_job(site(**answers), "x")):
            assert found == QueueEntry("9", "PENDING", "Resources"), "the first component's is the job's"
    assert query_jobs(site(squeue=(0, parts, "")), ["9"]) == {"9": QueueEntry("9", "PENDING", "Resources")}
    rows = "9+1|2|n[3-4]\n9+0|1|n7\n"
    asked = site(squeue=(0, rows, ""), scontrol=(0, "n7\nn3\nn4\n", ""))
    assert [find_node(asked, "9", node) for node in (0, 2)] == [("n7", ["--het-group=0"]), ("n4", ["--het-group=1"])]
    plain = site(squeue=(0, "9|2|n[3-4]\n", ""), scontrol=(0, "n3\nn4\n", ""))
    assert find_node(plain, "9", 1) == ("n4", [])
    line = "JobId=7 JobName=x-a1 UserId=u(1) JobState=NODE_FAIL Reason=NodeDown Dependency=(null)\n"
    assert query_job(site(squeue=(0, "7|PENDING|Priority\n", ""), sacct=off), "7") == QueueEntry(
        "7", "PENDING", "Priority"
    )
    assert query_job(site(squeue=(1, "", "denied"), scontrol=(0, line, "")), "7") == QueueEntry(
        "7", "NODE_FAIL", "NodeDown"
    )
    assert query_job(site(squeue=gone, scontrol=gone, sacct=(0, "7|CANCELLED by 1000|None\n", "")), "7") == QueueEntry(
        "7", "CANCELLED"
    )
    assert query_job(site(squeue=gone, scontrol=gone, sacct=off), "7") is None
    assert query_job(site(squeue=(0, "", "")), "7") is None, "some versions print nothing for a job that is forgotten"
    with pytest.raises(
        BackendError, match=r"Slurm's commands do not run: squeue: .*; scontrol: .*; sacct: Slurm accounting"
    ):
        query_job(site(sacct=off), "7")
    assert find_job(site(scontrol=(0, line.replace("x-a1", "other") + line, "")), "x-a1") == QueueEntry(
        "7", "NODE_FAIL", "NodeDown"
    )
    with pytest.raises(Unreachable, match="Slurm's commands do not run"):
        find_job(site(), "x-a1")  # a second job would be sent otherwise
    assert find_job(site(squeue=(0, "", "")), "x-a1") is None, "without accounting slurmctld's word is enough"
    silent = (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    for ask in (query_job, find_job):
        with pytest.raises(Unreachable):
            ask(site(squeue=silent, scontrol=silent, sacct=(0, "", "")), "7")  # slurmdbd may not have heard of it yet
        assert ask(site(squeue=(1, "", "denied"), scontrol=(1, "", "denied"), sacct=(0, "", "")), "7") is None
    assert all(not name.startswith(HIDDEN_VARIABLES) for name in ("SLURM_CONF", "PATH"))


def test_a_job_that_ends_between_two_looks_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are read, the job ends, Slurm is asked: what the files said is older than what Slurm says."""
    folder = tmp_path / "runs" / "r" / "a1"
    (folder / "node-0").mkdir(parents=True)
    (folder / "job").write_text("7")
    (folder / "state").write_text("STARTED 0 - 1")
    status = folder / "node-0" / "status.json"
    status.write_text('{"state": "RUNNING"}')

    def squeue(argv) -> dict:
        status.write_text('{"state": "FAILED", "exit_code": 3, "reason": "rank 0 exited with code 3"}')
        return {"code": 0, "out": "7|FAILED|NonZeroExitCode\n", "err": ""}

    backend = SlurmBackend({"folder": str(tmp_path)}, tmp_path)
    monkeypatch.setattr(backend, "_run", squeue)
    found = backend.status(str(folder))
    assert (found.state, found.exit_code) == (State.FAILED, 3)
    (folder / "state").write_text("ENDED 0 127 FAILED")
    status.unlink()
    monkeypatch.setattr(backend, "_run", lambda argv: {"code": 0, "out": "7|FAILED|NonZeroExitCode\n", "err": ""})
    assert backend.status(str(folder)).exit_code == 127


@pytest.mark.parametrize(
    "options, gpus, note",
    [
        ({}, "A100-80GB:8", "Slurm may give GPUs of any type, not only A100-80GB"),
        (
            {"gpu_type": "a100"},
            "H100:8",
            "the job names H100, and options.slurm.gpu_type requests a100: Slurm gives a100",
        ),
        ({"gpu_type": "nvidia_a100_80gb"}, "A100-80GB:8", ""),
        ({"gres": "gpu:h100:4"}, "H100:4", ""),
        ({}, None, ""),
    ],
)
def test_the_type_of_gpu_that_slurm_is_not_asked_for_is_said(
    options: dict[str, str], gpus: str | None, note: str
) -> None:
    job = Job(source=".", entrypoint="train.py", resources={"accelerators": gpus} if gpus else {})
    found = list(request.gpu_notes(job, options))
    assert len(found) == bool(note) and all(text.startswith(note) for text in found)


def test_a_team_shares_a_target_and_each_user_adds_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    page = (
        (Path(__file__).parents[3] / "docs" / "slurm.md").read_text().partition("## One cloudtrain.toml for a team")[2]
    )
    shared, own = re.findall(r"```toml\n(.*?)```", page.partition("\n## ")[0], re.DOTALL)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "cloudtrain.toml").write_text(own)
    (tmp_path / "cloudtrain.toml").write_text(shared)
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "train.py", "-t", "cluster", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["request"]["folder"].startswith("/project/nlp/you/cloudtrain/runs/")
    assert "--partition=gpu" in json.dumps(plan["request"])
    assert (
        main(["plan", "train.py", "-t", "cluster", "--set", "options.slurm.folder=/scratch/you/cloudtrain", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["request"]["folder"].startswith("/scratch/you/cloudtrain/runs/")
