"""Who of a rank's processes gets SIGTERM (a table, without processes), and that all wrappers let a script save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import grace, processes
from launcher.grace import SERVICE_S, SESSION, START, THREADS, USER_TIME, Grace, Process, decide, read_process

from tests.conftest import require, wait_for
from tests.entrypoints.launching import Attempt

PIPE = "pipe:[7]"


def shell(parent: int = 0, **more) -> Process:
    return Process(parent, "bash", **more)


def script(parent: int, program: str = "python3.11", **more) -> Process:
    """A process that handles SIGTERM."""
    return Process(parent, program, handles=True, **more)


def plain(parent: int, program: str = "python3.11", **more) -> Process:
    return Process(parent, program, **more)


# name -> family, who has been asked, who is patient; who gets SIGTERM, which shells stop, who is held
TABLE = {
    "a script": ({1: script(0)}, (), (), [1], [], []),
    "a script that handles nothing": ({1: plain(0)}, (), (), [1], [], []),
    "its loaders never": ({1: script(0), 2: script(1), 3: plain(1)}, (), (), [1], [], []),
    "loaders of one that handles nothing": ({1: plain(0), 2: plain(1)}, (), (), [1], [], []),
    "a service of one that handles nothing": ({1: plain(0), 2: script(1, "wandb-core")}, (), (), [1], [], []),
    "once": ({1: script(0), 2: plain(1)}, (1,), (), [], [], []),
    "behind a shell": ({1: shell(), 2: script(1)}, (), (), [2], [1], []),
    "behind two": ({1: shell(), 2: shell(1), 3: script(2)}, (), (), [3], [1, 2], []),
    "the shell after it": ({1: shell()}, (2,), (), [1], [], []),
    "a shell while it saves": ({1: shell(), 2: script(1)}, (2,), (), [], [1], []),
    "no handler behind a shell": ({1: shell(), 2: plain(1)}, (), (), [2], [1], []),
    "tee": (
        {1: shell(), 2: script(1, outputs=(PIPE, "")), 3: plain(1, "tee", stdin=PIPE)}, (), (), [2], [1], [3],
    ),
    "tee after a writer that handles nothing": (
        {1: shell(), 2: plain(1, outputs=(PIPE, "")), 3: plain(1, "tee", stdin=PIPE)}, (), (), [2], [1], [3],
    ),
    "tee has a moment for the last lines": ({1: shell(), 3: plain(1, "tee", stdin=PIPE)}, (2,), (3,), [], [1], []),
    "tee that does not end": ({1: shell(), 3: plain(1, "tee", stdin=PIPE)}, (2,), (), [3], [1], []),
    "tee of the shell's own output": (
        {1: shell(outputs=(PIPE, "")), 3: plain(1, "tee", stdin=PIPE)}, (2,), (), [3], [1], [],
    ),
    "a loop that reads": (
        {1: shell(), 2: script(1, outputs=(PIPE, "")), 3: shell(1, stdin=PIPE), 4: plain(3, "date")}, (), (), [2], [1], [3],
    ),
    "a loop has a moment for the last line": (
        {1: shell(), 3: shell(1, stdin=PIPE), 4: plain(3, "cat")}, (2,), (3,), [], [1], [],
    ),
    "a script that reads of what handles nothing": (
        {1: shell(), 2: plain(1, "yes", outputs=(PIPE, "")), 3: script(1, stdin=PIPE)}, (), (), [3], [1], [],
    ),
    "a shell with a trap, which waits in the foreground": ({1: shell(handles=True), 2: script(1)}, (), (), [1, 2], [], []),
    "a shell with a trap for its background": (
        {1: shell(handles=True), 2: script(1, background=True)}, (), (), [1], [], [],
    ),
    "torchrun's ranks never": ({1: shell(), 2: script(1), 3: script(2), 4: script(2)}, (), (), [2], [1], []),
    "mpirun whose ranks have ended": ({1: script(0, "mpirun")}, (1,), (), [], [], []),
    "an init shim": ({1: script(0, "tini"), 2: shell(1), 3: script(2)}, (), (), [3], [2], [1]),
    "uv run": ({1: script(0, "uv"), 2: script(1)}, (), (), [2], [], [1]),
    "conda run": ({1: plain(0), 2: shell(1), 3: script(2)}, (), (), [3], [2], [1]),
    "conda run passes on the exit code": ({1: plain(0)}, (3,), (1,), [], [], []),
    "a launcher whose next program starts": ({1: plain(0), 4: plain(1)}, (3,), (1,), [4], [], []),
    "a helper in the background while a script saves": ({1: shell(), 2: script(1), 3: plain(1)}, (2,), (), [], [1], []),
    "a shell while a script saves that ignores more": ({1: shell(), 2: script(1, ignores=True)}, (2,), (), [], [1], []),
    "a helper that ignores it": ({1: shell(), 3: plain(1, "sleep", ignores=True)}, (2, 3), (), [1], [], []),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_who_gets_the_signal(name: str):
    family, asked, patient, terminated, stopped, held = TABLE[name]
    steps = decide([1], family, asked, patient)
    assert bool(steps.kill) == name.startswith("mpirun")
    assert (sorted(steps.terminate), sorted(steps.stop), sorted(steps.hold)) == (terminated, stopped, held)


def test_an_orphan_of_what_ended_early_is_asked():
    assert decide([1, 5], {5: script(0)}, (1,)).terminate == [5]


def test_who_ignores_the_signal_only_since_a_scheduler_sent_it_saves(monkeypatch):
    """Slurm signals every process: the shell is dead, its script ignores a second signal, a helper always ignored it."""
    family = {42: plain(os.getpid(), ignores=True), 43: plain(os.getpid(), "sleep", ignores=True)}
    sent = []
    monkeypatch.setattr(grace, "read_process", lambda pid, _: family[pid])
    monkeypatch.setattr(processes, "kill", lambda *signals: sent.append(signals))
    fields = {1: str(os.getpid()), SESSION: "41", THREADS: "1", START: "7"}
    stats = dict.fromkeys(family, [fields.get(number, "0").encode() for number in range(22)])
    stop = Grace(41, deaf={43: b"7"})
    stop.look(stats, 0.0)
    assert stop.saving and not sent
    del stats[42]
    stop.look(stats, 1.0)
    assert not stop.saving and sent == [(43, signal.SIGTERM)]


@pytest.mark.parametrize("handles", [True, False])
def test_a_service_that_answers_the_signal_and_stays_has_five_seconds_after_what_trains(monkeypatch, handles):
    shell_pid, train, service = 41, 42, 43
    family = {
        shell_pid: shell(os.getpid()),
        train: plain(shell_pid, handles=handles),
        service: script(shell_pid, "redis-server", background=True),
    }
    sent = []
    monkeypatch.setattr(grace, "read_process", lambda pid, _: family[pid])
    monkeypatch.setattr(processes, "kill", lambda *signals: sent.append(signals))

    def look(now: float) -> bool:
        fields = {SESSION: "41", THREADS: "1", START: "7"}
        rows = {pid: {**fields, 1: str(process.parent)} for pid, process in family.items()}
        stop.look({pid: [row.get(number, "0").encode() for number in range(22)] for pid, row in rows.items()}, now)
        return stop.saving

    stop = Grace(shell_pid)
    assert look(0.0) and (service, signal.SIGTERM) in sent and (train, signal.SIGTERM) in sent
    if handles:
        assert look(100.0), "it saves for long"
    ended = 100.0 if handles else 0.0
    del family[train]
    assert look(ended + 4.0) and (shell_pid, signal.SIGTERM) not in sent
    assert not look(ended + 5.5) and (shell_pid, signal.SIGTERM) in sent


def test_what_trains_in_the_background_alone_has_the_whole_grace(monkeypatch):
    family = {41: shell(os.getpid()), 42: script(41, background=True)}
    monkeypatch.setattr(grace, "read_process", lambda pid, _: family[pid])
    monkeypatch.setattr(processes, "kill", lambda *_: None)
    fields = {SESSION: b"41", THREADS: b"1", START: b"7"}
    stop = Grace(41)
    for now in (0.0, 1000.0):
        rows = {pid: {**fields, 1: str(process.parent).encode()} for pid, process in family.items()}
        stop.look({pid: [row.get(number, b"0") for number in range(22)] for pid, row in rows.items()}, now)
        assert stop.saving


def test_the_loader_of_what_ended_while_it_was_looked_at_is_asked_nothing(monkeypatch):
    """A trap ends a script in the background; /proc lists it, and it is gone when it is read."""
    family = {41: script(os.getpid(), "bash"), 42: script(41, background=True), 43: script(42, background=True)}
    sent = []
    monkeypatch.setattr(grace, "read_process", lambda pid, _: family.get(pid))
    monkeypatch.setattr(processes, "kill", lambda *signals: sent.append(signals))
    fields = {SESSION: b"41", THREADS: b"1", START: b"7"}
    rows = {pid: {**fields, 1: str(process.parent).encode()} for pid, process in family.items()}
    stats = {pid: [row.get(number, b"0") for number in range(22)] for pid, row in rows.items()}
    stop = Grace(41)
    stop.look(stats, 0.0)
    del family[42]
    stop.look(stats, 0.1)
    assert sent == [(41, signal.SIGTERM)]
    assert read_process(2**30, stats[43]) is None


@pytest.mark.parametrize("works", [True, False])
def test_a_script_in_the_background_is_a_service_of_another_one_once_it_does_nothing(monkeypatch, works):
    family = {41: shell(os.getpid()), 42: script(41, background=True), 43: script(41)}
    monkeypatch.setattr(grace, "read_process", lambda pid, _: family[pid])
    monkeypatch.setattr(processes, "kill", lambda *_: None)
    fields = {SESSION: b"41", THREADS: b"1", START: b"7"}
    stop = Grace(41)
    for now in (0.0, 1.0, 7.0, 11.0, 13.0, 1000.0):
        used = b"%d" % (now if works else 3)
        rows = {pid: {**fields, 1: b"%d" % each.parent, USER_TIME: used} for pid, each in family.items()}
        stop.look({pid: [row.get(number, b"0") for number in range(22)] for pid, row in rows.items()}, now)
        assert stop.saving == (works or now < 7.0 + SERVICE_S), now
        family.pop(43, None)


# -- real processes ---------------------------------------------------------------------------------------------------

# Writes how many signals came, after a save of a second; a child, as a data loader's worker, must get none.
SAVER = """\
import os, signal, sys, time
name, told = sys.argv[1], []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: open(f"{name}.loader", "w").close())
    while os.getppid() != 1 and not os.path.exists(f"{name}.saved"):
        time.sleep(0.05)
    os._exit(0)
