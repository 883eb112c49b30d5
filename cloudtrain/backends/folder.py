"""FolderBackend: the base of backends whose attempts are folders on machines of your own, which the agent reads and changes.

    <runs>/<run>/a<N>/                an attempt, on each of its machines: its labels, its plan
    <runs>/<run>/a<N>/node-<rank>/    one of its nodes (nodes/directory.py)

The calls here suit supervisors that run by themselves. Slurm starts them, and answers some calls itself.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cloudtrain.backends.api import Backend, FoundAttempt
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, Unreachable, raise_first
from cloudtrain.events import LogLine, State, Status
from cloudtrain.nodes.files import MOST_REQUEST

if TYPE_CHECKING:
    from cloudtrain.nodes.agents import Agent, Node

PLAN = "plan.json"  # in an attempt's folder
FOLLOW_S = 0.2  # pause between two reads of a followed log of other machines
END_S = 120.0  # for the end of what an attempt left running
_T = TypeVar("_T")


class FolderBackend(Backend):
    """A backend whose attempts are folders.

    Attributes:
        runs: the folder of the runs, on every machine.
        labels_file: the file in an attempt's folder that has its labels, or an object with `labels`.
        lease_s: seconds without a client after which an attempt ends; None where it needs none.
        stops_nodes: the processes of a run are on the machines that have its folder.
    """

    runs: str
    labels_file = "labels.json"
    lease_s: float | None = None
    stops_nodes = True
    _clock: Clock = SYSTEM

    @abstractmethod
    def nodes(self, handle: str) -> list[Node]:
        """Return an attempt's nodes by rank; none where its folder is gone, or the handle names other machines."""

    def machines_with_runs(self) -> Sequence[Agent]:
        """Return the machines on which `labelled` looks for attempts."""
        return ()

    def run_folders(self, handle: str) -> Mapping[str, tuple[Agent, str]]:
        """Return name -> machine and path of each folder that an attempt's run has."""
        runs = {node.label: (node.agent, node.attempt.rpartition("/")[0]) for node in self.nodes(handle)}
        return {f"{label}:{run}": (machine, run) for label, (machine, run) in runs.items()}

    def absent(self, handle: str) -> str:
        """Return why an attempt has no nodes."""
        return f"the attempt's folder {handle} no longer exists"

    def attempt_folder(self, attempt_id: str) -> str:
        """Return the folder that an attempt has on its machines."""
        run_id, _, number = attempt_id.rpartition("-a")
        return f"{self.runs}/{run_id}/a{number}"

    def node(self, handle: str, number: int) -> Node:
        """Return one node of an attempt; raises BackendError where it has none of this number."""
        nodes = self.nodes(handle)
        if number >= len(nodes):
            raise BackendError(f"there is no node {number}: they are counted from 0, and the last is {len(nodes) - 1}")
        return nodes[number]

    # -- while it runs -------------------------------------------------------------------------------------------------

    def reports(self, nodes: Sequence[Node]) -> list[Any]:
        """Return what each node's supervisor reports, or the error instead; renews the client's lease on the way."""
        lease = self.lease_s is not None
        return _ask(lambda it: it.ask("report", folder=it.attempt, rank=it.rank, lease=lease).value, nodes)

    def status(self, handle: str) -> Status:
        from cloudtrain.nodes import directory

        if not (nodes := self.nodes(handle)):
            return Status(State.LOST, None, self.absent(handle))
        return directory.attempt_status(nodes, self.reports(nodes), self.lost_after_s or 0.0)

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        from cloudtrain.nodes import directory

        nodes = self.nodes(handle)
        unread: set[int] = set()
        files = [(node.agent, f"{node.folder}/log") for node in nodes]
        yield from self.read_logs(handle, files, follow, after, unread)
        bound_s = min(directory.CUT_OFF_S, self.lost_after_s or 0.0)
        cut_off = [node for node in nodes if node.rank in unread and node.agent.unreachable_s < bound_s]
        # An attempt that was lost with its node has no more lines; of any other the reader should know.
        if cut_off and directory.merge_reports(self.reports(nodes), []).state is not State.LOST:
            raise Unreachable(f"the lines of node {cut_off[0].rank} are missing: {cut_off[0].label} cannot be reached")

    def read_logs(
        self, handle: str, files: Sequence[tuple[Agent, str]], follow: bool, after: str | None, unread: set[int]
    ) -> Iterator[LogLine]:
        """Yield the lines of log files after a cursor, as `logs` does; `unread` gets the indices of those not reached."""
        from cloudtrain.nodes import logs
        from cloudtrain.nodes.agents import LocalAgent

        def ended() -> bool:
            try:
                return self.status(handle).state.final
            except Unreachable:
                return False  # the job continues without the client

        if all(isinstance(machine, LocalAgent) for machine, _ in files):
            return logs.tail([Path(path) for _, path in files], after=after, follow=follow, ended=ended)
        from cloudtrain.nodes.rpc import remote_log_reader

        read = remote_log_reader(files, unread)
        return logs.merge(
            read, len(files), after=after, follow=follow, ended=ended, pause_s=FOLLOW_S, clock=self._clock
        )

    def cancel(self, handle: str) -> None:
        nodes = self.nodes(handle)
        answers = _ask(lambda node: node.ask("cancel", folder=node.attempt, rank=node.rank), nodes)
        unreachable = [node for node, answer in zip(nodes, answers, strict=True) if isinstance(answer, Unreachable)]
        raise_first([answer for answer in answers if not isinstance(answer, Unreachable)])
        if unreachable:
            from cloudtrain.nodes.directory import CUT_OFF_S

            names = ", ".join(f"node {node.rank} ({node.label})" for node in unreachable)
            hint = "cancel again when the machine can be reached"
            if len(nodes) > 1:
                bound = f"within {CUT_OFF_S:g} s after the others"
                hint = f"it ends by itself {bound}, or cut off from them; else {hint}"
            raise Unreachable(
                f"{names} cannot be reached: cloudtrain does not know whether the job has ended there", hint
            )

    def end(self, handle: str) -> None:
        """Cancel an attempt and wait until its nodes have ended; blocking. Raises BackendError."""
        self.cancel(handle)
        raise_first(_ask(lambda node: node.ask("end", node=node.folder, timeout_s=END_S), self.nodes(handle)))

    # -- finding attempts again ----------------------------------------------------------------------------------------

    def labels(self, handle: str) -> dict[str, str]:
        machines = {node.label: node for node in self.nodes(handle)}.values()
        file = self.labels_file
        answers = _ask(lambda node: node.ask("read", path=f"{node.attempt}/{file}", limit=MOST_REQUEST).data, machines)
        text = next((answer for answer in answers if isinstance(answer, bytes) and answer), None)
        if text is None:
            raise_first(answers)
        return _labels(text or b"")

    def labelled(self, name: str, value: str, known: Container[str]) -> Iterator[FoundAttempt]:
        def find(machine: Agent) -> list[FoundAttempt]:
            found = []
            texts = machine.ask("texts", folder=self.runs, patterns=[f"*/a*/{self.labels_file}"]).value
            for path, text in texts.items():
                attempt_id = path.rpartition("/")[0].replace("/", "-")
                if attempt_id not in known and _labels(text).get(name) == value:
                    plan = _parse(machine.ask("read", path=f"{self.attempt_folder(attempt_id)}/{PLAN}").data)
                    if handle := self.find(attempt_id):
                        record = {"manifest": plan.get("manifest"), "about": plan}
                        found.append(FoundAttempt(attempt_id, handle, record))
            return found

        answers = _ask(find, self.machines_with_runs())
        yield from {each.attempt_id: each for found in answers if isinstance(found, list) for each in found}.values()
        raise_first(answers)

    # -- after its end -------------------------------------------------------------------------------------------------

    def remains(self, handle: str) -> dict[str, int | None]:
        folders = self.run_folders(handle)
        sizes: list[Any] = _ask(lambda it: it[0].ask("size", folder=it[1]).value, folders.values())
        raise_first(sizes)
        return {name: size for name, size in zip(folders, sizes, strict=True) if size is not None}

    def remove(self, handle: str) -> None:
        def remove_run(place: tuple[Agent, str]) -> None:
            machine, folder = place
            runs, _, run = folder.rpartition("/")
            machine.ask("remove", runs=runs, run=run, stops=self.stops_nodes)

        raise_first(_ask(remove_run, self.run_folders(handle).values()))


def _ask(question: Callable[[_T], object], several: Iterable[_T]) -> list[Any]:
    """Return the answers of several nodes or machines, with our errors as answers."""
    from cloudtrain.nodes.agents import call_all  # a submit on this machine does not need it

    return call_all(question, several)


def _labels(text: str | bytes) -> dict[str, str]:
    """Return the labels in the text of a `labels_file`."""
    parsed = _parse(text)
    inner = parsed.get("labels")
    return inner if isinstance(inner, dict) else parsed


def _parse(text: str | bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        parsed = json.loads(text)
        return parsed if isinstance(parsed, dict) else {}
    return {}
