"""Which variables a script needs to find its world, as far as its text shows: those of a rank, and of which framework."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cloudtrain.source.imports import Imports, parse, without_skipped
from cloudtrain.source.literals import constant, name_of
from cloudtrain.source.texts import Texts

NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
)
# Every script that needs them has one of these words; a shell's, as $RANK, among them.
HINT = re.compile(
    r"init_process_group|init_device_mesh|deepspeed|distributed\.initialize|[\"'${](?:\w*RANK|WORLD_SIZE|MASTER_)"
)
_BEGIN = ("init_process_group", "init_device_mesh")  # of torch.distributed: over env:// unless told otherwise
_DEEPSPEED = ("initialize", "init_distributed")
_JAX = ("distributed", "initialize")  # jax.distributed.initialize()
# What the entry imports -> whose variables its ranks get. Keras runs on the others; JAX's scripts may read data with TensorFlow.
FRAMEWORKS = {
    "keras": "KERAS_DISTRIBUTION_*, TF_CONFIG, JAX_COORDINATOR_ADDRESS and OMPI_COMM_WORLD_*",
    "jax": "JAX_COORDINATOR_ADDRESS and OMPI_COMM_WORLD_*",
    "tensorflow": "TF_CONFIG",
}
_OF_TORCH = (
    "torch",
    "accelerate",
    "transformers",
    "lightning",
    "pytorch_lightning",
)  # its ranks see all GPUs of a node
_FRAMEWORK = re.compile(rf"\b(?:{'|'.join(FRAMEWORKS)})\b")
_NO_CHOICE = ("is_initialized", "is_available", "__name__")  # an `if` over these says nothing on the number of ranks
_NOTHING = re.compile(r"(?!)")
_TESTS = re.compile(r"(?:^|/)(?:test_[^/]*|[^/]*_test|conftest)\.py$")  # pytest loads them, no script
_SHELL = re.compile(r"\$\{?(?:RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)\b(?!:?-)")


class _Need(NamedTuple):
    line: int
    sentence: str
    conditional: bool  # below an `if`, or after one that may return


def why_needed(texts: Texts, folders: Iterable[str] = ()) -> str:
    """Return why one process alone needs the variables of a rank; "" where nothing that it loads says so.

    It needs them when it calls init_process_group over env://, or reads one of them without a default. A script that
    does so below an `if`, and elsewhere asks whether they are set, runs under plain python too.

    Args:
        texts: the source. Where the entry's imports cannot be followed, all of its Python files count.
        folders: those of PYTHONPATH.
    """
    if texts.entry.endswith(".sh") and (found := _SHELL.search(texts.files.get(texts.entry, ""))):
        return f"{texts.entry} reads {found[0]}"
    if not (anywhere := first_need(texts)) or not texts.entry:
        return anywhere
    imports = Imports(texts, folders)
    if sentence := first_need(texts, imports):
        return sentence
    anywhere = first_need(texts, leave_out=_TESTS) if imports.unknown else ""
    return anywhere and f"{anywhere}, and {imports.unknown}"


def framework(texts: Texts, folders: Iterable[str] = ()) -> tuple[str, str]:
    """Return the framework that the entry imports, one of FRAMEWORKS, and the file that does; "" twice for none."""
    if texts.entry.endswith(".py") and texts.find(_FRAMEWORK):
        imports = Imports(texts, folders)
        for name in FRAMEWORKS:
            importer = imports.importer_of(name)
            if importer and (name == "jax" or not any(map(imports.importer_of, _OF_TORCH))):
                return name, importer
    return "", ""


def first_need(texts: Texts, imports: Imports | None = None, leave_out: re.Pattern[str] = _NOTHING) -> str:
    """Return the first need of the files that are loaded, or of all Python files; "" for none."""
    entry_asks = False
    for name in imports.importers if imports else dict(texts.scripts):
        if leave_out.search(name):
            continue
        text = texts.read(name)
        if not name.endswith(".py") or not HINT.search(text) or (tree := parse(text)) is None:
            continue
        tree = without_skipped(tree, imports is None or name in imports.mains)
        asks = any(_asks(node) for node in ast.walk(tree))
        entry_asks |= asks and name == texts.entry
        for need in _needs_of(tree):
            if not (need.conditional and (asks or entry_asks)):
                importer = imports.importers[name] if imports else ""
                return f"{name}:{need.line} {need.sentence}" + (f", and {importer} loads it" if importer else "")
    return ""


def _needs_of(tree: ast.Module) -> list[_Need]:
    """Return the needs of a file. Where it is nested too deeply, as generated code may be, none counts as conditional."""
    try:
        return list(_needs(tree.body, False, _find_returning(tree)))
    except RecursionError:
        return [_Need(getattr(at, "lineno", 0), text, False) for at in ast.walk(tree) if (text := _sentence(at))]


def _find_returning(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes in which something returns or raises."""
    found: set[ast.AST] = set()
    for node in reversed(list(ast.walk(tree))):  # those inside before those around them
        if isinstance(node, ast.Return | ast.Raise) or not found.isdisjoint(ast.iter_child_nodes(node)):
            found.add(node)
    return found


