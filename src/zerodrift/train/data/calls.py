"""Calls of tools in the forms that chat templates expect.

Some write arguments that are blocks of keys as JSON, and would quote a text once more; others put a text in
as it is, and fail on a block. Some see a call only where there is no content beside it, others where it is
empty.

Invariant: every form is the same call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zerodrift.errors import ConfigError
from zerodrift.train.data.conversation import Conversation, Message


def forms(talk: Conversation) -> list[Conversation]:
    """A conversation with calls in every form, that of its row first."""
    as_blocks = _with(talk, lambda arguments: _block(arguments, talk.where))
    as_texts = _with(talk, _text)
    written = [as_blocks, as_texts]
    return [*written, *map(_otherwise_empty, written)]


def _with(talk: Conversation, change: Callable[[Any], Any]) -> Conversation:
    def changed(turn: Message) -> Message:
        if "tool_calls" not in turn:
            return turn
        calls = []
        for call in turn["tool_calls"]:
            function = dict(call["function"])
            if "arguments" in function:
                function["arguments"] = change(function["arguments"])
            calls.append({**call, "function": function})
        return {**turn, "tool_calls": calls}

    return replace(talk, messages=tuple(map(changed, talk.messages)))


def _otherwise_empty(talk: Conversation) -> Conversation:
    """With an empty content where there is none, and none where it is empty."""

    def changed(turn: Message) -> Message:
        if "tool_calls" not in turn or turn["content"]:
            return turn
        return {**turn, "content": "" if turn["content"] is None else None}

    return replace(talk, messages=tuple(map(changed, talk.messages)))


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _block(arguments: Any, where: str) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        block = json.loads(arguments)
    except (ValueError, RecursionError):
        block = None
    if not isinstance(block, Mapping):
        got = repr(arguments[:60])
        raise ConfigError(f"{where}: tool_calls", "must have `arguments` of JSON keys", got=got)
    return block
