"""A log on standard output, and a copy of it in a file without a name, from which it is brought to the run's output."""

from __future__ import annotations

import tempfile

from .log import Log


class KeptLog(Log):
    """Appends to a descriptor and to a copy; on a disk that takes no copy there is none."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        try:
            self._copy = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as this process lives
        except OSError:
            return
        self.copy = (self._copy.fileno(), 0)

    def forget(self) -> None:
        if self.copy is not None:
            self.copy = None
            self._copy.close()

    def _write(self, data: bytes) -> None:
        if self.copy is not None:
            try:
                self._copy.write(data)
            except OSError:
                pass  # a full disk: standard output has it
        super()._write(data)
