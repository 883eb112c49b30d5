"""Connections of this machine's loopback to a port of a node: each one is a program on the node that copies both ways."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from cloudtrain.backends.api import Shell
from cloudtrain.errors import BadRequest, CloudtrainError

PIECE = 1 << 16
LOOPBACK = "127.0.0.1"  # no other address: what listens in a run asks for no password


class Forward:
    """Listens on a port of 127.0.0.1 and connects whoever comes to a port of a node.

    Args:
        connect: returns the program that is connected to the port, with standard input; called in threads.
        complain: called in threads with why a connection failed.
        local: the port here; 0 takes any that is free.
    """

    def __init__(self, connect: Callable[[], Shell], complain: Callable[[str], None], local: int) -> None:
        self._connect, self._complain = connect, complain
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((LOOPBACK, local))
        except OSError as error:
            self._listener.close()
            raise BadRequest(
                f"port {local} of this machine cannot be used: {error.strerror}",
                "write PORT:0 to use any free port of this machine",
            ) from None
        self._listener.listen(64)
        self.port = int(self._listener.getsockname()[1])
        self._programs: set[subprocess.Popen[bytes]] = set()

    def serve(self) -> None:
        """Serve connections until this is interrupted, or closed; blocking."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Listen no more, and end all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for program in list(self._programs):
            program.terminate()

    def _serve_one(self, connection: socket.socket) -> None:
        with connection:
            try:
                program = self._connect()
                if program.stream is not None:
                    self._copy_stream(program, connection)
                else:
                    self._copy_process(program, connection)
            except CloudtrainError as error:
                self._complain(error.message)
            except OSError:
                pass  # who came has gone

    def _copy_stream(self, program: Shell, connection: socket.socket) -> None:
        assert program.stream is not None
        read, write = os.pipe()
        with os.fdopen(read, "rb") as errors:
            try:
                code = program.stream(connection.fileno(), connection.fileno(), write, False)
            finally:
                os.close(write)
            self._check(program, code, errors.read())

    def _copy_process(self, program: Shell, connection: socket.socket) -> None:
        process = subprocess.Popen(
            program.argv,
            stdin=connection.fileno(),
            stdout=connection.fileno(),
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends this process, which ends the connections
        )
        self._programs.add(process)
        try:
            assert process.stderr is not None
            errors = process.stderr.read()
            self._check(program, process.wait(), errors)
        finally:
            self._programs.discard(process)

    def _check(self, program: Shell, code: int, errors: bytes) -> None:
        if code > 0:
            self._complain(program.failure(code, errors))
