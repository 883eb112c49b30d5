"""Run a command beside a rank, read the stacks of a node's ranks, connect to a port of a node. Runs on the node itself.

It is sent as text (`python3 -c TEXT WORDS`), so it imports the standard library alone, and runs on Python 3.9. Ranks are
found by the environment that the launcher gave them, in /proc. Nothing is traced: no capability is needed.

    exec ATTEMPT NODE RANK TERM CMD...   become CMD, in the folder and environment of a rank ("-": the node's first)
    stack ATTEMPT NODE                   print a line of JSON for each rank
    connect ATTEMPT NODE PORT            copy standard input to a port of this machine, and what it answers to the output
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Dict, Tuple

Environment = Dict[bytes, bytes]  # on a node, Python 3.9
Process = Tuple[int, int, Environment]  # its parent, when it began, its environment

EXIT_BAD = 2  # there is no such rank here
EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127  # as a shell's
SETTLE_S = 0.1  # how long a stack must not grow to be whole
ANSWER_S = 5.0  # how long a process may take to write its stack
# The name of a process's file for stacks, with the signal: entrypoints/path/sitecustomize.py
MARK = "cloudtrain-stacks-"
NESTED = "CLOUDTRAIN_EXEC"  # set in what `exec` starts: it has the environment of a rank, and is none


class Bad(Exception):
    """What was asked for is not on this node."""


def processes(attempt: str, node: int) -> dict[int, Process]:
    """Return pid -> (parent, start, environment) of an attempt's processes of one node."""
    if not os.path.exists("/proc/self/stat"):
        raise Bad("this system has no /proc, where ranks are found")
    mark = b"CLOUDTRAIN_ATTEMPT_ID=" + os.fsencode(attempt)
    found: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        try:
            if not name.isdigit():
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                words = file.read().split(b"\0")
            if mark not in words:
                continue
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:
            continue  # it has ended, or is another user's
        env = dict(word.split(b"=", 1) for word in words if b"=" in word)
        # The launcher has the attempt's id too, and no folders.
        if b"CLOUDTRAIN_CHECKPOINT_DIR" in env and os.fsencode(NESTED) not in env and fields[0] not in (b"Z", b"X"):
            found[int(name)] = (int(fields[1]), int(fields[19]), env)
    # Several nodes of a job may be on one machine, where each has a folder or a number of its own.
    names = {pid: os.path.basename(each[2].get(b"CLOUDTRAIN_NODE_DIR", b"")) for pid, each in found.items()}
    if any(name.startswith(b"node-") for name in names.values()):  # a backend may call its folders otherwise
        return {pid: each for pid, each in found.items() if names[pid] == b"node-%d" % node}
    number = b"%d" % node
    same = {pid: each for pid, each in found.items() if each[2].get(b"NODE_RANK") == number}
    return same or found


def ranks(found: dict[int, Process], node: int) -> dict[int, int]:
    """Return rank -> pid of its first process. One without RANK is that of its node, with roles of its role."""
    first: dict[int, tuple[int, int]] = {}
    has_ranks = any(b"RANK" in env for _, _, env in found.values())
    for pid, (parent, start, env) in found.items():
        rank = env.get(b"RANK")
        if (rank is None) == has_ranks:
            continue  # a launcher of the user's that has started the ranks
        above = found.get(parent)
        if above is not None and above[2].get(b"RANK") == rank:
            continue
        if rank is None:
            rank = b"%d" % node if b"CLOUDTRAIN_ROLE" not in env else env.get(b"CLOUDTRAIN_NODE_RANK", b"0")
        number = int(rank)
        if number not in first or start < first[number][0]:
            first[number] = (start, pid)
    return {rank: first[rank][1] for rank in sorted(first)}


def choose(attempt: str, node: int, rank: str) -> tuple[int, Environment]:
    """Return pid and environment of a rank."""
    found = processes(attempt, node)
    pids = ranks(found, node)
    if not pids:
        raise Bad(f"no rank of {attempt} runs on node {node}: it has ended, or has not started")
    number = min(pids) if rank == "-" else int(rank)
    if number not in pids:
        known = ", ".join(map(str, pids))
        raise Bad(f"rank {number} is not on node {node}, where these run: {known}")
    return pids[number], found[pids[number]][2]


