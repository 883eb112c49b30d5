"""What the parts of a job share: their common model and the kinds of values in them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticSerializationError

from cloudtrain.errors import BadJob
from cloudtrain.events import OFF
from cloudtrain.job.arguments import check_key, flat, normalised, text_of
from cloudtrain.job.problems import NUMBER, ONE, SEVERAL, example, explain, quote, wrong
from cloudtrain.job.units import MOST_RANKS, PRICE_LIST, RANKS_WHY, duration_s, size_bytes, usd

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    r"(env:[A-Za-z_][A-Za-z0-9_]*|azure-keyvault:[A-Za-z0-9-]{3,24}/[A-Za-z0-9-]{1,127}(#.+)?"
    r"|(file|aws-secretsmanager|gcp-secretmanager|k8s):.+)",
    re.DOTALL,
)
READY = r"tcp://:(?P<tcp>[0-9]{1,5})|http://:(?P<http>[0-9]{1,5})(/[!-~]*)?|line:.+"
# what the launcher sets on every rank, beside CLOUDTRAIN_*
_RANKS = {"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK"}
_LAUNCHERS = {*_RANKS, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# The largest numbers that a job may hold, each with its reason; what is larger is a slip of the keyboard. Time and memory of a
# plan grow with some of them. A bound stands well above what anybody runs.
MOST_NODES = 10_000
MOST_PROCESSES = 1024
FEW, MANY = 100, 10_000  # entries of lists and mappings
_MAIN_ROLE = "trainer"
_PROCESSES_WHY = "no machine has more accelerators or cores for one training"


def at_most(most: float, why: str) -> WrapValidator:
    """Return what refuses a number above a bound, infinity and NaN, with the bound's reason."""

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool) and not value <= most:
            raise wrong(f"must be at most {most:,}, not {quote(value)}", why)
        return inner(value)

    return WrapValidator(check)


def no_more_than(most: int, why: str) -> WrapValidator:
    """Return what refuses a list or a mapping of more items than a bound, before any of them is looked at."""

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        if isinstance(value, Sized) and not isinstance(value, str) and len(value) > most:
            raise wrong(f"has {len(value):,} entries; at most {most:,} are allowed", why)
        return inner(value)

    return WrapValidator(check)


