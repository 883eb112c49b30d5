"""Requirements become a layer over the interpreter's packages: made once, torch untouched."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import sys
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from launcher.errors import Refused
from launcher.prepare import requirements

from tests.conftest import served, wait_for
from tests.entrypoints.launching import Attempt


def wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """Write the smallest wheel that pip installs."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},{len(text)}"
        for path, text in texts.items()
    ]
    texts[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, text in texts.items():
            file.writestr(path, text)


def index(tmp_path: Path) -> str:
    """Return the options by which a requirements file names an index of its own; they pass through to pip."""
    wheel(tmp_path / "wheels", "spam_of_a_test", "1.0")
    wheel(tmp_path / "wheels", "spam_of_a_test", "2.0")
    wheel(tmp_path / "wheels", "needs_other_torch", "1.0", "torch==1.0.0")
    return f"--no-index\n--find-links {(tmp_path / 'wheels').as_uri()}\n"


SHOW = "import sys, spam_of_a_test, torch; print(spam_of_a_test.version, sys.prefix != sys.argv[1], torch.__file__)"


def test_a_layer_is_made_once_and_sees_what_is_below(tmp_path: Path):
    options = index(tmp_path)
    for number, version in enumerate(("1.0", "1.0", "2.0")):
        with Attempt(
            tmp_path / str(number),
            SHOW,
            files={"requirements.txt": options + f"spam-of-a-test=={version}\n"},
            argv=("train.py", sys.prefix),
            requirements="requirements.txt",
        ) as attempt:
            attempt.environ = {"CLOUDTRAIN_CACHE": str(tmp_path / "cache")}
            assert attempt.run() == [0], attempt.texts(-1) + attempt.texts(0)
            import torch

            assert attempt.texts(0) == [f"{version} True {torch.__file__}"]
            told = [line for event in attempt.events("requirements") for line in event["packages"]]
            assert f"spam-of-a-test=={version}" in told and f"torch=={metadata.version('torch')}" in told
            installed = any("Successfully installed" in text for text in attempt.texts(-1))
            assert installed == (number != 1)
    assert len(list((tmp_path / "cache" / "layers").glob("*/COMPLETE"))) == 2


def test_nodes_of_one_machine_make_one_layer(tmp_path: Path):
    files = {"requirements.txt": index(tmp_path) + "spam-of-a-test\n"}
    with Attempt(
        tmp_path,
        "import spam_of_a_test; print(spam_of_a_test.version)",
        files=files,
        nodes=2,
        requirements="requirements.txt",
    ) as attempt:
        assert attempt.run() == [0, 0]
        assert attempt.texts(0) == attempt.texts(1, 1) == ["2.0"]
        told = [sum("Successfully installed" in text for text in attempt.texts(-1, node)) for node in (0, 1)]
        assert sorted(told) == [0, 1]


def test_what_is_installed_already_installs_nothing(tmp_path: Path):
    files = {"requirements.txt": "torch\nnumpy>=1\n", "empty.txt": "# nothing\n\n"}
    with Attempt(
        tmp_path, "import sys; print(sys.executable)", files=files, requirements="requirements.txt"
    ) as attempt:
        assert attempt.run() == [0]
        assert attempt.texts(0) == [sys.executable]
        assert "requirements.txt: everything is installed already" in attempt.texts(-1)
    assert (
        requirements.layer(
            str(tmp_path / "node-0" / "source" / "empty.txt"), {"CLOUDTRAIN_CACHE": str(tmp_path / "x")}, None
        )
        == sys.executable
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("line", ["torch==1.0.0", "needs-other-torch"])
def test_torch_is_never_replaced(tmp_path: Path, line: str):
    files = {"requirements.txt": index(tmp_path) + line + "\n"}
    with Attempt(tmp_path, "print('never')", files=files, requirements="requirements.txt") as attempt:
        assert attempt.run() == [78]
        reason = attempt.status()["reason"]
        assert reason.startswith("requirements.txt cannot be installed: ") and "torch==1.0.0" in reason
        # pip names the constraints of its own configuration too, as in torch<=2.14.1,==2.13.0
        ours = rf"\(constraint\) torch\S*=={re.escape(metadata.version('torch'))}"
        assert re.search(ours, reason) or "No matching distribution" in reason


def test_a_layer_that_was_broken_off_is_made_again(tmp_path: Path):
    options = index(tmp_path)
    with Attempt(
        tmp_path,
        "import spam_of_a_test; print('fine')",
        files={"requirements.txt": options + "spam-of-a-test\n"},
        requirements="requirements.txt",
    ) as attempt:
        path = str(attempt.folders[0] / "source" / "requirements.txt")
        half = (
            tmp_path
            / "cache"
            / "layers"
            / requirements.digest(requirements.read(path), str(attempt.folders[0] / "source"))
        )
        (half / "lib").mkdir(parents=True)
        (half / "lib" / "rubbish").write_text("x")
        assert attempt.run() == [0]
        assert attempt.texts(0) == ["fine"]
        wait_for(lambda: (half / "COMPLETE").exists(), "the mark")
        assert not (half / "lib" / "rubbish").exists()


def test_the_digest_changes_with_included_files(tmp_path: Path):
    (tmp_path / "requirements.txt").write_text("-r more.txt\n--constraint=limits.txt\nnumpy\n")
    (tmp_path / "more.txt").write_text("a\n")
    with pytest.raises(Refused, match=r"limits\.txt cannot be read"):
        requirements.read(str(tmp_path / "requirements.txt"))
    (tmp_path / "limits.txt").write_text("b<2\n")
    before = requirements.digest(requirements.read(str(tmp_path / "requirements.txt")), "/a")
    (tmp_path / "more.txt").write_text("a>1\n")
    after = requirements.digest(requirements.read(str(tmp_path / "requirements.txt")), "/a")
    assert before != after
    assert after == requirements.digest(requirements.read(str(tmp_path / "requirements.txt")), "/b")
    for line in ("-e .", "--editable=.", "./lib", ".", "wheels/a.whl", "a @ file:///x/a.whl"):
        assert requirements.is_local(line), line
        assert requirements.digest(line, "/a") != requirements.digest(line, "/b")
    for line in (
        "a==1  # not ./here",
        "--find-links file:///wheels",
        "--index-url https://host/simple",
        "a @ https://host/a.whl",
        "# ./x",
        "",
    ):
        assert not requirements.is_local(line), line


def test_a_folder_of_wheels_in_the_source_needs_no_index(tmp_path: Path):
    """The layer follows the wheels: the same requirements with another wheel make another one."""
    files = {"requirements.txt": "--no-index\n--find-links wheels\nspam-of-a-test\n"}
    for version in ("1.0", "2.0"):
        wheel(tmp_path / version, "spam_of_a_test", version)
    for number, version in enumerate(("1.0", "2.0", "2.0")):
        with Attempt(
            tmp_path / str(number),
            "import spam_of_a_test; print(spam_of_a_test.version)",
            files=files,
            requirements="requirements.txt",
            environ={"CLOUDTRAIN_CACHE": str(tmp_path / "cache")},
        ) as attempt:
            shutil.copytree(tmp_path / version, attempt.folders[0] / "source" / "wheels")
            assert attempt.run() == [0], attempt.texts(-1)
            assert attempt.texts(0) == [version]
    assert len(list((tmp_path / "cache" / "layers").glob("*/COMPLETE"))) == 2


class PrivateIndex(BaseHTTPRequestHandler):
    """A simple index that wants a name and a password."""

    def do_GET(self) -> None:
        wanted = "Basic " + base64.b64encode(b"reader:planted-word-of-a-test").decode()
        folder: Path = self.server.folder
        if self.headers.get("Authorization") != wanted:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="wheels"')
            body = b""
        elif self.path == "/simple/spam-of-a-test/":
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            body = "".join(f'<a href="/{path.name}">{path.name}</a>' for path in folder.iterdir()).encode()
        elif (folder / self.path[1:]).is_file():
            self.send_response(200)
            body = (folder / self.path[1:]).read_bytes()
        else:
            self.send_response(404)
            body = b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("word", ["planted-word-of-a-test", "another-word-of-a-test"])
def test_a_private_index_is_told_to_pip_by_a_secret_that_nobody_sees(tmp_path: Path, word: str):
    wheel(tmp_path / "wheels", "spam_of_a_test", "1.0")
    with served(ThreadingHTTPServer(("127.0.0.1", 0), PrivateIndex)) as server:
        server.folder = tmp_path / "wheels"
        url = f"http://reader:{word}@127.0.0.1:{server.server_port}/simple/"
        with Attempt(
            tmp_path / "a",
            "import spam_of_a_test; print(spam_of_a_test.version)",
            files={"requirements.txt": "spam-of-a-test\n"},
            requirements="requirements.txt",
            secrets={"PIP_INDEX_URL": ["env:INDEX"]},
            stdin={"secrets": {"env:INDEX": url}, "token": ""},
            environ={"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""},
        ) as attempt:
            if word.startswith("planted"):
                assert attempt.run() == [0], attempt.texts(-1)
                assert attempt.texts(0) == ["1.0"]
            else:
                assert attempt.run() == [78]
                assert attempt.status()["reason"].startswith("requirements.txt cannot be installed: ")
            for path in [*attempt.folders[0].rglob("*"), *(tmp_path / "a" / "cache").rglob("*")]:
                assert not path.is_file() or word.encode() not in path.read_bytes(), path


def test_a_failure_is_told_in_pips_words():
    said = [
        "ERROR: Cannot install a and b because these package versions have conflicting dependencies.",
        "",
        "The conflict is caused by:",
        "    The user requested a==1",
        "    b 2 depends on a>1",
        "",
        "To fix this you could try to:",
    ]
    assert requirements.conflict(said) == (
        "Cannot install a and b because these package versions have conflicting dependencies; "
        "The user requested a==1; b 2 depends on a>1"
    )
    assert (
        requirements.conflict(
            ["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"]
        )
        == "the disk is full"
    )
    assert requirements.conflict(["some last words"]) == "some last words"
    assert requirements.conflict([]) == "pip printed nothing"
    told = ["error: subprocess-exited-with-error", "", "× python setup.py egg_info did not run successfully.",
            "│ exit code: 1", "╰─> See above for output.", "",
            "note: This error originates from a subprocess, and is likely not a problem with pip."]  # fmt: skip
    assert requirements.conflict(told) == "python setup.py egg_info did not run successfully."


def test_a_package_whose_build_requirements_are_not_there_needs_a_wheel(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=40.8.0"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "mine"\nversion = "1"\n'
    )
    (tmp_path / "offline.txt").write_text("--no-index\n./mine\n")
    environ = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    command = [sys.executable, *requirements.PIP, "install", "--dry-run", "-r", "offline.txt"]
    code, lines = requirements.run(command, str(tmp_path / "offline.txt"), environ)
    assert code == 1
    assert requirements.conflict(lines) == (
        "Could not find a version that satisfies the requirement setuptools>=40.8.0 (from versions: none): "
        "it is a build requirement of ./mine; name a wheel of ./mine instead"
    )
    assert "wheel" not in requirements.conflict(["WARNING: Retrying (Retry(total=4)) after connection broken", *lines])