def run(attempt: str, node: int, rank: str, term: str, argv: list[str]) -> int:
    """Become a command in the folder and environment of a rank."""
    pid, env = choose(attempt, node, rank)
    env = dict(env)
    env[os.fsencode(NESTED)] = b"1"
    if term != "-":
        env[b"TERM"] = os.fsencode(term)
    try:
        os.chdir(f"/proc/{pid}/cwd")
        os.chdir(os.getcwd())  # by its own name: the link is gone with the rank
    except OSError as error:
        raise Bad(f"the rank has ended: {error.strerror}") from None
    import signal

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python has turned these off, and a program inherits that
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where `cloudtrain` was started in the background of a script
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    try:
        os.execvpe(os.fsencode(argv[0]), [os.fsencode(word) for word in argv], env)
    except OSError as error:
        sys.stderr.write(f"cloudtrain: {argv[0]}: {error.strerror}\n")
        return EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE


def stacks(attempt: str, node: int) -> Iterator[dict[str, Any]]:
    """Yield what each rank of this node does: its rank, pid, command, state, and its `stack` or `why` there is none."""
    found = processes(attempt, node)
    for rank, pid in ranks(found, node).items():
        text, why = stack(pid)
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            command = ""
        yield {"rank": rank, "pid": pid, "command": command[:300], "state": state(pid), "stack": text, "why": why}


def stack(pid: int) -> tuple[str, str]:
    """Let a process write the stacks of its threads, and return (text, why there is none).

    The signal ends a process that does not handle it. So it is sent only to one that handles it now, as the kernel says,
    and that still has the file which the handler writes to.
    """
    file = memory_file(pid)
    if file is None:
        return "", "it is no Python of this attempt, or was started with -I, -E or -S"
    path, number = file
    if not handles(pid, number):
        return "", f"it no longer handles signal {number}"
    try:
        # Opened anew: a position of its own. The process appends.
        with open(path, "r+b") as memory:
            memory.truncate(0)
            os.kill(pid, number)
            text, changed = b"", time.monotonic()
            while True:
                memory.seek(0)
                now = memory.read()
                if now != text:
                    text, changed = now, time.monotonic()
                elif time.monotonic() - changed >= (SETTLE_S if text else ANSWER_S):
                    break
                time.sleep(0.01)
            memory.truncate(0)
    except ProcessLookupError:
        return "", "it has just ended"
    except OSError as error:
        return "", str(error.strerror)
    if not text:
        return "", f"it did not answer within {ANSWER_S:g} s: it is {state(pid)}"
    return text.decode("utf-8", "replace"), ""


def memory_file(pid: int) -> tuple[str, int] | None:
    """Return path and signal of a process's file for stacks, None where it has none."""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            try:
                target = os.readlink(f"{folder}/{name}")
            except OSError:
                continue
            if target.startswith("/memfd:" + MARK):
                return f"{folder}/{name}", int(target[len("/memfd:" + MARK) :].split()[0])
    except (OSError, ValueError):
        pass
    return None


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def state(pid: int) -> str:
    """Return a process's state in words, and what the kernel waits for in it."""
    words = {"R": "running", "S": "waiting", "D": "waiting for a device", "T": "stopped", "t": "stopped by a debugger"}
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            letter = file.read().rpartition(b") ")[2][:1].decode()
    except OSError:
        return "ended"
    return words.get(letter, letter)


def connect(port: int) -> int:
    """Copy standard input to a port of this machine, and what comes from it to standard output."""
    import socket
    import threading

    try:
        there = socket.create_connection(("127.0.0.1", port), timeout=30)
    except OSError as error:
        raise Bad(f"nothing accepts connections on port {port}: {error.strerror or error}") from None
    there.settimeout(None)

    def send() -> None:
        while True:
            data = os.read(0, 1 << 16)
            if not data:
                break
            there.sendall(data)
        there.shutdown(socket.SHUT_WR)

    def copy() -> None:
        try:
            send()
        except OSError:
            pass  # it has closed the connection: the other direction ends too

    threading.Thread(target=copy, daemon=True).start()
    while True:
        try:
            data = there.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            break
        while data:
            data = data[os.write(1, data) :]
    os._exit(0)  # the thread may wait for input


def main(words: list[str]) -> int:
    """Do what the words ask for, and return the exit code."""
    what, attempt, node = words[0], words[1], int(words[2])
    try:
        if what == "exec":
            return run(attempt, node, words[3], words[4], words[5:])
        if what == "connect":
            return connect(int(words[3]))
        for line in stacks(attempt, node):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        return 0
    except Bad as error:
        sys.stderr.write(f"cloudtrain: {error}\n")
        return EXIT_BAD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
