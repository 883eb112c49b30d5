"""The cluster's state and the attempt's outcome: which nodes joined, which failed first, who stops; no I/O.

Nodes join, say that they are ready, and start together. The first failure by time over all nodes, a lost node or a
request to stop ends all ranks everywhere: none continues in a world that is no longer whole. After a failure that may
pass they start again on the same nodes, where the job says so (retry.restarts); else the attempt ends.
"""

from __future__ import annotations

from collections import namedtuple

from ..health.verdict import Check, Checks
from ..manifest import Manifest
from . import platforms
from .roles import RoleStarts

EXIT_RESUMABLE = 75  # left on request
EXIT_REFUSED = 78  # refused before training
EXIT_LOST = 69  # a node is gone; its exit code is not known
EXIT_FINAL = 1  # in place of a code that starts the pod again
SETTLE_S = 1.0  # how long the message of another node's earlier failure may take
LEFT_S = 60.0  # how long a rank may have ended with 0, and others run, before it is said
SIGNAL_S = 3.0  # how long after a rank died of SIGTERM or SIGINT the same request may still reach a supervisor
TERMINATED = (128 + 15, 128 + 2)
# What an attempt that hangs is asked to stop with: nothing happens, no GPU works, no line is printed. It is LOST, and may
# be tried again.
STALLED, IDLE, SILENT = "STALLED", "IDLE", "SILENT"
HUNG = (STALLED, IDLE, SILENT)
CLOCKS_AGREE_S = 1.0  # below this a difference between clocks is taken for the time of travel

Outcome = namedtuple("Outcome", "state exit_code by failed_rank reason", defaults=("launcher", None, ""))
Outcome.__doc__ = "How the attempt ended, the same on every node; exit_code is None where none is known (LOST)."

Start = namedtuple("Start", "node_ranks")
Start.__doc__ = "All ranks start now: the nodes that take part, in the order of their new node ranks."

Restart = namedtuple("Restart", "number reason")
Restart.__doc__ = "All nodes end their ranks, and start them again when each has reported that it is ready."


def launcher_code(outcome: Outcome) -> int:
    """Return what the launcher exits with."""
    return EXIT_LOST if outcome.exit_code is None else outcome.exit_code


def container_code(outcome: Outcome, platform: str) -> int:
    """Return what the launcher exits with on a platform that starts a container again by its exit code.

    Vertex AI does so by 134; a Kubernetes Job by 75 and 69, with which nothing else may leave there.
    """
    code, does = launcher_code(outcome), platforms.of(platform)
    if does.preempted_code is not None and outcome.state == "PREEMPTED":
        return int(does.preempted_code)
    if code in does.restart_codes and outcome.state not in ("PREEMPTED", "LOST"):
        return EXIT_FINAL
    return code


def refused_outcome(reason: str) -> Outcome:
    """Return the outcome of an attempt that cannot begin."""
    return Outcome("FAILED", EXIT_REFUSED, "launcher", None, reason)


def missing_outcome(reason: str) -> Outcome:
    """Return the outcome of an attempt whose machines did not all come: another one may find them."""
    return Outcome("PREEMPTED", EXIT_RESUMABLE, "launcher", None, reason)


class _Node:
    def __init__(self, hostname: str) -> None:
        self.hostname = hostname
        self.ready = False
        self.ended = False
        self.clock: float | None = None  # seconds to add to its times; None before its first heartbeat


