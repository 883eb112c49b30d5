"""Parse a job file into nodes that keep the written text, and write it as YAML 1.2 again, with its comments.

A node is a str, a `Plain` scalar (number, true, false or null, with its written text), a list of nodes, or a `Table`:
ordered pairs, which keep duplicate keys so that they can be reported.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from cloudtrain.job.document import Document, Path, read_yaml, scalar, written

MAX_LINE = 100  # characters of a list on one line
# Text that every YAML parser, also of YAML 1.1, reads as a string; anything else is quoted.
_SAFE = re.compile(r"(?:[A-Za-z0-9_/]|\.{1,2}(?:/|\Z))(?:[A-Za-z0-9_./@%+=:~ -]*[A-Za-z0-9_./@%+=~-])?")
_YAML11_WORDS = re.compile(r"(?i)y|n|yes|no|on|off|[0-9][0-9:._]*|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*")
_HIDDEN = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
_MAX_KEY = 500  # characters: YAML ends a simple key at 1,024


class Plain(NamedTuple):
    """A scalar that is not text: a number, true, false or null, as it was written."""

    text: str
    tag: str = ""  # !!float, where the text alone would have another type


class Table(list[tuple[str, "Node"]]):
    """A mapping as ordered pairs."""

    def get(self, key: str) -> Node | None:
        """Return the first value of a key, None where it is not there."""
        return next((value for name, value in self if name == key), None)


Node: TypeAlias = "str | Plain | Table | list[Node]"


def from_document(document: Document) -> Table:
    """Return the nodes of a document whose value is a mapping."""
    table = _node(document.value or {}, (), document)
    assert isinstance(table, Table)
    return table


def parse(text: str, name: str = "") -> Node:
    """Parse one typed value like `--set`; raises BadJob."""
    document = scalar(text, name)
    return _node(document.value, (), document)


def format_node(node: Node) -> str:
    """Return the text that `parse` turns into this node (without a tag)."""
    if isinstance(node, Plain):
        return node.text
    if isinstance(node, str):
        return node if _reads_as_itself(node) else _quoted(node)
    return _flow(node)


def dump(table: Table) -> str:
    """Return the text of a job file."""
    return "\n".join(_block(table, "")) + "\n" if table else "{}\n"


def edit(text: str, before: Table, after: Table) -> str:
    """Return the text of a job file with other values: what is equal keeps its comments and how it was written.

    A file whose anchors would change several values at once is written anew, without comments.

    Args:
        text: the file.
        before: its values, in its order.
        after: the new values.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if before == after:
        return text
    writer = YAML()
    writer.width = 1 << 20  # no line is broken
    writer.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    try:
        root = writer.compose(text)
        if root is None or not after:  # it has, or will have, comments only
            stream.write("".join(line for line in text.splitlines(keepends=True) if line.lstrip().startswith("#")))
            stream.write(dump(after))
        else:
            _edit(root, before, after)
            writer.serialize(root, stream)
        edited = stream.getvalue()
        return edited if from_document(read_yaml(edited)) == after else dump(after)
    except (YAMLError, ValueError):  # ValueError: an alias stands for one value twice
        return dump(after)


def _edit(node: Any, before: Table, after: Table) -> None:
    """Give a mapping of ruamel.yaml other values. Comment lines below a value are about the next key, and stay above it."""
    from ruamel.yaml import YAML

    old: dict[str, tuple[Any, Any]] = {
        name: (pair, value) for pair, (name, value) in zip(node.value, before, strict=True)
    }
    below = [_take_lines(value) for _, value in node.value]
    above = dict(zip([*list(old)[1:], None], below, strict=True))
    pairs = []
    for name, value in after:
        (key, inner), was = old.get(name, ((None, None), None))
        if value and was and isinstance(value, Table) and isinstance(was, Table):
            _edit(inner, was, value)
        elif key is None or value != was:
            fresh_key, fresh = YAML().compose(dump(Table([(name, value)]))).value[0]
            if key is not None:
                [*_ends(fresh)][-1].comment = [*_ends(inner)][-1].comment
            key, inner = key or fresh_key, fresh
        if lines := above.get(name):
            key.comment = [None, [_comment(lines)]]
        pairs.append((key, inner))
    node.value = pairs
    if lines := above[None]:
        last = [*_ends(pairs[-1][1])][-1]
        last.comment = [_comment((last.comment[0].value if last.comment else "\n") + lines), None]


