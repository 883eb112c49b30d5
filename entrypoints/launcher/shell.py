"""The command of a shell text: `run` and `setup` end at the first command that fails, and say at which."""

from __future__ import annotations

import os

from .log import Log

# What bash prints before it ends the text, unless that was its last command and no pipeline. The line is taken from the
# text: of a pipeline bash names the last command only. A file that the text sources has lines of its own.
_TRAP = r"""trap '_code=$? _parts=${#PIPESTATUS[@]} _file=${BASH_SOURCE-}; if [[ $- == *e* && $BASH_SUBSHELL == 0 ]]; then
  mapfile -t _lines <<<"$BASH_EXECUTION_STRING"; _line=${_lines[LINENO-1]-}; _line=${_line##* ERR; } _of="";
  [[ ${_file:-environment} == environment ]] || { _line=$BASH_COMMAND _of=" of $_file"; };
  [[ $LINENO -ge ${#_lines[@]} && $_parts == 1 && ! $_of ]] ||
    printf "%s\n" "NAME: line $LINENO$_of failed with exit code $_code: $_line" "HINT" >&2;
fi' ERR; """
_HINT = "(bash runs this text with {}; write || true after a command that may fail, or begin the text with set +e)"
_SPECIAL = "|&;\n<>(){}$`"  # a line without any of these is one command, which bash becomes


def command(text: str, name: str, compat: str, log: Log) -> list[str]:
    """Return what executes a shell text; `name` is its key of the job.

    With `compat` it is what that tool does: SkyPilot runs a script of bash that goes on after a failure
    (sky/skylet/log_lib.py), dstack joins the commands by && (services/jobs/configurators/base.py; both read 2026-11-27).
    sbatch runs a file with the interpreter of its first line.
    """
    import shutil

    if compat == "sbatch" and name == "run":
        path = os.path.join(os.environ.get("CLOUDTRAIN_NODE_DIR") or ".cloudtrain", "slurm_script")
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        return [*text.partition("\n")[0].removeprefix("#!").split(None, 1), path]
    if shutil.which("bash") is None:
        log.say(f"bash is not installed here: sh -e runs {name}, and a pipeline fails only where its last command does")
        return ["sh", "-c" if _has_own_way(text) or compat == "skypilot" else "-ec", text]
    if _has_own_way(text) or compat == "skypilot":
        return ["bash", "-c", text]
    strict = ["-e"] if compat == "dstack" else ["-e", "-o", "pipefail"]
    if not any(letter in text.strip() for letter in _SPECIAL) and text.split()[:1] not in (["source"], ["."]):
        return ["bash", *strict, "-c", text]
    prefix = "" if name == "setup" else f"{name}: "  # a line of the setup has it in the log
    trap = _TRAP.replace("\n", " ").replace("NAME: ", prefix).replace("HINT", _HINT.format(" ".join(strict)))
    return ["bash", *strict, "-E", "-c", trap + text.rstrip("\n")]


def _has_own_way(text: str) -> bool:
    """Return whether a text begins with a shebang or `set +e`, behind comments and empty lines."""
    if text.lstrip().startswith("#!"):
        return True
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.startswith("set +e")
