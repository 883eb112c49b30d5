"""Stop ranks so that whoever handles SIGTERM can save: decide which processes get the signal, and send it.

SIGTERM goes once to the first process on each path of a rank's tree that handles it, and not to its children. What only
waits for others, a shell above all, is held back until they have ended: it would take them along, or go on.
"""

from __future__ import annotations

import os
import signal
from collections import namedtuple
from collections.abc import Collection, Iterable, Mapping

from . import processes
from .world import scheduler

LOOK_S = 0.1  # between two looks at the processes
SERVICE_S = 5.0  # for what a shell started with & to end, after all that trains: a service may answer SIGTERM and stay
OWN_END_S = 5.0  # for what waited for others to end by itself: it passes on their exit code or their last lines
SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "busybox")
# They pass signals on to their child alone, or to its whole group: a shell below them would be killed.
SHIMS = ("tini", "tini-static", "docker-init", "dumb-init", "catatonit", "uv", "timeout")
MPIRUN = ("mpirun", "orterun", "mpiexec", "prterun")  # Open MPI sleeps for all of its time when its ranks have ended
LOADER = "pt_data_worker"  # PyTorch's name of a data loader's worker; without it its parent cannot save
SESSION, USER_TIME, SYSTEM_TIME, THREADS, START = 3, 11, 12, 17, 19  # fields of /proc/PID/stat, counted from the state

Process = namedtuple(
    "Process",
    "parent program handles ignores background stdin outputs",
    defaults=("python", False, False, False, "", ()),
)
Process.__doc__ = """A living process. `program` is its executable's name, `handles` whether it handles SIGTERM, `ignores`
whether it ignores it, `background` whether a shell started it with &, `stdin` and `outputs` name its pipes."""

Steps = namedtuple("Steps", "terminate stop hold left kill")
Steps.__doc__ = """What follows: processes that get SIGTERM, shells that are stopped, what waits for others, what is left to
one of those that have been asked, and what is killed."""


def decide(
    roots: Iterable[int], family: Mapping[int, Process], asked: Collection[int], patient: Collection[int] = ()
) -> Steps:
    """Return what follows in one rank's tree.

    Args:
        roots: the rank's first process, and orphans of processes that were held back or ended early.
        family: its living processes by pid.
        asked: those that have been sent SIGTERM.
        patient: those that have waited for others and may still end by themselves.
    """
    tree = _Tree(family, asked, patient)
    for root in roots:
        tree.visit(root)
    return Steps(tree.terminate, tree.stop, tree.hold, tree.left, tree.kill)


class _Tree:
    def __init__(self, family: Mapping[int, Process], asked: Collection[int], patient: Collection[int]) -> None:
        self._family, self._asked, self._patient = family, asked, patient
        self._children: dict[int, list[int]] = {}
        for pid, process in family.items():
            self._children.setdefault(process.parent, []).append(pid)
        self.terminate: list[int] = []
        self.stop: list[int] = []
        self.hold: list[int] = []
        self.left: list[int] = []
        self.kill: list[int] = []
        self._is_saved = any(map(self._saves, family))

    def visit(self, pid: int) -> None:
        process, children = self._family.get(pid), self._children.get(pid, [])
        if process is None:
            return
        is_shell, is_shim = process.program in SHELLS, process.program in SHIMS
        if pid not in self._asked and self._reads(pid, process):
            self.hold.append(pid)
            return
        if pid in self._patient and process.stdin:
            return  # with what it has started for the last lines
        if process.handles and not is_shim:
            if pid not in self._asked:
                self.terminate.append(pid)
            elif process.program in MPIRUN and not children:
                self.kill.append(pid)
            for child in children:
                # A shell runs its trap after its foreground process; its trap cares for those in the background.
                if is_shell and not self._family[child].background:
                    self.visit(child)
                else:
                    self._leave(child)
            return
        below = [self._family[child] for child in children if child in self._asked]
        waits = len(below) < len(children) or any(child.handles or not child.ignores for child in below)
        if waits and (is_shell or is_shim or self._saves_below(pid)):
            (self.stop if is_shell else self.hold).append(pid)
        elif pid not in self._patient:
            if pid not in self._asked and (is_shell or not self._is_saved):
                self.terminate.append(pid)
            return
        for child in children:
            self.visit(child)

    def _leave(self, pid: int) -> None:
        self.left.append(pid)
        for child in self._children.get(pid, ()):
            self._leave(child)

    def _saves(self, pid: int) -> bool:
        """Return whether a process handles the signal, and is no service of or beside a Python process that trains."""
        process = self._family[pid]
        if not process.handles or process.program in SHIMS:
            return False
        if _may_be_service(process) and any(map(_trains, self._family.values())):
            return False
        parent = self._family.get(process.parent)
        trains = parent is not None and not parent.handles and parent.program.startswith("python")
        return not trains or process.program.startswith("python") or process.program in SHELLS

    def _saves_below(self, pid: int) -> bool:
        return any(self._saves(child) or self._saves_below(child) for child in self._children.get(pid, ()))

    def _reads(self, pid: int, reader: Process) -> bool:
        """Return whether a process reads what another one still writes, as `tee` does."""
        if not reader.stdin:
            return False
        above, parent = {pid}, reader.parent
        while parent in self._family:
            above.add(parent)
            parent = self._family[parent].parent
        return any(
            reader.stdin in writer.outputs and (writer.handles or not reader.handles)
            for other, writer in self._family.items()
            if other not in above
        )


