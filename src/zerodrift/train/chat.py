"""Conversations: what a row means, how it is written as tokens, and which of them are learned.

A tokenizer with a chat template writes a conversation itself; which tokens are an answer is found by
writing it turn by turn. Without a template each turn is `<|role|>`, a line with what was said, and the end
token.

Invariant: a learned token is one that the assistant says, its end included, and no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zerodrift.errors import ConfigError, Problem
from zerodrift.train.tokens import Folder, Tokenizer, Tokens

Message = Mapping[str, str]
"""`role` and `content`."""

ASSISTANT = "assistant"
_KEYS = {"role", "content"}


def conversation(row: Mapping[str, Any], key: str, where: str) -> list[Message]:
    """The messages of a row, in any of the forms that a row may have."""
    if key in row:
        return _messages(row[key], f"{where}: {key}")
    if "prompt" in row and "completion" in row:
        return _pair(row["prompt"], row["completion"])
    if "instruction" in row and ("output" in row or "response" in row):
        more = row.get("input") or ""
        asked = f"{row['instruction']}\n\n{more}" if more else row["instruction"]
        return _pair(asked, row.get("output", row.get("response")))
    must = f"must have `{key}`, or `prompt` and `completion`, or `instruction` and `output`"
    raise ConfigError(str(Problem(where, must, ", ".join(f"`{name}`" for name in row) or "nothing")))


def is_conversation(row: Mapping[str, Any], key: str) -> bool:
    """Whether a row looks like one."""
    return isinstance(row.get(key), list) or {"prompt", "completion"} <= row.keys() or "instruction" in row


def _pair(asked: Any, answered: Any) -> list[Message]:
    return [{"role": "user", "content": str(asked)}, {"role": ASSISTANT, "content": str(answered)}]


def _messages(value: Any, where: str) -> list[Message]:
    fine = isinstance(value, list) and value
    if not fine or not all(
        isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in value
    ):
        must = "must be a list of `role` and `content`"
        raise ConfigError(str(Problem(where, must, f"{str(value)[:80]!r}")))
    return [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in value]


def written(messages: Sequence[Message], tokenizer: Tokenizer, learn_all: bool) -> tuple[Tokens, Tokens]:
    """The tokens of a conversation, and for each whether it is learned."""
    if isinstance(tokenizer, Folder) and tokenizer.inner.chat_template:
        tokens, learned = _templated(messages, tokenizer)
    else:
        tokens, learned = _plain(messages, tokenizer)
    return tokens, np.ones_like(learned) if learn_all else learned


def prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> Tokens:
    """A conversation up to where the assistant begins to speak."""
    if isinstance(tokenizer, Folder) and tokenizer.inner.chat_template:
        return _apply(messages, tokenizer, ask=True)
    return np.concatenate([_plain(messages, tokenizer)[0], tokenizer.encode(_head(ASSISTANT))])


def _head(role: str) -> str:
    return f"<|{role}|>\n"


def _plain(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
    parts: list[Tokens] = []
    learned: list[Tokens] = []
    for turn in messages:
        head = tokenizer.encode(_head(turn["role"]))
        said = np.append(tokenizer.encode(turn["content"]).astype(np.int64), tokenizer.end)
        parts += [head.astype(np.int64), said]
        answer = np.full(len(said), turn["role"] == ASSISTANT)
        learned += [np.zeros(len(head), dtype=bool), answer]
    return np.concatenate(parts), np.concatenate(learned)


def _templated(messages: Sequence[Message], tokenizer: Folder) -> tuple[Tokens, Tokens]:
    """Written up to before and up to after each answer: what is between is the answer."""
    tokens = _apply(messages, tokenizer, ask=False)
    learned = np.zeros(len(tokens), dtype=bool)
    for number, turn in enumerate(messages):
        if turn["role"] != ASSISTANT:
            continue
        before = _apply(messages[:number], tokenizer, ask=True)
        after = _apply(messages[: number + 1], tokenizer, ask=False)
        if not (np.array_equal(tokens[: len(before)], before) and len(before) <= len(after) <= len(tokens)):
            must = "must write a conversation turn by turn, so that answers can be told from the rest"
            todo = "Use `data.loss_on: everything`, or a template without look-ahead."
            raise ConfigError(str(Problem(f"chat template of {tokenizer.name}", must, "another text", todo)))
        learned[len(before) : len(after)] = True
    return tokens, learned


def _apply(messages: Sequence[Message], tokenizer: Folder, *, ask: bool) -> Tokens:
    made = tokenizer.inner.apply_chat_template(
        list(messages), tokenize=True, add_generation_prompt=ask, return_dict=False
    )
    return np.asarray(made, dtype=np.int64)
