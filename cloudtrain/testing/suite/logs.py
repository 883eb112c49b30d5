"""The log: every line once, in order, from any cursor on."""

from __future__ import annotations

import threading
from itertools import islice
from typing import Any

from cloudtrain import events
from cloudtrain.backends.api import Backend
from cloudtrain.clock import SYSTEM
from cloudtrain.events import MARK, LogLine, State
from cloudtrain.testing.fixtures import WAIT_S, ContractFixtures


class LogsContract(ContractFixtures):
    """What `logs` promises."""

    def test_every_line_once_and_in_order(self, backend: Backend, start: Any) -> None:
        script = (
            "import sys\nfor n in range(5000): print('line', n)\nsys.stdout.write('\\n  indented \\nthe last one')\n"
        )
        handle = start(script)
        self.until_final(backend, handle)
        assert [line.text for line in self.script_lines(backend, handle)] == [
            *(f"line {n}" for n in range(5000)),
            "",
            "  indented ",
            "the last one",
        ]
        lines = list(backend.logs(handle))
        assert [line.seq for line in lines] == list(range(len(lines)))
        last = events.parse([line.text for line in lines if line.rank == -1][-1])
        assert last is not None and last[0] == "state" and last[1]["state"] == "SUCCEEDED", (
            "the log's last line must be the launcher's event: state SUCCEEDED"
        )

    def test_a_cursor_continues_behind_its_line(self, backend: Backend, start: Any) -> None:
        handle = start("for n in range(200): print('line', n)")
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        lines = list(backend.logs(handle))
        for cut in {0, 1, 17, len(lines) // 2, len(lines) - 1}:
            assert list(backend.logs(handle, after=lines[cut].cursor)) == lines[cut + 1 :]
            assert list(backend.logs(handle, after=lines[cut].cursor, follow=True)) == lines[cut + 1 :]

    def test_a_log_that_is_read_while_it_grows_is_whole(self, backend: Backend, start: Any) -> None:
        """First in pieces, each from the last cursor on, then followed from there."""
        handle = start("import time\nfor n in range(40):\n    print('line', n, flush=True)\n    time.sleep(0.03)\n")
        pieces: list[LogLine] = []
        deadline = SYSTEM.monotonic() + WAIT_S
        while not any(line.text == "line 10" for line in pieces):
            assert SYSTEM.monotonic() < deadline, f"logs() did not return the growing log's line 10 within {WAIT_S} s"
            pieces += backend.logs(handle, after=pieces[-1].cursor if pieces else None)
            SYSTEM.sleep(0.1)
        pieces += backend.logs(handle, after=pieces[-1].cursor, follow=True)
        texts = [line.text for line in pieces if line.rank >= 0 and not line.text.startswith(MARK)]
        assert texts == [f"line {n}" for n in range(40)]
        assert pieces == list(backend.logs(handle))

    def test_following_sees_lines_as_they_come_and_ends(self, backend: Backend, start: Any) -> None:
        handle = start("import time\nprint('early', flush=True)\ntime.sleep(1)\nprint('late', flush=True)\n")
        seen, running = [], []

        def follow() -> None:
            for line in backend.logs(handle, follow=True):
                if line.text == "early":
                    running.append(not backend.status(handle).state.final)
                seen.append(line)

        reader = threading.Thread(target=follow, daemon=True)
        reader.start()
        reader.join(WAIT_S)
        assert not reader.is_alive(), f"following did not end within {WAIT_S} s"
        assert running == [True]
        assert [line.text for line in seen if line.rank == 0 and not line.text.startswith(MARK)] == ["early", "late"]
        assert seen == list(backend.logs(handle))
        assert list(islice(backend.logs(handle, follow=True, after=seen[-1].cursor), 1)) == []

    def test_junk_in_the_log_does_no_harm(self, backend: Backend, start: Any) -> None:
        script = "import os\nos.write(1, b'\\xff\\xfe\\x00 junk\\r\\nnext\\n' + b'x' * 100000 + b'\\nend')\n"
        handle = start(script)
        assert self.until_final(backend, handle).state is State.SUCCEEDED
        lines = [line.text for line in self.script_lines(backend, handle)]
        assert "junk" in lines[0] and lines[1] == "next" and lines[-1] == "end"
        assert "".join(lines[2:-1]) == "x" * 100000