open(f"{name}.runs", "w").close()
while not told:
    time.sleep(0.05)
print("saving", flush=True)
time.sleep(1)
with open(f"{name}.new", "w") as file:
    file.write(str(len(told)))
os.replace(f"{name}.new", f"{name}.saved")
print("saved", flush=True)
"""
SERVICE = """\
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, lambda *_: None)
open(f"{sys.argv[1]}.up", "w").close()
while True:
    time.sleep(600)
"""
DRIVER = """\
import subprocess, sys
done = subprocess.run(["bash", "-c", f"{sys.executable} saver.py {sys.argv[1]}; exit"], stdout=subprocess.PIPE)
print("passed on:", done.stdout.decode().split(), flush=True)
"""
SAVE = '"$PYTHON" saver.py "$NAME"'
WRAPPERS = {  # name -> what the rank's first process is executed as; wrap.sh saves, and would go on
    "text": f"bash -c '{SAVE}\ntouch $NAME.after'",
    "sh": "sh wrap.sh",
    "bash": "bash wrap.sh",
    "strict": f"bash -eo pipefail -c '{SAVE}\ntouch $NAME.after'",
    "nested": "sh -c 'bash wrap.sh; touch $NAME.after'",
    "tee": f"bash -c '{SAVE} 2>&1 | tee $NAME.log; touch $NAME.after'",
    "own-tee": f"bash -c 'exec > >(tee $NAME.log) 2>&1; {SAVE}; touch $NAME.after'",
    "loop": f"bash -c '{SAVE} | while read line; do echo \"at $line\" | cat >>$NAME.log; done; touch $NAME.after'",
    "exit-trap": f"bash -c 'trap \"touch $NAME.cleaned\" EXIT; {SAVE}; touch $NAME.after'",
    "trap": f"bash -c 'trap \"exit 3\" TERM; {SAVE}; touch $NAME.after'",
    "trap-wait": f"bash -c 'trap \"kill \\$child; wait \\$child; exit 3\" TERM; {SAVE} & child=$!; wait; touch $NAME.after'",
    "nohup": f"nohup bash -c '{SAVE}; touch $NAME.after'",
    "timeout": "timeout 600 bash wrap.sh",
    "driver": '"$PYTHON" driver.py $NAME',
    "service": f"bash -c '\"$PYTHON\" service.py $NAME & until [ -e $NAME.up ]; do sleep 0.1; done; {SAVE}; touch $NAME.after'",
    "deaf-helper": f"bash -c '(trap \"\" TERM; sleep 600) & {SAVE}; touch $NAME.after; wait'",
}  # fmt: skip


def table(wrappers: dict[str, str]) -> dict[str, str]:
    """Return the files of a job whose ranks are started behind one wrapper each."""
    cases = "\n".join(
        f"{number}) export NAME={name}; exec {text};;" for number, (name, text) in enumerate(wrappers.items())
    )
    return {
        "table.sh": f"export PYTHON={sys.executable}\ncase $LOCAL_RANK in\n{cases}\nesac\n",
        "wrap.sh": f"{SAVE}\ntouch $NAME.after\n",
        "saver.py": SAVER,
        "service.py": SERVICE,
        "driver.py": DRIVER,
    }


def saved(attempt: Attempt, wrappers: dict[str, str], ends: tuple[str, ...] = ("after", "loader")) -> dict[str, str]:
    """Stop the attempt once all scripts run, and return what is wrong, by wrapper."""
    source = attempt.folders[0] / "source"
    attempt.start()
    for name in wrappers:
        wait_for((source / f"{name}.runs").exists, name)
    attempt.launchers[0].send_signal(signal.SIGTERM)
    assert attempt.wait() == [75]
    return faults_below(source, wrappers, ends)


def faults_below(folder: Path, wrappers: dict[str, str], ends: tuple[str, ...]) -> dict[str, str]:
    """Return what is wrong with the files that a stopped attempt has left, by wrapper."""
    faults = {}
    for name in wrappers:
        path = folder / f"{name}.saved"
        found = [f"{path.read_text()} signals" if path.exists() else "not saved"]
        found += [f"{end} exists" for end in ends if (folder / f"{name}.{end}").exists()]
        log = folder / f"{name}.log"
        if log.exists() and "saved" not in log.read_text():
            found.append("its last line is lost")
        if found != ["1 signals"]:
            faults[name] = ", ".join(found)
    return faults


def test_a_script_behind_any_wrapper_saves(tmp_path):
    """One rank for each wrapper. The helper that ignores the signal does not hold the end for the grace of an hour."""
    files = table(WRAPPERS)
    with Attempt(tmp_path, argv=("table.sh",), files=files, processes=len(WRAPPERS), grace_s=3600) as attempt:
        assert saved(attempt, WRAPPERS) == {}
        assert (tmp_path / "node-0/source/exit-trap.cleaned").exists()
        assert "passed on: ['saving', 'saved']" in attempt.texts(list(WRAPPERS).index("driver"))


@pytest.mark.parametrize("name", ["text", "exit-trap"])
def test_nothing_else_runs_when_the_shell_has_ended(tmp_path, name):
    """Alone on its node: the launcher waits for the script, not for the shell that was its rank."""
    wrappers = {name: WRAPPERS[name]}
    with Attempt(tmp_path, argv=("table.sh",), files=table(wrappers), grace_s=3600) as attempt:
        assert saved(attempt, wrappers) == {}


def test_who_does_not_end_is_killed_after_the_grace(tmp_path):
    deaf = {"deaf": f"bash -c '{SAVE}; touch $NAME.after'"}
    files = table(deaf) | {"saver.py": SAVER.replace("time.sleep(1)", "time.sleep(600)")}
    with Attempt(tmp_path, argv=("table.sh",), files=files, grace_s=2) as attempt:
        assert saved(attempt, deaf) == {"deaf": "not saved"}
        assert attempt.texts(0) == ["saving"]


def test_so_is_who_saves_when_the_shell_died_before_the_request_came(tmp_path):
    """As on Slurm, which signals every process of a job at once."""
    files = {"saver.py": SAVER.replace("time.sleep(1)", "time.sleep(600)")}
    text = "echo $$ > shell; $PYTHON saver.py a; true\n"
    with Attempt(
        tmp_path, argv=(text,), form="shell", files=files, environ={"PYTHON": sys.executable}, grace_s=2
    ) as attempt:
        attempt.set("world/outcome", "SIGNAL_S", 600.0).start()
        wait_for(lambda: (tmp_path / "node-0/source/a.runs").exists(), "the handler")
        os.kill(int((tmp_path / "node-0/source/shell").read_text()), signal.SIGTERM)
        attempt.heard("saving")
        os.kill(attempt.guard(), signal.SIGTERM)
        assert attempt.wait() == [75] and attempt.status()["state"] == "PREEMPTED"


@pytest.mark.long
@pytest.mark.parametrize(
    ("tool", "wrapper"),
    [
        ("tini", "tini -s -- bash wrap.sh"),
        ("tini", f"tini -s -- {SAVE}"),
        ("mpirun", f"mpirun --allow-run-as-root --oversubscribe -n 1 {SAVE}"),
        ("mpirun", "mpirun --allow-run-as-root --oversubscribe -n 1 bash -c 'exec \"$PYTHON\" saver.py $NAME'"),
    ],
)
def test_programs_of_debian(tmp_path, tool, wrapper):
    require(tool)
    wrappers = {"case": wrapper}
    with Attempt(tmp_path, argv=("table.sh",), files=table(wrappers), grace_s=30) as attempt:
        assert saved(attempt, wrappers, ("after",)) == {}


@pytest.mark.long
def test_programs_of_pypi(tmp_path):
    """torchrun and dumb-init signal whole process groups: what their loaders get is not ours."""
    tools = tmp_path / "tools"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tools, "dumb-init", "uv"], check=True
    )
    scripts, tools = Path(sys.executable).parent, tools / "bin"
    wrappers = {
        "dumb-init": f"{tools}/dumb-init {SAVE}",
        "dumb-init-shell": f"{tools}/dumb-init bash wrap.sh",
        "uv": f'{tools}/uv run --no-project --offline --python "$PYTHON" python saver.py $NAME',
        "uv-shell": f'{tools}/uv run --no-project --offline --python "$PYTHON" bash wrap.sh',
        "torchrun": f"{scripts}/torchrun --nproc-per-node=1 --master-port=0 saver.py $NAME",
        "torchrun-shell": f"bash -c '{scripts}/torchrun --nproc-per-node=1 --master-port=0 saver.py $NAME; touch $NAME.after'",
        "accelerate": f"{scripts}/accelerate launch --cpu --num_processes=1 --num_machines=1 saver.py $NAME",
    }
    files = table(wrappers)
    with Attempt(tmp_path / "run", argv=("table.sh",), files=files, processes=len(wrappers), grace_s=600) as attempt:
        assert saved(attempt, wrappers, ("after",)) == {}
