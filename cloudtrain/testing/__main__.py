"""Print the conformance table of a backend, in Markdown for a plugin's README.

python -m cloudtrain.testing NAME [OPTION=VALUE ...]   a backend by its name, constructed with these options
python -m cloudtrain.testing FILE.py                   a test file with a subclass of BackendContract

The tests run in this process; what pytest prints goes to standard error. It exits as pytest does: 0 when all have passed.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.__about__ import __version__
from cloudtrain.backends import registry
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BadRequest

PROMISES = "cloudtrain.testing.suite."
SUITE = """
import pytest
from cloudtrain.backends.registry import backend_class
from cloudtrain.testing.contract import BackendContract

class TestBackend(BackendContract):
    @pytest.fixture
    def connect(self, tmp_path):
        return lambda: backend_class({name!r})({options!r}, tmp_path / "work")
"""


class Table:
    """A pytest plugin that notes what came of each test of the contract."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[str, str]] = {}  # node id -> noun, test
        self.results: dict[tuple[str, str], str] = {}  # noun, test -> result, the worst of its cases

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            module = getattr(getattr(item, "function", None), "__module__", "")
            if module.startswith(PROMISES):
                self.tests[item.nodeid] = module.removeprefix(PROMISES), item.name.partition("[")[0]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.get(report.nodeid)
        if test is None or self.results.get(test) == "**failed**":
            return
        if report.failed:
            self.results[test] = "**failed**"
        elif report.skipped:
            self.results[test] = f"not offered: {str(report.longrepr[2]).removeprefix('Skipped: ')}"  # type: ignore[index]
        elif report.when == "call":
            self.results[test] = "passed"

    def markdown(self, command: str) -> str:
        """Return the table, with what it was made on and how."""
        count = list(self.results.values())
        lines = [
            f"{count.count('passed')} of {len(count)} promises of the contract hold, {count.count('**failed**')} fail.",
            f"cloudtrain {__version__}, Python {platform.python_version()}, {platform.system()}, "
            f"{SYSTEM.utc():%Y-%m-%d}: `python -m cloudtrain.testing {command}`",
            "",
            "| about | promise | result |",
            "| --- | --- | --- |",
        ]
        for (noun, test), result in self.results.items():
            lines.append(f"| {noun} | {test.removeprefix('test_').replace('_', ' ')} | {result} |")
        return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> int:
    """Run the suite for what the command line names, and print the table."""
    if not words or words[0].startswith("-"):
        sys.stderr.write(str(__doc__))
        return 2
    table = Table()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        if words[0].endswith(".py"):
            arguments = [words[0]]
        else:
            try:
                options = _options(words[0], words[1:])
            except BadRequest as error:
                sys.stderr.write(f"{error}\n")
                return 2
            path = Path(folder) / "test_conformance.py"
            path.write_text(SUITE.format(name=words[0], options=options))
            arguments = ["-c", "/dev/null", "--rootdir", folder, str(path)]
        ignored = "ignore::pytest.PytestUnknownMarkWarning"
        # Folders of its own: pytest deletes the old ones of its usual place before it ends, however large they are.
        own = ["-p", "no:cacheprovider", f"--basetemp={folder}/files"]
        code = pytest.main(["-q", "-W", ignored, *own, *arguments], plugins=[table])
    sys.stdout.write(table.markdown(" ".join(words)))
    return int(code)


def _options(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return validated options of a backend from OPTION=VALUE; raises BadRequest."""
    from pydantic import ValidationError

    given = dict(word.partition("=")[::2] for word in words)
    try:
        return registry.backend_class(name).options().model_validate(given).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise BadRequest(f"options of {name}: {error}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
