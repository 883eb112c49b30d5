"""Columns: which columns of a row a task reads, and the predicates of what is in them.

It imports no torch: a plan checks rows by the same predicates as the training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PAIR = {"prompt", "completion"}
NO_MESSAGES = "it is not a list of messages with role and content"
NO_PAIR = "prompt, chosen and rejected must be texts, or all three lists of role and content"


@dataclass(frozen=True)
class Columns:
    """Where rows have their text and, in classification, their label; and how a hub dataset is asked for."""

    text: str = "text"
    label: str | None = None
    turns: bool = False  # conversations: prompt and completion are one too, where the text is not there
    config: str = ""
    split: str = "train"
    together: tuple[str, ...] = ()  # columns that make one document, as JSON: prompt, chosen and rejected

    def missing(self, row: Mapping[str, Any]) -> list[str]:
        """Return the columns that a row lacks; of columns that make one document the first."""
        if self.turns and row.keys() >= PAIR:
            return []
        needed = self.together or [name for name in (self.text, self.label) if name is not None]
        found = [name for name in needed if row.get(name) is None]
        return found[:1] if self.together else found


def wrong_conversation(value: Any) -> str:
    """Return why a value is no conversation to learn from, "" where it is one."""
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    ):
        return NO_MESSAGES
    answers = [message["content"] for message in value if message["role"] == "assistant"]
    if not answers:
        return "no message by the assistant: there is nothing to learn"
    return "" if any(map(str.strip, answers)) else "the assistant's answer is empty: there is nothing to learn"


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of role and content."""
    return isinstance(value, list) and all(
        isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value
    )


def messages_of(row: Mapping[str, Any], column: str) -> Any:
    """Return the conversation of a row, from a list, its JSON, or a prompt and its completion."""
    value = row.get(column)
    if value is None:
        turns = (("user", row["prompt"]), ("assistant", row["completion"]))
        return [{"role": role, "content": content} for role, content in turns]
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