class ClusterState:
    """The attempt as node 0 sees it. `decide` is called after every event and returns what follows, once."""

    def __init__(self, manifest: Manifest, join_by: float, join_s: float) -> None:
        self._manifest = manifest
        self._join_by = join_by
        self._join_s = join_s
        self._nodes: dict[int, _Node] = {}
        self._started = False
        self._decided = False
        self._failures: list[tuple[float, int, Outcome, bool]] = []  # when, on which node, whether it may pass
        self._first_failure: Outcome | None = None  # of all that a restart followed
        self.restarts = 0
        self._settle_by: float | None = None
        self._refused: str | None = None
        self._lost: Outcome | None = None
        self._lost_node = -1
        self._ranks: list[int] = []  # all that started
        self._left_ranks: dict[int, float] = {}  # those that ended with 0, and when
        self._left_said = False
        self._signs: dict[
            int, tuple[float, float, float]
        ] = {}  # of life, by node: seconds of silence, idle CPU, idle GPUs
        self.stopping: str | None = None
        self._stopped_at = 0.0
        self.roles = RoleStarts(manifest.roles)
        self.checks = Checks(manifest, own_machine=True)
        self.closed = False  # no other node may join: the nodes take their GPUs

    def join(self, node: int, hostname: str, processes: int) -> str | None:
        """Take a node in, or return why not."""
        if self._started or self._decided or self.closed or self.checks.begun:
            return "the attempt has started without it"
        if not 0 <= node < self._manifest.nodes:
            return f"node rank {node} is not one of {self._manifest.nodes} nodes"
        if node in self._nodes:
            return f"node rank {node} is already used by {self._nodes[node].hostname}"
        if processes != (wanted := self._manifest.processes_of(node)):
            return f"node {node} would start {processes} processes, not {wanted}"
        self._nodes[node] = _Node(hostname)
        return None

    def name(self, node: int) -> str:
        """Return a node's number with the name that its platform has for it."""
        return f"node {node} ({self._nodes[node].hostname})"

    def join_by(self, moment: float) -> None:
        """Let the nodes join until an earlier moment: another node has waited longer than this one."""
        self._join_by = min(self._join_by, moment)

    @property
    def missing(self) -> list[int]:
        """The nodes that have not joined yet, while they may."""
        if self._started or self._decided or self.closed or self.checks.begun:
            return []
        return [node for node in range(self._manifest.nodes) if node not in self._nodes]

    def record_clock(self, node: int, at: float, now: float) -> None:
        """Record from a node's heartbeat how its clock differs from ours."""
        entry = self._nodes[node]
        entry.clock = now - at if entry.clock is None else min(entry.clock, now - at)

    def idle(self, node: int, quiet_s: float, idle_s: float, gpus_idle_s: float) -> None:
        """Record for how long no rank of a node has printed a line, the idlest has used no CPU, and none a GPU."""
        self._signs[node] = (quiet_s, idle_s, gpus_idle_s)

    @property
    def hung(self) -> str | None:
        """STALLED, SILENT or IDLE where a limit of the job is reached.

        SILENT: no rank of any node has printed a line. STALLED: and one has used no CPU. IDLE: no node has used its GPUs.
        """
        going = [number for number, node in self._main() if not node.ended]
        if self._decided or self.stopping or not going or any(n not in self._signs for n in going):
            return None
        quiet_s = min(quiet for quiet, _, _ in self._signs.values())
        silent_s = min(quiet_s, max(self._signs[number][1] for number in going))
        if self._manifest.stall_s and silent_s >= self._manifest.stall_s:
            return STALLED
        if self._manifest.silence_s and quiet_s >= self._manifest.silence_s:
            return SILENT
        gpus_idle_s = min(self._signs[number][2] for number in going)
        return IDLE if self._manifest.idle_s and gpus_idle_s >= self._manifest.idle_s else None

    def ready(self, node: int) -> None:
        self._nodes[node].ready = True

    def refuse(self, node: int, reason: str) -> None:
        self._refused = self._refused or self._on(node, reason)

    def fail(self, node: int, rank: int, code: int, at: float, reason: str, passes: bool = False) -> None:
        """A rank ended badly at a time by its own node's clock; `rank` is the global one, -1 for a service."""
        clock = self._nodes[node].clock or 0.0
        at += clock if abs(clock) > CLOCKS_AGREE_S else 0.0
        if self._is_due_again:
            return  # a report of the world that has ended
        if self.stopping is None or at < self._stopped_at:
            failed = rank if rank >= 0 else None
            outcome = Outcome("FAILED", code, "script", failed, self._on(node, reason))
            self._failures.append((at, node, outcome, passes))

    def leave(self, rank: int, now: float) -> None:
        """A rank has ended with 0. `now` is monotonic."""
        if not self.stopping and not self._failures and not self._is_due_again:
            self._left_ranks[rank] = now

    def left_early(self, now: float) -> str:
        """Return once which ranks have ended with 0 while others run, when that has lasted for long; "" otherwise."""
        running = [rank for rank in self._ranks if rank not in self._left_ranks]
        if self._left_said or self.stopping or self._decided or not self._left_ranks or not running:
            return ""
        if now - min(self._left_ranks.values()) < LEFT_S:
            return ""
        self._left_said = True
        left, verb = _count(list(self._left_ranks)), "has" if len(self._left_ranks) == 1 else "have"
        return f"{left} {verb} ended with 0, {_count(running)} still run{'s' * (len(running) == 1)}"

    def end(self, node: int) -> None:
        """All ranks of a node have ended, well or after a request."""
        self._nodes[node].ended = not self._is_due_again

    def lose(self, node: int, why: str) -> None:
        """A node does not answer any more."""
        entry = self._nodes.get(node)
        if entry is None or (entry.ended and self.stopping):
            return
        if self.stopping:
            entry.ended = True  # a machine that is taken away after the notice
        elif self._lost is None:
            self._lost = Outcome("LOST", None, "launcher", None, f"node {node} ({entry.hostname}) was lost: {why}")
            self._lost_node = node

    def stop(self, state: str, at: float) -> None:
        """Somebody asks all ranks to leave: PREEMPTED, TIMED_OUT or CANCELLED, which outweighs PREEMPTED."""
        if self.stopping is None:
            self.stopping, self._stopped_at = state, at
            # A scheduler may signal ranks and supervisors at once: who died of that has left on request.
            self._failures = [failure for failure in self._failures if failure[2].exit_code not in TERMINATED]
            if not self._failures:
                self._settle_by = None
        elif state == "CANCELLED" and self.stopping == "PREEMPTED":
            self.stopping = state

    @property
    def patience_s(self) -> float:
        """How long `decide` may be left waiting when nothing happens."""
        return 0.02 if self._settle_by is not None else 1.0

    def decide(self, now: float) -> Check | Start | Restart | Outcome | None:
        """Return what follows now: a check of the nodes, that all start or start again, the outcome, or None.

        `now` is monotonic.
        """
        if self._decided:
            return None
        decision = self._running(now) if self._started else self._joining(now)
        if isinstance(decision, Start):
            self._started = True
            count, nodes = self._manifest.processes_per_node, min(len(decision.node_ranks), self._manifest.main_nodes)
            self._ranks = list(range(0, nodes * count, 1 if self._manifest.form == "script" else count))
        elif isinstance(decision, Outcome):
            self._decided = True
        return decision

    def _joining(self, now: float) -> Check | Start | Outcome | None:
        if self.stopping:
            return self._left()
        if self._refused is not None:
            return refused_outcome(self._refused)
        if self._lost is not None:
            return self._lost
        asked, fewest = self._manifest.nodes, self._manifest.fewest_nodes
        if len(self._nodes) < asked and not self.checks.begun:
            if now < self._join_by:
                return None
            if len(self._nodes) < fewest:
                least = f" (min_nodes is {fewest})" if fewest < asked else ""
                return missing_outcome(
                    f"{len(self._nodes)} of {asked} nodes joined within {self._join_s:g} s{least}; missing: "
                    + ", ".join(map(str, self.missing))
                )
        if all(node.ready for node in self._nodes.values()):
            names = {number: self.name(number) for number in sorted(self._nodes)}
            decision = self.checks.decide(names, now)
            if isinstance(decision, str):
                return Outcome("LOST", None, "launcher", None, decision)
            return Start(tuple(names)) if decision is True else decision
        return None

    @property
    def _is_due_again(self) -> bool:
        """Whether the world has ended and not yet started again."""
        return self.restarts > 0 and not self._started

    def _restart(self) -> Restart | None:
        """Begin to start the world again, where the first failure may pass and the job allows one more."""
        if self._lost is not None or self.stopping or self.restarts >= self._manifest.restarts:
            return None
        _, _, first, passes = min(self._failures)
        if not passes:
            return None
        self._first_failure = self._first_failure or first
        self.restarts += 1
        self.closed, self._started, self.checks = True, False, self.checks.again()
        self._failures, self._settle_by, self._left_ranks, self._signs = [], None, {}, {}
        for node in self._nodes.values():
            node.ready = node.ended = False
        return Restart(self.restarts, first.reason)

    def _running(self, now: float) -> Outcome | Restart | None:
        if self._refused is not None:
            return refused_outcome(self._refused)
        if self._failures or self._lost is not None:
            if self._settle_by is None:
                self._settle_by = now + self._patience()
            if now >= self._settle_by:
                return self._restart() or self._first()
            return None
        if all(node.ended for _, node in self._main()):
            return self._left() if self.stopping else Outcome("SUCCEEDED", 0, "script")
        return None

    def _main(self) -> list[tuple[int, _Node]]:
        """Return the nodes of the main role, with whose end the attempt ends; of a job without roles, all."""
        return [(number, node) for number, node in self._nodes.items() if number < self._manifest.main_nodes]

    def _first(self) -> Outcome | None:
        """Return what came first: a rank whose peer's machine vanished fails too, often before that node counts as lost."""
        failures = self._failures
        if self._lost is not None:
            failures = [failure for failure in failures if failure[1] == self._lost_node]
        if not failures:
            return self._lost
        _, _, first, passes = min(failures)
        if passes and self._first_failure is not None:
            last, first = first, self._first_failure
            first = first._replace(
                reason=f"{first.reason}; after {self.restarts} restart{'s' * (self.restarts > 1)} it ended with: {last.reason}"
            )
        left = f"; {_count(list(self._left_ranks))} had ended with 0" if self._left_ranks else ""
        return first._replace(reason=first.reason + left)

    def _patience(self) -> float:
        if any(outcome.exit_code in TERMINATED for _, _, outcome, _ in self._failures):
            return SIGNAL_S
        return SETTLE_S if len(self._nodes) > 1 else 0.0

    def _left(self) -> Outcome:
        if self.stopping in HUNG:
            return Outcome("LOST", None, "launcher", None, hung_reason(self.stopping, self._manifest))
        reasons = {
            "PREEMPTED": "stopped by SIGTERM",
            "CANCELLED": "cancelled",
            "TIMED_OUT": "no GPUs were free within limits.max_wait"
            if self.closed and not self._started and not self.restarts
            else f"max_runtime ({self._manifest.max_runtime_s:g} s) was over",
        }
        before = "" if self._started or self.restarts else " before the ranks started"
        return Outcome(self.stopping, EXIT_RESUMABLE, "launcher", None, reasons[self.stopping or ""] + before)

    def _on(self, node: int, reason: str) -> str:
        return f"node {node}: {reason}" if self._manifest.nodes > 1 else reason


def _count(ranks: list[int]) -> str:
    """Return ranks in words, of many only how many there are."""
    if len(ranks) > 4:
        return f"{len(ranks)} ranks"
    words = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' * (len(ranks) > 1)} " + " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def hung_reason(state: str, manifest: Manifest) -> str:
    """Return why an attempt that hangs is ended."""
    if state == STALLED:
        return f"nothing happened for {manifest.stall_s:g} s (limits.stall)"
    if state == SILENT:
        return f"no rank printed a line for {manifest.silence_s:g} s (limits.max_silence)"
    return f"the GPUs were not used for {manifest.idle_s:g} s (limits.idle)"