T = TypeVar("T")
FEW_ENTRIES = no_more_than(FEW, "each one is prepared by a step of its own")
MANY_ENTRIES = no_more_than(MANY, "the command line of a process has no place for more")
Count = Annotated[int, Field(strict=True, ge=1)]
Nodes = Annotated[Count, Field(le=MOST_NODES), at_most(MOST_NODES, "no known training has more nodes")]
Processes = Annotated[Count, Field(le=MOST_PROCESSES), at_most(MOST_PROCESSES, _PROCESSES_WHY)]
Ranks = Annotated[Count, Field(le=MOST_RANKS), at_most(MOST_RANKS, RANKS_WHY)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Cores = Annotated[Count, Field(le=100_000), at_most(100_000, "no machine has more CPU cores")]
DiskGb = Annotated[Count, Field(le=1_000_000), at_most(1_000_000, "no platform has larger disks: it is in GB")]
HourlyUsd = Annotated[float, Field(ge=0, le=100_000), at_most(100_000, "no machine costs more an hour, in USD")]
Attempts = Annotated[Count, Field(le=9999), at_most(9999, "an attempt's number has four digits")]
Restarts = Annotated[
    int, Field(strict=True, ge=0, le=1000), at_most(1000, "a node that needs more restarts than this is broken")
]
Checkpoints = Annotated[Count, Field(le=1_000_000), at_most(1_000_000, "no folder holds more checkpoints")]
Steps = Annotated[Count, Field(le=10**12), at_most(10**12, "a thousand steps a second take 30 years")]
Samples = Annotated[Count, Field(le=10**9), at_most(10**9, "no accelerator holds more in one pass")]
Passes = Annotated[Count, Field(le=100_000), at_most(100_000, "no optimizer step has more passes")]
Few = Annotated[T, Field(max_length=FEW), FEW_ENTRIES]
Many = Annotated[T, Field(max_length=MANY), MANY_ENTRIES]


def _text(value: Any) -> Any:
    if value is None:
        raise wrong("has no value", 'write "" for an empty text')
    if isinstance(value, bool | int | float):
        return str(value).lower() if isinstance(value, bool) else text_of(value)
    return value


def _variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise wrong(
            "is not a valid name of an environment variable", "use letters, digits and _; do not begin with a digit"
        )
    if name in _LAUNCHERS or name.startswith("CLOUDTRAIN_"):
        raise wrong("is set by cloudtrain on every rank", "choose another name")
    return name


def _duration(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise wrong(
            f"needs a unit: {quote(value).removeprefix(NUMBER)}", "write {0}s, {0}m or {0}h".format(example(value))
        )
    if isinstance(value, str):
        try:
            duration_s(value)
        except ValueError as error:
            raise wrong(f'is not a duration: "{value[:40]}"', str(error)) from None
    return value


NO_WAIT = "0s"


def _wait(value: Any) -> Any:
    return NO_WAIT if str(value) in ("0", NO_WAIT) else _duration(value)


def _every(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise wrong(
            f"needs a unit: {quote(value).removeprefix(NUMBER)}",
            'write "{0} steps", {0}s or {0}m'.format(example(value)),
        )
    if isinstance(value, str) and not re.fullmatch(r"\s*0*[1-9]\d{0,11}\s*steps?\s*", value):
        try:
            duration_s(value)
        except ValueError:
            raise wrong(f"is not a duration or a number of steps: {quote(value)}", 'write 15m or "500 steps"') from None
    return value


def _ready(value: str) -> str:
    match = re.fullmatch(READY, value)
    if match is None or not 1 <= int(match["tcp"] or match["http"] or 1) <= 65535:
        raise wrong(f"is not known: {quote(value)}", "write tcp://:8000, http://:8000/health or line:TEXT")
    return value


def _priced_as(value: str) -> str:
    if re.fullmatch(rf"{PRICE_LIST}/\S{{1,100}}", value):
        return value
    hint = "write provider/region/machine, as in aws/us-east-1/g5.12xlarge"
    raise wrong(f"is not a machine in a price list: {quote(value)}", hint)


def _accelerators(value: Any) -> Any:
    if isinstance(value, list):
        return [_accelerators(text) for text in value]
    count = re.fullmatch(r"[A-Za-z][A-Za-z0-9.-]*:0*([1-9]\d*)", value)
    if count and (len(count[1]) > 4 or int(count[1]) > MOST_PROCESSES):
        raise wrong(f"has more than {MOST_PROCESSES:,} GPUs of a node: {quote(value)}", "no machine has more")
    joined = re.fullmatch(r"([A-UW-Za-uw-z]+\d{1,4}[A-Za-z]?|[Vv]100)[x-]([1-9]|16)", value)  # not v5e-8, a TPU
    if value == "0" or (not joined and re.fullmatch(r"[A-Za-z][A-Za-z0-9.-]*(:[1-9]\d{0,3})?", value)):
        return value
    number = re.fullmatch(r"(\d+) ?[x:* ] ?([A-Za-z][\w.-]*)|([A-Za-z][\w.-]*?) ?[x*\- ] ?(\d+)", value)
    right = f"{number[2] or number[3]}:{number[1] or number[4]}" if number else "A100:8"
    raise wrong(f"must be a name and a count, not {quote(value)}", f"write {right}")


def _money(value: Any) -> Any:
    try:
        usd(str(value))
    except ValueError as error:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        hint = f"write a currency: {example(value)} USD" if is_number and value > 0 else str(error)
        raise wrong(f"is not an amount of money: {quote(value)}", hint) from None
    return str(value)


def _size(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise wrong(
            f"needs a unit: {quote(value).removeprefix(NUMBER)}", "write {0}GB or {0}GiB".format(example(value))
        )
    if isinstance(value, str):
        try:
            size_bytes(value)
        except ValueError as error:
            raise wrong(f'is not a size: "{value[:40]}"', str(error)) from None
    return value


def inside(value: str) -> str:
    """Return a path below the source in its shortest form."""
    path = os.path.normpath(value) if value else value
    if not path or path == "." or path.startswith(("/", "~")) or path.split("/")[0] == "..":
        raise wrong(
            f"must be a path inside the source, not {quote(value)}",
            "write it relative to the source, as in src/train.py",
        )
    return path


def program(value: str | list[str]) -> str | list[str]:
    """Return an entrypoint: a script, -m module, or the words of a command."""
    if isinstance(value, list):
        if not value or not value[0].strip():
            raise wrong("is an empty command", 'write a script, or a command such as ["bash", "run.sh"]')
        return value
    if not value.strip():
        raise wrong("is empty", "write a script, or trainer: true for the shared trainer")
    if value == "-m" or value.startswith("-m "):
        module = value[2:].strip()
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
            raise wrong(f"does not name a module: {quote(value)}", "write -m package.module; put arguments into args")
        return f"-m {module}"
    if value.startswith("-"):
        raise wrong(f"must be a script or -m package.module, not {quote(value)}", "put arguments into args")
    if re.search(r"\.(py|sh)\s+-", value):
        raise wrong(f"contains arguments: {quote(value)}", "put them into hyperparameters or args")
    return inside(value)


def place(value: str, info: ValidationInfo) -> str:
    """Return a local path as an absolute one, a URI as it is."""
    if not value.strip():
        raise wrong("is empty", "write a path or a URI such as s3://bucket/prefix")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
        return value
    if re.match(r"\$[A-Za-z_{]", value):
        raise wrong(
            f"has a variable, which is not replaced: {quote(value)}", "write the path itself; ~ is your home folder"
        )
    if uri := re.match(r"(s3|gs|az)(:/?|//)(?=[^/])", value):
        raise wrong(f"is a path of this machine: {quote(value)}", f"write {uri[1]}://{value[uri.end() :]}")
    folder = (info.context or {}).get("folder") or Path.cwd()
    path = os.path.join(folder, os.path.expanduser(value))  # noqa: PTH111, PTH118 - a trailing slash has a meaning
    plain = os.path.realpath(path) if ".." in Path(path).parts else os.path.abspath(path)  # noqa: PTH100
    return plain + "/" if value.endswith("/") and plain != "/" else plain


def _sources(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _source_of_secret(value: str) -> str:
    if not _SECRET.fullmatch(value):
        raise wrong(
            "is not a source of a secret (never write the secret itself here)",
            "write env:NAME, file:PATH, aws-secretsmanager:NAME, gcp-secretmanager:NAME, azure-keyvault:VAULT/KEY"
            " or k8s:NAME/KEY",
        )
    return value


def _files(value: list[str]) -> list[str]:
    if not value:
        return value
    from pathspec import GitIgnoreSpec

    for line in value:
        try:
            spec = GitIgnoreSpec.from_lines([line])
        except ValueError:
            spec = GitIgnoreSpec([])
        if "\n" in line or not any(pattern.include is not None for pattern in spec.patterns):
            raise wrong(
                f"has a pattern that can match no file: {quote(line)}", "write patterns as in .gitignore: tests/keys/"
            )
    return value


def _metric(value: str) -> str:
    if value == OFF:
        return value
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise wrong(f"is not a valid regular expression: {error}", 'as in "loss=([0-9.e+-]+)"') from None
    if groups < 1:
        raise wrong("has no group for the number", 'put it in parentheses, as in "loss=([0-9.e+-]+)"')
    return value


def _hyperparameter(value: Any, info: ValidationInfo) -> Any:
    try:
        return normalised(value, info.data.get("arg_style", "argparse"))
    except ValueError as error:
        raise wrong(str(error)) from None


def _hyperparameter_name(value: Any, info: ValidationInfo) -> Any:
    try:
        check_key(str(value), info.data.get("arg_style", "argparse"))
    except ValueError as error:
        raise wrong(str(error)) from None
    return str(value)


def _hyperparameters(value: dict[str, Any]) -> dict[str, Any]:
    try:
        return flat(value)
    except ValueError as error:
        raise wrong(str(error)) from None


Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | int | float | bool)]
OneOrMore = Annotated[
    Annotated[T, Tag(ONE)] | Annotated[Annotated[list[T], Field(min_length=1, max_length=FEW)], Tag(SEVERAL)],
    Discriminator(lambda value: SEVERAL if isinstance(value, list) else ONE),
]
Accelerators = Annotated[OneOrMore[Text], FEW_ENTRIES, AfterValidator(_accelerators)]
PricedAs = Annotated[str, AfterValidator(_priced_as)]
Ready = Annotated[str, AfterValidator(_ready)]
Name = Annotated[str, AfterValidator(_variable)]
Duration = Annotated[str, BeforeValidator(_duration)]
Every = Annotated[str, BeforeValidator(_every)]  # a duration or steps
Wait = Annotated[str, BeforeValidator(_wait)]  # a duration that may be nothing
Size = Annotated[str, BeforeValidator(_size)]
Money = Annotated[str, BeforeValidator(_money)]
Inside = Annotated[str, AfterValidator(inside)]
Kept = Annotated[
    Annotated[Literal["auto", "none"], Tag(ONE)] | Annotated[Many[list[Inside]], Tag(SEVERAL)],
    Discriminator(lambda value: SEVERAL if isinstance(value, list | tuple) else ONE),
]
Place = Annotated[str, AfterValidator(place)]
Files = Annotated[list[str], AfterValidator(_files)]
Pattern = Annotated[str, AfterValidator(_metric)]
Metrics = Annotated[
    dict[str, Pattern],
    Field(max_length=FEW),
    BeforeValidator(
        lambda value: {"*": OFF} if value in (OFF, False) else value,
        json_schema_input_type=dict[str, str] | Literal["off", False],
    ),
]
Sources = Annotated[
    list[Annotated[str, AfterValidator(_source_of_secret)]],
    BeforeValidator(_sources, json_schema_input_type=str | list[str]),
    Field(min_length=1),
]
Hyperparameters = Annotated[
    dict[
        Annotated[str, BeforeValidator(_hyperparameter_name)],
        Annotated[Any, BeforeValidator(_hyperparameter, json_schema_input_type=Any)],
    ],
    Field(max_length=MANY),
    AfterValidator(_hyperparameters),
]


def none_yet() -> list[Any]:
    """Return a new list; of `list` itself pydantic reads the signature, a text, with a tokenizer, at every import."""
    return []


class Spec(BaseModel):
    """What all parts of a job share: frozen, no unknown keys, null means left out, BadJob when something is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise BadJob(explain(error, type(self))) from None

    # pydantic's own mark of an __init__ that it need not call for nested models: their problems are collected first
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return plain data, as pydantic does; but Ctrl-C meanwhile stays one, of which it makes another error or none."""
        try:
            return super().model_dump(**{"warnings": "error", **options})
        except PydanticSerializationError:
            try:
                super().model_dump(**{"warnings": "error", **options})
            except PydanticSerializationError:  # it was the model itself
                return super().model_dump(**options)
        raise KeyboardInterrupt

    @model_validator(mode="before")
    @classmethod
    def _left_out(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}
        return data


def bucket_name(value: str) -> str:
    """Check an option that is the name of a bucket; raises where there is more than the name."""
    name, _, folder = re.sub(r"^(s3|gs)://", "", value).strip("/").partition("/")
    if folder or value.startswith("s3://"):
        raise wrong(
            f'must be a name alone, not "{value}"', f"write bucket: {name}" + f", prefix: {folder}" * bool(folder)
        )
    return value


def main_role(roles: Any) -> str:
    """Return the name of the main role, of several the first; "" where no role is."""

    def is_main(role: Any) -> bool:
        return (role.get("main") if isinstance(role, Mapping) else getattr(role, "main", False)) is True

    if not isinstance(roles, Mapping):
        return ""
    return next((name for name, role in roles.items() if is_main(role)), _MAIN_ROLE if _MAIN_ROLE in roles else "")