def _needs(body: list[ast.stmt], conditional: bool, returning: set[ast.AST]) -> Iterator[_Need]:
    """Yield the needs of statements, in their order."""
    for statement in body:
        inner = conditional
        if isinstance(statement, ast.If) and not any(word in ast.dump(statement.test) for word in _NO_CHOICE):
            inner = True
            returns = statement in returning
            yield from _own_needs(statement.test, conditional)
        else:
            returns = False
            for field in ast.iter_child_nodes(statement):
                if not isinstance(field, ast.stmt | ast.ExceptHandler | ast.match_case):
                    yield from _own_needs(field, inner)
        for block in ("body", "orelse", "finalbody"):
            yield from _needs(getattr(statement, block, []), inner, returning)
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _needs(part.body, inner, returning)
        conditional = conditional or returns


def _own_needs(node: ast.AST, conditional: bool) -> Iterator[_Need]:
    """Yield the needs of an expression; the branches of `a if b else c`, and what follows `and` and `or`, are conditional."""
    if sentence := _sentence(node):
        yield _Need(getattr(node, "lineno", 0), sentence, conditional)
    chosen = [node.body, node.orelse] if isinstance(node, ast.IfExp) else []
    chosen += node.values[1:] if isinstance(node, ast.BoolOp) else []
    for child in ast.iter_child_nodes(node):
        yield from _own_needs(child, conditional or child in chosen)


def _sentence(node: ast.AST) -> str:
    """Return what a node does that needs the variables; "" for any other."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environ(node.value):
        name = constant(node.slice)
        return f"reads {name}" if name in NAMES else ""
    if not isinstance(node, ast.Call):
        return ""
    called = name_of(node.func)
    if called in ("int", "float") and node.args and (name := _looked_up(node.args[0], 1)):
        return f"reads {name}"
    owner = name_of(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if (owner, called) == _JAX and not node.args and not node.keywords:
        return "calls jax.distributed.initialize"
    if called not in _BEGIN and not (owner == "deepspeed" and called in _DEEPSPEED):
        return ""
    given = {word.arg: word.value for word in node.keywords}
    method = constant(given.get("init_method"))
    over_env = "store" not in given and (method is None or method.startswith("env://"))
    return f"calls {called}" if over_env else ""


def _asks(node: ast.AST) -> bool:
    """Return whether a node asks for one of the variables without needing it, or sets it."""
    if isinstance(node, ast.Compare):
        return constant(node.left) in NAMES and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Store) and _is_environ(node.value) and constant(node.slice) in NAMES
    if not isinstance(node, ast.Call):
        return False
    if name_of(node.func) in ("is_torchelastic_launched", "is_torchrun"):
        return True
    if name_of(node.func) == "add_argument":
        return bool(node.args) and constant(node.args[0]) in ("--local_rank", "--local-rank")
    return bool(_looked_up(node, 1) or _looked_up(node, 2))


def _looked_up(node: ast.AST, arguments: int) -> str:
    """Return the variable of os.environ.get(NAME) or os.getenv(NAME) with so many arguments; else ""."""
    if not isinstance(node, ast.Call) or len(node.args) + len(node.keywords) != arguments or not node.args:
        return ""
    name = constant(node.args[0])
    by_get = isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop", "setdefault")
    asked = name_of(node.func) == "getenv" or (by_get and _is_environ(node.func.value))  # type: ignore[attr-defined]
    return name if asked and name in NAMES else ""


def _is_environ(node: ast.AST) -> bool:
    return name_of(node) in ("environ", "env")