class Grace:
    """Stops one rank; to be asked every LOOK_S until it has ended or its time is over.

    Args:
        root: pid of the rank's first process.
        deaf: what ignored SIGTERM before the stop, by pid its start time, where a scheduler signals every process; a
            process that ignores it only now saves.
    """

    def __init__(self, root: int, deaf: Mapping[int, bytes] | None = None) -> None:
        self._root, self._deaf = root, deaf
        self._seen: dict[int, bytes] = {}  # pid -> start time, of what is or was in its tree
        self._left: set[int] = set()
        self._asked: dict[int, bytes] = {}
        # Of those: one that ends has no handlers any more, and its children stay its own.
        self._handlers: set[int] = set()
        self._stopped: set[int] = set()
        self._held: dict[int, float] = {}
        self._services_end: float | None = None  # once something in the foreground has been asked
        self._worked: dict[int, tuple[int, float]] = {}  # pid -> its processor time, and when that last changed
        self.saving = False  # one that has been asked and handles the signal still runs

    def look(self, stats: Mapping[int, list[bytes]], now: float) -> None:
        """Send what is due; `stats` are the descendants of this process, as processes.descendants."""
        children: dict[int, list[int]] = {}
        for pid, fields in stats.items():
            children.setdefault(int(fields[1]), []).append(pid)
        roots = [pid for pid in children.get(os.getpid(), ()) if self._is_ours(pid, stats[pid])]
        family: dict[int, Process] = {}
        queue = list(roots)
        while queue:
            pid = queue.pop()
            if pid not in stats or pid in family or not _is_alive(stats[pid]):
                continue
            if process := read_process(pid, stats[pid]):  # its children are orphans else, and are seen next time
                family[pid] = process
                queue += children.get(pid, ())
        if self._deaf is not None:
            saving = [pid for pid in family if family[pid].ignores and self._deaf.get(pid) != stats[pid][START]]
            self._asked.update((pid, stats[pid][START]) for pid in saving)
            self._handlers.update(saving)
            self._deaf = None  # what ignores it later was asked by us
        asked = {pid for pid in family if self._asked.get(pid) == stats[pid][START]}
        family.update((pid, family[pid]._replace(handles=True)) for pid in asked & self._handlers)
        if self._services_end is not None and now >= self._services_end:
            services = [pid for pid in asked if _may_be_service(family[pid])]
            idle = [pid for pid in asked if family[pid].background and not self._is_at_work(pid, stats, children, now)]
            family.update((pid, family[pid]._replace(handles=False, ignores=True)) for pid in services + idle)
        patient = {pid for pid, at in self._held.items() if now - at < OWN_END_S}
        steps = decide(roots, family, asked, patient)
        for pid in steps.stop:
            if pid not in self._stopped:
                self._stopped.add(pid)
                processes.kill(pid, signal.SIGSTOP)
        for pid in steps.terminate:
            self._asked[pid] = stats[pid][START]
            if not (family[pid].program == "srun" and scheduler.signal_tasks()):
                processes.kill(pid, signal.SIGTERM)
            if pid in self._stopped:
                processes.kill(pid, signal.SIGCONT)
        for pid in steps.kill:
            processes.kill(pid, signal.SIGKILL)
        self._held.update(dict.fromkeys(steps.hold, now))
        self._seen.update((pid, stats[pid][START]) for pid in family)
        self._left.update(steps.left)
        self._handlers.update(pid for pid in steps.terminate if family[pid].handles)
        told = [family[pid] for pid in (*asked, *steps.terminate)]
        self.saving = any(process.handles for process in told)
        if any(_trains(process) for process in told):
            self._services_end = now + SERVICE_S

    def _is_at_work(
        self, pid: int, stats: Mapping[int, list[bytes]], children: Mapping[int, list[int]], now: float
    ) -> bool:
        """Return whether a process, or one below it, has used a processor or a disk in the last SERVICE_S."""
        below, used, waits_for_disk = [pid], 0, False
        for each in below:
            fields = stats[each]
            used += int(fields[USER_TIME]) + int(fields[SYSTEM_TIME])
            waits_for_disk |= fields[0] == b"D"
            below += children.get(each, ())
        last, at = self._worked.get(pid, (-1, now))
        if used != last or waits_for_disk:
            at = now
        self._worked[pid] = used, at
        return now - at < SERVICE_S

    def _is_ours(self, pid: int, fields: list[bytes]) -> bool:
        """Whether it is the rank's first process, or an orphan of its: of a shell that somebody else ended, for instance."""
        known = self._seen.get(pid, fields[START] if int(fields[SESSION]) == self._root else None)
        return known == fields[START] and pid not in self._left


