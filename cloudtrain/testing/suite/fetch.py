"""Files: what the script wrote, byte by byte."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.api import FETCHABLE, Backend, BadJob, Paths, State
from cloudtrain.testing.fixtures import ContractFixtures

FILES = {  # name -> bytes
    "plain.txt": 10,
    ".hidden/.file": 20,
    "empty": 0,
    "4096": 4096,
    "4097": 4097,
    "large.bin": 300_000,
    "two words/ünïcödé": 30,
    "a/b/c/d/e/deep": 40,
}
# Writes files of some sizes, given as SIZE:NAME, into each of the three folders.
WRITER = """
import os, pathlib, sys
for name in ("MODEL", "OUTPUT", "CHECKPOINT"):
    for size, file in (word.split(":") for word in sys.argv[1:]):
        path = pathlib.Path(os.environ[f"CLOUDTRAIN_{name}_DIR"], "kept", file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(n % 251 for n in range(int(size))))
"""


def content(size: int) -> bytes:
    """Return what WRITER writes."""
    return bytes(n % 251 for n in range(size))


class FetchContract(ContractFixtures):
    """What `fetch` promises."""

    def test_fetch_brings_what_the_script_wrote(self, backend: Backend, start: Any, tmp_path: Path) -> None:
        """Hidden, empty, large and deep files, with any name; a second fetch completes what a first one left.

        It writes through no link that stands where a folder was: see cloudtrain.source.folder_writer.
        """
        outside = tmp_path / "outside"
        outside.mkdir()
        handle = start(WRITER, args=[f"{size}:{name}" for name, size in FILES.items()])
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        into = backend.fetch(handle, tmp_path / "fetched")
        for _ in range(2):
            for folder in FETCHABLE:
                top = into / folder / "kept"
                found = {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}
                assert found.keys() == FILES.keys(), folder
                assert found == {name: content(size) for name, size in FILES.items()}, (
                    "fetched files differ from those that the script wrote"
                )
                (top / "large.bin").unlink()
                shutil.rmtree(top / "a")
                (top / "a").symlink_to(outside)
            assert backend.fetch(handle, into) == into
            assert not list(outside.iterdir()), "fetch wrote outside its folder, through a link"
        for what in (*((name,) for name in FETCHABLE), ("model", "checkpoints")):
            part = backend.fetch(handle, tmp_path / "-".join(what), what)
            assert {path.name for path in part.iterdir() if (path / "kept").exists()} == set(what)

    def test_files_keep_what_they_are(self, backend: Backend, start: Any, tmp_path: Path) -> None:
        """Modes, times and links, where paths of machines of your own keep the results."""
        if not backend.traits.own_machines or backend.traits.paths not in (Paths.HERE, Paths.NODES):
            pytest.skip("a store keeps bytes alone")
        script = (
            "import os, pathlib\n"
            "folder = pathlib.Path(os.environ['CLOUDTRAIN_OUTPUT_DIR'])\n"
            "(folder / 'program').write_text('#!/bin/sh')\n"
            "(folder / 'program').chmod(0o750)\n"
            "os.utime(folder / 'program', (1_500_000_000, 1_500_000_000))\n"
            "(folder / 'link').symlink_to('program')\n"
        )
        handle = start(script)
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        outputs = backend.fetch(handle, tmp_path / "fetched") / "outputs"
        about = (outputs / "program").stat()
        assert about.st_mode & 0o100 and not about.st_mode & 0o002
        assert about.st_mtime == 1_500_000_000
        assert (outputs / "link").readlink() == Path("program")

    def test_every_node_has_files(self, backend: Backend, start: Any, tmp_path: Path) -> None:
        self.require(backend, "num_nodes")
        script = (
            "import os, pathlib\n"
            "node = os.environ['NODE_RANK']\n"
            "pathlib.Path(os.environ['CLOUDTRAIN_OUTPUT_DIR'], f'of-{node}').write_text(node)\n"
        )
        handle = start(script, num_nodes=2)
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        outputs = backend.fetch(handle, tmp_path / "fetched") / "outputs"
        found = {path.name: path.read_text() for path in outputs.rglob("of-*")}
        assert found == {"of-0": "0", "of-1": "1"}

    def test_results_are_where_output_says(self, backend: Backend, start: Any, tmp_path: Path) -> None:
        """Where `traits.paths` takes a path, the results of the run are below it, unless `plan` refuses it."""
        if backend.traits.paths is Paths.NONE:
            pytest.skip("it takes no paths as output")
        output = tmp_path / "results"
        script = (
            "import os, pathlib\n"
            "folder = pathlib.Path(os.environ['CLOUDTRAIN_OUTPUT_DIR'])\n"
            "(folder / 'result').write_text('1')\n"
            "print(folder)\n"
        )
        try:
            handle = start(script, output=str(output))
        except BadJob as refused:
            assert any(problem.path.startswith("output") for problem in refused.problems), refused
            return
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        if backend.traits.writes_here:
            assert [path.read_text() for path in output.rglob("result")] == ["1"]
        else:
            assert [output in Path(line.text).parents for line in self.script_lines(backend, handle)] == [True]

    def test_checkpoints_belong_to_the_run(self, backend: Backend, start: Any) -> None:
        script = (
            "import os, pathlib\n"
            "path = pathlib.Path(os.environ['CLOUDTRAIN_CHECKPOINT_DIR'], 'step')\n"
            "print('found', path.read_text() if path.exists() else None)\n"
            "path.parent.mkdir(parents=True, exist_ok=True)\n"
            "path.write_text(os.environ['CLOUDTRAIN_ATTEMPT'])\n"
        )
        run_id = f"contract-{random.getrandbits(32):08x}"
        first = start(script, run_id=run_id, attempt=1)
        self.until_final(backend, first)
        second = start(script, run_id=run_id, attempt=2)
        self.until_final(backend, second)
        assert [line.text for line in self.script_lines(backend, first)] == ["found None"]
        assert [line.text for line in self.script_lines(backend, second)] == ["found 1"]
