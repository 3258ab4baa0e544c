"""Conversations as tokens, and which of them are learned.

A tokenizer with a chat template writes a conversation itself. A template that marks what the assistant says
(`{% generation %}`) says what is learned. Of any other the answers are found in the text that it writes: an
answer begins where the template ends when it is asked to let the assistant speak, and ends where the
template ends when the conversation does. Without a template each turn is `<|role|>`, a line with what was
said, and the end token.

Invariant: a learned token is one that the assistant says, its end included, and no other; and whatever a row
says is in the text, or the row is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zerodrift.errors import ConfigError
from zerodrift.train.data import calls
from zerodrift.train.data.conversation import ASSISTANT, TOOL, USER, Conversation, Message
from zerodrift.train.data.tokenizer import Tokenizer, Tokens, TransformersTokenizer

Render = Callable[..., str]
"""Messages to text: `render(messages, ask=False)`."""
Span = tuple[int, int]
"""Characters of a text from one place to before another."""

_REFERENCES = {"tool_call_id", "id"}
"""Keys of a turn that only say which other it belongs to."""


def written(talk: Conversation, tokenizer: Tokenizer, learn_all: bool) -> tuple[Tokens, Tokens]:
    """The tokens of a conversation, and for each whether it is learned."""
    if isinstance(tokenizer, TransformersTokenizer) and tokenizer.inner.chat_template:
        tokens, learned = _templated(talk, tokenizer, learn_all)
    else:
        tokens, learned = _plain(talk, tokenizer)
    return tokens, np.ones_like(learned) if learn_all else learned


def prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> Tokens:
    """A conversation up to where the assistant begins to speak."""
    talk = Conversation(tuple(messages), "the prompt")
    if isinstance(tokenizer, TransformersTokenizer) and tokenizer.inner.chat_template:
        return tokenizer.encode(_render(talk, tokenizer)(talk.messages, ask=True))
    return np.concatenate([_plain(talk, tokenizer)[0], tokenizer.encode(_head(ASSISTANT))])


def ends(tokenizer: Tokenizer) -> set[int]:
    """The tokens with which an answer ends: the end of a text, and the mark that a template writes behind
    what the assistant says, which is another one in many."""
    found = {tokenizer.end}
    if isinstance(tokenizer, TransformersTokenizer) and tokenizer.has_template:
        said = "an answer"
        turns = ({"role": USER, "content": "a question"}, {"role": ASSISTANT, "content": said})
        talk = Conversation(turns, "a conversation")
        behind = tokenizer.encode(_render(talk, tokenizer)(turns).rpartition(said)[2])
        found |= {int(token) for token in behind[:1] if int(token) in tokenizer.marks.values()}
    return found


def marked(text: str, spans: Sequence[Span], tokenizer: Tokenizer, where: str) -> tuple[Tokens, Tokens]:
    """The tokens of a text, and for each whether it is of one of these spans."""
    if isinstance(tokenizer, TransformersTokenizer) and tokenizer.inner.is_fast:
        tokens, places = tokenizer.encode_with_places(text)
        learned = np.zeros(len(tokens), dtype=bool)
        for first, end in spans:
            learned |= (places[:, 0] < end) & (places[:, 1] > first)
        return tokens, learned
    tokens = tokenizer.encode(text).astype(np.int64)
    learned = np.zeros(len(tokens), dtype=bool)
    for span in spans:
        first, end = (_before(text[:cut], tokens, tokenizer, where) for cut in span)
        learned[first:end] = True
    return tokens, learned


def _before(text: str, tokens: Tokens, tokenizer: Tokenizer, where: str) -> int:
    """How many tokens the start of a text is, of those of the whole."""
    start = tokenizer.encode(text)
    if not np.array_equal(tokens[: len(start)], start):
        must = "must make tokens that end where an answer begins and ends"
        todo = "Use a tokenizer with a `tokenizer.json`, or `data.loss_on: everything`."
        raise ConfigError(where, must, got=f"others of {tokenizer.name}", do=todo)
    return len(start)


# --- without a template -----------------------------------------------------------------------------------


def _head(role: str) -> str:
    return f"<|{role}|>\n"


def _plain(talk: Conversation, tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
    more = _beside(talk)
    if more or talk.tools:
        must = "must be `role` and `content` alone where the tokenizer has no chat template"
        got = ", ".join(f"`{key}`" for key in (*more, *(["tools"] if talk.tools else [])))
        raise ConfigError(talk.where, must, got=got, do="Leave it out, or use a tokenizer with one.")
    parts: list[Tokens] = [np.array(tokenizer.start, np.int64)]
    learned: list[Tokens] = [np.zeros(len(tokenizer.start), dtype=bool)]
    for number, turn in enumerate(talk.messages):
        head = tokenizer.encode(_head(turn["role"]))
        said = np.append(tokenizer.encode(turn["content"]).astype(np.int64), tokenizer.end)
        parts += [head.astype(np.int64), said]
        learned += [np.zeros(len(head), dtype=bool), np.full(len(said), number in talk.answers)]
    return np.concatenate(parts), np.concatenate(learned)


# --- with one ---------------------------------------------------------------------------------------------


def _templated(
    talk: Conversation, tokenizer: TransformersTokenizer, learn_all: bool
) -> tuple[Tokens, Tokens]:
    talk, text = _as_written(talk, tokenizer)
    every = [number for number, turn in enumerate(talk.messages) if turn["role"] == ASSISTANT]
    if not learn_all and tokenizer.marks_answers(talk.tools) and list(talk.answers) == every:
        return _marked_by_template(talk, tokenizer)
    render = _render(talk, tokenizer)
    spans = [] if learn_all else [_answer(talk, number, text, render, tokenizer) for number in talk.answers]
    return marked(text, spans, tokenizer, talk.where)


def _as_written(talk: Conversation, tokenizer: TransformersTokenizer) -> tuple[Conversation, str]:
    """The conversation in the form that the template expects, and its text."""
    forms = [talk] if not _has_calls(talk) else calls.forms(talk)
    problems = []
    for form in forms:
        render = _render(form, tokenizer)
        try:
            text = render(form.messages)
            _require_written(form, text, render, tokenizer)
        except ConfigError as error:
            problems.append(error)
            continue
        return form, text
    raise problems[0]


def _has_calls(talk: Conversation) -> bool:
    return any("tool_calls" in turn for turn in talk.messages)


def _marked_by_template(talk: Conversation, tokenizer: TransformersTokenizer) -> tuple[Tokens, Tokens]:
    made = tokenizer.inner.apply_chat_template(
        tokenizer.turns(talk.messages),
        tools=list(talk.tools) or None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return np.asarray(made["input_ids"], np.int64), np.asarray(made["assistant_masks"], bool)


def _answer(
    talk: Conversation, number: int, text: str, render: Render, tokenizer: TransformersTokenizer
) -> Span:
    """Where an answer is in the text of its conversation."""
    try:
        before = render(talk.messages[:number], ask=True)
    except ConfigError:  # a template that wants a turn, or a question, in front
        before = ""
    # A template may write more when it asks than it keeps, `<think>` say: then the answer is what is said.
    kept = bool(before) and text.startswith(before)
    start = len(before) if kept else _around(talk, number, text, render)[0]
    until = render(talk.messages[: number + 1])
    if text.startswith(until) and len(until) >= start:
        return start, len(until)
    # Or it writes an answer in another way when it is the last: what follows it in both is its end.
    _, last = _around(talk, number, text, render)
    _, there = _around(talk, number, until, lambda messages: render(messages[: number + 1]))
    return start, last + _end(text[last:], until[there:], tokenizer)


def _end(behind: str, behind_the_last: str, tokenizer: TransformersTokenizer) -> int:
    """How many characters behind an answer are its end: the marks and lines that follow it in the middle of a
    conversation and at its end, or else the mark that follows it."""
    if not tokenizer.inner.is_fast:
        return _common(behind, behind_the_last)
    (here, places), (there, _) = map(tokenizer.encode_with_places, (behind, behind_the_last))
    marks = set(tokenizer.inner.all_special_ids) | set(tokenizer.inner.added_tokens_decoder)
    same = _common(here.tolist(), there.tolist())
    if same < len(there):
        ends = [n + 1 for n in range(same) if int(here[n]) in marks or behind[places[n, 1] - 1] == "\n"]
        same = max(ends, default=0)
    if not same and len(here) and int(here[0]) in marks:
        same = 1
    return int(places[same - 1, 1]) if same else 0


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items at the start of two are the same."""
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _around(talk: Conversation, number: int, text: str, render: Render) -> Span:
    """Where a turn's content is in a text, found by saying something else instead."""
    content = talk.messages[number]["content"] or ""
    mark = next(chr(code) for code in range(ord("A"), 0x10FFFF) if chr(code) not in content)
    other = render(_saying(talk.messages, number, mark))
    first = _common(text, other)
    after = 0
    while after < min(len(text), len(other)) - first and text[-1 - after] == other[-1 - after]:
        after += 1
    return first, len(text) - after


