"""Batch scripts as jobs: which lines count, what each option becomes, and how a body of one command runs elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cloudtrain.backends.slurm import sbatch
from cloudtrain.errors import BadJob
from cloudtrain.job import targets

PAGE = Path(__file__).parents[3] / "docs" / "migrate" / "sbatch.md"
# The options of doc/man/man1/sbatch.1 of Slurm 22.05 and 24.11, together (2026-11-28).
OPTIONS = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container container-id
contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution
error exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-pbs input job-name kill-on-invalid-dep licenses
mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile
nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output
overcommit oversubscribe parsable partition power prefer priority profile propagate qos quiet reboot requeue
reservation resv-ports segment signal sockets-per-node spread-job stepmgr switches test-only thread-spec
threads-per-core time time-min tmp tres-bind tres-per-task uid usage use-min-nodes verbose version wait wait-all-nodes
wckey wrap
""".split()  # fmt: skip # noqa: SIM905
SIMPLE = "#!/bin/bash\n{}\nsrun python train.py\n"


def made(text: str, target: str = "slurm", folder: Path | None = None) -> targets.Resolved:
    """Return the job of a script for a target."""
    path = (folder or Path.cwd()) / "job.sbatch"
    path.write_text(text)
    return targets.resolve(path, target=target)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def test_every_option_of_the_manual_has_one_row_on_the_page():
    assert sorted(sbatch.KNOWN) == sorted(OPTIONS)
    rows = re.findall(r"^\| (`--.*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    page = {name: said for names, said in rows for name in re.findall(r"`--([a-z-]+)`", names)}
    assert sorted(page) == sorted(OPTIONS)
    for name, said in page.items():
        kind = "refused" if name in sbatch.REFUSED else "no effect" if name in sbatch.NAMED else ""
        assert said.startswith(kind) and said.startswith("refused") == (kind == "refused"), name
        assert ("passed to sbatch" in said) == (name in sbatch.PASSED or name == "exclusive"), name


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_taken_over_named_or_refused_with_its_line(name: str):
    values = {"nodes": "2", "time": "90", "export": "ALL,LR=1", "signal": "USR1@30", "gres": "gpu:2"}
    value = "" if name in sbatch.FLAGS else f"={values.get(name, '3')}"
    text = SIMPLE.format(f"#SBATCH --{name}{value}")
    if name in sbatch.REFUSED:
        with pytest.raises(BadJob, match=rf"job\.sbatch:2: #SBATCH --{name}{value} cannot be taken over \("):
            made(text)
        return
    job = made(text).job
    assert job.compat == "sbatch" and job.run is not None
    given = job.options.get("slurm", {})
    assert bool(sbatch.notes(job.run)) == (name in sbatch.NAMED), "a line without effect is named"
    assert bool(given.get("directives")) == (name in sbatch.PASSED)
    if name in sbatch.SITE:
        assert given == {name: "3"}


@pytest.mark.parametrize(
    ("lines", "keys"),
    [
        ("#SBATCH -J My_Job", {"name": "my-job", "env": {"SLURM_JOB_NAME": "My_Job"}}),
        ("#SBATCH -N2 -p gpu # a comment", {"num_nodes": 2, "options": {"slurm": {"partition": "gpu"}}}),
        ("#SBATCH --nodes=2-4", {"num_nodes": 4, "min_nodes": 2}),
        ("#SBATCH --nodes 3\n#SBATCH --nodes 2", {"num_nodes": 2}),
        ("#SBATCH --part=gpu", {"options": {"slurm": {"partition": "gpu"}}}),
        ("#SBATCH --exclusive", {"options": {"slurm": {"exclusive": True}}}),
        ("#SBATCH --exclusive=user", {"options": {"slurm": {"directives": ["--exclusive=user"]}}}),
        ("#SBATCH -t 90", {"limits": {"max_runtime": "90m"}}),
        ("#SBATCH -t 90:30", {"limits": {"max_runtime": "91m"}}),
        ("#SBATCH -t 1:30:00", {"limits": {"max_runtime": "90m"}}),
        ("#SBATCH -t 2-12", {"limits": {"max_runtime": "60h"}}),
        ("#SBATCH -t 1-02:03:04", {"limits": {"max_runtime": "1564m"}}),
        ("#SBATCH --requeue", {"retry": {"max_attempts": 3}}),
        ('#SBATCH --export=ALL,A=1,B="2 3"', {"env": {"A": "1", "B": "2 3"}}),
        ("#SBATCH --signal=USR1", {"options": {"slurm": {"directives": ["--signal=USR1@360"]}}}),
        ("##SBATCH --nodes=4\n# SBATCH --nodes=4\n #SBATCH --nodes=4", {}),
        ("echo begun\n#SBATCH --nodes=4", {}),
    ],
)
def test_lines_become_keys(lines: str, keys: dict[str, object]):
    document = sbatch.read(SIMPLE.format(lines), "job.sbatch")
    assert not document.problems
    assert {key: value for key, value in document.value.items() if key not in ("compat", "run")} == keys
    assert len(document.value["run"].splitlines()) == len(SIMPLE.format(lines).splitlines()), "bash's line numbers hold"


@pytest.mark.parametrize(
    ("lines", "resources"),
    [
        ("--gres=gpu:a100:4", {"accelerators": "a100:4"}),
        ("--gres=gpu:2,shard:1", {"accelerators": "gpu:2"}),
        ("--gres=gpu", {"accelerators": "gpu:1"}),
        ("--gpus-per-node=a100:4", {"accelerators": "a100:4"}),
        ("--nodes=2 --gpus=8", {"accelerators": "gpu:4"}),
        ("--nodes=2 --ntasks=8 --gpus-per-task=1 --cpus-per-task=6", {"accelerators": "gpu:4", "cpus": 24}),
        ("--mem=64G", {"memory": "64GiB"}),
        ("--mem=4000", {"memory": "4000MiB"}),
        ("--mem=0", None),
        ("--gres=license:2", None),
    ],
)
def test_hardware_of_a_node(lines: str, resources: dict[str, object] | None):
    assert sbatch.read(SIMPLE.format(f"#SBATCH {lines}"), "job.sbatch").value.get("resources") == resources


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("#SBATCH --nodes=two", "write a number of nodes, such as 2 or 2-4"),
        ("#SBATCH --time=UNLIMITED", "write a limit such as 90, 1:30:00 or 2-00:00:00"),
        ("#SBATCH --export=ALL,EDITOR", "EDITOR has no value: use --env EDITOR"),
        ("#SBATCH --no-such=1", "it is not an option of sbatch that is known"),
        ("#SBATCH hetjob", "#SBATCH hetjob cannot be read"),
        ("#PBS -l nodes=2\n#SBATCH -N1", "#PBS -l nodes=2 cannot be read"),
        ("#SBATCH --comment='a", "cannot be read"),
        ("#SBATCH --array=1-3", r"write a sweep over env\.SLURM_ARRAY_TASK_ID"),
    ],
)
def test_what_is_refused_names_its_line(line: str, message: str):
    with pytest.raises(BadJob, match=message) as caught:
        made(SIMPLE.format(line))
    assert [(problem.file[-10:], problem.line) for problem in caught.value.problems] == [("job.sbatch", 2)]


