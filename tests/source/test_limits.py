"""What is too large to be sent, and pointers that stand in for files that are not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloudtrain.errors import BadSource
from cloudtrain.job.units import format_size
from cloudtrain.source import limits
from cloudtrain.source.bundle import Bundle, why
from cloudtrain.source.files import File
from tests.source.trees import repository, write

MB = 1_000_000


def file(path: str, size: int) -> File:
    return File(path, size, 0o644)


def refusal(files, allowed=()) -> BadSource:
    with pytest.raises(BadSource) as caught:
        limits.check(files, allowed)
    return caught.value


def sparse(path: Path, size: int) -> Path:
    """Make a file of any size that takes no room."""
    path.touch()
    os.truncate(path, size)
    return path


def pointer(version: str = "https://git-lfs.github.com/spec/v1", extra: str = "", size: int = 12345) -> str:
    return f"version {version}\n{extra}oid sha256:{'4d7a2146' * 8}\nsize {size}\n"


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_what_is_as_large_as_may_be_passes():
    limits.check([])
    limits.check([file(str(number), 500 * MB) for number in range(4)])


def test_files_over_the_limit_are_named_with_their_sizes_biggest_first():
    error = refusal([file("a.bin", 600 * MB), file("b.py", 5), file("odd\nname", 2_500 * MB)])
    assert str(error).splitlines() == [
        "the source has 2 files over 500 MB:",
        "     2.5 GB  'odd\\nname'",
        "     600 MB  a.bin",
    ]
    assert ".cloudtrainignore" in error.hint and "allow_large" in error.hint and "inputs:" in error.hint


def test_many_large_files_are_a_screenful():
    lines = str(refusal([file(f"f{number}", 500 * MB + number) for number in range(1, 31)])).splitlines()
    assert lines[0] == "the source has 30 files over 500 MB:" and lines[-1] == "  and 20 more" and len(lines) == 12


def test_a_tree_over_the_limit_names_its_biggest_files():
    files = [file(f"f{number:02}", 100 * MB + number) for number in range(20)] + [file("big", 400 * MB)]
    lines = str(refusal(files)).splitlines()
    assert lines[0] == "the source has 2.4 GB in 21 files, which is over 2 GB; the biggest:"
    assert lines[1].split() == ["400", "MB", "big"] and lines[2].endswith("f19") and len(lines) == 11


def test_files_that_are_allowed_do_not_count():
    files = [file("data/a.bin", 1_900 * MB), file("data/b.bin", 600 * MB), file("c.bin", 501 * MB)]
    assert "1 file over" in str(refusal(files, ["data/"]))
    assert "data/b.bin" in str(refusal(files, ["*.bin", "!b.bin"]))
    limits.check(files, ["data/", "/c.bin"])


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_250_000, "1.2 MB"),
        (500 * MB, "500 MB"),
        (3_000 * MB, "3 GB"),
    ],
)
def test_sizes_as_people_say_them(size, text):
    assert format_size(size) == text


def test_a_large_file_is_refused_before_anything_is_read(tmp_path):
    root = write(tmp_path / "source", {"a.py": "ghp_" + "aB3" * 12})
    sparse(root / "weights.bin", limits.MAX_FILE + 1)
    with pytest.raises(BadSource, match=r"1 file over 500 MB:\n +500 MB  weights.bin"):
        Bundle.make(root, tmp_path / "bundles")
    assert not (tmp_path / "bundles").exists()
    assert "it has 500 MB, and 500 MB are the most" in why(root, "weights.bin")
    assert "refused" not in why(root, "weights.bin", allow_large=["*.bin"])


# -- pointers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [pointer(), pointer("https://hawser.github.com/spec/v1"), pointer(extra=f"ext-0-foo sha256:{'a' * 64}\n"),
     pointer().replace("\n", "\r\n")],
)  # fmt: skip
def test_pointers_are_known(text):
    assert limits.is_pointer(text.encode())


@pytest.mark.parametrize(
    "text",
    ["", "version 1\n", "x" + pointer(), pointer("https://example.org/spec/v1"), pointer() + "x" * 1024,
     "version https://git-lfs.github.com/spec/v1\nsize 3\n", "see " + pointer()],
)  # fmt: skip
def test_what_is_no_pointer(text):
    assert not limits.is_pointer(text.encode())


def test_pointers_are_refused_by_name_with_what_to_do_and_allowed_if_wanted(tmp_path):
    root = repository(tmp_path / "source", {"a.py": "1", "m/model.bin": pointer(), "m/other.bin": pointer(size=7)})
    with pytest.raises(BadSource) as caught:
        Bundle.make(root, tmp_path / "bundles")
    assert str(caught.value) == (
        "the source has Git-LFS pointers instead of the files in 2 files:\n"
        "  m/model.bin:1  Git-LFS pointer\n  m/other.bin:1  Git-LFS pointer"
    )
    assert "git lfs pull" in caught.value.hint and "allow_pointers" in caught.value.hint
    assert why(root, "m/model.bin").endswith("but it is refused: it is a Git-LFS pointer")
    assert why(root, "m/model.bin", allow_pointers=["m/"]) == "m/model.bin is packaged: git tracks it"
    made = Bundle.make(root, tmp_path / "bundles", allow_pointers=["m/"])
    made.extract(tmp_path / "out")
    assert (tmp_path / "out/m/model.bin").read_text() == pointer()
    with pytest.raises(BadSource, match="in 2 files"):  # known by now, and still refused
        Bundle.make(root, tmp_path / "bundles")


# -- why --------------------------------------------------------------------------------------------------------------


def test_why_names_what_is_refused_line_by_line(tmp_path):
    token = "npm_" + "aB3" * 12
    root = write(
        tmp_path / "source", {".env": f"\nA={token}\n", "b.py": f"t = '{token}'\n", "c.py": "", "gone.log": ""}
    )
    (root / "link").symlink_to("c.py")
    os.mkfifo(root / "pipe")
    assert why(root, ".env") == (
        ".env is packaged: no rule excludes it, but it is refused: by its name: environment file, line 2: npm token"
    )
    assert why(root, "b.py") == "b.py is packaged: no rule excludes it, but it is refused: line 1: npm token"
    assert why(root, "b.py", allow_secrets=["*.py"]) == "b.py is packaged: no rule excludes it"
    assert why(root, "c.py") == "c.py is packaged: no rule excludes it"
    assert why(root, "link") == "link is packaged: no rule excludes it"
    assert why(root, "nothing") == "nothing is not packaged: it does not exist"
    write(root, {".cloudtrainignore": "*.log\n"})
    assert why(root, "gone.log") == "gone.log is not packaged: .cloudtrainignore:1: *.log excludes it"
