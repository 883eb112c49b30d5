"""Node supervisor: prepare the node, start the ranks together with the other nodes, end all processes at the end.

One thread and one loop; only the preparation has a thread of its own (preparation.py).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from . import manifest as manifests
from . import processes, resume
from .clock import SYSTEM, Clock
from .environment import Prepared, command, measuring_environment, program_environments
from .errors import Refused
from .log import KeptLog, Log, PlainLog
from .loop import Loop
from .preparation import Preparation
from .ranks import Ranks, manner
from .reports import Reports
from .restarts import Restarts
from .result import finish_output, report
from .stall import STACKS_S, StallDetector, show_stacks
from .status import Status, stamp
from .stdin import Lease, check_world, later_rank, sagemaker_file, standard_input, starter_died
from .world import cluster as clusters
from .world import roles, scheduler
from .world.channel import Listener, World, proof
from .world.cluster import SHARED_GPUS
from .world.coordinator import Coordinator, channel_end
from .world.outcome import (
    EXIT_LOST,
    EXIT_REFUSED,
    HUNG,
    TERMINATED,
    Outcome,
    container_code,
    hung_reason,
    refused_outcome,
)

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from .health.check import NodeCheck
    from .service import Service
    from .shared_gpus import SharedGpus
    from .world.worker import Worker

TICK_S = 1.0
SHORT_GRACE_S = 5.0  # for ranks whose world is broken: nothing they could save would be whole
LOST_GRACE_S = 3.0  # the same after a lost node, so that silence (channel.SILENCE_S) and grace end within 15 s
SECOND_REQUEST_S = 3.0  # a scheduler signals every process of a job at once: guard and supervisor both receive it
EXIT_BROKEN = 70  # an error of the launcher itself
FINISHED_S = 900.0  # there: how long nodes wait for the uploads of all others


class Supervisor:
    """One attempt on this node, from the first write of status.json to the last."""

    def __init__(
        self, environ: Mapping[str, str], source: str, guard: int, lifeline: int, clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        self._environ, self._source, self._lifeline = environ, source, lifeline
        folder = environ.get("CLOUDTRAIN_NODE_DIR") or None
        self.status = Status(folder, guard, clock)
        if folder:
            os.makedirs(folder, exist_ok=True)
        self.log = Log.in_folder(folder, clock) if folder else self._standard_output()
        self._loop = Loop(clock)
        self._ranks = Ranks(self._loop, self.log, self._rank_ended)
        self._peers: Coordinator | Worker | None = None
        self._prepared: Prepared | None = None
        self._outcome: Outcome | None = None
        self._guard_died = False
        self._stopping: str | None = None
        self._asked_at: float | None = None  # when the first request to stop came
        self._cancelled = False  # a person asked
        self._ended = False  # all ranks have
        self._restarts = Restarts(self._ranks)
        self._kill_at: float | None = None
        self._end_at: float | None = None  # when max_runtime, or this slice of it, is over
        self._end_state = "TIMED_OUT"
        self._lease: Lease | None = None
        self._stall: StallDetector | None = None
        self._reports: Reports | None = None
        self._preparation: Preparation | None = None
        self._shared: SharedGpus | None = None
        self._health: NodeCheck | None = None  # the measurement of this node, if there was one
        self._service: Service | None = None  # where this node's role is one
        self._programs: list[tuple[int, list[str], dict[str, str], str]] = []  # that this node runs
        if environ.get(SHARED_GPUS):
            self.status.fields["started_at"] = None  # until it has them

    def _standard_output(self) -> Log:
        return (PlainLog if later_rank(self._environ) else KeptLog)(1, clock=self._clock)

    def run(self) -> int:
        """Supervise until the end and return the launcher's exit code; blocking."""
        self._loop.watch_signals(self._signalled)
        if self._lifeline >= 0:
            self._loop.watch(self._lifeline, self._guard_gone)
        self.status.set()
        self.log.event("state", state="STARTING")
        try:
            self._begin()
            self._attend()
        except Refused as reason:
            self._outcome = self._outcome or refused_outcome(str(reason))
        except Exception:
            import traceback

            text = traceback.format_exc()
            self.log.say(text.rstrip())
            broken = f"internal error of the launcher: {text.splitlines()[-1]}"
            self._outcome = Outcome("FAILED", EXIT_BROKEN, "launcher", None, broken)
        return self._finish(
            self._outcome or refused_outcome("the launcher could not tell whether the job succeeded or failed")
        )

    def _begin(self) -> None:
        config, hyperparameters = sagemaker_file("resourceconfig.json"), sagemaker_file("hyperparameters.json")
        whole = sagemaker_file("../data/cloudtrain-manifest/manifest")
        self._manifest = manifest = manifests.decode(manifests.pieces(self._environ, hyperparameters, whole))
        cluster = clusters.resolve(self._environ, config)
        placed = clusters.in_groups(cluster, config, [role["name"] for role in manifest.roles])
        if placed.node_rank != cluster.node_rank:
            self.log.say(f"by its instance group this host, {placed.host}, is node {placed.node_rank}")
        cluster = placed
        if cluster.does.has_pod_names and cluster.node_rank > 0:
            cluster = cluster._replace(control_host=clusters.absolute(cluster.control_host))
        self._cluster = cluster
        stdin_data = standard_input() if self._environ.get("CLOUDTRAIN_STDIN") == "1" else {}
        for value in (stdin_data.get("token"), *(stdin_data.get("secrets") or {}).values()):
            if value:
                self.log.masks.hide(value)
        check_world(manifest, cluster, self._environ)
        manifest.take_role(cluster.node_rank)
        self._cluster = cluster = clusters.with_own_gpus(cluster, manifest, self._environ)
        if manifest.is_service and manifest.role:
            from .service import Service

            self._environ = dict(self._environ)  # the job's credentials that stores' clients get are not the service's
            self._service = Service(manifest.role, self._loop, lambda: self._peers.up())
            printed = self._service.printed
            self._ranks.printed = lambda rank, lines: printed(lines)
        self.status.fields["world_size"] = manifest.world_size
        self._lease = Lease.of(self._environ, self._clock)
        if self._environ.get(SHARED_GPUS):
            from .shared_gpus import SharedGpus

            self._shared = SharedGpus(manifest, self._environ, self.log)
        listener = Listener(
            self._start,
            self._stop,
            self._decided,
            self.log,
            self._shared and self._shared.turn.set,
            self._begin_time,
            self._check,
            self._restart,
        )
        token = stdin_data.get("token") or ""
        if token and manifest.argv[:1] == [manifests.RAY]:
            secret = proof(token, "ray", "")
            self.log.masks.hide(secret)
            self._environ = {"RAY_AUTH_TOKEN": secret, **self._environ}
        self._peers = channel_end(self._loop, manifest, cluster, self._environ, token, listener)
        if self.status.cancelled:
            self._request()
        if isinstance(self._peers, Coordinator) and (slice_end := self._environ.get("CLOUDTRAIN_SLICE")):
            at, self._end_state = slice_end.split()
            self._end_at = self._clock.monotonic() + float(at) - self._clock.now()
        control = self._peers.open()
        if control:
            self.status.set(control={"host": control[0], "port": control[1]})
        if self._shared is not None:
            self._shared.queue(self._peers)
        self._preparation = Preparation(
            manifest, cluster, self._environ, self._source, self.log, self.status.fields, self._shared
        )
        self._preparation.start(stdin_data.get("secrets") or {})

    def _end_if_replaced(self) -> None:
        """End the ranks at once where a later start of the run has begun: it waits for that."""
        if self._preparation.starts is not None:
            self._preparation.starts.beat()
        if self._outcome is None and (reason := self._preparation.replaced()):
            self._kill_at = self._clock.monotonic()
            self._peers.refuse(reason)

    def _attend(self) -> None:
        """Answer to signals, output, other nodes and the clock until the attempt and all of its ranks have ended."""
        beat = self._clock.monotonic()
        self._reports = reports = Reports(self._loop, self.log, self._manifest, self._environ)
        if self._service is None and self._manifest.nodes > 1:
            self._ranks.printed = reports.pace.printed
        while not self._guard_died:
            now = self._clock.monotonic()
            self._ranks.look()
            self._report_end()
            if self._outcome is not None and not self._ranks.active and self._peers.settled:
                return
            self._loop.wait(self._pause(now))
            now = self._clock.monotonic()
            if self._health is not None:
                self._health.look()
            if self._shared is not None and self._outcome is None:
                self._shared.report(self.status, self._peers)
            self._take_preparation()
            self._keep_times(now)
            if self._service is not None and self._stopping is None and self._outcome is None:
                self._service.watch(self._start_ranks, self._peers.refuse)
            due = now - beat >= TICK_S
            if due:
                beat = now
                self._look(reports, now)
            self._peers.tick(due)

    def _take_preparation(self) -> None:
        """Say to the other nodes how this node's preparation has ended, where it has."""
        result = self._preparation.take_result()
        if isinstance(result, Refused):
            self._peers.refuse(str(result))
        elif result is not None:
            self._prepared, self._cluster = result, self._preparation.cluster
            self._peers.ready()

    def _keep_times(self, now: float) -> None:
        """Kill ranks that did not end in their grace, and stop the attempt where its time is over."""
        if self._kill_at is not None and now >= self._kill_at:
            self._ranks.kill()
            self._kill_at = now + 1.0
        if self._end_at is not None and now >= self._end_at:
            self._end_at = None
            if self._end_state == "PREEMPTED":
                self.log.say("this time slice is over: the ranks save and exit, and the next slice resumes")
            self._peers.stop(self._end_state)

    def _look(self, reports: Reports, now: float) -> None:
        """Look, once a tick, for a later start, a request to cancel, the end of a lease and a stall; measure usage."""
        self.log.flush()
        self._end_if_replaced()
        if self._prepared is not None and self._prepared.sync is not None:
            self._prepared.sync.freshness.look()
        if self.status.cancelled and not self._cancelled:
            self._request()
        if self._lease is not None and self._stopping is None and self._lease.over():
            self.log.say(
                f"no cloudtrain process has contacted this job for {self._lease.length_s:g} s (lease_s of the target):"
                " the ranks save and exit, and `cloudtrain resume` continues the run"
            )
            self._peers.stop("PREEMPTED")
        if self._stall is not None and self._stall.look(self._ranks.running, now):
            self._peers.idle(now - self.log.printed_at, self._stall.idle_s(now), reports.gpus_idle_s)
        if reports.look(self._ranks.running, now):
            self._peers.pace(reports.speed)
            if self._cluster.does.signals_all:
                self._ranks.find_deaf()

    def _pause(self, now: float) -> float:
        """Return how long the loop may sleep."""
        pause = 0.05 if self._outcome is not None or self._stopping else TICK_S
        pause = min(pause, self._peers.patience_s, self._service.patience_s if self._service is not None else pause)
        for moment in (self._kill_at, self._end_at):
            if moment is not None:
                pause = min(pause, max(0.0, moment - now))
        return pause

    def _begin_time(self) -> None:
        """The first ranks start: from now on the time counts."""
        if self._end_at is None:
            self._end_at = self._clock.monotonic() + self._manifest.max_runtime_s

    def _check(self, world: World) -> None:
        """Measure this node: all nodes are ready, and are compared before their ranks start."""
        from .health.check import NodeCheck

        assert self._prepared is not None, "nodes are measured when every node is ready"
        self._health = NodeCheck(self._loop, self.log, self._cluster.name, self._peers.checked)
        env = measuring_environment(self._environ, self._manifest, self._cluster, world, self._prepared, self._source)
        self._health.start(self._prepared.python, env, self._source)

    def _start(self, world: World) -> None:
        """All nodes are ready: start the ranks."""
        manifest, prepared = self._manifest, self._prepared
        assert prepared is not None, "the ranks start when every node is ready"
        assert self._reports is not None, "it is made before the loop"
        if limit_s := min(
            (each for each in (manifest.stall_s, manifest.idle_s, manifest.silence_s) if each), default=None
        ):
            manifest.env.setdefault("PYTHONFAULTHANDLER", "1")  # what writes the stacks of a rank that hangs
        if world.roles:
            self._environ = {**self._environ, **roles.variables(world.roles)}
            prepared.placeholders.update(roles.placeholders(world.roles))
        world_size, environments = program_environments(
            self._environ, manifest, self._cluster, world, prepared, self._source
        )
        self._reports.world(world, world_size, self._cluster)
        resumed = resume.arguments(manifest, prepared)
        if resumed:
            self.log.say(f"resume_args: {' '.join(resumed)}")
        argv = command(prepared, manifest, self.log, resumed)
        self._reports.begin(prepared, self._cluster)
        if not world.restarts:
            prepared.keeper.begin()
        self._restarts.under_way = False
        if self._cluster.does.signals_all:
            self._ranks.find_deaf()
        self._programs = [(rank, argv, env, self._source) for rank, env in environments.items()]
        if self._service is not None:
            self._service.host = world.addresses[world.node_rank]
        if not self._start_ranks(manifest.role["ports"] if manifest.role else ()):
            return
        if limit_s:
            self.log.printed_at = self._clock.monotonic()
            self._stall = StallDetector(limit_s, self._ranks.running, self.log.printed_at)
        if prepared.sync is not None and not world.restarts:
            prepared.sync.start()
        self.status.set(state="RUNNING", world_size=world_size)
        self.log.event("state", state="RUNNING")
        if world.node_rank == 0 and self._service is None and not world.restarts:
            from .prepare import packages  # only now: no rank waits for it

            packages.report(prepared.python, self.log)

    def _start_ranks(self, ports: Sequence[int] = ()) -> bool:
        """Start this node's programs, whose ports must be free; return whether they could be."""
        try:
            if ports:
                from .service import check_free

                for port in ports:
                    check_free(port)
            for program in self._programs:
                self._ranks.start(*program)
        except OSError as error:
            what = f"{error.filename or self._programs[0][1][0]} cannot be started: {error.strerror}"
            self._peers.refuse(what)
            return False
        if self._service is not None:
            self._service.began()
        return True

    def _restart(self) -> None:
        """The world has ended by what may pass: end what is left of it here, and be ready to start again."""
        self._ended, self._kill_at, self._stall = False, None, None
        self._restarts.end_world()
        self.status.set(failed_at=None)
        self._preparation.again()

    def _service_ended(self, service: Service, rank: int, status: int, at: float) -> None:
        """A rank of the service has ended before the main role: restart all of this node, or end the attempt."""
        if self._stopping is None and (verdict := service.rank_ended(self._ranks, self.log, rank, status)):
            from .service import EXIT_SERVICE

            self.status.set(failed_at=stamp(at))
            self._peers.fail(-1, processes.exit_code(status) or EXIT_SERVICE, at, verdict)

    def _rank_ended(self, rank: int, status: int, at: float) -> None:
        if self._outcome is not None or self._restarts.under_way:
            return
        if self._service is not None:
            self._service_ended(self._service, rank, status, at)
            return
        code = processes.exit_code(status)
        if self._stopping is None and self._manifest.compat == "sbatch" and scheduler.is_preempted():
            self._peers.stop("PREEMPTED")  # its steps were asked, and it has ended in time
        if code != 0 and self._stopping is None:
            if self.status.fields["failed_at"] is None:
                self.status.set(failed_at=stamp(at))
            passes = self._restarts.passes(self._manifest, rank, status)
            self._peers.fail(rank, code, at, f"rank {rank} {manner(status)}", passes)
            if code in TERMINATED:  # Slurm signals all processes at once: a shell has died whose child saves
                self._ranks.terminate()
        elif self._stopping is None:
            self._peers.leave(rank)
        self._report_end()

    def _report_end(self) -> None:
        """Tell the other nodes, once, that all ranks of this one have ended, and whatever of them still saved."""
        if self._service is not None:
            return  # it ends after the main role
        if self._outcome is None and not self._ended and self._ranks.groups and not self._ranks.active:
            self._ended = True
            self._peers.end()

    def _request(self) -> None:
        """A request to stop this node: a signal, or the cancel mark. A second request kills the ranks."""
        now = self._clock.monotonic()
        first, self._asked_at = self._asked_at is None, self._asked_at or now
        if self.status.cancelled and not self._cancelled:
            self._cancelled = True  # a person's request counts, even after a machine's
            self._peers.stop("CANCELLED")
        elif first:
            self._peers.stop("PREEMPTED")
        elif now - self._asked_at >= SECOND_REQUEST_S:
            self._kill_at = now

    def _stop(self, state: str) -> None:
        """The attempt is to stop on all nodes: ask the ranks, and kill them when their time is over."""
        self._stopping = state
        if self._service is not None:
            self._service.stop()
            return  # it ends after the main role
        if self._manifest.roles and not self._ranks.groups:  # it waits for a service
            self._ended = True
            self._peers.end()
        if self._ranks.active:
            self.status.set(state="STOPPING")
            self.log.event("state", state="STOPPING")
            if state in HUNG:
                self.log.say(f"{hung_reason(state, self._manifest)}; stack of each rank:")
                show_stacks(self._ranks)
                self._kill_at = self._clock.monotonic() + STACKS_S
                return
            self._ranks.terminate()
            self._kill_at = self._clock.monotonic() + self._manifest.grace_s

    def _decided(self, outcome: Outcome) -> None:
        """The attempt has ended: stop what still runs here."""
        self._outcome = outcome
        self._end_at = None
        if self._shared is not None and not self._programs:
            self.status.fields["started_at"] = None  # no rank has run: GPUs of other hosts were not free
        if self._ranks.active:
            self._ranks.terminate()
            patience = LOST_GRACE_S if outcome.state == "LOST" else SHORT_GRACE_S
            if self._service is not None and outcome.state != "LOST":
                patience = self._service.patience_after(self._manifest.grace_s)
            limit = self._clock.monotonic() + min(patience, self._manifest.grace_s)
            self._kill_at = limit if self._kill_at is None else min(self._kill_at, limit)

    def _signalled(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._request()  # first: ranks that got the same signal may have died of it
        if signal.SIGCHLD in numbers and self._prepared is not None:
            # Not before: until then children belong to the preparing thread, which waits for them itself.
            self._ranks.reap(processes.reap()[0])

    def _guard_gone(self) -> None:
        self._guard_died = True
        self._outcome = Outcome("LOST", None, "launcher", None, "the launcher's guard process was killed")

    def _finish(self, outcome: Outcome) -> int:
        """End every descendant, read what is left in their pipes, and report how the attempt ended (result.py)."""
        self._ranks.reap(processes.end_descendants(self._ranks.groups))
        self._ranks.drain()
        if self._reports is not None:
            self._reports.new_checkpoints()
        outcome = self._complete(outcome)
        last = report(outcome, self.log, self._prepared)
        history = self._preparation.history if self._preparation is not None else None
        if history is not None and not self._guard_died:
            history.finish(last)  # before the final status is published
        platform = self._cluster.platform if self._peers is not None else ""
        if self._peers is not None and self._cluster.does.ends_together:
            self._await_others()
        self.status.set(**last)
        if self._peers is not None:
            self._peers.close()
        return container_code(outcome, platform)

    def _complete(self, outcome: Outcome) -> Outcome:
        """End this start of the run and finish its uploads; a start that a later one replaced leaves the output alone."""
        if self._preparation is not None and (replaced := self._preparation.end()):
            return refused_outcome(replaced) if outcome.state == "SUCCEEDED" else outcome
        if self._prepared is None or self._guard_died:
            return outcome
        return finish_output(
            outcome, self._prepared, self.status, lambda: self.status.cancelled and not self._cancelled
        )

    def _await_others(self) -> None:
        """Leave together: the first replica that ends is the end of all others there, whatever they still upload."""
        self._peers.finished()
        until = self._clock.monotonic() + FINISHED_S
        while not self._guard_died and not self._peers.all_finished and self._clock.monotonic() < until:
            self._loop.wait(0.2)


def main(source: str, guard: int, lifeline: int) -> int:
    """Run the supervisor of this node and return its exit code."""
    processes.adopt_orphans()
    if os.environ.get("CLOUDTRAIN_STDIN") == "1" and starter_died():
        print("the process that started this supervisor ended before it sent the secrets", file=sys.stderr)
        return EXIT_LOST
    try:
        supervisor = Supervisor(os.environ, source, guard, lifeline)
    except OSError as error:
        print(f"the node's folder cannot be written: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return supervisor.run()
