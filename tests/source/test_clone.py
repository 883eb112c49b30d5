"""Git sources: real repositories behind git+file://, a cache, and credentials that never show."""

from __future__ import annotations

import threading

import pytest

from cloudtrain.errors import BadSource
from cloudtrain.source.bundle import Bundle
from cloudtrain.source.clone import Remote, fetch_git, hide
from tests.source.trees import git, repository, save, write


@pytest.fixture
def remote(tmp_path):
    return repository(tmp_path / "remote repo", {"a.py": "1", "sub/b.py": "2"})


def url(remote, rev="", tail=""):
    return f"git+file://{remote}{'@' if rev else ''}{rev}{tail}"


def refusal(address, cache) -> str:
    with pytest.raises(BadSource) as caught:
        fetch_git(address, cache)
    return f"{caught.value} {caught.value.hint}"


def test_head_branch_tag_and_commit(remote, tmp_path):
    first = git(remote, "rev-parse", "HEAD").strip()
    git(remote, "tag", "-a", "v1", "-m", "release")
    git(remote, "tag", "light")
    git(remote, "checkout", "-q", "-b", "feature/x")
    second = save(write(remote, {"a.py": "changed"}))
    git(remote, "checkout", "-q", "main")
    cache = tmp_path / "cache"
    revs = {"": first, "main": first, "v1": first, "light": first, "feature/x": second, second: second, first[:9]: first,
            "refs/heads/main": first}  # fmt: skip
    for rev, commit in revs.items():
        path, found = fetch_git(url(remote, rev), cache)
        assert (found, path.name) == (commit, commit), rev
        assert (path / "a.py").read_text() == ("1" if commit == first else "changed")
    assert len(list(cache.glob("*/*"))) == 2  # a commit is there once, however it is called


def test_a_checkout_is_packaged_clean_with_its_commit(remote, tmp_path, monkeypatch):
    config = write(tmp_path / "config", {"gitconfig": "[core]\n autocrlf = true\n"}) / "gitconfig"
    write(remote, {"lines.txt": "one\ntwo\n"})
    commit = save(remote)
    here = Bundle.make(remote, tmp_path / "bundles")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    path, _ = fetch_git(url(remote), tmp_path / "cache")
    made = Bundle.make(path, tmp_path / "bundles")
    assert (made.commit, made.dirty, made.sha256) == (commit, False, here.sha256)


def test_a_branch_that_moved_is_followed_and_a_commit_needs_no_remote(remote, tmp_path):
    _, first = fetch_git(url(remote, "main"), tmp_path / "cache")
    second = save(write(remote, {"a.py": "2"}))
    assert fetch_git(url(remote, "main"), tmp_path / "cache")[1] == second
    remote.rename(tmp_path / "gone")
    assert fetch_git(url(remote, first), tmp_path / "cache")[1] == first
    assert "git cannot fetch" in refusal(url(remote, "main"), tmp_path / "cache")


def test_a_commit_that_the_server_hands_out_only_with_everything(remote, tmp_path):
    first = git(remote, "rev-parse", "HEAD").strip()
    save(write(remote, {"a.py": "2"}))
    git(remote, "config", "uploadpack.allowAnySHA1InWant", "false")
    assert fetch_git(url(remote, first), tmp_path / "cache")[1] == first


def test_submodules_and_a_subdirectory(remote, tmp_path, monkeypatch):
    inner = repository(tmp_path / "inner", {"lib.py": "3"})
    git(remote, "submodule", "add", "-q", str(inner), "vendor")
    save(remote)
    path, _ = fetch_git(url(remote, "main", "#subdirectory=sub"), tmp_path / "cache")
    assert (path / "b.py").read_text() == "2"
    assert (path.parent / "vendor/lib.py").read_text() == "3"
    assert "has no folder nowhere" in refusal(url(remote, "main", "#subdirectory=nowhere"), tmp_path / "cache")


def test_a_failure_leaves_no_half_checkout(remote, tmp_path):
    assert "no branch, tag or commit nothing" in refusal(url(remote, "nothing"), tmp_path / "cache")
    assert "git cannot fetch" in refusal(url(tmp_path / "nowhere"), tmp_path / "cache")
    assert list(tmp_path.glob("cache/*/*")) == []


def test_many_at_once(remote, tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch_git(url(remote), tmp_path / "cache"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert len(list(tmp_path.glob("cache/*/*"))) == 1


def test_hooks_of_a_template_do_not_run(remote, tmp_path, monkeypatch):
    hook = f"#!/bin/sh\ntouch '{tmp_path}/ran'\n"
    template = write(tmp_path / "template", {"hooks/post-checkout": hook, "info/exclude": "*.py\n"})
    (template / "hooks/post-checkout").chmod(0o755)
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(template))
    path, _ = fetch_git(url(remote), tmp_path / "cache")
    assert not (tmp_path / "ran").exists()
    write(path, {"new.py": ""})
    assert "?? new.py" in git(path, "status", "--porcelain")


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("git+https://h/a/b", ("https://h/a/b", "", "")),
        ("git+https://h:8443/a/b.git@v1.0", ("https://h:8443/a/b.git", "v1.0", "")),
        ("git+ssh://git@h/a/b@feature/x#subdirectory=c/d", ("ssh://git@h/a/b", "feature/x", "c/d")),
        ("git+ssh://git@h/a/b", ("ssh://git@h/a/b", "", "")),
        ("git+file:///a@b/c@main", ("file:///a@b/c", "main", "")),
    ],
)
def test_addresses(address, parts):
    remote = Remote.parse(address)
    assert (remote.address, remote.rev, remote.subdirectory) == parts


@pytest.mark.parametrize(
    "address",
    ["https://h/a", "git+ftp://h/a", "git+ext::sh -c x", "git+https://h", "git+https://h/", "git+https://h/a@", "git+https://h/a@--upload-pack=x",
     "git+ssh://-oProxyCommand=x/a", "git+https://h/a#egg=b", "git+https://h/a#subdirectory=../x", "git+https://h/a#subdirectory=/x",
     "git+https://[::1/a", "git+https://h/a@b c"],
)  # fmt: skip
def test_addresses_that_are_refused(address, tmp_path):
    assert "git+https://host/repo@rev" in refusal(address, tmp_path)


@pytest.mark.parametrize(
    "address", ["git+https://user:" + "hunter2@h/a@v1", "git+https://hunter2@h/a", "git+ssh://git:" + "hunter2@h/a"]
)
def test_credentials_in_an_address_are_refused_and_never_repeated(address, tmp_path):
    text = refusal(address, tmp_path)
    assert "hunter2" not in text and "contains credentials" in text


def test_what_git_says_is_shown_without_credentials():
    said = "unable to access 'https://ada:hunter2@h/a/': and ssh://git:hunter2@h and ssh://git@h"
    assert hide(said) == "unable to access 'https://***@h/a/': and ssh://git:***@h and ssh://git@h"
