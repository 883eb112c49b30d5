"""Which files of a source a script loads: its own imports and those of what it imports, as far as their text shows."""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import islice

from cloudtrain.source.literals import Literals, constant, name_of
from cloudtrain.source.texts import LONGEST, MOST_BYTES, Texts

_PACKAGED = ("pyproject.toml", "setup.py", "setup.cfg")  # a folder with one may be installed
_BY_NAME = ("import_module", "__import__", "run_module", "locate")
_BY_PATH = {
    "run_path": 0,
    "spec_from_file_location": 1,
    "SourceFileLoader": 1,
    "load_source": 1,
}  # which argument it is
_PROCESSES = ("run", "call", "check_call", "check_output", "Popen", "system", "popen", "execv", "execvp", "spawnv")
_OTHER_LAUNCHERS = re.compile(r"\b(?:torchrun|torch\.distributed|accelerate|deepspeed|mpirun|srun)\b")  # set the world
_BY_CONFIG = frozenset(
    ("hydra", "jsonargparse", "instantiate", "LightningCLI")
)  # import what a configuration file names
MOST_PARTS = 1000  # of the text of a command that are looked at
_NOT_INSTALLED = frozenset(("test", "tests", "example", "examples", "doc", "docs", "benchmarks"))
_CONFIGURED = re.compile(r"(?m)^[ \t-]*(?:_target_|class_path):[ \t]*[\"']?([A-Za-z_][\w.]*)")
_IN_SHELL = re.compile(r"(?<![\w./-])([\w./-]+\.(?:py|sh))\b|-m[ \t]+([A-Za-z_][\w.]*)")


