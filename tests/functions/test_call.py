"""The script that calls a function on a node: what it keeps of a value, of an exception, and when it refuses."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest

from cloudtrain.diagnosis.judge import judge
from cloudtrain.diagnosis.verdict import End
from cloudtrain.events import LogLine, State
from cloudtrain.functions import call, packing
from cloudtrain.functions.function import function
from cloudtrain.source.node_code import module

PICKLES = call.Pickles(
    module("trainer.pickles.array_file").ArrayFile,
    module("trainer.pickles.mapped").Arrays,
    module("trainer.pickles.mapped").Unpickler,
    module("trainer.pickles.pickler").Pickler,
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that calls another as a node does, and what was kept: exit code, file name, content."""

    def run(code: object, *args: object) -> tuple[int, str, bytes]:
        monkeypatch.setenv("CLOUDTRAIN_OUTPUT_DIR", str(tmp_path / "out"))
        monkeypatch.setenv("CLOUDTRAIN_ATTEMPT", "2")
        monkeypatch.setenv("RANK", "3")
        done = call.call(PICKLES, cloudpickle.dumps(code), pickle.dumps((args, {})))
        [path] = (tmp_path / "out" / call.RETURNED).glob("*-2-3.[pj]*")
        return done, path.name, path.read_bytes()

    return run


def test_a_value_is_kept_by_attempt_and_rank(kept):
    assert kept(lambda x: {"twice": 2 * x}, 4) == (0, "value-2-3.pkl", cloudpickle.dumps({"twice": 8}))


def test_a_function_by_name_is_imported_and_its_decorator_is_taken_off(kept, module):
    module("tasks", "import cloudtrain\n@cloudtrain.function\ndef add(a, b):\n    return a + b\n")
    code, _, data = kept(("tasks", "add"), 1, 2)
    assert (code, pickle.loads(data)) == (0, 3)


def test_an_exception_is_kept_as_text_and_as_itself(kept, capsys):
    def fails(x):
        raise KeyError(x)

    code, name, data = kept(fails, "a")
    about = json.loads(data)
    assert (code, name, about["type"], about["text"]) == (1, "error-2-3.json", "KeyError", "'a'")
    assert repr(pickle.loads(base64.b64decode(about["pickle"]))) == "KeyError('a')"
    assert "raise KeyError(x)" in about["traceback"] and str(call.__file__) not in about["traceback"]
    assert about["traceback"] in capsys.readouterr().err


def test_an_exception_that_cannot_be_pickled_is_kept_as_text(kept):
    class Odd(Exception):
        def __reduce__(self):
            raise TypeError("not this one")

    def fails():
        raise Odd("why")

    about = json.loads(kept(fails)[2])
    assert (about["type"], about["text"], about["pickle"]) == ("Odd", "why", "")


def test_a_value_that_cannot_be_pickled_is_an_error(kept):
    code, name, data = kept(lambda: (each for each in ()))
    assert (code, name) == (1, "error-2-3.json")
    assert json.loads(data)["text"].startswith("the returned value (generator) cannot be pickled")


def test_an_exception_has_its_arrays_in_itself(kept):
    numpy = pytest.importorskip("numpy")

    def fails():
        raise ValueError(numpy.arange(100_000))

    kept_error = pickle.loads(base64.b64decode(json.loads(kept(fails)[2])["pickle"]))
    assert kept_error.args[0][-1] == 99_999


def test_a_value_that_cannot_be_pickled_leaves_no_arrays(kept, tmp_path: Path):
    numpy = pytest.importorskip("numpy")
    kept(lambda: (numpy.ones((1000, 1000))[:, 3].repeat(100)[::7], threading.Lock()))
    assert [path.name for path in (tmp_path / "out" / call.RETURNED).iterdir()] == ["error-2-3.json"]


def test_a_script_that_leaves_keeps_its_own_exit_code(kept):
    def leaves():
        raise SystemExit(75)

    with pytest.raises(SystemExit) as left:
        kept(leaves)
    assert left.value.code == 75


def test_a_node_without_cloudtrain_has_the_decorator_alone():
    stub = call.without_cloudtrain()
    assert stub.function(len) is len
    assert stub.function(num_nodes=2)(len) is len
    assert not hasattr(stub, "submit")


def test_the_object_of_the_decorator_is_known_by_its_module():
    assert call.is_ours(function(len)) and not call.is_ours(len)


def start(tmp_path: Path, *words: str, code: bytes = b"", path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script in a folder as it is in a bundle."""
    packed, _ = packing.pack(lambda x: x, [((1,), {})], None, tmp_path)
    for name, file in packed.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(file.read_bytes())
    if code:
        (tmp_path / packing.FOLDER / "function.pkl").write_bytes(code)
    digest = [] if "--digest" in words else ["--digest", packed.digest]
    arguments = base64.b64encode(pickle.dumps(((5,), {}))).decode()
    return subprocess.run(
        [sys.executable, "-S", packing.CALL, *digest, *words, "--arguments", arguments],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "CLOUDTRAIN_OUTPUT_DIR": str(tmp_path / "out")},
    )  # fmt: skip


def test_a_python_without_packages_calls_the_function(tmp_path: Path):
    done = start(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert pickle.loads((tmp_path / "out" / "returned" / "value-1-0.pkl").read_bytes()) == 5


def test_a_call_imports_nothing_heavy_for_itself(tmp_path: Path):
    def imported(_):
        return {"argparse", "ctypes", "hashlib", "shutil"} & sys.modules.keys()

    packed, _ = packing.pack(imported, [((1,), {})], None, tmp_path)
    code = (tmp_path / "function.pkl").read_bytes()
    done = start(tmp_path, "--digest", packed.digest, code=code)
    assert (done.returncode, done.stderr) == (0, "")
    assert pickle.loads((tmp_path / "out" / "returned" / "value-1-0.pkl").read_bytes()) == set()


class Harm:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_another_python_and_another_pickle_are_refused_before_anything_is_loaded(tmp_path: Path):
    harm = pickle.dumps(Harm(tmp_path / "loaded"))
    done = start(tmp_path, "--python", "2.7", code=harm)
    assert done.returncode == 78
    assert "pickled with Python 2.7, and this node runs Python 3." in done.stderr
    line = LogLine("", 0, 0, 1, done.stderr.strip(), "")
    verdict = judge(End(State.FAILED, 78, "rank 0 exited with code 78", "script", 0), [line])
    assert verdict.label == "refused" and "Python 2.7" in verdict.deciding
    told = json.loads((tmp_path / "out" / "returned" / "error-1-0.json").read_text())
    assert told["text"] in done.stderr, "it becomes the cause of the RunFailed"
    done = start(tmp_path, code=harm)
    assert done.returncode == 78
    assert "is not the one that was submitted" in done.stderr
    assert not (tmp_path / "loaded").exists()
