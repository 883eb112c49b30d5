"""A program in a pod over a websocket, as a kubelet runs it: channels of v5.channel.k8s.io."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.simulators.kubernetes_cluster.websocket import CLOSE, Frames

PROTOCOL = "v5.channel.k8s.io"


class Program:
    """A program of a container, whose streams are the channels of a websocket."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], folder: Path, streams: frozenset[str], frames: Frames
    ) -> None:
        self._frames, self._terminal = frames, "tty" in streams
        ours = theirs = -1
        if self._terminal:
            ours, theirs = pty.openpty()
        stdin: int = subprocess.PIPE if "stdin" in streams else subprocess.DEVNULL
        self._process = subprocess.Popen(
            list(argv),
            cwd=folder,
            env=dict(env),
            stdin=theirs if self._terminal else stdin,
            stdout=theirs if self._terminal else subprocess.PIPE,
            stderr=theirs if self._terminal else subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_own_terminal if self._terminal else None,
        )
        if self._terminal:
            os.close(theirs)
        self._pty = ours

    def serve(self) -> None:
        """Copy the streams until the program has ended, and send its status."""
        threading.Thread(target=self._receive, daemon=True).start()
        if self._terminal:
            readers = [threading.Thread(target=self._copy, args=(self._pty, 1), daemon=True)]
        else:
            assert self._process.stdout is not None
            assert self._process.stderr is not None
            outputs = ((self._process.stdout, 1), (self._process.stderr, 2))
            readers = [threading.Thread(target=self._copy, args=(pipe.fileno(), n), daemon=True) for pipe, n in outputs]
        for reader in readers:
            reader.start()
        code = self._process.wait()
        for reader in readers:
            reader.join(60)
        status: dict[str, Any] = {"metadata": {}, "status": "Success"}
        if code:
            number = str(code if code > 0 else 128 - code)
            status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
                      "message": f"command terminated with non-zero exit code: exit status {number}",
                      "details": {"causes": [{"reason": "ExitCode", "message": number}]}}  # fmt: skip
        with suppress(OSError):
            self._frames.send(b"\x03" + json.dumps(status).encode())
            self._frames.send(struct.pack(">H", 1000), CLOSE)

    def _copy(self, descriptor: int, channel: int) -> None:
        with suppress(OSError):  # a terminal whose program has ended; a client that has gone
            while data := os.read(descriptor, 1 << 15):
                self._frames.send(bytes([channel]) + data)

    def _receive(self) -> None:
        stdin = self._process.stdin
        for message in self._frames.messages():
            with suppress(OSError, ValueError):
                if message[:1] == b"\x00":
                    target = self._pty if self._terminal else stdin.fileno() if stdin else -1
                    data = message[1:]
                    while data:
                        data = data[os.write(target, data) :]
                elif message == b"\xff\x00" and stdin:
                    stdin.close()
                elif message[:1] == b"\x04" and self._terminal:
                    size = json.loads(message[1:])
                    packed = struct.pack("HHHH", size["Height"], size["Width"], 0, 0)
                    fcntl.ioctl(self._pty, termios.TIOCSWINSZ, packed)
        with suppress(OSError, ValueError, ProcessLookupError):  # the client has gone
            if stdin:
                stdin.close()
            if self._terminal:
                os.killpg(self._process.pid, signal.SIGHUP)


def _own_terminal() -> None:
    # As in a container, also where the simulator's process ignores or blocks the signal (nohup, a launcher's thread).
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
