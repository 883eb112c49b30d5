"""Ranks killed at drawn moments, with retry.restarts: the losses are an unbroken run's, or the first cause is the verdict."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.entrypoints.launching import Attempt
from tests.seed import first_seed

# Two ranks that add up a number in each step. Rank 0 saves every third step; after KILLS[restart] = [rank, step, place, how]
# a rank ends in that step of its start.
SCRIPT = """\
import json, os, signal, socket, struct, sys, time
import cloudtrain_runtime as runtime

run, number = runtime.context(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank, step_of_kill, place, how = (json.loads(os.environ["KILLS"]) + [[-1, 0, "", ""]] * 9)[number]
step, weight = 0, 1.0
if run.rank == 0 and os.environ["RESUME"] and (path := runtime.latest_checkpoint()):
    step, weight = json.load(open(os.path.join(path, "state")))

def at(here, now):
    if run.rank == rank and here == place and now >= step_of_kill:
        if how == "socket":
            peer.shutdown(socket.SHUT_RDWR)
        else:
            os.kill(os.getpid(), signal.Signals[how])

def read(size):
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise ConnectionResetError(104, os.strerror(104))
        data += more
    return struct.unpack("dd"[: size // 8], data)

def save():
    folder = os.path.join(run.checkpoint_dir, f"step_{step}")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "state"), "w") as file:
        json.dump([step, weight], file)
    at("save", step - first)
    runtime.complete_checkpoint(folder, step=step)

if place == "start" and how != "socket":
    at("start", 9)
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if run.rank == 0:
    print("begins", number, step, address[1], flush=True)
    peer = socket.create_server(("", address[1])).accept()[0]
    peer.sendall(struct.pack("dd", step, weight))
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.01)
    step, weight = read(16)
    step = int(step)
if place == "start":
    at("start", 9)
first = step
while step < 24:
    step += 1
    at("before", step - first)
    own = (weight * (3 + run.rank) + step) % 7 - 3
    if run.rank == 0:
        total = own + read(8)[0]
        peer.sendall(struct.pack("d", total))
    else:
        peer.sendall(struct.pack("d", own))
        total = read(8)[0]
    weight -= 0.1 * total
    if run.rank == 0:
        print("loss", step, repr(weight), flush=True)
        if step % 3 == 0:
            save()
    at("after", step - first)
"""
SIGNALS = {"SIGSEGV": 139, "SIGABRT": 134, "SIGBUS": 135}
CODES = {**SIGNALS, "socket": 1}


class Draw(NamedTuple):
    nodes: int
    resumes: bool
    restarts: int
    kills: list[tuple[int, int, str, str]]


def draw(seed: int) -> Draw:
    choose = random.Random(seed)
    kills = []
    for _ in range(choose.randint(1, 3)):
        place = choose.choice(("start", "before", "after", "save"))
        how = choose.choice(list(SIGNALS if place == "save" else CODES))
        rank = 0 if place == "save" else choose.randint(0, 1)
        kills.append((rank, choose.randint(1, 5), place, how))
    return Draw(choose.randint(1, 2), choose.random() < 0.5, choose.randint(1, 3), kills)


def run(root: Path, drawn: Draw) -> tuple[dict, list[list[str]]]:
    """Return the status of the attempt and what its rank 0 has printed, in words."""
    environ = {"KILLS": json.dumps(drawn.kills), "RESUME": "1" * drawn.resumes}
    job = {"nodes": drawn.nodes, "processes": 3 - drawn.nodes, "restarts": drawn.restarts}
    with Attempt(root, SCRIPT, environ=environ, **job) as attempt:
        attempt.run()
        return attempt.status(), [line.split() for line in attempt.texts(0)]


def losses(lines: list[list[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in lines:
        if line[0] == "loss":
            found.setdefault(line[1], set()).add(line[2])
    return found


def resumed(began: int, kill: tuple[int, int, str, str]) -> set[int]:
    """Return from which steps a start may resume after a kill in the one that began with this step."""
    rank, step, place, _ = kill
    if place == "start":
        return {began}
    step += began
    if place == "save":
        return {(step + 2) // 3 * 3 - 3}
    done = step if place == "after" else step - 1
    return {done // 3 * 3, (done - (rank == 1)) // 3 * 3}  # of rank 1's death rank 0 may hear before it has saved


def check(root: Path, drawn: Draw) -> None:
    status, lines = run(root, drawn)
    assert {step: len(values) for step, values in losses(lines).items() if len(values) > 1} == {}, lines
    began = [int(line[2]) for line in lines if line[0] == "begins"]
    ports = [line[3] for line in lines if line[0] == "begins"]
    assert len(set(ports)) == len(ports), ports
    if drawn.restarts >= len(drawn.kills):
        assert status["state"] == "SUCCEEDED", status
        assert losses(lines) == losses(run(root / "unbroken", drawn._replace(kills=[]))[1])
    else:
        _, _, _, how = drawn.kills[0]
        again = f"after {drawn.restarts} restart{'s' * (drawn.restarts > 1)} it ended with: "
        assert status["state"] == "FAILED" and status["exit_code"] == CODES[how], status
        assert ("exited with code 1" if how == "socket" else how) in status["reason"].split("; " + again)[0], status
        assert again in status["reason"], status
    if not drawn.resumes:
        assert set(began) <= {0}
    elif len(began) == min(drawn.restarts, len(drawn.kills)) + 1:  # else one was killed before it could say so
        for before, after, kill in zip(began, began[1:], drawn.kills, strict=False):
            assert after in resumed(before, kill), (began, drawn)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [10, 100])
def test_drawn_deaths(tmp_path, count: int):
    first = first_seed()
    for number in range(count):
        drawn = draw(first + number)
        print(number, drawn)
        check(tmp_path / str(number), drawn)


# One of each: one node and two, a script that resumes and one that does not, more deaths than restarts.
FEW = [
    Draw(1, True, 2, [(0, 4, "save", "SIGBUS"), (1, 5, "before", "SIGABRT")]),
    Draw(2, False, 1, [(1, 2, "after", "socket")]),
    Draw(2, True, 1, [(0, 5, "after", "SIGSEGV"), (1, 1, "start", "SIGABRT")]),
]


@pytest.mark.parametrize("drawn", FEW, ids=lambda drawn: f"{drawn.nodes}-{drawn.kills[0][3]}")
def test_a_run_goes_on_after_a_death_as_if_unbroken(tmp_path, drawn: Draw):
    check(tmp_path, drawn)
