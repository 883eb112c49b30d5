"""Two processes: an attempt that one has submitted is the other's as well, whatever differs between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloudtrain.backends.api import Backend
from cloudtrain.events import State
from cloudtrain.testing.elsewhere import SURROUNDINGS, Elsewhere
from cloudtrain.testing.fixtures import ContractFixtures


class ProcessesContract(ContractFixtures):
    """What two objects in two processes see of one attempt; clock, locale, umask and directory change between calls."""

    def test_another_process_submits(
        self, backend: Backend, elsewhere: Elsewhere, prepare: Any, start: Any, tmp_path: Path
    ) -> None:
        script = (
            "import os, pathlib\n"
            "folder = pathlib.Path(os.environ['CLOUDTRAIN_OUTPUT_DIR'], 'deep')\n"
            "folder.mkdir(parents=True)\n"
            "(folder / 'file').write_text('written')\n"
            "print('wrötten', flush=True)\n"
        )
        plan, bundle = prepare(script)
        for _ in SURROUNDINGS[1:]:
            assert elsewhere("find", plan.attempt_id) is None
        handle = elsewhere("submit", plan, bundle)  # with the last of the surroundings
        assert elsewhere("find", plan.attempt_id) == handle == backend.find(plan.attempt_id)
        assert elsewhere("submit", plan, bundle) == handle == backend.submit(plan, bundle)
        status = self.until_final(backend, handle)
        assert status.state is State.SUCCEEDED, self.text(backend, handle)
        assert [line.text for line in self.script_lines(backend, handle)] == ["wrötten"]
        lines = list(backend.logs(handle))
        for number, _ in enumerate(SURROUNDINGS):
            assert elsewhere("status", handle) == status
            assert elsewhere("logs", handle) == lines
            assert elsewhere("logs", handle, follow=True, after=lines[1].cursor) == lines[2:]
            assert elsewhere("find", plan.attempt_id) == handle
            into = elsewhere("fetch", handle, tmp_path / f"fetched-{number}")
            assert (into / "outputs" / "deep" / "file").read_text() == "written"

    def test_another_process_cancels(self, backend: Backend, elsewhere: Elsewhere, start: Any) -> None:
        handle = start("import time\nprint('there', flush=True)\ntime.sleep(600)\n")
        self.until_line(backend, handle, "there")
        for _ in SURROUNDINGS:
            assert elsewhere("status", handle).state is State.RUNNING
        elsewhere("cancel", handle)
        status = self.until_final(backend, handle)
        assert status.state is State.CANCELLED
        elsewhere("cancel", handle)
        for _ in SURROUNDINGS:
            assert elsewhere("status", handle) == status == backend.status(handle)
        self.assert_no_leftovers(handle)
