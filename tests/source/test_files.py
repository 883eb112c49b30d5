"""Law 4, which files: git's own list, decided by real git on real trees."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudtrain.errors import BadSource
from cloudtrain.source.files import Source, list_files, shown, why
from tests.source.trees import git, repository, save, write


def names(root: Path) -> list[str]:
    return [file.path for file in list_files(root)]


def problem(root: Path) -> str:
    with pytest.raises(BadSource) as caught:
        Source.of(root)
    return str(caught.value)


# -- git's list -------------------------------------------------------------------------------------------------------


def test_tracked_and_new_files_are_in_and_ignored_ones_are_not(tmp_path):
    root = repository(tmp_path / "repo", {"a.py": "1", ".gitignore": "*.log\n/out/\n", "kept/b.py": "2"})
    write(root, {"new.py": "3", "x.log": "-", "out/y": "-", "kept/out/z": "in"})
    assert names(root) == [".gitignore", "a.py", "kept/b.py", "kept/out/z", "new.py"]


def test_nested_ignore_files_and_negation(tmp_path):
    root = repository(tmp_path / "repo", {".gitignore": "*.csv\n!keep.csv\n", "d/.gitignore": "!all.csv\nkeep.csv\n"})
    write(root, {"a.csv": "", "keep.csv": "", "d/all.csv": "", "d/keep.csv": "", "d/e/all.csv": ""})
    assert names(root) == [".gitignore", "d/.gitignore", "d/all.csv", "d/e/all.csv", "keep.csv"]


def test_a_tracked_file_stays_in_though_a_rule_ignores_it(tmp_path):
    root = repository(tmp_path / "repo", {"model.bin": "1"})
    write(root, {".gitignore": "*.bin\n", "other.bin": ""})
    assert names(root) == [".gitignore", "model.bin"]


def test_a_file_that_is_gone_is_left_out(tmp_path):
    root = repository(tmp_path / "repo", {"a": "", "b": "", "d/c": ""})
    (root / "b").unlink()
    shutil.rmtree(root / "d")
    assert names(root) == ["a"]


def test_a_file_with_a_folder_in_its_place_is_gone(tmp_path):
    root = repository(tmp_path / "repo", {"a": "", "b": ""})
    (root / "b").unlink()
    write(root, {"b/c": ""})
    assert names(root) == ["a", "b/c"]


def test_files_of_a_sparse_checkout_are_those_that_are_there(tmp_path):
    root = repository(tmp_path / "repo", {"a/x": "", "b/y": "", "top": ""})
    git(root, "sparse-checkout", "set", "a")
    assert names(root) == ["a/x", "top"]


def test_a_conflict_lists_each_file_once(tmp_path):
    root = repository(tmp_path / "repo", {"f": "base\n"})
    git(root, "checkout", "-q", "-b", "other")
    save(write(root, {"f": "theirs\n"}))
    git(root, "checkout", "-q", "main")
    save(write(root, {"f": "ours\n"}))
    with pytest.raises(AssertionError):
        git(root, "merge", "other")
    assert names(root) == ["f"]


def test_a_subdirectory_of_a_repository_obeys_the_rules_above_it(tmp_path):
    root = repository(tmp_path / "repo", {".gitignore": "*.log\n/sub/cache/\n", "sub/a.py": "", "other/b.py": ""})
    write(root, {"sub/x.log": "", "sub/cache/y": "", "sub/new": ""})
    assert names(root / "sub") == ["a.py", "new"]


def test_the_machines_own_excludes_do_not_matter(tmp_path, monkeypatch):
    root = repository(tmp_path / "repo", {"a.py": ""})
    write(root, {"notes.txt": ""})
    write(tmp_path / "config", {"git/ignore": "notes.txt\n", "everything": "*.txt\n"})
    write(tmp_path / "config", {"gitconfig": f"[core]\n excludesFile = {tmp_path}/config/everything\n"})
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config/gitconfig"))
    assert names(root) == ["a.py", "notes.txt"]


def test_what_the_repository_itself_excludes_is_never_sent(tmp_path):
    root = repository(tmp_path / "repo", {"a.py": ""})
    write(root, {"private.txt": "", ".git/info/exclude": "private.txt\n"})
    assert names(root) == ["a.py"]


def test_a_hooks_environment_does_not_name_another_repository(tmp_path, monkeypatch):
    root = repository(tmp_path / "repo", {"a.py": ""})
    other = repository(tmp_path / "other", {"b.py": ""})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    assert names(root) == ["a.py"]
    assert Source.of(root).commit != git_head(other, monkeypatch)


def git_head(root, monkeypatch):
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_INDEX_FILE")
    return git(root, "rev-parse", "HEAD").strip()


def test_listing_writes_nothing_into_the_repository(tmp_path):
    root = repository(tmp_path / "repo", {"a.py": "", "b.py": ""})
    os.utime(root / "a.py", (1, 1))  # the index is stale now: git would refresh it
    before = {path: path.stat().st_mtime_ns for path in (root / ".git").rglob("*")}
    Source.of(root)
    assert {path: path.stat().st_mtime_ns for path in (root / ".git").rglob("*")} == before


ODD = ["-dash", "new\nline", "tab\there", "qu'ote", 'dou"ble', "back\\slash", "späße", "日本語.py", " lead",
       "trail ", "$HOME", "a*b", "[x]"]  # fmt: skip


@pytest.mark.parametrize("repo", [True, False])
def test_odd_names_arrive_as_they_are(tmp_path, repo):
    root = write(tmp_path / "odd", dict.fromkeys(ODD, "") | {f"d {i}/{name}": "" for i, name in enumerate(ODD)})
    if repo:
        repository(root)
    assert names(root) == sorted([*ODD, *(f"d {i}/{name}" for i, name in enumerate(ODD))], key=str.encode)


@pytest.mark.parametrize("repo", [True, False])
def test_a_name_that_is_no_utf8_is_refused_by_name(tmp_path, repo):
    root = write(tmp_path / "odd", {"good": ""})
    (Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9.txt"))).write_text("")
    if repo:
        repository(root, commit=False)
    assert "caf" in problem(root) and "not UTF-8" in problem(root)
    write(root, {".cloudtrainignore": "caf*\n"})
    assert names(root) == [".cloudtrainignore", "good"]


def test_a_broken_repository_is_not_taken_for_none(tmp_path):
    root = write(tmp_path / "copy", {"a.py": "", ".git": "gitdir: /nowhere/at/all\n"})
    assert "git cannot list" in problem(root)


def test_an_empty_git_folder_is_not_taken_for_none(tmp_path):
    assert "git cannot list" in problem(write(tmp_path / "copy", {"a.py": "", ".git/": ""}))


def test_git_decides_whether_a_repository_above_counts_and_no_process_is_left(tmp_path, monkeypatch):
    root = write(repository(tmp_path / "repo", {".gitignore": "*\n"}, commit=False) / "sub", {"a.py": ""})
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path / "repo"))
    before = psutil.Process().children()
    found = Source.of(root)
    assert ([file.path for file in found.files], found.commit) == (["a.py"], None)
    assert psutil.Process().children() == before


def test_without_git_a_repository_is_refused_and_another_directory_is_not(tmp_path, monkeypatch):
    root = repository(tmp_path / "repo", {"a.py": ""})
    plain = write(tmp_path / "plain", {"a.py": ""})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git is not installed" in problem(root)
    assert names(plain) == ["a.py"]


def test_a_repository_of_somebody_else_is_listed_and_its_programs_are_not_run(tmp_path, monkeypatch):
    root = repository(tmp_path / "repo", {"a.py": "", ".gitignore": "x\n", ".gitattributes": "* filter=evil\n"})
    write(root, {"x": "", "evil": f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n"})
    (root / "evil").chmod(0o755)
    git(root, "config", "core.fsmonitor", f"{root}/evil")
    git(root, "config", "filter.evil.clean", f"{root}/evil")
    os.utime(root / "a.py", (1, 1))
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own switch
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    assert subprocess.run(["git", "status"], cwd=root, capture_output=True).returncode != 0
    found = Source.of(root)
    assert [file.path for file in found.files] == [".gitattributes", ".gitignore", "a.py", "evil"]
    assert (len(found.commit or ""), found.dirty) == (40, True)
    assert not (tmp_path / "ran").exists()


# -- commit and dirty -------------------------------------------------------------------------------------------------


def test_the_commit_and_whether_the_files_are_those_of_it(tmp_path):
    root = repository(tmp_path / "repo", {"a.py": "1", "sub/b.py": "2", ".gitignore": "*.log\n"})
    head = git(root, "rev-parse", "HEAD").strip()
    clean = Source.of(root)
    assert (clean.commit, clean.dirty) == (head, False)
    write(root, {"x.log": "ignored files do not count"})
    assert Source.of(root).dirty is False
    write(root, {"new.py": ""})
    assert Source.of(root).dirty is True
    assert Source.of(root / "sub").dirty is False
    (root / "new.py").unlink()
    write(root, {"a.py": "changed"})
    assert Source.of(root).dirty is True
    git(root, "checkout", "-q", "a.py")
    (root / "a.py").unlink()
    assert Source.of(root).dirty is True


def test_before_the_first_commit(tmp_path):
    found = Source.of(repository(tmp_path / "repo", {"a.py": ""}, commit=False))
    assert (found.commit, found.dirty) == (None, True)


def test_an_ignored_file_that_is_taken_in_makes_it_dirty(tmp_path):
    root = repository(tmp_path / "repo", {".gitignore": "data\n", ".cloudtrainignore": "!data\n"})
    assert Source.of(root).dirty is False
    write(root, {"data": "1"})
    assert Source.of(root).dirty is True


def test_line_ends_are_those_of_the_working_tree_and_do_not_make_it_dirty(tmp_path, monkeypatch):
    root = repository(tmp_path / "repo", {"a.txt": "one\ntwo\n"})
    config = write(tmp_path / "config", {"gitconfig": "[core]\n autocrlf = true\n"}) / "gitconfig"
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    (root / "a.txt").unlink()
    subprocess.run(["git", "checkout", "-q", "a.txt"], cwd=root, check=True)
    assert (root / "a.txt").read_bytes() == b"one\r\ntwo\r\n"
    found = Source.of(root)
    assert (found.files[0].size, found.dirty) == (10, False)


# -- .cloudtrainignore ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repo", [True, False])
@pytest.mark.parametrize(
    ("rules", "there"),
    [
        ("*.csv\n", ["big/x.bin", "data/sub/c.txt", "train.py"]),
        ("/data/\n", ["big/x.bin", "train.py"]),
        ("data/*\n!data/a.csv\n", ["big/x.bin", "data/a.csv", "train.py"]),
        ("data/\n!data/a.csv\n", ["big/x.bin", "data/a.csv", "train.py"]),  # more than git can: the last line decides
        ("# comment\n\n*\n!train.py\n", ["train.py"]),
        ("*\r\n!*.py\r\n", ["train.py"]),
        ("!secret.log\n", ["big/x.bin", "data/a.csv", "data/sub/c.txt", "secret.log", "train.py"]),
        ("!ignored/deep/\n", ["big/x.bin", "data/a.csv", "data/sub/c.txt", "ignored/deep/z", "train.py"]),
        ("!/ignored/deep/z\nbig\n", ["data/a.csv", "data/sub/c.txt", "ignored/deep/z", "train.py"]),
    ],
)
def test_cloudtrainignore_rules_out_and_takes_in(tmp_path, repo, rules, there):
    files = {"train.py": "", "data/a.csv": "", "data/sub/c.txt": "", "big/x.bin": ""}
    root = write(tmp_path / "repo", {**files, ".gitignore": "*.log\nignored/\n"})
    if repo:
        repository(root)
    write(root, {"secret.log": "", "ignored/deep/z": "", "ignored/y": "", ".cloudtrainignore": rules})
    assert [name for name in names(root) if not name.startswith(".")] == there


@pytest.mark.parametrize("repo", [True, False])
def test_what_is_of_a_run_is_left_out_unless_it_is_taken_in(tmp_path, repo):
    report, other = "sub/tiny-lm-261125-201003-steq.html", "by-key-k0123456789abcdef.html"
    results = [f"out/lm-261125-201003-steq/{name}" for name in ("model/w.bin", "run.json", "source/a.tar.gz")]
    results.append("out/.index/new/lm-261125-201003-steq.a1.20261125T201003.830528Z-9515.end.json")
    plain = {"train.py": "x", "page.html": "x", "a-123.html": "x", "out/lm-261125/x": "x"}
    write(tmp_path, {**plain, **dict.fromkeys([report, other, *results], "x")})
    if repo:
        git(tmp_path, "init", "-q")
    assert names(tmp_path) == sorted(plain)
    assert all("named as a run's report or results" in why(tmp_path, name).sentence for name in (report, *results))
    (tmp_path / ".cloudtrainignore").write_text(f"!{other}\n")
    assert names(tmp_path) == sorted([".cloudtrainignore", *plain, other])
    if repo:
        (tmp_path / ".cloudtrainignore").unlink()
        git(tmp_path, "add", "-A")
        assert report in names(tmp_path), "what git tracks is packaged"


@pytest.mark.parametrize("repo", [True, False])
def test_a_home_below_the_source_is_never_packaged(tmp_path, repo, monkeypatch):
    root = write(
        tmp_path, {"train.py": "x", ".ci/home.id": "x", ".ci/bundles/a.tar.gz": "x", ".ci/sources/r/.git/HEAD": ""}
    )
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(root / ".ci"))
    if repo:
        git(root, "init", "-q")
        git(root, "add", "-f", ".ci/home.id")
    assert names(root) == ["train.py"]
    assert why(root, ".ci/home.id").sentence.endswith("cloudtrain's own home (CLOUDTRAIN_HOME) is never packaged")
    write(root, {".cloudtrainignore": "!**\n"})
    assert names(root) == [".cloudtrainignore", "train.py"]
    monkeypatch.delenv("CLOUDTRAIN_HOME")
    given = Source.of(write(tmp_path / "two", {"b.py": "", "home/x": ""}), home=tmp_path / "two" / "home")
    assert [file.path for file in given.files] == ["b.py"], "a home that a program gives"


@pytest.mark.parametrize("repo", [True, False])
def test_cloudtrainignore_in_a_folder_holds_below_it(tmp_path, repo):
    root = write(tmp_path / "repo", {"a/x.csv": "", "b/x.csv": "", "a/.cloudtrainignore": "/x.csv\n"})
    if repo:
        repository(root)
    assert names(root) == ["a/.cloudtrainignore", "b/x.csv"]


def test_everything_ruled_out_is_said(tmp_path):
    root = repository(tmp_path / "repo", {".gitignore": "*\n"}, commit=False)
    assert "git ignores every file" in problem(root)
    assert "it has no files" in problem(write(tmp_path / "empty", {}))


# -- repositories in repositories -------------------------------------------------------------------------------------


def nest(tmp_path: Path) -> Path:
    inner = repository(tmp_path / "inner", {"lib.py": "1", ".gitignore": "*.o\n"})
    middle = repository(tmp_path / "middle", {"mid.py": "2"})
    git(middle, "submodule", "add", "-q", str(inner), "vendor/inner")
    save(middle)
    root = repository(tmp_path / "repo", {"a.py": "3"})
    git(root, "submodule", "add", "-q", str(middle), "third party")
    git(root, "submodule", "update", "-q", "--init", "--recursive")
    save(root)
    return root


def test_submodules_recurse(tmp_path):
    root = nest(tmp_path)
    write(root, {"third party/vendor/inner/x.o": "-", "third party/vendor/inner/new.py": "in"})
    assert names(root) == [
        ".gitmodules", "a.py", "third party/.gitmodules", "third party/mid.py", "third party/vendor/inner/.gitignore",
        "third party/vendor/inner/lib.py", "third party/vendor/inner/new.py",
    ]  # fmt: skip
    assert Source.of(root).dirty is True
    write(root, {".cloudtrainignore": "third party/vendor/\n"})
    assert "third party/mid.py" in names(root) and "third party/vendor/inner/lib.py" not in names(root)
    write(root, {".cloudtrainignore": "!*.o\n"})
    assert "third party/vendor/inner/x.o" in names(root)


def test_a_changed_submodule_makes_it_dirty(tmp_path):
    root = nest(tmp_path)
    assert Source.of(root).dirty is False
    write(root, {"third party/mid.py": "changed"})
    assert Source.of(root).dirty is True


def test_a_submodule_that_is_not_checked_out_is_refused(tmp_path):
    nest(tmp_path)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(tmp_path / "repo"), str(clone))
    assert "'third party'" not in problem(clone) and "third party is a submodule that is not checked out" in problem(
        clone
    )
    write(clone, {".cloudtrainignore": "third party/\n"})
    assert "a.py" in names(clone)


@pytest.mark.parametrize("repo", [True, False])
def test_other_repositories_inside_are_refused_all_at_once(tmp_path, repo):
    root = write(tmp_path / "repo", {"a.py": ""})
    if repo:
        repository(root)
    repository(root / "one", {"x": ""})
    repository(root / "deep/two", {"y": ""})
    text = problem(root)
    assert "one is a separate git repository" in text and "deep/two is a separate git repository" in text
    write(root, {".cloudtrainignore": "/one\ntwo/\n"})
    assert names(root) == [".cloudtrainignore", "a.py"]


def test_an_ignored_repository_inside_does_not_matter(tmp_path):
    root = repository(tmp_path / "repo", {"a.py": "", ".gitignore": "work/\n"})
    repository(root / "work", {"x": ""})
    assert names(root) == [".gitignore", "a.py"]


# -- outside of git ---------------------------------------------------------------------------------------------------


def test_outside_of_git_a_few_customs_apply(tmp_path):
    root = write(
        tmp_path / "plain", {"a.py": "", "__pycache__/a.pyc": "", ".venv/bin/python": "", "b/c.pyc": "", ".hidden": "",
                             "b/.DS_Store": "", "b/venv/x": "", "b/node_modules": "", "old.pyo": "", "d.pyc/e": ""}
    )  # fmt: skip
    assert names(root) == [".hidden", "a.py", "b/node_modules"]  # a folder's custom is not a file's
    found = Source.of(root)
    assert (found.commit, found.dirty) == (None, False)
    write(root, {".cloudtrainignore": "!c.pyc\n"})
    assert names(root) == [".cloudtrainignore", ".hidden", "a.py", "b/c.pyc", "b/node_modules"]


PARTS = st.sampled_from(["a", "b", "c.log", "d.py", "build", "ab", "x y"])
PATHS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
LINES = st.sampled_from(
    ["a", "/a", "a/", "b/", "*.log", "!*.log", "!c.log", "build", "/build/", "**/b", "a/**", "a/**/b", "a/*", "!a/b", "*", "!*/",
     "!d.py", "?b", "[ab]", "[!a]b", "x y", "x\\ y", "# no", "", "!/a/", "b/c.log", "/*/b", "**", "a*", "ab/", "*.py", "!build/"]
)  # fmt: skip
IGNORES = st.dictionaries(st.sampled_from(["", "a/", "b/", "a/b/", "build/"]), st.lists(LINES, max_size=5), max_size=3)


def tree(root: Path, paths: set[str], ignores: dict[str, list[str]]) -> None:
    for path in sorted(paths, key=len, reverse=True):
        if not (root / path).exists() and not any(parent.is_file() for parent in (root / path).parents):
            write(root, {path: ""})
    for folder, lines in ignores.items():
        if not any(parent.is_file() for parent in (root / folder / "x").parents):
            write(root, {f"{folder}.gitignore": "".join(f"{line}\n" for line in lines)})


def listed(root: Path) -> list[str]:
    output = git(root, "ls-files", "-co", "--exclude-standard", "-z")
    return sorted(path for path in output.split("\0") if path and (root / path).exists())


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(paths=st.sets(PATHS, min_size=1, max_size=10), ignores=IGNORES, tracked=st.sets(PATHS, max_size=3))
def test_the_list_is_gits_inside_and_outside_of_a_repository(paths, ignores, tracked):
    with tempfile.TemporaryDirectory() as folder:
        root = write(Path(folder, "source"), {"always": ""})
        tree(root, paths, ignores)
        plain = sorted_or_none(root)
        repository(root, commit=False)
        assert sorted_or_none(root) == (listed(root) or None)
        assert plain == (listed(root) or None)
        git(root, "add", "-f", "always", *(path for path in tracked if (root / path).is_file()))
        assert sorted_or_none(root) == listed(root)


def sorted_or_none(root: Path) -> list[str] | None:
    try:
        return names(root)
    except BadSource as error:
        assert "ignores every file" in str(error) or "has no files" in str(error)
        return None


# -- why --------------------------------------------------------------------------------------------------------------


def test_why_in_a_repository(tmp_path):
    root = repository(
        tmp_path / "repo", {"a.py": "", "d/.gitignore": "\n*.log\n", ".cloudtrainignore": "*.csv\n!/d/y.log\n"}
    )
    write(root, {"new.py": "", "d/x.log": "", "d/y.log": "", "big.csv": "", "d/z.txt": ""})
    repository(root / "nested", {"q": ""})
    os.mkfifo(root / "pipe")
    asked = ["a.py", "./new.py", str(root / "d/x.log"), "d/y.log", "big.csv", "d", "nested/q", "gone", "../x", "pipe"]
    said = {name: why(root, name).sentence for name in asked}
    assert [name for name in said if why(root, name).inside] == ["a.py", "./new.py", "d/y.log"]
    assert said == {
        "a.py": "a.py is packaged: git tracks it",
        "./new.py": "new.py is packaged: it is new, and no rule ignores it",
        str(root / "d/x.log"): "d/x.log is not packaged: git ignores it (d/.gitignore:2: *.log)",
        "d/y.log": "d/y.log is packaged: .cloudtrainignore:2: !/d/y.log includes it",
        "big.csv": "big.csv is not packaged: .cloudtrainignore:1: *.csv excludes it",
        "d": "d is not packaged: it is a folder; only files are packaged",
        "nested/q": "nested/q is not packaged: nested is a repository of its own",
        "gone": "gone is not packaged: it does not exist",
        "../x": f"../x is not packaged: it is not below {root}",
        "pipe": "pipe is not packaged: it is not a regular file, or git does not look there",
    }


def test_why_outside_of_git(tmp_path):
    root = write(tmp_path / "s", {"a.py": "", "__pycache__/a.pyc": "", ".gitignore": "/out\n", "out/x/y": "", "b.csv": "",
                                  ".cloudtrainignore": "*.csv\n"})  # fmt: skip
    assert why(root, "a.py").sentence == "a.py is packaged: no rule excludes it"
    assert why(root, "out/x/y").sentence == "out/x/y is not packaged: .gitignore:1: /out excludes it"
    assert why(root, "b.csv").sentence == "b.csv is not packaged: .cloudtrainignore:1: *.csv excludes it"
    write(root, {"any name/pyvenv.cfg": "home = /usr/bin\n", "any name/lib/torch.py": ""})
    for path in ("__pycache__/a.pyc", "any name/lib/torch.py"):
        assert "never packaged outside of git" in why(root, path).sentence


def test_shown_quotes_only_what_is_unusual():
    assert [shown(name) for name in ("a/b.py", "späß", "a\nb", "", " a")] == ["a/b.py", "späß", "'a\\nb'", "''", "' a'"]