def _saying(messages: Sequence[Message], number: int, content: str) -> tuple[Message, ...]:
    changed = {**messages[number], "content": content}
    return (*messages[:number], changed, *messages[number + 1 :])


def _require_written(talk: Conversation, text: str, render: Render, tokenizer: Tokenizer) -> None:
    """That the template leaves nothing out: some skip roles, calls or tools without a word."""

    def is_left_out(messages: Sequence[Message], **rest: Any) -> bool:
        try:
            return render(messages, **rest) == text
        except ConfigError:  # what it cannot do without is there
            return False

    for number, turn in enumerate(talk.messages):
        said = (turn["content"] or "").strip()
        if said and said not in text and is_left_out(_saying(talk.messages, number, "A" + said)):
            got = f"turn {number}, of the role {turn['role']!r}, which it leaves out"
            raise _left_out(talk, got, tokenizer)
    for key in _beside(talk):
        if is_left_out(tuple({k: turn[k] for k in turn if k != key} for turn in talk.messages)):
            raise _left_out(talk, f"`{key}` of a turn, which it leaves out", tokenizer)
    if talk.tools and is_left_out(talk.messages, tools=()):
        raise _left_out(talk, "`tools`, which it leaves out", tokenizer)


def _beside(talk: Conversation) -> list[str]:
    """What turns have beside a role and what is said; the name of a tool only says whose answer it is."""
    keys = {key for turn in talk.messages for key in turn if key != "name" or turn["role"] != TOOL}
    return sorted(keys - {"role", "content"} - _REFERENCES)


def _left_out(talk: Conversation, got: str, tokenizer: Tokenizer) -> ConfigError:
    must = f"must be what the chat template of {tokenizer.name} writes"
    return ConfigError(talk.where, must, got=got, do="Leave it out, or use a template that writes it.")


def _render(talk: Conversation, tokenizer: TransformersTokenizer) -> Render:
    def render(messages: Sequence[Message], *, ask: bool = False, tools: Sequence[Any] = talk.tools) -> str:
        return _text(messages, tools, ask, tokenizer, talk.where)

    return render


def _text(
    messages: Sequence[Message], tools: Sequence[Any], ask: bool, tokenizer: TransformersTokenizer, where: str
) -> str:
    try:
        return str(
            tokenizer.inner.apply_chat_template(
                tokenizer.turns(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=ask,
            )
        )
    except Exception as error:  # the template is a program of its owner's
        roles = ", ".join(turn["role"] for turn in messages[:8])
        must = f"must be a conversation that the chat template of {tokenizer.name} writes"
        got = f"{roles or 'no turns'}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(where, must, got=got, do="Change the conversation or the template.") from error
