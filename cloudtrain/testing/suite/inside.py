"""A program inside: it runs beside a rank, with its streams, its arguments and its exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cloudtrain.backends import shell
from cloudtrain.backends.api import Backend
from cloudtrain.errors import BackendError
from cloudtrain.testing.fixtures import ContractFixtures
from cloudtrain.testing.suite.hostile import HOSTILE

WAITS = (
    "import os, time\n"
    "os.environ['LATER'] = 'set by the script'\n"
    "def wait_for_nobody():\n"
    "    print('waits', os.getcwd(), os.environ.get('GIVEN'), flush=True)\n"
    "    time.sleep(600)\n"
    "wait_for_nobody()\n"
)
ECHO = "import json, sys; print(json.dumps(sys.argv[1:]))"
EVERY_BYTE = bytes(range(256)) * 40 + b"\0\xff\r\n\x04\x1a"


class InsideContract(ContractFixtures):
    """What a backend's `shell` starts. Where it gives an address only, nothing is started."""

    @pytest.fixture
    def start_with_shell(self, backend: Backend, start: Any) -> Any:
        """Return `start`; skips, before anything runs, where the backend starts no program on a node."""
        if not backend.traits.shell:
            pytest.skip("it starts no program on a node")
        return start

    def inside(
        self, backend: Backend, handle: str, what: str, *words: str, node: int = 0, given: bytes | None = None
    ) -> shell.Completed:
        """Run a program on a node; skips where the backend starts none itself."""
        arguments = shell.program(what, self.submitted[handle], node, *words)
        started = backend.shell(handle, node, arguments, stdin=given is not None, terminal=False)
        if not started.argv and started.stream is None:
            assert started.address or started.note, "shell() gave no program, no address and no note why"
            pytest.skip("it gives an address")
        return shell.call(started, given)

    def test_a_command_runs_beside_the_rank(self, backend: Backend, start_with_shell: Any) -> None:
        handle = start_with_shell(WAITS, env={"GIVEN": "a value"})
        self.until_line(backend, handle, "waits")
        (said,) = [line.text for line in self.script_lines(backend, handle) if line.text.startswith("waits")]
        lines = 'pwd; echo "$GIVEN" "$CLOUDTRAIN_ATTEMPT_ID"; echo to the errors >&2; exit 7'
        done = self.inside(backend, handle, "exec", "-", "-", "sh", "-c", lines)
        assert done.code == 7, done
        folder, values = done.out.decode().splitlines()
        assert said == f"waits {folder} a value"
        assert values == f"a value {self.submitted[handle]}", done
        assert b"to the errors\n" in done.err

    def test_its_input_and_output_are_bytes(self, backend: Backend, start_with_shell: Any) -> None:
        handle = start_with_shell(WAITS)
        self.until_line(backend, handle, "waits")
        done = self.inside(backend, handle, "exec", "-", "-", "cat", given=EVERY_BYTE)
        assert (done.code, done.out) == (0, EVERY_BYTE)
        done = self.inside(backend, handle, "exec", "-", "-", "cat")
        assert (done.code, done.out) == (0, b""), "its input must end at once"

    def test_its_arguments_are_what_was_typed(self, backend: Backend, start_with_shell: Any) -> None:
        handle = start_with_shell(WAITS)
        self.until_line(backend, handle, "waits")
        done = self.inside(backend, handle, "exec", "-", "-", "python3", "-c", ECHO, *HOSTILE)
        assert done.code == 0, done
        assert json.loads(done.out) == list(HOSTILE)

    def test_a_command_that_is_not_there(self, backend: Backend, start_with_shell: Any) -> None:
        handle = start_with_shell(WAITS)
        self.until_line(backend, handle, "waits")
        done = self.inside(backend, handle, "exec", "-", "-", "no-such-program")
        assert done.code == 127
        assert b"no-such-program: No such file or directory" in done.err

    def test_each_node_has_its_ranks(self, backend: Backend, start_with_shell: Any) -> None:
        self.require(backend, "num_nodes")
        handle = start_with_shell(WAITS, num_nodes=2, processes_per_node=2)
        self.until_line(backend, handle, "waits", 4)
        ranks = [self.inside(backend, handle, "exec", "-", "-", "sh", "-c", "echo $RANK", node=node) for node in (0, 1)]
        assert [done.out for done in ranks] == [b"0\n", b"2\n"]
        done = self.inside(backend, handle, "exec", "3", "-", "sh", "-c", "echo $RANK $LOCAL_RANK", node=1)
        assert (done.code, done.out) == (0, b"3 1\n")
        done = self.inside(backend, handle, "exec", "3", "-", "true", node=0)
        assert done.code == 2
        assert b"rank 3 is not on node 0, where these run: 0, 1" in done.err
        with pytest.raises(BackendError, match="there is no node 2"):
            self.inside(backend, handle, "exec", "-", "-", "true", node=2)

    def test_a_node_that_is_not_there(self, backend: Backend, start_with_shell: Any) -> None:
        handle = start_with_shell(WAITS)
        self.until_line(backend, handle, "waits")
        with pytest.raises(BackendError, match="there is no node 1"):
            self.inside(backend, handle, "exec", "-", "-", "true", node=1)

    def test_the_stacks_of_all_ranks(self, backend: Backend, start_with_shell: Any) -> None:
        handle = start_with_shell(WAITS, processes_per_node=2)
        self.until_line(backend, handle, "waits", 2)
        for _ in range(2):  # the ranks continue
            done = self.inside(backend, handle, "stack")
            rows = [json.loads(line) for line in done.out.splitlines()]
            assert [row["rank"] for row in rows] == [0, 1], done
            assert all("in wait_for_nobody" in row["stack"] and not row["why"] for row in rows), rows
            assert all(row["stack"].count("wait_for_nobody") == 1 for row in rows), "the stacks of an earlier request"

    def test_a_rank_that_has_ended(self, backend: Backend, start_with_shell: Any) -> None:
        handle = start_with_shell("print('done')\n")
        self.until_final(backend, handle)
        try:
            done = self.inside(backend, handle, "exec", "-", "-", "echo", "it runs")
        except BackendError:
            return
        assert done.code != 0
        assert b"it runs" not in done.out
        assert done.err
