"""Batch scripts on a real Slurm: under plain sbatch and under cloudtrain they have the same exit code, lines and files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from tests.conftest import WAIT_S, wait_for
from tests.lab.slurm import Slurm

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("census")]

SCRIPT = """
import os, pathlib, sys
rank, host = os.environ.get("SLURM_PROCID", "0"), os.environ.get("SLURMD_NODENAME", "")
print("rank", rank, "of", os.environ.get("SLURM_NTASKS", "1"), "on", host, *sys.argv[1:], flush=True)
print("loss: 0.5 step: 1", flush=True)
pathlib.Path(f"out-{rank}.txt").write_text(host)
"""
RANKS = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_ADDR"], flush=True)
"""
FILES = {
    "python": "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --time=5\npython train.py --lr 1\n",
    "srun": "#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2\n#SBATCH -t 0:05:00\nsrun python train.py\n",
    "torchrun": """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun python -m torch.distributed.run --nnodes $SLURM_NNODES --nproc-per-node 1 --rdzv-backend c10d \\
  --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $MASTER_ADDR:29531 ranks.py
""",
    "steps": """#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --nodes=2
srun -N1 -n1 python train.py prepare
srun python train.py train
srun -N1 -n1 bash -c 'cat out-0.txt out-1.txt | wc -l; exit 4'
echo "the last step ended with $?"
""",
    "setup": """#!/bin/bash -l
#SBATCH --job-name=set-up
#SBATCH --nodes=1
set -e
module() { echo "module $*"; }
module load cuda/12
cd "$SLURM_SUBMIT_DIR"
export LR=3e-4
echo "$SLURM_JOB_NAME $LR"
python3 train.py
""",
    "failing": "#!/bin/bash\n#SBATCH -N 2\nset -e\nsrun -n 2 python train.py\nno-such-program\necho not reached\n",
}
CODES = {"failing": 127}
# Warnings of torchrun, with their stack, when the node of the rendezvous leaves first; a message of srun.
NOISE = re.compile(r"W\d{4} |\*{5}|^frame #\d|^<omitting python frames>|^Exception raised from|cpu binding")


def source(folder: Path, name: str) -> Path:
    folder.mkdir()
    for file, text in {"train.py": SCRIPT, "ranks.py": RANKS, "job.sbatch": FILES[name]}.items():
        (folder / file).write_text(text)
    return folder


def lines_of(text: str) -> list[str]:
    """Return a log's lines in an order that does not depend on the nodes' speed, without paths of the batch script."""
    kept = [re.sub(r"\S*slurm_script", "slurm_script", line.rstrip()) for line in text.splitlines()]
    return sorted(line for line in kept if line and not NOISE.search(line))


def written(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.rglob("out-*.txt")}


@pytest.fixture
def target(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    config = tmp_path / "config"
    config.mkdir()
    options = {"backend": "slurm", "folder": str(slurm.shared), "python": sys.executable}
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    (config / "cloudtrain.toml").write_text("\n".join(["[targets.cluster]", *lines]) + "\n")
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(config))
    return slurm


def submitted(cli, home: Path, folder: Path, *more: str) -> Run:
    code, out, err = cli("submit", str(folder / "job.sbatch"), "-t", "cluster", "--json", *more)
    assert code == 0, out + err
    return Run(json.loads(out.splitlines()[-1])["run_id"], Store(home))


@pytest.mark.parametrize("name", FILES)
def test_it_ends_as_under_sbatch(name: str, target: Slurm, tmp_path: Path, home: Path, cli) -> None:
    plain = source(target.shared / f"plain-{name}", name)
    command = ["sbatch", "--parsable", "--wait", f"--output={plain}/log", f"--chdir={plain}", "job.sbatch"]
    done = subprocess.run(command, cwd=plain, env={**os.environ, **target.environ}, timeout=5 * WAIT_S)
    assert done.returncode == CODES.get(name, 0)

    run = submitted(cli, home, source(tmp_path / name, name))
    status = run.wait(5 * WAIT_S)
    log = "\n".join(line.text for line in run.logs() if line.rank >= 0)
    assert status.exit_code == done.returncode, log
    assert status.state is (State.FAILED if done.returncode else State.SUCCEEDED)
    assert lines_of(log) == lines_of((plain / "log").read_text())
    fetched = run.fetch(tmp_path / "fetched", ["outputs"])
    assert written(fetched) == written(plain)
    if name == "srun":
        assert {point.name for point in Store(home).metrics(run.run_id)} == {"loss"}, "read from the steps' lines"


def test_a_signal_for_the_batch_shell_reaches_the_body_alone(target: Slurm, tmp_path: Path, home: Path, cli) -> None:
    folder = source(tmp_path / "signalled", "python")
    (folder / "job.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --time=10 --signal=B:USR1@60\n"
        "trap 'echo saved; exit 3' USR1\npython -c 'import time; print(1, flush=True); time.sleep(600)' &\nwait\n"
    )
    run = submitted(cli, home, folder)
    wait_for(lambda: any(line.text == "1" for line in run.logs()), "the body", 5 * WAIT_S)
    job = (target.shared / "runs" / run.run_id / "a1" / "job").read_text()
    target.ask("scancel", "--signal=USR1", "--batch", job)
    assert run.wait(5 * WAIT_S).exit_code == 3
    assert "saved" in [line.text for line in run.logs()]


@pytest.mark.parametrize("shell", ["srun python train.py", "srun python train.py | tee log.txt"])
def test_a_preempted_body_saves_is_requeued_and_goes_on(
    shell: str, target: Slurm, tmp_path: Path, home: Path, cli
) -> None:
    folder = source(tmp_path / "requeued", "python")
    (folder / "train.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "state = pathlib.Path('state.txt')\n"
        "def save(*_):\n    time.sleep(2)\n    state.write_text('41')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('step', state.read_text() if state.exists() else '0', flush=True)\n"
        "time.sleep(0 if state.exists() else 600)\n"
    )
    (folder / "job.sbatch").write_text(f"#!/bin/bash\n#SBATCH -N1 --requeue -p low\n{shell}\n")
    run = submitted(cli, home, folder)
    steps = lambda: [line.text for line in run.logs() if line.text.startswith("step ")]  # noqa: E731
    wait_for(lambda: steps() == ["step 0"], "the body", 5 * WAIT_S)
    high = target.ask(
        "sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2"
    )
    assert high.strip()
    assert run.wait(10 * WAIT_S).state is State.SUCCEEDED
    assert steps() == ["step 0", "step 41"]
    job = (target.shared / "runs" / run.run_id / "a1" / "job").read_text().strip()
    assert "Restarts=1" in target.ask("scontrol", "-o", "show", "job", job)


def test_a_step_saves_before_it_is_ended(target: Slurm, tmp_path: Path, home: Path, cli) -> None:
    folder = source(tmp_path / "saving", "python")
    (folder / "train.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n    time.sleep(2)\n    pathlib.Path('saved.txt').write_text('1')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('ready', flush=True)\ntime.sleep(600)\n"
    )
    (folder / "job.sbatch").write_text("#!/bin/bash\n#SBATCH -N1\nsrun python train.py\n")
    run = submitted(cli, home, folder, "--set", "limits.max_runtime=20s")
    assert run.wait(5 * WAIT_S).state is State.TIMED_OUT
    assert (target.shared / "runs" / run.run_id / "a1" / "source" / "saved.txt").exists()
