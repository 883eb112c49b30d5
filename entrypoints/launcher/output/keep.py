"""Bring files that the script writes in its working directory into the run's outputs, as `keep` names them.

They are mirrored while the ranks run and at the end, and are back in the working directory when the next attempt begins.
A node's files lie below outputs/ by their own names; those of other nodes than the first below outputs/node-N/.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence

from ..log import Log

EVERY_S = 15.0
OURS = ".cloudtrain"
PART = ".cloudtrain-part-keep"  # a file that is being copied; names that begin like store.PARTIAL are nobody's results
# Not a script's results: caches, environments and what version control keeps.
CACHES = {OURS, "__pycache__", ".git", ".cache", ".ipynb_checkpoints", ".pytest_cache", "node_modules", ".venv", "venv"}
MOST = 100_000  # files that are looked at when the rest is counted
NODE = r"node-[1-9]\d*/"  # begins the name of another node's file below outputs/
SHOWN = 3  # folders in the line about what is not kept
_SCRIPT = re.compile(r"(?<![\w./-])[\w./-]+\.py\b")
_RESULTS_OPTION = re.compile(
    r"""["'](--(?:output|out|save|model|results?|checkpoint|ckpt)[_-]?(?:dir|path|folder))["']"""
)
_LONGEST_SCRIPT = 1 << 20  # bytes that are read of it


