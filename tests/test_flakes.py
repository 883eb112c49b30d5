"""What made tests fail now and then stands in no test: ports given back too early, short waits, dates, draws without a seed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
SHORTEST_S = 30.0  # of a wait for what must happen
WORDS = re.compile(
    r"getsockname|(timeout|bound_s)=[12]?[0-9](\.\d+)?\b|with ThreadingHTTPServer|Random\(\)|\.date\(\)|date\.today"
)
# Programs of others and of users are not ours; a host is asked again in a loop.
OTHERS = ("golden/", "thirdparty/scripts/", "diagnosis/scripts/", "lab/host.py")


def faults(text: str) -> list[str]:
    """Return what a text of Python does that a busy machine, midnight or chance makes fail, each with its line."""
    tree = ast.parse(text)
    expected = {  # to raise: there a short wait is what is tested
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and any("raises" in ast.unparse(item.context_expr) for item in node.items)
        for inner in ast.walk(node)
    }
    return [said for node in ast.walk(tree) if id(node) not in expected for said in _faults(node)]


def _faults(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.With) and any(ast.unparse(each).startswith("ThreadingHTTPServer(") for each in node.items):
        yield f"{node.lineno}: a server is closed while its thread may serve, which spins then: take served()"
    if isinstance(node, ast.FunctionDef):
        for name in _ports(node):
            yield f"{node.lineno}: {node.name} uses a port of which {name} has let go: take the fixture held"
    elif isinstance(node, ast.Call):
        called = _called(node)
        for given in node.keywords:
            seconds = given.value.value if isinstance(given.value, ast.Constant) else None
            waits = given.arg in ("timeout", "bound_s") and not called.endswith("connect")
            if waits and isinstance(seconds, int | float) and 0 < seconds < SHORTEST_S:
                yield f"{node.lineno}: {called} waits for {seconds} s at most: give it WAIT_S"
        if called in ("random.Random", "Random") and not node.args:
            yield f"{node.lineno}: {called} draws without a seed"
        if called in ("date.today", "datetime.date.today") or (called.endswith(".date") and "now(" in called):
            yield f"{node.lineno}: {called} is another day after midnight"


def _called(node: ast.AST) -> str:
    return (
        ast.unparse(node.func) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) else ""
    )


def _ports(function: ast.FunctionDef) -> Iterator[str]:
    """Yield each socket whose port is used behind its end: what `with` opens, or what is closed in the body itself."""
    for block in ast.walk(function):
        for name in _opened(block):
            if any(
                isinstance(each, ast.Return) and f"{name}.getsockname" in ast.unparse(each) for each in ast.walk(block)
            ):
                yield name
    ends = {name: block.end_lineno for block in function.body for name in _opened(block)}
    ends |= {_called(each.value)[: -len(".close")]: each.lineno for each in function.body
             if isinstance(each, ast.Expr) and _called(each.value).endswith(".close")}  # fmt: skip
    for node in ast.walk(function):
        for name, end in ends.items() if isinstance(node, ast.Assign) else ():
            if re.fullmatch(
                rf"((str|int)\()?{name}\.getsockname\(\)(\[1\]\)?)?|f['\"].*{name}\.getsockname.*",
                ast.unparse(node.value),
            ):
                made = {ast.unparse(target) for target in node.targets}
                if any(isinstance(use, ast.Name) and use.id in made and use.lineno > end for use in ast.walk(function)):
                    yield name


def _opened(block: ast.AST) -> list[str]:
    items = block.items if isinstance(block, ast.With) else []
    return [item.optional_vars.id for item in items if isinstance(item.optional_vars, ast.Name)]


def test_no_test_waits_too_short_or_draws_without_a_seed_or_uses_a_port_that_is_free_again():
    found = []
    for path in sorted([*TESTS.rglob("*.py"), *(TESTS.parent / "cloudtrain" / "testing").rglob("*.py")]):
        text = path.read_text()
        name = path.relative_to(TESTS.parent).as_posix()
        if WORDS.search(text) and not name.removeprefix("tests/").startswith(OTHERS):
            found += [f"{name}:{fault}" for fault in faults(text)]
    assert found == []


def test_each_kind_is_found():
    seeded = {
        "def a(s):\n    port = s.getsockname()[1]\n    s.close()\n    connect(port)": "has let go",
        "def a():\n    with socket() as s:\n        return s.getsockname()[1]": "has let go",
        "def a():\n    with socket() as s:\n        port = s.getsockname()[1]\n    connect(port)": "has let go",
        "run(x, timeout=5)": "5 s at most",
        "wait_for(x, bound_s=2.5)": "2.5 s at most",
        "with ThreadingHTTPServer(at, X) as s:\n    yield s": "which spins",
        "random.Random()": "without a seed",
        "datetime.now(UTC).date()": "after midnight",
    }
    assert [text for text, said in seeded.items() if not any(said in fault for fault in faults(text))] == []
    fine = (
        "def a(s):\n    port = s.getsockname()[1]\n    connect(port)\n    s.close()",
        "with pytest.raises(X):\n    run(x, timeout=5)",
        "run(x, timeout=60)\nrandom.Random(1)",
        "connect(x, timeout=1)",
    )
    assert [faults(text) for text in fine] == [[]] * len(fine)