def _ends(node: Any) -> Iterator[Any]:
    """Yield a value and the last values in it, down to the scalar or flow collection that it ends with."""
    yield node
    while not isinstance(node.value, str) and node.value and not node.flow_style:
        node = node.value[-1][-1] if isinstance(node.value[-1], tuple) else node.value[-1]
        yield node


def _take_lines(node: Any) -> str:
    """Take the comment lines below a value away from it; the comment on its last line stays."""
    lines = ""
    for end in _ends(node):
        if len(end.comment or ()) > 2:  # of a collection that ends with one on its last line
            lines = "".join(token.value for token in end.comment[2] or ()) + lines
            end.comment = end.comment[:2]
    if end.comment and end.comment[0]:
        behind, _, below = end.comment[0].value.partition("\n")
        lines = below + lines
        if behind:
            end.comment[0].value = f"{behind}\n"
        else:
            end.comment = None
    return lines


def _comment(text: str) -> Any:
    from ruamel.yaml.error import CommentMark
    from ruamel.yaml.tokens import CommentToken

    return CommentToken(text, CommentMark(0), None)


def items(node: list[Any]) -> list[Node]:
    """Return the items of a list; for type checkers, which cannot tell a list from a Table."""
    return list(node)


def _node(value: Any, path: Path, document: Document) -> Node:
    if isinstance(value, dict):
        return Table((key, _node(item, (*path, key), document)) for key, item in value.items())
    if isinstance(value, list):
        return [_node(item, (*path, index), document) for index, item in enumerate(value)]
    if isinstance(value, str):
        return value
    text = document.mark(path).text
    if value is None:
        return Plain(text or "null") if text is None or _parse_scalar(text) is None else Plain("null")
    text = written(value) if text is None else text
    if _same(_parse_scalar(text), value):
        return Plain(text)
    if isinstance(value, float):
        other = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)
        return Plain(other) if _same(_parse_scalar(other), value) else Plain(other, "!!float")
    return Plain(written(value))


def _parse_scalar(text: str) -> Any:
    try:
        return scalar(text, "").value if text[:1] not in ("[", "{", '"', "'") else text
    except ValueError:
        return text


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and (first == second or (first != first and second != second))  # nan


def _reads_as_itself(text: str) -> bool:
    """Return whether a typed text is parsed as that same text."""
    return text[:1] not in ("[", "{", '"', "'") and isinstance(_parse_scalar(text), str)


def _block(table: Table, indent: str) -> Iterator[str]:
    for key, value in table:
        name = _text(key)
        if len(name) > _MAX_KEY:
            yield f"{indent}? {name}"
            yield f"{indent}: {_flow(value)}"
        elif isinstance(value, Table) and value:
            yield f"{indent}{name}:"
            yield from _block(value, indent + "  ")
        elif isinstance(value, list) and value and len(_flow(value)) > MAX_LINE:
            yield f"{indent}{name}:"
            yield from (f"{indent}  - {_flow(item)}" for item in items(value))
        else:
            yield f"{indent}{name}: {_flow(value, alone=True)}"


def _flow(node: Node, *, alone: bool = False) -> str:
    """Return a node on one line; `alone` outside of a list or mapping."""
    if isinstance(node, Table):
        return "{" + ", ".join(f"{_inner_key(key)}: {_flow(value)}" for key, value in node) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(_flow, items(node))) + "]"
    if isinstance(node, Plain):
        return f"{node.tag} {node.text}".strip()
    return _text(node) if alone or not {":", "=", "%"} & set(node) else _quoted(node)


def _inner_key(key: str) -> str:
    name = _text(key) if ":" not in key else _quoted(key)
    return name if len(name) <= _MAX_KEY else f"? {name}"


def _text(text: str) -> str:
    plain = (
        _SAFE.fullmatch(text)
        and ": " not in text
        and not _YAML11_WORDS.fullmatch(text)
        and isinstance(_parse_scalar(text), str)
    )
    return text if plain and len(text) < _MAX_KEY else _quoted(text)


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)
