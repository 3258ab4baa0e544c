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

from zerodrift.errors import ConfigError
from zerodrift.train.tokens import Tokenizer, Tokens, TransformersTokenizer

Message = Mapping[str, str]
"""`role` and `content`."""

ASSISTANT = "assistant"
_KEYS = {"role", "content"}


def conversation(row: Mapping[str, Any], key: str, where: str) -> list[Message]:
    """The messages of a row, in any of the forms that a row may have."""
    if key in row:
        return _messages(row[key], f"{where}: {key}")
    if "prompt" in row and "completion" in row:
        return _pair(_text_field(row, "prompt", where), _text_field(row, "completion", where))
    if "instruction" in row and ("output" in row or "response" in row):
        asked = _text_field(row, "instruction", where)
        more = _text_field(row, "input", where) if row.get("input") is not None else ""
        answered = _text_field(row, "output" if "output" in row else "response", where)
        return _pair(f"{asked}\n\n{more}" if more else asked, answered)
    must = f"must have `{key}`, or `prompt` and `completion`, or `instruction` and `output`"
    raise ConfigError(where, must, got=", ".join(f"`{name}`" for name in row) or "nothing")


def is_conversation(row: Mapping[str, Any], key: str) -> bool:
    """Whether a row looks like one."""
    return isinstance(row.get(key), list) or {"prompt", "completion"} <= row.keys() or "instruction" in row


def _pair(asked: str, answered: str) -> list[Message]:
    return [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": answered}]


def _messages(value: Any, where: str) -> list[Message]:
    fine = isinstance(value, list) and value
    if not fine or not all(isinstance(turn, Mapping) and turn.keys() >= _KEYS for turn in value):
        must = "must be a list of `role` and `content`"
        raise ConfigError(where, must, got=f"{str(value)[:80]!r}")
    for number, turn in enumerate(value):
        more = [key for key, held in turn.items() if key not in _KEYS and held]
        if more:
            must = "must be `role` and `content` alone: nothing else of a turn is learned"
            got = ", ".join(f"`{key}`" for key in more)
            raise ConfigError(f"{where}[{number}]", must, got=got, do="Leave it out.")
    return [
        {key: _text_field(turn, key, f"{where}[{number}]") for key in ("role", "content")}
        for number, turn in enumerate(value)
    ]


def _text_field(row: Mapping[str, Any], key: str, where: str) -> str:
    """What is under a key, if it is a text: anything else would be learned as Python prints it."""
    if not isinstance(row[key], str):
        raise ConfigError(f"{where}: {key}", "must be a text", got=type(row[key]).__name__)
    return unicode(row[key], f"{where}: {key}")


def unicode(text: str, where: str) -> str:
    """A text as it is, where it is one: JSON may spell half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a character, {text[error.start]!a}, at {error.start:,}"
        raise ConfigError(where, "must be valid Unicode", got=half) from None
    return text


def written(messages: Sequence[Message], tokenizer: Tokenizer, learn_all: bool) -> tuple[Tokens, Tokens]:
    """The tokens of a conversation, and for each whether it is learned."""
    if isinstance(tokenizer, TransformersTokenizer) and tokenizer.inner.chat_template:
        tokens, learned = _templated(messages, tokenizer)
    else:
        tokens, learned = _plain(messages, tokenizer)
    return tokens, np.ones_like(learned) if learn_all else learned


def prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> Tokens:
    """A conversation up to where the assistant begins to speak."""
    if isinstance(tokenizer, TransformersTokenizer) and tokenizer.inner.chat_template:
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


def _templated(messages: Sequence[Message], tokenizer: TransformersTokenizer) -> tuple[Tokens, Tokens]:
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
            raise ConfigError(f"chat template of {tokenizer.name}", must, got="another text", do=todo)
        learned[len(before) : len(after)] = True
    return tokens, learned


def _apply(messages: Sequence[Message], tokenizer: TransformersTokenizer, *, ask: bool) -> Tokens:
    try:
        tokens = tokenizer.inner.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=ask, return_dict=False
        )
    except Exception as error:  # the template is a program of its owner's
        roles = ", ".join(turn["role"] for turn in messages[:8])
        must, todo = f"must write a conversation of {roles}", "Change the template or the conversation."
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"chat template of {tokenizer.name}", must, got=got, do=todo) from error
    return np.asarray(tokens, dtype=np.int64)