def _may_be_service(process: Process) -> bool:
    """Return whether a process is in the background and runs no Python, which may train there."""
    return process.background and not process.program.startswith("python")


def _trains(process: Process) -> bool:
    """Return whether a process is what a stop is for, and nothing beside it."""
    return not process.background and (process.handles or process.program.startswith("python"))


def find_deaf() -> dict[int, bytes]:
    """Return the descendants of this process that ignore SIGTERM, by pid their start time."""
    stats = processes.descendants(os.getpid())
    found = {pid: read_process(pid, fields) for pid, fields in stats.items()}
    return {pid: stats[pid][START] for pid, process in found.items() if process and process.ignores}


def _is_alive(fields: list[bytes]) -> bool:
    return fields[0] not in (b"Z", b"X") or int(fields[THREADS]) > 1


def read_process(pid: int, fields: list[bytes]) -> Process | None:
    """Return what /proc says of a process, None once it has gone."""
    masks = dict.fromkeys((b"SigBlk", b"SigIgn", b"SigCgt"), 0)
    name = ""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                key, _, value = line.partition(b":")
                if key in masks:
                    masks[key] = int(value, 16)
                elif key == b"Name":
                    name = value.strip().decode("utf-8", "replace")
    except OSError:
        return None
    ignored = masks[b"SigIgn"]
    return Process(
        int(fields[1]),
        os.path.basename(_link(f"/proc/{pid}/exe")) or name,
        bool((masks[b"SigCgt"] | masks[b"SigBlk"]) & _bit(signal.SIGTERM)) and name != LOADER,
        bool(ignored & _bit(signal.SIGTERM)),
        bool(ignored & _bit(signal.SIGQUIT)),  # of SIGINT too, but most servers handle that one
        _pipe(pid, 0),
        (_pipe(pid, 1), _pipe(pid, 2)),
    )


def _bit(number: int) -> int:
    return 1 << (number - 1)


def _pipe(pid: int, descriptor: int) -> str:
    target = _link(f"/proc/{pid}/fd/{descriptor}")
    return target if target.startswith("pipe:") else ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