class Imports:
    """What the entry of a source loads when it runs, other scripts that it starts among it.

    Attributes:
        importers: file -> the file that loads it; "" for the entry. The entry comes first.
        mains: the files that run as `__main__`.
        unknown: the place that loads code by a name which only a run knows, and how; "" where all can be followed.
    """

    def __init__(self, texts: Texts, folders: Iterable[str] = ()) -> None:
        """Follow the imports; blocking.

        Args:
            texts: the source.
            folders: those of PYTHONPATH, relative to the source.
        """
        self._texts = texts
        self._parents = {above for name in texts.names for above in _folders(name)}
        self._holders = _find_holders(texts.names, self._parents)
        self._folders = [
            posixpath.normpath(folder or ".")
            for folder in ("." if texts.is_module else posixpath.dirname(texts.entry), *folders)
        ]
        self._installed = [
            posixpath.normpath(posixpath.join(posixpath.dirname(name), inner))
            for name in sorted(texts.names)
            if posixpath.basename(name) in _PACKAGED
            for inner in ("", "src")
        ]
        self._wanted: dict[tuple[str, ...], str] = {}  # absolute imports, and the first file with each
        self._configurations = texts.files  # which may name classes
        self._left = MOST_BYTES
        self._queue: list[str] = []
        self.importers: dict[str, str] = {}
        self.mains = {texts.entry}
        self.unknown = ""
        for above in _folders(texts.entry) if texts.is_module else ():
            self._add(posixpath.join(above, "__init__.py"), "")
        self._add(texts.entry, "")
        while self._queue:
            self._read(self._queue.pop(0))

    def importer_of(self, package: str) -> str:
        """Return a file that imports an installed package; "" where none does, or the source has one of that name."""
        if package in self._holders:
            return ""
        return next((path for words, path in self._wanted.items() if words[0] == package), "")

    def _add(self, path: str, importer: str, is_main: bool = False) -> bool:
        """Take in a file, where the source has it."""
        path = posixpath.normpath(path)
        if path not in self._texts.names:
            return False
        if is_main:
            self.mains.add(path)
            self._grow(posixpath.dirname(path))
        if path not in self.importers:
            self.importers[path] = importer
            self._queue.append(path)
        return True

    def _read(self, path: str) -> None:
        text = self._texts.read(path)
        self._left -= len(text)
        if self._left < 0 or len(text) >= LONGEST:
            self.unknown = self.unknown or f"{path} is too much to read"
        elif path.endswith(".sh"):
            self._read_shell(path, text)
        elif (tree := parse(text)) is None:
            self.unknown = self.unknown or f"{path} is not valid Python"
        else:
            try:
                self._read_python(path, without_skipped(tree, path in self.mains))
            except RecursionError:
                self.unknown = self.unknown or f"{path} is nested too deeply to be read"

    def _read_shell(self, path: str, text: str) -> None:
        if _OTHER_LAUNCHERS.search(text):
            return
        found = False
        for match in _IN_SHELL.finditer(text):
            found |= self._add(match[1], path, is_main=True) if match[1] else self._start_module(match[2], path)
        if not found:
            self.unknown = self.unknown or f"{path} names no script of the source"

    def _read_python(self, path: str, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        literals = Literals(path, nodes)
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._import(tuple(alias.name.split(".")), path)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node, path)
            else:
                self._grow_path(node, literals, path)
                if isinstance(node, ast.Call):
                    self._called(node, literals, path)

    def _import_from(self, node: ast.ImportFrom, path: str) -> None:
        words = tuple((node.module or "").split(".")) if node.module else ()
        for alias in node.names:
            if node.level:
                above = posixpath.join(posixpath.dirname(path), *[".."] * (node.level - 1))
                self._load(posixpath.normpath(above), (*words, alias.name), path)
            else:
                self._import((*words, alias.name), path)

    def _import(self, words: tuple[str, ...], path: str) -> None:
        """Load a module by its absolute name from the first folder that has it."""
        if words not in self._wanted:
            self._wanted[words] = path
            self._find(words, path)

    def _find(self, words: tuple[str, ...], path: str) -> None:
        if not _BY_CONFIG.isdisjoint(words):
            self._load_configured(path)
        holders = self._holders.get(words[0], {})
        found = [each for each in dict.fromkeys((*self._folders, *self._installed)) if each in holders]
        if not found and self._installed and words[0] not in sys.stdlib_module_names:
            # A build file may install packages of any folder, and helpers such as rootutils add the root.
            packages = [
                each for each in holders if f"{each}/{words[0]}/__init__.py".removeprefix("./") in self._texts.names
            ]
            found = [each for each in packages if _NOT_INSTALLED.isdisjoint(each.split("/"))]
        regular = next((each for each in found if holders[each]), None)
        for folder in found if regular is None else [regular]:  # packages without __init__.py may be in several
            self._load(folder, words, path)

    def _load_configured(self, path: str) -> None:
        """Load, once, the classes that configuration files name."""
        texts, self._configurations = self._configurations, {}
        for text in texts.values():
            for match in _CONFIGURED.finditer(text):
                self._import(tuple(match[1].split(".")), path)

    def _load(self, folder: str, words: Iterable[str], path: str) -> None:
        """Load a module and the packages above it; words behind the module are what is taken from it."""
        for word in words:
            folder = posixpath.normpath(posixpath.join(folder, word)) if word != "*" else folder
            is_package = self._add(f"{folder}/__init__.py", path)
            if word == "*" or (not is_package and (self._add(f"{folder}.py", path) or folder not in self._parents)):
                return

    def _start_module(self, name: str, path: str) -> bool:
        """Take in what `python -m` runs."""
        known = len(self.importers)
        words = tuple(name.split("."))
        self._import((*words, "__main__"), path)
        self.mains |= {
            each for each in list(self.importers)[known:] if each.endswith((f"{words[-1]}.py", "__main__.py"))
        }
        return len(self.importers) > known

    def _grow_path(self, node: ast.AST, literals: Literals, path: str) -> None:
        """Take note of folders that a statement adds to sys.path; those of one file count for all."""
        for added in _added(node):
            folder = literals.value(added)
            if folder is None:
                self.unknown = self.unknown or f"{path}:{_line(node)} adds a folder to sys.path that only the run knows"
            elif not folder.startswith("/"):
                self._grow(folder)

    def _grow(self, folder: str) -> None:
        """Let modules be found in one more folder, those too that were imported before."""
        folder = posixpath.normpath(folder or ".")
        if folder not in self._folders:
            self._folders.append(folder)
            for words, importer in list(self._wanted.items()):
                if folder in self._holders.get(words[0], ()):
                    self._find(words, importer)

    def _called(self, node: ast.Call, literals: Literals, path: str) -> None:
        called = name_of(node.func)
        followed: bool | None = None
        if called in _BY_NAME and node.args:
            followed = self._import_named(node, literals, path)
        elif called in _BY_PATH and len(node.args) > _BY_PATH[called]:
            place = literals.value(node.args[_BY_PATH[called]])
            followed = place is not None and (self._add(place, path, called == "run_path") or True)
        elif called == "exec" and isinstance(node.func, ast.Name) and node.args:
            followed = self._executed(node.args[0], literals, path)
        elif called in _PROCESSES:
            followed = self._started(node, literals, path)
        elif called in _BY_CONFIG:
            self._load_configured(path)
        if followed is False:
            self.unknown = self.unknown or f"{path}:{node.lineno} calls {called} with what only the run knows"

    def _import_named(self, node: ast.Call, literals: Literals, path: str) -> bool:
        """Load what import_module and the like name; of a name that begins with a package all that is below it."""
        name, begin = literals.value(node.args[0]), literals.beginning(node.args[0])
        if name == "__main__" or (name is not None and not name.strip(".")):
            return False
        if name is not None and name_of(node.func) == "run_module":
            self._start_module(name, path)
        elif name is not None and name.startswith("."):
            level = len(name) - len(name.lstrip("."))
            self._load(
                posixpath.join(posixpath.dirname(path), *[".."] * (level - 1)), name.lstrip(".").split("."), path
            )
        elif name is not None:
            self._import(tuple(name.split(".")), path)
        elif "." in begin:
            package = begin.rpartition(".")[0].strip(".").replace(".", "/")
            bases = [posixpath.dirname(path)] if begin.startswith(".") else [*self._folders, *self._installed]
            for base in bases:
                below = posixpath.normpath(posixpath.join(base, package)) + "/"
                for other in sorted(self._texts.names):
                    if other.startswith(below.removeprefix("./")) and other.endswith(".py"):
                        self._add(other, path)
        return name is not None or "." in begin

    def _executed(self, node: ast.expr, literals: Literals, path: str) -> bool:
        """Take in what exec runs: a file whose name stands there, or a text."""
        if (text := literals.value(node)) is not None and (tree := parse(text)) is not None:
            self._read_python(path, tree)
            return True
        texts = [text for part in literals.parts(node) if (text := constant(part)) is not None]
        return any([self._add(text, path, path in self.mains) for text in texts])  # noqa: C419 - all of them

    def _started(self, node: ast.Call, literals: Literals, path: str) -> bool | None:
        """Take in the scripts that a command runs with Python; None where it runs something else."""
        parts = list(islice(literals.parts(node), MOST_PARTS))
        text = " ".join(filter(None, map(constant, parts)))
        is_python = any(name_of(part) == "executable" for part in parts) or re.search(r"\bpython", text)
        if not is_python or _OTHER_LAUNCHERS.search(text):
            return None
        found = False
        for match in _IN_SHELL.finditer(text):
            found |= self._add(match[1], path, True) if match[1] else self._start_module(match[2], path) or True
        return found


