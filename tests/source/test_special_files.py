"""What is no plain file in a source: links, pipes, sockets, our own folder."""

from __future__ import annotations

import os
import shutil
import socket

import pytest

from cloudtrain.source.archive import LINK
from cloudtrain.source.files import Source, list_files
from tests.source.test_files import names, problem
from tests.source.trees import repository, write


def test_modes_are_those_of_the_owners_execute_bit(tmp_path):
    root = write(tmp_path / "plain", dict.fromkeys("abcd", ""))
    for name, mode in (("a", 0o600), ("b", 0o700), ("c", 0o677), ("d", 0o4755)):
        (root / name).chmod(mode)
    assert [file.mode for file in list_files(root)] == [0o644, 0o755, 0o644, 0o755]


@pytest.mark.parametrize("repo", [True, False])
def test_links_inside_are_kept_also_those_that_dangle_or_turn_in_a_ring(tmp_path, repo):
    root = write(tmp_path / "repo", {"d/file": "", "e/": ""})
    links = {
        "a": "d/file",
        "d/up": "../a",
        "folder": "d",
        "gone": "nothing",
        "ring": "ring",
        "e/over": "../d/../d/file",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    if repo:
        repository(root)
    found = Source.of(root)
    assert [file.path for file in found.files if file.mode == LINK] == ["a", "d/up", "e/over", "folder", "gone", "ring"]
    assert found.links == links
    assert "folder/file" not in names(root)


@pytest.mark.parametrize(
    ("links", "bad"),
    [
        ({"l": "/etc/passwd"}, "l"),
        ({"l": "../x"}, "l"),
        ({"d/l": "../../x"}, "d/l"),
        ({"l": "../repo/d/file"}, "l"),  # comes back in here, but not on a node
        ({"up": "d/deep/back", "d/deep/back": "../..", "l": "up/../x"}, "l"),  # each name looks harmless
        ({"d/a": "../b", "b": "../x"}, "d/a"),
    ],
)
def test_links_that_lead_out_are_refused_by_name(tmp_path, links, bad):
    root = write(tmp_path / "repo", {"d/deep/file": "", "d/file": ""})
    for name, target in links.items():
        (root / name).symlink_to(target)
    assert f"{bad} is a link that points outside the source" in problem(root)
    write(root, {".cloudtrainignore": "".join(f"/{name}\n" for name in links)})
    assert names(root) == [".cloudtrainignore", "d/deep/file", "d/file"]


def test_files_behind_a_folder_that_became_a_link_are_not_read(tmp_path):
    root = repository(tmp_path / "repo", {"d/secret": "mine", "a": ""})
    shutil.rmtree(root / "d")
    write(tmp_path / "else", {"secret": "not mine"})
    (root / "d").symlink_to("../else")
    assert "d is a link that points outside" in problem(root)
    (root / "d").unlink()
    write(root, {"other/secret": "mine too"})
    (root / "d").symlink_to("other")
    assert names(root) == ["a", "d", "other/secret"]


def test_pipes_and_sockets_are_refused_by_name(tmp_path):
    root = write(tmp_path / "plain", {"a": ""})
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(root)  # a socket's path may not be long
        try:
            one.bind("sock")
        finally:
            os.chdir(here)
    assert "pipe is a named pipe" in problem(root) and "sock is a socket" in problem(root)


def test_a_tracked_file_that_became_a_pipe_is_refused(tmp_path):
    root = repository(tmp_path / "repo", {"a": "", "b": ""})
    (root / "a").unlink()
    os.mkfifo(root / "a")
    assert "a is a named pipe" in problem(root)


def test_our_own_folder_in_the_source_is_refused(tmp_path):
    assert ".cloudtrain/x has a name that is reserved" in problem(write(tmp_path / "s", {".cloudtrain/x": "", "a": ""}))


def test_a_source_that_is_no_directory(tmp_path):
    assert "does not exist" in problem(tmp_path / "nowhere")
    assert "is not a directory" in problem(write(tmp_path, {"file": ""}) / "file")


def test_many_problems_are_cut_to_a_screenful(tmp_path):
    root = write(tmp_path / "s", {"a": ""})
    for number in range(50):
        (root / f"l{number:02}").symlink_to("/etc")
    text = problem(root)
    assert "l00" in text and "l49" not in text and "and 30 more" in text
