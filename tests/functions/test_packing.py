"""What of a function travels: by name or by value, with which files, and what is refused by the name of its variable."""

from __future__ import annotations

import functools
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
from cloudtrain.functions import modules, packing
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
    assert (found.source, found.has_code) == ((tmp_path / "project").resolve(), False)
    assert stored(found) == (name, "twice")


def test_a_function_of_a_package_itself_travels_with_the_folder_above_it(module, tmp_path: Path):
    module("mine.other", "")
    (tmp_path / "project" / "mine" / "__init__.py").write_text(DECORATED)
    importlib.invalidate_caches()
    del sys.modules["mine"]
    call = importlib.import_module("mine").twice.__wrapped__
    found, _ = packed(call, tmp_path, 1)
    assert (found.source, stored(found)) == ((tmp_path / "project").resolve(), ("mine", "twice"))


def test_an_installed_function_travels_by_name_alone(tmp_path: Path):
    found, _ = packed(subprocess.list2cmdline, tmp_path, ["a b"])
    assert (found.source, found.has_code, stored(found)) == (None, False, ("subprocess", "list2cmdline"))


def test_a_closure_travels_by_value_with_the_modules_of_the_user(module, tmp_path: Path):
    tasks = module("helpers", "FACTOR = 3\ndef times(x):\n    return FACTOR * x\n")

    def call(x):
        return tasks.times(x) + 1

    found, [arguments] = packed(call, tmp_path, 2)
    assert (found.source, found.has_code) == (None, True)
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
    assert found.has_code
    data = found.files[f"{packing.FOLDER}/function.pkl"].read_bytes()
    del sys.modules["helpers"]
    (tmp_path / "project" / "helpers.py").write_text("def times(x):\n    return 'the file'\n")
    assert cloudpickle.loads(data)(1) == "the file"


def test_a_module_below_a_folder_of_the_given_source_travels_by_value(module, tmp_path: Path):
    """A node that starts in the source does not import it by this name."""
    tasks = module("helpers", "def times(x):\n    return 2 * x\n")
    call = tasks.times
    found, _ = packing.pack(call, [((1,), {})], tmp_path, tmp_path)
    assert found.has_code
    del sys.modules["helpers"]
    (tmp_path / "project" / "helpers.py").unlink()
    assert stored(found)(4) == 8


def test_two_threads_do_not_take_each_others_modules_off_the_list(module):
    helpers = module("helpers", "")
    there, left = threading.Event(), threading.Event()
    listed: list[bool] = []

    def other() -> None:
        with modules.by_value():
            there.set()
            left.wait()
            listed.append(helpers.__name__ in cloudpickle.list_registry_pickle_by_value())

    thread = threading.Thread(target=other)
    with modules.by_value():
        thread.start()
        there.wait(0.1)
    left.set()
    thread.join()
    assert listed == [True]


def test_a_repository_as_source_is_not_a_folder_of_this_machine(module, tmp_path: Path):
    call = module("tasks", DECORATED).twice.__wrapped__
    source = packing.source_of(call, "git+https://example.com/repo@main")
    assert source is None
    assert packing.pack(call, [((1,), {})], source, tmp_path)[0].has_code


def test_code_in_an_argument_needs_the_same_python(tmp_path: Path):
    assert packed(len, tmp_path, (lambda: 1,))[0].has_code
    assert not packed(len, tmp_path, (1,))[0].has_code


def test_the_very_cloudpickle_and_the_script_travel(tmp_path: Path):
    found, _ = packed(lambda: 1, tmp_path)
    assert {CALL, f"{packing.FOLDER}/cloudpickle/cloudpickle.py"} <= found.files.keys()
    assert all(path.is_file() and name.startswith(".cloudtrain/call/") for name, path in found.files.items())


def test_small_arguments_are_in_the_command_and_large_ones_in_a_file(tmp_path: Path):
    small, _ = packed(len, tmp_path, b"x" * 100)
    large, [data] = packed(len, tmp_path, b"x" * 10_000)
    assert f"{packing.FOLDER}/calls.pkl" not in small.files
    assert large.files[f"{packing.FOLDER}/calls.pkl"].read_bytes() == data


def test_the_arguments_of_a_group_are_files_even_of_a_single_call(tmp_path: Path):
    group, [data] = packing.pack(len, [((b"x",), {})], None, tmp_path, files=True)
    assert group.files[f"{packing.FOLDER}/calls.pkl"].read_bytes() == data