class Keeper:
    """Mirrors one node's files; `safe` is a second folder, which a platform brings back when it starts the job again.

    A file goes from a mirror only when the script has removed it: two looks have not found it, and all that the second
    one did find is in the mirrors by then. A file that is renamed is therefore never without a copy.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        source: str,
        outputs: str,
        node_rank: int,
        log: Log,
        safe: str | None = None,
        argv: Sequence[str] = (),
    ) -> None:
        self._patterns = [_compiled(pattern) for pattern in patterns]
        self._roots = sorted({_literal(pattern) for pattern in patterns})
        self._source, self._log, self._argv = source, log, argv
        self._is_other, self._first_outputs = node_rank > 0, outputs
        self._outputs = os.path.join(outputs, f"node-{node_rank}") if node_rank else outputs
        self._mirrors = [self._outputs, *([os.path.join(safe, f"node-{node_rank}")] if safe else [])]
        self._mirrored: dict[str, tuple[int, int]] = {}
        self._borrowed: dict[str, tuple[int, int]] = {}  # the first node's files, as they were given to this one
        self._absent: set[str] = set()  # mirrored files that the last look has not found
        self._every_s = float(os.environ.get("CLOUDTRAIN_SYNC_EVERY_S") or EVERY_S)
        self._mark = os.path.join(source, OURS, "began")
        self._is_first = True  # no earlier start has left anything here
        self.not_kept = ""  # what the ranks wrote elsewhere, once they have ended
        self._began_ns = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def folders(self) -> list[str]:
        """The folders of the working directory below which kept files of earlier starts can lie."""
        return [] if self._is_first else [os.path.join(self._source, root) for root in self._roots]

    def wants(self, name: str) -> bool:
        """Return whether a file below outputs/, wherever that is, is one of this node's kept ones."""
        node = re.match(NODE, name)
        prefix = node[0] if node else ""
        mine = os.path.basename(self._outputs) + "/" if self._is_other else ""
        return prefix == mine and self._is_kept(name[len(prefix) :])

    def is_kept_output(self, name: str) -> bool:
        """Return whether a file below outputs/ is a kept one of any node."""
        return self._is_kept(re.sub(rf"\A{NODE}", "", name))

    def restore(self) -> int:
        """Copy what earlier starts left into the working directory and return how many files; blocking.

        Where no rank has run in this copy of the source yet, a file of the source that they changed is replaced. What only
        the first node wrote comes to the others too, where they see its outputs: rank 0 alone saves in most scripts.
        """
        is_fresh = not os.path.exists(self._mark)
        for mirror in self._mirrors:
            for name in _files(mirror, self._roots):
                path = os.path.join(self._source, name)
                if mirror == self._outputs and not self._is_other and re.match(NODE, name):
                    continue  # another node's
                if self._is_kept(name) and name not in self._mirrored and (is_fresh or not os.path.exists(path)):
                    _replace(os.path.join(mirror, name), self._source, name)
                    # Those that the outputs lack are brought there again; all of them go there when the script removes them.
                    self._mirrored[name] = _state(os.stat(path)) if mirror == self._outputs else (-1, -1)
        for name in _files(self._first_outputs, self._roots) if self._is_other else ():
            absent = name not in self._mirrored and (is_fresh or not os.path.exists(os.path.join(self._source, name)))
            if absent and self._is_kept(name) and not re.match(NODE, name):
                _replace(os.path.join(self._first_outputs, name), self._source, name)
                self._borrowed[name] = _state(os.stat(os.path.join(self._source, name)))
        self._is_first = is_fresh and not self._mirrored and not self._borrowed
        return len(self._mirrored) + len(self._borrowed)

    def begin(self) -> None:
        """The ranks start: what changes from now on is theirs. Mirrors in the background."""
        try:
            with open(self._mark, "w"):
                pass
            self._began_ns = os.stat(self._mark).st_ctime_ns  # by the clock of this file system
        except OSError:  # it cannot be written
            self._began_ns = int(self._log.clock.now() * 1e9)
        if self._patterns:
            self._thread = threading.Thread(target=self._run, name="keep", daemon=True)
            self._thread.start()

    def finish(self) -> str:
        """Mirror once more, and log what is not kept; return "" or what went wrong. Blocking."""
        if not self._began_ns:
            return ""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        problem = self._look(is_last=True) if self._patterns else ""
        self._report_rest()
        return problem

    def _run(self) -> None:
        reported = ""
        while not self._log.clock.wait(self._end, self._every_s):
            problem = self._look()
            if problem and problem != reported:
                self._log.say(
                    f"the files that `keep` names could not be copied to the outputs folder: {problem}; trying again"
                )
            reported = problem

    def _look(self, is_last: bool = False) -> str:
        """Bring the mirrors up to date and return "" or the first thing that went wrong. After the last one nothing moves."""
        problem, seen = "", set()
        for name in _files(self._source, self._roots):
            if not self._is_kept(name):
                continue
            path = os.path.join(self._source, name)
            try:
                status = os.stat(path)
                if name not in self._mirrored and (
                    status.st_ctime_ns < self._began_ns or self._borrowed.get(name) == _state(status)
                ):
                    continue  # it came with the source, or from the first node
                seen.add(name)
                state = _state(status)
                if self._mirrored.get(name) != state:
                    for mirror in self._mirrors:
                        _replace(path, mirror, name)
                    self._mirrored[name] = state
            except FileNotFoundError:
                continue  # the script has removed it meanwhile
            except OSError as error:
                problem = problem or f"{name} cannot be copied to the output: {error.strerror or error}"
        absent = {name for name in self._mirrored if name not in seen}
        if not problem:
            for name in absent if is_last else absent & self._absent:
                if _is_gone(os.path.join(self._source, name)):
                    del self._mirrored[name]
                    for mirror in self._mirrors:
                        _remove(os.path.join(mirror, name))
        self._absent = absent
        return problem

    def _is_kept(self, name: str) -> bool:
        return any(pattern.match(name) for pattern in self._patterns)

    def _report_rest(self) -> None:
        """Log in one line what the ranks wrote elsewhere in the working directory."""
        sizes: dict[str, int] = {}
        for count, name in enumerate(_files(self._source, [""])):
            if count == MOST:
                break
            try:
                status = os.stat(os.path.join(self._source, name))
            except OSError:
                continue
            if status.st_ctime_ns >= self._began_ns and not self._is_kept(name) and not name.endswith(".pyc"):
                top = name.partition("/")[0] + ("/" if "/" in name else "")
                sizes[top] = sizes.get(top, 0) + status.st_size
        if not sizes:
            return
        from .store import format_bytes  # only here: it costs every job some milliseconds

        largest = sorted(sizes, key=lambda top: -sizes[top])
        tops = ", ".join(f"{format_bytes(sizes[top])} in {top}" for top in largest[:SHOWN])
        more = f" and {len(largest) - SHOWN} more" if len(largest) > SHOWN else ""
        names = ", ".join(top.rstrip("/") for top in largest[:SHOWN])
        option = results_option(self._source, self._argv)
        self.not_kept = (
            f"{tops}{more} are not kept, and the next attempt will not find them: set keep: [{names}] in the job file,"
            f" or add --set 'keep=[{names}]' to submit"
        ) + (f", or give the script {option}" if option else "")
        self._log.say(self.not_kept)


