"""What a node tells of its packages: names and versions, no address, in lines that every reader takes."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from launcher.log import Log
from launcher.prepare import packages

from cloudtrain import events
from cloudtrain.events import Event
from cloudtrain.report.packages import requirements


def test_what_this_interpreter_has_is_what_its_metadata_says():
    places = packages.folders(sys.executable)
    known = metadata.distributions(path=places)
    plain = {f"{re.sub('[-_.]+', '-', one.metadata['Name']).lower()}=={one.version}" for one in known}
    assert plain and set(packages.packages(places)) == plain


def test_folders_say_names_and_versions_and_the_first_one_wins(tmp_path: Path):
    for name in ("one/Spam_of.eggs-1.0+cu121.dist-info", "two/spam_of_eggs-2.0.dist-info", "two/six-1.16.0.egg-info",
                 "two/old_one-3.1rc1-py3.11.egg-info", "two/my-pkg-2.5.dist-info", "two/nameless.egg-info"):  # fmt: skip
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "one/Spam_of.eggs-1.0+cu121.dist-info/direct_url.json").write_text(
        '{"url": "https://me:secret@host/x"}'
    )
    places = [str(tmp_path / name) for name in ("one", "gone", "two")]
    assert packages.packages(places) == ["my-pkg==2.5", "old-one==3.1rc1", "six==1.16.0", "spam-of-eggs==1.0+cu121"]


def test_many_packages_come_in_lines_that_are_events(tmp_path: Path, monkeypatch):
    names = sorted(f"package-{'x' * (n % 90)}-{n}=={n}.0" for n in range(packages.MOST))
    monkeypatch.setattr(packages, "packages", lambda _: names)
    log = Log.in_folder(str(tmp_path))
    for _ in range(2):  # an attempt that is started again
        packages.report(sys.executable, log)
    told = []
    for seq, line in enumerate((tmp_path / "log").read_text().splitlines()):
        parsed = events.parse(line.split(" ", 3)[3])
        assert parsed is not None, "a longer line would be ordinary text"
        told.append(Event("a-1", 0, seq, "t", *parsed))
    assert len(told) > 10 and requirements(told) == names
    assert requirements(
        [Event("a-1", 0, 0, "t", "requirements", {"packages": ["x==1", "http://me:x@y", 1, "\x1b==1"]})]
    ) == ["x==1"]
    assert requirements([Event("a-1", 0, 0, "t", "requirements", {"packages": {}, "part": 0})]) == []
