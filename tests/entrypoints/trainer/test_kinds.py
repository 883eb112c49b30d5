"""What tasks say of themselves: one table of the built-in ones, and which arguments apply."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.entrypoints.training import ENTRYPOINTS

from trainer.arguments import Arguments, Misuse, parse  # isort: skip
from trainer.argument_rules import task_problems  # isort: skip
from trainer.kinds import BUILT_IN, TASK_ARGUMENTS, CausalText  # isort: skip

CLIENT = ENTRYPOINTS.parent / "cloudtrain"
# The tokens of a run before this table are found in the cache by these settings of an Encoder.
CACHE_KEYS = {"chat.py": "chat", "preference.py": "dpo", "language.py": "sequence-classification"}


def names_in(path: Path) -> set[str]:
    """Return the strings of a file that are the name of a built-in task."""
    found = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    return BUILT_IN.keys() & {each for each in found if isinstance(each, str)}


def test_only_the_table_has_the_names_of_built_in_tasks():
    files = [*(ENTRYPOINTS / "trainer").rglob("*.py"), *ENTRYPOINTS.glob("*.py"), *CLIENT.rglob("*.py")]
    assert len(files) > 300
    named = {path.name: names_in(path) for path in files if names_in(path)}
    assert named.pop("kinds.py") == BUILT_IN.keys()
    assert named == {name: {key} for name, key in CACHE_KEYS.items()}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--dpo_beta 0.2", "--dpo_beta has no effect with the task causal-lm, only with dpo: remove --dpo_beta"),
        ("--task chat --label_column x", "--label_column has no effect with the task chat, only with sequence-class"),
        ("--task chat --text_column x", "only with causal-lm, sequence-classification"),
        (
            "--task dpo --assistant_only_loss false",
            "--assistant_only_loss has no effect with the task dpo, only with chat",
        ),
        ("--task sequence-classification --sample_prompts a", "--sample_prompts has no effect with the task sequence"),
    ],
)
def test_an_argument_that_the_task_does_not_read_is_refused(argv: str, said: str):
    with pytest.raises(Misuse) as caught:
        parse(argv.split())
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TASK_ARGUMENTS)
def test_each_of_them_is_an_argument_that_a_task_reads_and_another_does_not(name: str):
    readers = [name in (each.kind.own_arguments or ()) for each in BUILT_IN.values()]
    assert hasattr(Arguments(), name) and any(readers) and not all(readers)


def test_a_class_of_the_source_takes_what_it_says():
    class Mine(CausalText):
        own_arguments = (*CausalText.own_arguments, "label_column")
        streams = False

    arguments = parse(["--task", "a:Mine", "--label_column", "x", "--streaming", "--max_steps", "1"])
    assert task_problems(arguments)[0].startswith("--streaming works with"), "of the defaults of any class"
    arguments.kind = Mine
    assert len(task_problems(arguments)) == 1
    Mine.streams = True
    assert task_problems(arguments) == []
    arguments.dpo_beta = 0.5
    assert "--dpo_beta has no effect with the task a:Mine, only with dpo" in task_problems(arguments)[0]