def test_large_arrays_are_beside_the_pickle_of_what_holds_them(tmp_path: Path):
    numpy = pytest.importorskip("numpy")
    rows, more = numpy.arange(100_000), numpy.ones(50_000)
    found, [data] = packed(lambda x: rows.sum() + x.sum(), tmp_path, more)
    assert len(data) < packing.IN_COMMAND and len(found.files[f"{packing.FOLDER}/function.pkl"].read_bytes()) < 10_000
    sizes = {name: path.stat().st_size for name, path in found.files.items() if name.endswith(".arrays")}
    assert sizes.keys() == {f"{packing.FOLDER}/function.arrays", f"{packing.FOLDER}/0.arrays"}
    assert rows.nbytes < sizes[f"{packing.FOLDER}/function.arrays"] < rows.nbytes + 200


def test_what_cannot_be_sent_leaves_no_arrays(tmp_path: Path):
    numpy = pytest.importorskip("numpy")
    with pytest.raises(BadRequest, match="the item 1 of the argument x cannot be sent: it is a lock"):
        packed(lambda x: x, tmp_path, [numpy.ones((1000, 1000))[:, 3].repeat(100)[::7], LOCK])
    assert not [*(tmp_path / "packed").iterdir()]


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


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def rest(self):
        return list(self.rows)

    def __call__(self):
        return self.rest()


def test_methods_partials_and_objects_with_a_call_travel_by_value(tmp_path: Path):
    for call in (Rows([1, 2]).rest, Rows([1, 2]), functools.partial(Rows.rest, Rows([1, 2]))):
        found, [arguments] = packed(function(call).__wrapped__, tmp_path)
        assert stored(found)() == [1, 2]
    assert packing.plain(functools.partial(Rows([]))).__name__ == "Rows"
    assert "def rest" in next(packing.text_folder(Rows([]), tmp_path / "text").iterdir()).read_text()


def test_a_decorated_method_is_one_of_its_object(tmp_path: Path):
    class Model:
        @function(num_nodes=2)
        def times(self, x):
            return self.factor * x

        def twice(self, x):
            return 2 * self.times(x)

    model = Model()
    model.factor = 3
    assert (model.times(4), model.twice(4), Model.times(model, 4)) == (12, 24, 12)
    assert model.times.job == {"num_nodes": 2}
    for name, value in (("times", 12), ("twice", 24)):
        call = getattr(model, name)
        found, _ = packed(getattr(call, "__wrapped__", call), tmp_path, 4)
        assert stored(found)(4) == value


def test_what_is_no_function_is_refused():
    with pytest.raises(BadRequest, match="a classmethod is not a function"):
        function(classmethod(len))


def test_an_attribute_of_what_is_called_changes_no_option():
    class Task:
        def __init__(self):
            self.target, self.job = "of the task", "of the task"

        def __call__(self):
            return self.target

    made = function(Task(), target="local")
    assert (made.target, made.job, made()) == ("local", {}, "of the task")


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
            "the attribute rows of the object of rest cannot be sent: it is a generator": (Rows(generator).rest,),
            "the attribute rows of Rows cannot be sent: it is a generator": (Rows(generator),),
            "the item 0 of the arguments of list2cmdline cannot be sent: it is a lock": (
                functools.partial(subprocess.list2cmdline, LOCK),
            ),
            "the argument 0 cannot be sent: it is a lock": (max, LOCK),
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
    for call, *args in [
        (lambda: token,),
        (len, token),
        (len, {"token": token.encode()}),
        (len, bytearray(token.encode())),
        (len, ["a\0zero", token]),
        (len, token + "x" * 10_000),
        (len, ["x" * 3_000_000, token]),
    ]:
        with pytest.raises(BadRequest, match="what looks like a credential"):
            packed(call, tmp_path, *args)


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


def test_cloudpickle_of_any_folder_is_not_pickled_itself(monkeypatch: pytest.MonkeyPatch):
    """It may be on PYTHONPATH, as modules of a cluster are; it travels beside the pickle."""
    monkeypatch.setattr(modules, "_is_installed", lambda file: False)
    call = eval("lambda x: x", {"__name__": "__main__"})
    with modules.by_value():
        assert packing._dumps(call, call, Path("/none/function"))