def test_the_directives_of_the_target_stay(tmp_path: Path):
    (tmp_path / "cloudtrain.toml").write_text(
        '[targets.cluster]\nbackend = "slurm"\nfolder = "/s"\npartition = "old"\ndirectives = ["--exclude=node7"]\n'
    )
    first = made(SIMPLE.format("#SBATCH -p new -n 4"), "cluster").job
    expected = {"folder": "/s", "partition": "new", "directives": ["--exclude=node7", "--ntasks=4"]}
    assert first.options["slurm"] == expected
    assert targets.resolve(first.to_dict(), target="cluster").job.options["slurm"] == expected, "a stored job, again"


HEADER = "#!/bin/bash\n#SBATCH --nodes={} --ntasks-per-node={}\n"


@pytest.mark.parametrize(
    ("head", "body", "keys"),
    [
        ((1, 1), "python train.py --lr 1", {"entrypoint": "train.py", "args": ["--lr", "1"], "processes_per_node": 1}),
        ((2, 8), "srun -u python train.py", {"entrypoint": "train.py", "num_nodes": 2, "processes_per_node": 8}),
        ((1, 2), "srun python -u -m package.train 'a b'", {"entrypoint": "-m package.train", "args": ["a b"]}),
        ((1, 1), "torchrun --nproc-per-node 2 train.py", {"run": "torchrun --nproc-per-node 2 train.py"}),
        (
            (2, 1),
            "set -euo pipefail\ncd $SLURM_SUBMIT_DIR\nexport A=1\nexport B='x y'\n"
            "export MASTER_ADDR=$(scontrol show hostnames | head -1)\nexport MASTER_PORT=29500\nexport WORLD_SIZE=16\n"
            "srun torchrun --nnodes $SLURM_NNODES --node-rank ${SLURM_NODEID} --rdzv-id=$SLURM_JOB_ID \\\n"
            "  --master-addr $MASTER_ADDR train.py",
            {
                "run": "torchrun --nnodes $CLOUDTRAIN_NUM_NODES --node-rank $CLOUDTRAIN_NODE_RANK"
                " --rdzv-id=$CLOUDTRAIN_RUN_ID --master-addr $MASTER_ADDR train.py",
                "env": {"A": "1", "B": "x y"},
            },
        ),
        (
            (1, 1),
            "accelerate launch --num_processes 2 train.py",
            {"run": "accelerate launch --num_processes 2 train.py"},
        ),
    ],
)
def test_a_body_of_one_command_runs_elsewhere(head: tuple[int, int], body: str, keys: dict[str, object]):
    job = made(HEADER.format(*head) + body + "\n", "local").job.to_dict()
    assert job.get("compat") is None and {key: job[key] for key in keys} == keys