def parse(text: str) -> ast.Module | None:
    """Return the tree of a file; None where it is not valid Python."""
    try:
        return ast.parse(text.removeprefix("\ufeff"))
    except (SyntaxError, ValueError, RecursionError):
        return None


def without_skipped(tree: ast.Module, is_main: bool) -> ast.Module:
    """Empty the branches that do not run: what only type checkers read, and what a file does only as `__main__`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and (
            name_of(node.test) == "TYPE_CHECKING" or (not is_main and _asks_for_main(node.test))
        ):
            node.body = []
    return tree


def _asks_for_main(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Eq)
        and {"__name__", "__main__"} <= {name_of(part) or constant(part) for part in (test.left, *test.comparators)}
    )


def _added(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a statement or call adds to sys.path."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        called = node.func.attr
        if (called in ("append", "insert", "extend") and _is_path(node.func.value)) or called == "addsitedir":
            last = node.args[-1]
            yield from last.elts if isinstance(last, ast.List | ast.Tuple) and called == "extend" else [last]
    elif isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(_is_path(target.value if isinstance(target, ast.Subscript) else target) for target in targets):
            lists = [part for part in ast.walk(node.value) if isinstance(part, ast.List | ast.Tuple)]
            yield from [each for part in lists for each in part.elts]
            yield from [node.value] if isinstance(node, ast.AugAssign) and not lists else []


def _is_path(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "path" and name_of(node.value) == "sys"


def _find_holders(names: Iterable[str], folders: Iterable[str]) -> dict[str, dict[str, bool]]:
    """Return top name -> the folders that have such a module or package, and whether it is more than a plain folder."""
    holders: dict[str, dict[str, bool]] = {}
    for name in sorted(folders):
        holders.setdefault(posixpath.basename(name), {})[posixpath.dirname(name) or "."] = False
    for name in sorted(names):
        folder, base = posixpath.split(name)
        if base == "__init__.py":
            folder, base = posixpath.split(folder)
        if base.endswith(".py") or name.endswith("/__init__.py"):
            holders.setdefault(base.removesuffix(".py"), {})[folder or "."] = True
    return holders


def _folders(name: str) -> list[str]:
    """Return the folders above a file, the outermost first."""
    parts = name.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)
