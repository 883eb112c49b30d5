from __future__ import annotations

import pytest

from cloudtrain.errors import BadJob, CloudtrainError, Problem, RunFailed
from cloudtrain.events import FINAL, State, Status


def test_final_states():
    assert {state for state in State if state.final} == FINAL
    assert {State.QUEUED, State.STARTING, State.RUNNING, State.STOPPING}.isdisjoint(FINAL)


@pytest.mark.parametrize("state", list(State))
def test_what_counts_as_failed(state: State):
    assert Status(state).failed == (state in (State.FAILED, State.TIMED_OUT, State.PREEMPTED, State.LOST))


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        (State.SUCCEEDED, 0, 0),
        (State.FAILED, 3, 3),
        (State.FAILED, 75, 75),
        (State.FAILED, None, 1),  # failed without anybody knowing a code: still no success
        (State.FAILED, 0, 1),
        (State.CANCELLED, 0, 130),
        (State.TIMED_OUT, 75, 124),
        (State.PREEMPTED, 75, 75),
        (State.LOST, None, 69),
    ],
)
def test_exit_codes_of_the_command_line(state, code, expected):
    assert Status(state, code).cli_exit_code == expected


def test_state_prints_as_its_name():
    assert f"{State.TIMED_OUT}" == str(State.TIMED_OUT) == "TIMED_OUT"


def test_every_error_is_in_the_tree_of_the_docstring():
    import cloudtrain.errors as module

    names = [
        name for name, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, CloudtrainError)
    ]
    assert len(names) >= 9
    assert [name for name in names if name not in module.__doc__] == []


def test_a_bad_job_says_all_its_problems():
    error = BadJob([Problem("first", "a.b", "do x", "job.yaml", 3), Problem("second")])
    assert error.exit_code == 2
    assert str(error) == "the job has 2 problems:\n  job.yaml:3: a.b: first (do x)\n  second"


def test_run_failed_carries_the_runs_code():
    error = RunFailed("run-1", Status(State.FAILED, 17, "rank 0 exited with 17"))
    assert error.exit_code == 17
    assert "rank 0 exited with 17" in str(error)