@pytest.mark.parametrize(
    ("head", "body", "line", "message"),
    [
        (
            (1, 1),
            "module load cuda\npython train.py",
            3,
            "module load cuda cannot run on local: it is not the one command",
        ),
        ((2, 1), "srun python a.py\n\nsrun python b.py", 5, "it is not the one command of the body"),
        ((2, 1), "python train.py", 3, "without srun it runs on the first of 2 nodes only"),
        ((1, 4), "srun torchrun train.py", 3, "srun starts it 4 times on a node"),
        ((1, 1), "./train.sh", 3, "the body must be one line of srun, torchrun, accelerate launch or python"),
        ((1, 1), "srun --ntasks=3 python train.py", 3, "the body must be one line"),
        ((1, 1), "python train.py | tee log", 3, "the body must be one line"),
        ((1, 1), "python train.py $1", 3, "only a script or -m with plain arguments"),
        ((1, 1), "python -c 'print(1)'", 3, "only a script or -m with plain arguments"),
        ((1, 1), "torchrun --rdzv-id $SLURM_RESTART_COUNT train.py", 3, r"\$SLURM_RESTART_COUNT is not known there"),
        ((1, 1), "# nothing", 1, "it has no command"),
    ],
)
def test_anything_else_is_refused_with_its_line(head: tuple[int, int], body: str, line: int, message: str):
    with pytest.raises(BadJob, match=message) as caught:
        made(HEADER.format(*head) + body + "\n", "local")
    assert [problem.line for problem in caught.value.problems] == [line]


def test_init_writes_the_same_job(cli, tmp_path: Path):
    text = HEADER.format(2, 4) + "#SBATCH --output=%j.out\n#SBATCH --gres=gpu:a100:4\nsrun python train.py\n"
    (tmp_path / "cloudtrain.toml").write_text('[targets.cluster]\nbackend = "slurm"\nfolder = "/s"\n')
    first = made(text, "cluster").job
    assert cli("init", "--from", "job.sbatch", "-t", "cluster")[0] == 0
    written = (tmp_path / "job.yaml").read_text()
    assert "# #SBATCH --output=%j.out has no effect: `cloudtrain logs RUN` prints the lines" in written
    second = targets.resolve(tmp_path / "job.yaml").job
    assert second.run == "#!/bin/bash\nsrun python train.py\n" and "run: |\n" in written
    assert {**second.to_dict(), "run": ""} == {**first.to_dict(), "run": "", "name": second.name}
    (tmp_path / "job.sbatch").write_text(text + "echo done\n")
    code, _, said = cli("init", "--from", "job.sbatch", "-t", "local", "--force")
    assert code == 2 and "job.sbatch:6: run: echo done cannot run on local" in said
    assert yaml.safe_load((tmp_path / "job.yaml").read_text())["compat"] == "sbatch", "nothing was written"


def test_init_takes_the_configured_target(cli, tmp_path: Path):
    (tmp_path / "job.sbatch").write_text(HEADER.format(1, 1) + "srun python train.py\n")
    config, job = tmp_path / "cloudtrain.toml", tmp_path / "job.yaml"

    def target(*words: str) -> str:
        assert cli("init", "--from", "job.sbatch", "--force", *words)[0] == 0
        return str(yaml.safe_load(job.read_text())["target"])

    assert target() == "slurm"
    config.write_text('[targets.near]\nbackend = "ssh"\n[targets.a]\nbackend = "slurm"\n')
    assert target() == "a" and "configured for" not in job.read_text()
    config.write_text(config.read_text() + '[targets.b]\nbackend = "slurm"\n[defaults]\ntarget = "b"\n')
    assert target() == "b" and "# target: a, b are configured for slurm" in job.read_text()
    config.write_text(config.read_text().replace('target = "b"', 'target = "near"'))
    assert target() == "a" and target("-t", "b") == "b"


def test_a_script_with_directives_is_no_plain_script(cli, tmp_path: Path):
    (tmp_path / "job.sh").write_text(HEADER.format(1, 2) + "srun python train.py\n")
    (tmp_path / "prepare.sh").write_text("#!/bin/bash\necho '#SBATCH --nodes=2'\n")
    code, out, said = cli("plan", "job.sh")
    assert code == 0 and "1 node x 2 processes" in out
    assert "note: job.sh has #SBATCH lines: it is read as a batch script of Slurm" in out + said
    for words in (["--", "bash", "job.sh"], ["--", "sbatch", "./job.sh"]):
        code, out, said = cli("plan", *words)
        assert "job.sh has #SBATCH lines, which have no effect here: submit that file itself" in out, (out, said)
    assert "#SBATCH" not in "".join(cli("plan", "prepare.sh")[1:])


def test_elsewhere_the_plan_names_each_line_without_effect(cli, tmp_path: Path):
    lines = "#SBATCH --output=x.out\n#SBATCH --partition=gpu\n#SBATCH --mail-user=a@b.c\n"
    (tmp_path / "job.sbatch").write_text(HEADER.format(1, 2) + lines + "srun python train.py\n")
    code, out, said = cli("plan", "job.sbatch", "-t", "local")
    assert code == 0, said
    assert "#SBATCH --output=x.out has no effect" in out
    assert "without effect on local: --mail-user, --partition of #SBATCH lines" in out
