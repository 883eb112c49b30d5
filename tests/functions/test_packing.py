"""What of a function travels: by name or by value, with which files, and what is refused by the name of its variable."""

from __future__ import annotations

import importlib
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest

from cloudtrain.errors import BadRequest
from cloudtrain.functions import packing
from cloudtrain.functions.function import Function, function
from cloudtrain.source.node_code import CALL

DECORATED = "import cloudtrain\n@cloudtrain.function\ndef twice(x):\n    return 2 * x\n"


def packed(call, tmp_path: Path, *args, **kwargs):
    folder = tmp_path / "packed"
    folder.mkdir(exist_ok=True)
    return packing.pack(call, [(args, kwargs)], packing.source_of(call, None), folder)


def stored(found: packing.Packed, name: str = "function.pkl"):
    return cloudpickle.loads(found.files[f"{packing.FOLDER}/{name}"].read_bytes())


@pytest.mark.parametrize("name", ["tasks", "mine.deep.tasks"])
def test_a_function_of_a_module_travels_by_name_with_the_folder_of_its_top_package(name, module, tmp_path: Path):
    call = module(name, DECORATED).twice.__wrapped__
    found, _ = packed(call, tmp_path, 1)
    assert (found.source, found.by_value) == ((tmp_path / "project").resolve(), False)
    assert stored(found) == (name, "twice")


def test_a_function_of_a_package_itself_travels_with_the_folder_above_it(module, tmp_path: Path):
    module("mine.other", "")
    (tmp_path / "project" / "mine" / "__init__.py").write_text(DECORATED)
    del sys.modules["mine"]
    call = importlib.import_module("mine").twice.__wrapped__
    found, _ = packed(call, tmp_path, 1)
    assert (found.source, stored(found)) == ((tmp_path / "project").resolve(), ("mine", "twice"))


def test_an_installed_function_travels_by_name_alone(tmp_path: Path):
    found, _ = packed(subprocess.list2cmdline, tmp_path, ["a b"])
    assert (found.source, found.by_value, stored(found)) == (None, False, ("subprocess", "list2cmdline"))


def test_a_closure_travels_by_value_with_the_modules_of_the_user(module, tmp_path: Path):
    tasks = module("helpers", "FACTOR = 3\ndef times(x):\n    return FACTOR * x\n")

    def call(x):
        return tasks.times(x) + 1

    found, [arguments] = packed(call, tmp_path, 2)
    assert (found.source, found.by_value) == (None, True)
    del sys.modules["helpers"]
    tasks.times = None  # what was pickled does not need it any more
    args, kwargs = pickle.loads(arguments)
    assert stored(found)(*args, **kwargs) == 7


def test_a_module_of_the_given_source_travels_by_name(module, tmp_path: Path):
    tasks = module("helpers", "def times(x):\n    return x\n")

    def call(x):
        return tasks.times(x)

    source = packing.source_of(call, tmp_path / "project")
    found, _ = packing.pack(call, [((1,), {})], source, tmp_path)
    assert found.by_value
    data = found.files[f"{packing.FOLDER}/function.pkl"].read_bytes()
    del sys.modules["helpers"]
    (tmp_path / "project" / "helpers.py").write_text("def times(x):\n    return 'the file'\n")
    assert cloudpickle.loads(data)(1) == "the file"


def test_the_very_cloudpickle_and_the_script_travel(tmp_path: Path):
    found, _ = packed(lambda: 1, tmp_path)
    assert {CALL, f"{packing.FOLDER}/cloudpickle/cloudpickle.py"} <= found.files.keys()
    assert all(path.is_file() and name.startswith(".cloudtrain/call/") for name, path in found.files.items())


def test_small_arguments_are_in_the_command_and_large_ones_in_a_file(tmp_path: Path):
    small, _ = packed(len, tmp_path, b"x" * 100)
    large, [data] = packed(len, tmp_path, b"x" * 10_000)
    assert f"{packing.FOLDER}/0.pkl" not in small.files
    assert large.files[f"{packing.FOLDER}/0.pkl"].read_bytes() == data


