"""Run the agent's operations (agent.py) in this process, and on several machines at once. rpc.py reaches other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from cloudtrain.errors import BackendError, CloudtrainError

if TYPE_CHECKING:
    from concurrent.futures import Future

ANSWER_S = 60.0  # default timeout of an operation, or of a command
MAX_THREADS = 64  # machines
_T = TypeVar("_T")
_R = TypeVar("_R")


class Answer(NamedTuple):
    """The result of an operation: a value, or bytes."""

    value: Any
    data: bytes = b""


class Agent(Protocol):
    """A machine that runs the agent's operations."""

    @property
    def label(self) -> str: ...

    @property
    def unreachable_s(self) -> float:
        """For so many seconds the machine has not answered."""
        ...

    def begin(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Future[Answer]:
        """Send a request without waiting for the answer; several may be in flight at once."""
        ...

    def ask(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Answer:
        """Run an operation of agent.OPERATIONS on the machine and return its result; blocking. Raises BackendError."""
        ...


class LocalAgent:
    """Runs the agent's operations in this process."""

    label = "this machine"
    unreachable_s = 0.0

    def begin(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Future[Answer]:
        from concurrent.futures import Future

        future: Future[Answer] = Future()
        try:
            future.set_result(self.ask(operation, given, **arguments))
        except BackendError as error:
            future.set_exception(error)
        return future

    def ask(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Answer:
        from cloudtrain.nodes import agent  # a submit does not need all that it can do

        if given is not None:
            arguments["given"] = given
        try:
            value = agent.OPERATIONS[operation](**arguments)
        except (OSError, ValueError) as error:
            raise BackendError(f"{operation} failed: {error}") from None
        return Answer(None, value) if isinstance(value, bytes) else Answer(value)


class Node:
    """A machine as one node of an attempt, whose folder there is `attempt`."""

    def __init__(self, machine: Agent, rank: int, attempt: str) -> None:
        self.agent, self.label, self.ask = machine, machine.label, machine.ask
        self.rank, self.attempt, self.folder = rank, attempt, f"{attempt}/node-{rank}"


def call_all(function: Callable[[_R], _T], items: Iterable[_R]) -> list[_T | CloudtrainError]:
    """Call a function for several items in parallel; return the results in order, with our errors as results."""

    def call(item: _R) -> _T | CloudtrainError:
        try:
            return function(item)
        except CloudtrainError as error:
            return error

    all_items = list(items)
    if len(all_items) < 2:
        return [call(item) for item in all_items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(len(all_items), MAX_THREADS)) as pool:
        return list(pool.map(call, all_items))
