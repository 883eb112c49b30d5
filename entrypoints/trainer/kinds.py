"""Kind, what a task says of itself before its data is read, and the built-in tasks by name.

It imports no torch. A plan, the rules of arguments and the forecast read the kinds of the built-in tasks; the classes of
the tasks derive from them. A plan cannot load a class of the source: what that says of itself is known on the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .columns import NO_PAIR, Columns, are_messages, messages_of, wrong_conversation

# Arguments that only some tasks read. A task that does not name one refuses it.
TASK_ARGUMENTS = (
    "text_column", "messages_column", "label_column", "dpo_beta", "chat_template_path", "assistant_only_loss",
    "max_train_bytes", "sample_prompt", "sample_prompts",
)  # fmt: skip


class Kind:
    """The defaults are those of a class of the source that says nothing else."""

    writes: ClassVar[bool] = False  # the model is a language model: it continues texts
    chats: ClassVar[bool] = False  # a prompt is a user's message
    streams: ClassVar[bool] = False  # `--streaming` works
    equal_lengths: ClassVar[bool] = False  # all samples have `--block_size` tokens
    sequences: ClassVar[int] = 1  # of a sample, in a forward pass
    whole_loss: ClassVar[bool] = True  # the loss needs the whole model and whole samples
    staged: ClassVar[bool] = False  # the model can be cut in pipeline stages
    needs_rows: ClassVar[bool] = False  # a plain text file is no data
    metric_names: ClassVar[tuple[str, ...]] = ()  # results of an evaluation; (): not known before it
    own_arguments: ClassVar[tuple[str, ...] | None] = None  # of TASK_ARGUMENTS those that it reads; None: any

    @classmethod
    def columns(cls, arguments: Any) -> Columns:
        """Return the columns that are read of each row."""
        return Columns(arguments.text_column, config=arguments.dataset_config, split=arguments.dataset_split)

    @classmethod
    def column_options(cls, arguments: Any) -> dict[str, str]:
        """Return the options that name columns, by column."""
        return {arguments.text_column: "text_column"}

    @classmethod
    def example(cls, arguments: Any) -> str:
        """Return a row that is read, for messages."""
        return f'{{"{arguments.text_column}": "..."}}'

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], arguments: Any) -> str:
        """Return what is wrong with a row that has all columns, "" for nothing."""
        return ""


class CausalText(Kind):
    """All text in one stream, cut into blocks."""

    writes, streams, equal_lengths, staged, whole_loss = True, True, True, True, False
    metric_names = ("loss", "perplexity")
    own_arguments = ("text_column", "max_train_bytes", "sample_prompt", "sample_prompts")


class Conversations(Kind):
    """Conversations, of which the answers are learned."""

    writes, chats, needs_rows, whole_loss = True, True, True, False
    metric_names = ("loss", "perplexity")
    own_arguments = (
        "messages_column", "chat_template_path", "assistant_only_loss", "sample_prompt", "sample_prompts",
    )  # fmt: skip
    _MESSAGES = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'

    @classmethod
    def columns(cls, arguments: Any) -> Columns:
        """Return the columns that are read of each row."""
        return Columns(arguments.messages_column, None, True, arguments.dataset_config, arguments.dataset_split)

    @classmethod
    def column_options(cls, arguments: Any) -> dict[str, str]:
        """Return the options that name columns, by column."""
        return {}

    @classmethod
    def example(cls, arguments: Any) -> str:
        """Return a row that is read, for messages."""
        return f'{{"{arguments.messages_column}": {cls._MESSAGES}}}, or prompt and completion'

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], arguments: Any) -> str:
        """Return what is wrong with a conversation, "" for nothing."""
        wrong = wrong_conversation(messages_of(row, arguments.messages_column))
        return f"{arguments.messages_column}: {wrong}" if wrong else ""


class LabelledTexts(Kind):
    """Texts with one label each."""

    needs_rows, whole_loss = True, False
    metric_names = ("loss", "accuracy", "f1")
    own_arguments = ("text_column", "label_column")

    @classmethod
    def columns(cls, arguments: Any) -> Columns:
        """Return the columns that are read of each row."""
        hub = {"config": arguments.dataset_config, "split": arguments.dataset_split}
        return Columns(arguments.text_column, arguments.label_column, **hub)

    @classmethod
    def column_options(cls, arguments: Any) -> dict[str, str]:
        """Return the options that name columns, by column."""
        return {arguments.text_column: "text_column", arguments.label_column: "label_column"}

    @classmethod
    def example(cls, arguments: Any) -> str:
        """Return a row that is read, for messages."""
        return f'{{"{arguments.text_column}": "...", "{arguments.label_column}": "..."}}'


class Preferences(Kind):
    """Pairs of answers, of which one is preferred."""

    writes, needs_rows, sequences = True, True, 2
    metric_names = ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
    own_arguments = ("dpo_beta", "chat_template_path", "sample_prompt", "sample_prompts")
    PARTS = ("prompt", "chosen", "rejected")

    @classmethod
    def columns(cls, arguments: Any) -> Columns:
        """Return the columns that are read of each row."""
        hub = {"config": arguments.dataset_config, "split": arguments.dataset_split}
        return Columns(arguments.text_column, together=cls.PARTS, **hub)

    @classmethod
    def column_options(cls, arguments: Any) -> dict[str, str]:
        """Return the options that name columns, by column."""
        return {}

    @classmethod
    def example(cls, arguments: Any) -> str:
        """Return a row that is read, for messages."""
        return '{"prompt": "...", "chosen": "...", "rejected": "..."}'

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], arguments: Any) -> str:
        """Return what is wrong with a pair of answers, "" for nothing."""
        values = [row[name] for name in cls.PARTS]
        texts = all(isinstance(value, str) for value in values)
        return "" if texts or all(map(are_messages, values)) else NO_PAIR


@dataclass(frozen=True)
class BuiltIn:
    """A built-in task: its kind, and the class that a node loads."""

    kind: type[Kind]
    path: str  # module:Class


BUILT_IN = {  # the only place with these names; the first is the default
    "causal-lm": BuiltIn(CausalText, "trainer.data.language:CausalLM"),
    "chat": BuiltIn(Conversations, "trainer.data.language:Chat"),
    "sequence-classification": BuiltIn(LabelledTexts, "trainer.data.language:Classification"),
    "dpo": BuiltIn(Preferences, "trainer.data.preference:PreferenceTuning"),
}
DEFAULT = next(iter(BUILT_IN))


def kind_of(task: str) -> type[Kind]:
    """Return the kind of a task by its name; of a class of the source what holds for any."""
    return BUILT_IN[task].kind if task in BUILT_IN else Kind