def test_the_digest_is_of_the_functions_code_alone(tmp_path: Path):
    def call(x):
        return x

    def other(x):
        return x + 1

    first, second, third = (packed(each, tmp_path, arg)[0].digest for each, arg in ((call, 1), (call, 2), (other, 1)))
    assert first == second != third


LOCK = threading.Lock()


def with_lock():
    with LOCK:
        return 1


def nested():
    def inner():
        return LOCK

    return inner()


class Holder:
    def __init__(self, lock):
        self.rows = [1, lock]


def test_what_cannot_travel_is_refused_with_the_name_of_its_variable(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(with_lock, "__module__", "__main__")
    monkeypatch.setattr(nested, "__module__", "__main__")
    generator, connection = (n for n in range(3)), socket.socket()
    with connection, open(__file__) as text, open(__file__, "rb") as data:
        cases = {
            "the variable LOCK of with_lock cannot be sent: it is a lock": (with_lock,),
            "the variable LOCK of nested cannot be sent: it is a lock": (nested,),
            "the variable text of <lambda> cannot be sent: it is an open file": (lambda: text.read(),),
            "the variable data of <lambda> cannot be sent: it is an open file": (lambda: data.read(),),
            "the variable connection of <lambda> cannot be sent: it is a socket": (lambda: connection.recv(1),),
            "the variable generator of <lambda> cannot be sent: it is a generator": (lambda: next(generator),),
            "the variable value of <lambda> cannot be sent: it is a lock": (lambda value=LOCK: value,),
            "the argument x cannot be sent: it is a generator": (lambda x: x, generator),
            "the item 'a' of the argument x cannot be sent: it is a lock": (lambda x: x, {"a": LOCK}),
            "the item 1 of the attribute rows of the argument x cannot be sent: it is a lock": (
                lambda x: x,
                Holder(LOCK),
            ),
        }
        for message, (call, *args) in cases.items():
            with pytest.raises(BadRequest) as caught:
                packed(call, tmp_path, *args)
            assert caught.value.message == message
            assert "inside the function" in caught.value.hint


def test_a_tensor_on_a_gpu_is_refused(tmp_path: Path, monkeypatch):
    class Tensor:
        class device:
            type = "cuda"
            __str__ = lambda self: "cuda:0"  # noqa: E731

    class Torch:
        pass

    Torch.Tensor = Tensor
    Tensor.device = Tensor.device()
    monkeypatch.setitem(sys.modules, "torch", Torch)
    weights = Tensor()
    with pytest.raises(BadRequest, match=r"the variable weights of <lambda> cannot be sent: it is a tensor on cuda:0"):
        packed(lambda: weights, tmp_path)


def test_standard_output_and_texts_in_memory_travel(tmp_path: Path):
    import io

    stream = io.StringIO("text")
    found, _ = packed(lambda: stream.getvalue(), tmp_path)
    assert stored(found)() == "text"


def test_a_credential_in_what_is_captured_is_refused(tmp_path: Path):
    token = "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3h"
    with pytest.raises(BadRequest, match="what looks like a credential"):
        packed(lambda: token, tmp_path)


def test_a_decorated_function_that_another_one_calls_travels_as_the_plain_one(tmp_path: Path):
    def helper(x):
        return x + 1

    helper = function(helper)
    found, _ = packed(lambda x: helper(x), tmp_path, 1)
    again = stored(found)
    assert again(2) == 3
    assert not isinstance(again.__closure__[0].cell_contents, Function)


def test_the_text_of_a_function_is_its_source(tmp_path: Path):
    def call():
        return "a text"

    folder = packing.text_folder(call, tmp_path)
    assert folder == packing.text_folder(call, tmp_path)
    assert 'return "a text"' in (folder / "call.py").read_text()
    made: dict = {}
    exec("def unknown(): pass", made)
    assert "its text is not known" in next(packing.text_folder(made["unknown"], tmp_path).iterdir()).read_text()
