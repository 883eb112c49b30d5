"""Starts the shared trainer as the launcher would: one process a rank over env://, output to a file each."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"
WAIT_S = 270.0  # four ranks on two busy cores take their time
TINY = shlex.split(
    "--tokenizer bpe:300 --hidden_size 32 --num_hidden_layers 2 --num_attention_heads 2 --block_size 16 "
    "--learning_rate 5e-3 --logging_steps 1 --dropout 0 --sample_tokens 4"
)

if str(ENTRYPOINTS) not in sys.path:
    sys.path.append(str(ENTRYPOINTS))  # behind the rest: its short names must not hide anybody's


def hold_port() -> socket.socket:
    """Return what keeps a port for the ranks until rank 0 listens: a free one that is not held is soon somebody else's."""
    from launcher.world import ports

    return ports.hold()


def texts(folder: Path, files: int = 8, words: int = 300) -> Path:
    """Write text files that are the same everywhere and have something to learn in them."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(7)
    known = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(40)]
    for number in range(files):
        chosen = draw.choices(known, weights=range(1, 41), k=words + 37 * number)
        (folder / f"text{number}.txt").write_text(" ".join(chosen) + "\n")
    return folder


class Warm:
    """The process that forks ranks (warm.py), one for each process of tests."""

    _process: subprocess.Popen[str] | None = None

    def __init__(self, argv: list[str], env: dict[str, str], log: Path, cwd: Path) -> None:
        start = {"argv": argv, "env": env, "log": str(log), "cwd": str(cwd)}
        self.pid, self.returncode = self.ask({"start": start})["pid"], None

    @classmethod
    def ask(cls, request: dict) -> dict:
        if cls._process is None:
            env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            cls._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("warm.py"))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            )  # fmt: skip
        cls._process.stdin.write(json.dumps(request) + "\n")
        cls._process.stdin.flush()
        return json.loads(cls._process.stdout.readline())

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("train.py", timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Trainer:
    """One attempt of a run in a folder; used as a context manager it leaves no process behind."""

    def __init__(
        self,
        run: Path,
        args: Sequence[str],
        world: int = 1,
        env: Mapping[str, object] | None = None,
        attempt: int = 1,
        script: Path = ENTRYPOINTS / "train.py",
        rank_input: str = "",  # an input of which each rank gets its own folder: ranks on machines of their own
    ) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self.run, self.world = run, world
        self._port = hold_port()
        self.logs = [run / f"attempt-{attempt}-rank-{rank}.log" for rank in range(world)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            place = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "NODE_RANK": 0,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port.getsockname()[1],
                "OMP_NUM_THREADS": 1, "PYTHONUNBUFFERED": 1,
                "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": 1,
                "CLOUDTRAIN_RUN_ID": run.name, "CLOUDTRAIN_ATTEMPT": attempt,
                "CLOUDTRAIN_CHECKPOINT_DIR": run / "checkpoints", "CLOUDTRAIN_OUTPUT_DIR": run / "outputs",
                "CLOUDTRAIN_MODEL_DIR": run / "model", **(env or {}),
            }  # fmt: skip
            if rank_input:
                place[f"CLOUDTRAIN_INPUT_{rank_input}"] = f"{place[f'CLOUDTRAIN_INPUT_{rank_input}']}/{rank}"
                place |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": rank}
            if script.parent != ENTRYPOINTS:
                place.setdefault("PYTHONPATH", ENTRYPOINTS)
            words = os.environ | {name: str(value) for name, value in place.items()}
            log.write_bytes(b"")
            self.processes.append(Warm([str(script), *args], words, log, run))

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._port.close()
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait(WAIT_S)

    def everything(self) -> str:
        return "\n".join(self.output(rank) for rank in range(self.world))

    def terminate(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGTERM)

    def codes(self) -> list[int]:
        """Wait for all ranks and return their exit codes."""
        deadline = time.monotonic() + WAIT_S
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                for other in self.processes:
                    other.send_signal(signal.SIGUSR1)
                time.sleep(1)
                self.kill()
                raise AssertionError(f"still running after {WAIT_S} s:\n{self.everything()}") from None
        return [process.returncode for process in self.processes]

    def output(self, rank: int = 0) -> str:
        return self.logs[rank].read_text(errors="replace")

    def wait_for_step(self, step: int) -> None:
        """Return as soon as rank 0 has told of a step."""
        deadline = time.monotonic() + WAIT_S
        while not any(row["step"] >= step and "loss" in row for row in self.events("metric")):
            assert time.monotonic() < deadline, f"no step {step} within {WAIT_S} s:\n{self.output()}"
            assert self.processes[0].poll() is None, f"ended before step {step}:\n{self.output()}"
            time.sleep(0.01)

    def events(self, kind: str, rank: int = 0) -> list[dict]:
        whole = [line for line in self.output(rank).splitlines(keepends=True) if line.endswith("\n")]
        rows = [json.loads(line.removeprefix("::cloudtrain::")) for line in whole if line.startswith("::cloudtrain::")]
        return [row for row in rows if row["kind"] == kind]

    def losses(self) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in self.events("metric") if "loss" in row}

    def norms(self) -> dict[int, float]:
        return {row["step"]: row["grad_norm"] for row in self.events("metric") if "grad_norm" in row}

    def held_out(self) -> dict[int, float]:
        return {row["step"]: row["eval_loss"] for row in self.events("metric") if "eval_loss" in row}


def train(
    run: Path,
    args: Sequence[str],
    world: int = 1,
    attempt: int = 1,
    script: Path = ENTRYPOINTS / "train.py",
    **env: str,
) -> Trainer:
    """Train to the end and return what there is to see; fails the test unless every rank ends with 0."""
    with Trainer(run, args, world, env, attempt, script) as trainer:
        codes = trainer.codes()
    assert codes == [0] * world, trainer.everything()
    return trainer


def ranks(text: str, folder: Path, world: int, **env: str) -> list[str]:
    """Run a script in so many ranks, which have imported what the trainer imports, and return what each has printed.

    It gets the folder as its argument.
    """
    script = folder / "ranks.py"
    script.write_text(text)
    paths = os.pathsep.join((str(ENTRYPOINTS), str(ENTRYPOINTS.parent)))
    ended = train(folder / "ranks", [str(folder)], world, script=script, PYTHONPATH=paths, **env)
    return [ended.output(rank) for rank in range(world)]
