"""A plugin of pytest that seeds faults one after the other, each in a fork of one process that has collected the tests.

`seeded_faults.py` starts it with the environment variable FAULT_LOOP, a JSON file: `faults` (number, file, line, source,
text, and the ids of the tests that come by with their seconds), `minutes`, and `answers`, a file that gets a line for each
fault that was tried. A fork changes the code of the functions that are there, and the file, for processes that tests start.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from zlib import crc32

import pytest

FACTOR, LEAST_S = 20.0, 60.0  # a test may take so much longer than it took, and so long at least


def functions_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of the functions of a module and of its classes, in order; not of those inside of functions."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            if part.co_flags & 1:  # optimized: a function. Bodies of classes are not.
                yield part
            else:
                yield from functions_of(part)


def is_inside_functions(source: str, text: str) -> bool:
    """Return whether two texts of a file differ only in bodies of functions: code that can be changed in a process."""
    return _without_bodies(source) == _without_bodies(text)


@cache
def _without_bodies(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = []
    return ast.dump(tree)


class Loop:
    """The collected tests, the functions that exist, and the faults to try."""

    def __init__(self, session: pytest.Session, given: dict[str, Any]) -> None:
        self.faults, self.answers = given["faults"], Path(given["answers"])
        self.until = time.monotonic() + given["minutes"] * 60
        self.items = {item.nodeid: item for item in session.items}
        files = {fault["file"] for fault in self.faults}
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        gc.unfreeze()
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and (code := each.__code__).co_filename in files:
                self.functions.setdefault(_key(code), []).append(each)
        gc.freeze()
        self.config, self.sound = session.config, set[str]()
        self.failed = False
        self.temporary: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]

    def run(self) -> None:
        for fault in self.faults:
            if time.monotonic() > self.until:
                return
            file = Path(fault["file"])
            times = file.stat()
            file.write_text(fault["text"])
            os.utime(file, (10**9, 10**9 + crc32(fault["text"].encode()) // 8))  # no bytecode of another text has it
            try:
                failed = self.first_failure(fault, fault["tests"])
            finally:
                file.write_text(fault["source"])
                os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            with self.answers.open("a") as answers:
                answers.write(json.dumps({"number": fault["number"], "test": failed}) + "\n")

    def first_failure(self, fault: dict[str, Any], tests: Sequence[tuple[str, float]]) -> str:
        """Return the first test that fails with a fault and passes without it, "" where none does."""
        left = [(test, seconds) for test, seconds in tests if test in self.items]
        while left:
            failed = self.in_fork(fault, left)
            if not failed or failed in self.sound:
                return failed
            file = Path(fault["file"])
            file.write_text(fault["source"])
            is_sound = not self.in_fork(None, [each for each in left if each[0] == failed])
            file.write_text(fault["text"])
            if is_sound:
                self.sound.add(failed)
                return failed
            left = left[next(at for at, each in enumerate(left) if each[0] == failed) + 1 :]
        return ""

    def in_fork(self, fault: dict[str, Any] | None, tests: Sequence[tuple[str, float]]) -> str:
        """Run tests in a fork until one fails; return its id. One that does not end in its time has failed."""
        read, write = os.pipe()
        if not (child := os.fork()):
            os.setpgid(0, 0)
            os.close(read)
            self.in_child(fault, tests, write)
        os.close(write)
        seconds, at, told = dict(tests), "(cannot be seeded)", b""
        bound = LEAST_S
        while select.select([read], [], [], bound)[0] and (part := os.read(read, 65536)):
            *lines, told = (told + part).split(b"\n")
            for line in lines:
                at = line.decode()
                bound = LEAST_S + FACTOR * seconds.get(at, 0.0)
        os.close(read)
        try:
            os.killpg(child, signal.SIGKILL)
        except OSError:
            pass
        os.waitpid(child, 0)
        for path in self.temporary.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        return "" if at == "-" else at

    def in_child(self, fault: dict[str, Any] | None, tests: Sequence[tuple[str, float]], write: int) -> None:
        """Run tests, and write the id of each when it begins, and "-" where all have passed."""
        code = 1
        try:
            self.failed = False
            self.config.pluginmanager.register(self)
            if fault:
                self.change(fault)
            following = [*(self.items[test] for test, _ in tests[1:]), None]
            for (test, _), then in zip(tests, following, strict=True):
                os.write(write, f"{test}\n".encode())
                item = self.items[test]
                item.ihook.pytest_runtest_protocol(item=item, nextitem=then)
                if self.failed:
                    item.session._setupstate.teardown_exact(None)
                    break
            else:
                os.write(write, b"-\n")
                code = 0
        finally:
            os._exit(code)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed

    def change(self, fault: dict[str, Any]) -> None:
        """Change the functions of a fault where they are imported; an import that is yet to come reads the file."""
        pair = (
            functions_of(compile(fault[name], fault["file"], "exec", dont_inherit=True)) for name in ("source", "text")
        )
        for before, after in zip(*pair, strict=True):
            if before != after:
                for function in self.functions.get(_key(before), ()):
                    if before.co_freevars != after.co_freevars:  # a call of super() more or less: no cell for it
                        after = after.replace(co_freevars=before.co_freevars)
                    function.__code__ = after


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


@pytest.hookimpl
def pytest_runtestloop(session: pytest.Session) -> bool:
    sys.dont_write_bytecode = True
    given = json.loads(Path(os.environ.pop("FAULT_LOOP")).read_text())
    Loop(session, given).run()
    return True