def results_option(source: str, argv: Sequence[str]) -> str:
    """Return the option by which the script of a command takes a folder for its results, with the run's folder; or ""."""
    names = (
        [f"{argv[1].replace('.', '/')}.py"] if len(argv) > 1 and argv[0] == "-m" else _SCRIPT.findall(" ".join(argv))
    )
    for name in names:
        try:
            with open(os.path.join(source, name), encoding="utf-8", errors="replace") as stream:
                text = stream.read(_LONGEST_SCRIPT)
        except OSError:
            continue
        has_arguments = "HfArgumentParser" in text and "TrainingArguments" in text
        found = _RESULTS_OPTION.search(text)
        if found or has_arguments:
            option = found[1] if found else "--output_dir"
            return f"{option} {'{checkpoint_dir}' if 'ckpt' in option or 'checkpoint' in option else '{model_dir}'}"
    return ""


def _files(folder: str, roots: Sequence[str]) -> Iterator[str]:
    """Yield relative paths of the regular files below some places of a folder (links to files count)."""
    for root in roots:
        top = os.path.join(folder, root)
        if os.path.isfile(top):
            yield root
        for at, folders, names in os.walk(top):
            folders[:] = [
                name
                for name in folders
                if name not in CACHES and not os.path.exists(os.path.join(at, name, "pyvenv.cfg"))
            ]
            for name in names:
                path = os.path.join(at, name)
                if os.path.isfile(path) and not name.startswith(PART):
                    yield os.path.relpath(path, folder).replace(os.sep, "/")


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _replace(path: str, folder: str, name: str) -> None:
    """Make <folder>/<name> a copy of a file, in one step; a folder that stands there, or a file above it, gives way."""
    import shutil  # only here: it costs every job some milliseconds

    to = os.path.join(folder, name)
    part = os.path.join(os.path.dirname(to), PART)
    for end in (at for at, letter in enumerate(name) if letter == "/"):
        if os.path.isfile(os.path.join(folder, name[:end])):
            os.unlink(os.path.join(folder, name[:end]))
    os.makedirs(os.path.dirname(to), exist_ok=True)
    try:
        shutil.copy2(path, part)
        if os.path.isdir(to):
            shutil.rmtree(to)
        os.replace(part, to)
    finally:
        _remove(part)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # it is gone already


def _is_gone(path: str) -> bool:
    """Return whether no file is there; not where that cannot be told, as in a folder that cannot be read for now."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _literal(pattern: str) -> str:
    """Return the folders at the head of a pattern that hold no wildcard."""
    parts = pattern.strip("/").split("/")
    plain = [part for at, part in enumerate(parts) if not any(set("*?[") & set(each) for each in parts[: at + 1])]
    return "/".join(plain)


def _compiled(pattern: str) -> re.Pattern[str]:
    """Return what matches a pattern's files and all that lies below the folders that it names; ** is any depth."""
    parts = pattern.strip("/").split("/")
    text = "".join("(?:[^/]+/)*" if part == "**" else _segment(part) + "/" for part in parts[:-1])
    text += ".*" if parts[-1] == "**" else _segment(parts[-1]) + "(?:/.*)?"
    return re.compile(text + r"\Z", re.DOTALL)


def _segment(part: str) -> str:
    """Return a pattern without slashes as a regular expression: *, ? and [abc]."""
    text, at = "", 0
    while at < len(part):
        end = part.find("]", at + 2) if part[at] == "[" else -1
        if end > 0:
            text += "[" + ("^" + part[at + 2 : end] if part[at + 1] == "!" else part[at + 1 : end]) + "]"
            at = end
        else:
            text += {"*": "[^/]*", "?": "[^/]"}.get(part[at], re.escape(part[at]))
        at += 1
    return text
