"""Encode conversations as tokens, with a loss mask that marks the tokens of the assistant.

A chat template with `{% generation %}` gives the loss mask. For any other template, the turns before an
answer are rendered with a generation prompt, and the answer begins at the end of this text. The turns up to
and with the answer are rendered too, and the answer ends at the end of that text. Without a template each
turn is `<|role|>`, a line with its content, and the end token.

The end of an answer is learned too. A row is refused if the template leaves out some of its content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zerodrift.errors import ConfigError
from zerodrift.model import cause
from zerodrift.train.data.conversation import ASSISTANT, TOOL, USER, Conversation, Message, names
from zerodrift.train.data.tokenizer import Tokenizer, Tokens, TransformersTokenizer

Render = Callable[..., str]
"""Messages to text: `render(messages, ask=False)`."""
Span = tuple[int, int]
"""First character, and the one after the last."""

_REFERENCES = {"tool_call_id", "id"}
"""Keys of a turn that only say which other turn it belongs to."""


def encode_conversation(talk: Conversation, tokenizer: Tokenizer, learn_all: bool) -> tuple[Tokens, Tokens]:
    """Return the tokens of a conversation, and for each whether it is learned."""
    if isinstance(tokenizer, TransformersTokenizer) and tokenizer.inner.chat_template:
        tokens, learned = _with_template(talk, tokenizer, learn_all)
    else:
        tokens, learned = _without_template(talk, tokenizer)
    return tokens, np.ones_like(learned) if learn_all else learned


def encode_prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> Tokens:
    """Return the tokens of a conversation with the generation prompt."""
    talk = Conversation(tuple(messages), "the prompt")
    if isinstance(tokenizer, TransformersTokenizer) and tokenizer.inner.chat_template:
        return tokenizer.encode(_renderer(talk, tokenizer)(talk.messages, ask=True))
    return np.concatenate([_without_template(talk, tokenizer)[0], tokenizer.encode(_head(ASSISTANT))])


def prompt_tokens(prompt: str, tokenizer: Tokenizer, as_chat: bool) -> tuple[list[int], set[int]]:
    """Return the tokens of a prompt to continue, and the tokens that end the continuation.

    `as_chat` puts the prompt into the chat template, as a turn of the user.
    """
    if as_chat:
        given = encode_prompt([{"role": USER, "content": prompt}], tokenizer)
        return [*map(int, given)], end_tokens(tokenizer)
    given = tokenizer.encode(prompt)
    return [*tokenizer.start, *map(int, given)] or [tokenizer.end], {tokenizer.end}


def end_tokens(tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that end an answer: the end of a text, and the template's mark after an answer."""
    found = {tokenizer.end}
    if isinstance(tokenizer, TransformersTokenizer) and tokenizer.has_template:
        answer = "an answer"
        turns = ({"role": USER, "content": "a question"}, {"role": ASSISTANT, "content": answer})
        talk = Conversation(turns, "a conversation")
        behind = tokenizer.encode(_renderer(talk, tokenizer)(turns).rpartition(answer)[2])
        found |= {int(token) for token in behind[:1] if int(token) in tokenizer.marks.values()}
    return found


def encode_with_mask(
    text: str, spans: Sequence[Span], tokenizer: Tokenizer, where: str
) -> tuple[Tokens, Tokens]:
    """Return the tokens of a text, and for each whether it belongs to one of the spans."""
    if isinstance(tokenizer, TransformersTokenizer) and tokenizer.inner.is_fast:
        tokens, places = tokenizer.encode_with_places(text)
        learned = np.zeros(len(tokens), dtype=bool)
        for first, end in spans:
            learned |= (places[:, 0] < end) & (places[:, 1] > first)
        return tokens, learned
    tokens = tokenizer.encode(text).astype(np.int64)
    learned = np.zeros(len(tokens), dtype=bool)
    for span in spans:
        counts = []
        for cut in span:
            start = tokenizer.encode(text[:cut])
            if not np.array_equal(tokens[: len(start)], start):
                must = "must make tokens that end where an answer begins and ends"
                todo = "Use a tokenizer with a `tokenizer.json`, or `data.loss_on: everything`."
                raise ConfigError(where, must, got=f"others of {tokenizer.name}", do=todo)
            counts.append(len(start))
        learned[counts[0] : counts[1]] = True
    return tokens, learned


def _head(role: str) -> str:
    return f"<|{role}|>\n"


def _without_template(talk: Conversation, tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
    if more := [*_other_keys(talk), *(["tools"] if talk.tools else [])]:
        must = "must be only `role` and `content` if the tokenizer has no chat template"
        todo = "Leave it out, or use a tokenizer with one."
        raise ConfigError(talk.where, must, got=names(more), do=todo)
    parts: list[Tokens] = [np.array(tokenizer.start, np.int64)]
    learned: list[Tokens] = [np.zeros(len(tokenizer.start), dtype=bool)]
    for number, turn in enumerate(talk.messages):
        head = tokenizer.encode(_head(turn["role"]))
        content = np.append(tokenizer.encode(turn["content"]).astype(np.int64), tokenizer.end)
        parts += [head.astype(np.int64), content]
        learned += [np.zeros(len(head), dtype=bool), np.full(len(content), number in talk.answers)]
    return np.concatenate(parts), np.concatenate(learned)


def _with_template(
    talk: Conversation, tokenizer: TransformersTokenizer, learn_all: bool
) -> tuple[Tokens, Tokens]:
    talk, text = _accepted_form(talk, tokenizer)
    every = [number for number, turn in enumerate(talk.messages) if turn["role"] == ASSISTANT]
    if not learn_all and tokenizer.marks_answers(talk.tools) and list(talk.answers) == every:
        more = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        made = _apply(tokenizer, talk.messages, talk.tools, **more)
        return np.asarray(made["input_ids"], np.int64), np.asarray(made["assistant_masks"], bool)
    render = _renderer(talk, tokenizer)
    answers = () if learn_all else talk.answers
    spans = [_answer(talk, number, text, render, tokenizer) for number in answers]
    return encode_with_mask(text, spans, tokenizer, talk.where)


def _apply(
    tokenizer: TransformersTokenizer, messages: Sequence[Message], tools: Sequence[Any], **more: Any
) -> Any:
    turns = tokenizer.turns(messages)
    return tokenizer.inner.apply_chat_template(turns, tools=list(tools) or None, **more)


def _renderer(talk: Conversation, tokenizer: TransformersTokenizer) -> Render:
    def render(messages: Sequence[Message], *, ask: bool = False, tools: Sequence[Any] = talk.tools) -> str:
        try:
            return str(_apply(tokenizer, messages, tools, tokenize=False, add_generation_prompt=ask))
        except Exception as error:  # the template is a program of its owner
            roles = ", ".join(turn["role"] for turn in messages[:8])
            must = f"must be a conversation that the chat template of {tokenizer.name} writes"
            got, todo = f"{roles or 'no turns'}: {cause(error)}", "Change the conversation or the template."
            raise ConfigError(talk.where, must, got=got, do=todo) from error

    return render


def _accepted_form(talk: Conversation, tokenizer: TransformersTokenizer) -> tuple[Conversation, str]:
    """Return the conversation in the first form that the template renders completely, and its text."""
    has_calls = any("tool_calls" in turn for turn in talk.messages)
    problems = []
    for form in _call_forms(talk) if has_calls else [talk]:
        render = _renderer(form, tokenizer)
        try:
            text = render(form.messages)
            _require_complete(form, text, render, tokenizer)
            return form, text
        except ConfigError as error:
            problems.append(error)
    raise problems[0]


def _call_forms(talk: Conversation) -> Iterator[Conversation]:
    """Yield a conversation with tool calls in the four forms that templates expect.

    Arguments are a mapping for some templates and a JSON text for others. Some templates render a call only
    if the content is missing, others only if it is empty.
    """
    for swap_emptiness in (False, True):
        for as_text in (False, True):
            turns = []
            for turn in talk.messages:
                if "tool_calls" in turn:
                    calls = [_call_form(call, as_text, talk.where) for call in turn["tool_calls"]]
                    turn = {**turn, "tool_calls": calls}
                    if swap_emptiness and not turn["content"]:
                        turn["content"] = "" if turn["content"] is None else None
                turns.append(turn)
            yield replace(talk, messages=tuple(turns))


def _call_form(call: Mapping[str, Any], as_text: bool, where: str) -> dict[str, Any]:
    """Return a call with its arguments as a text, or as a mapping."""
    function = dict(call["function"])
    arguments = function.get("arguments")
    if as_text and arguments is not None and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except (ValueError, RecursionError):
            function["arguments"] = None
        if not isinstance(function["arguments"], Mapping):
            must, got = "must have `arguments` of JSON keys", repr(arguments[:60])
            raise ConfigError(f"{where}: tool_calls", must, got=got)
    return {**call, "function": function}


def _answer(
    talk: Conversation, number: int, text: str, render: Render, tokenizer: TransformersTokenizer
) -> Span:
    try:
        before = render(talk.messages[:number], ask=True)
    except ConfigError:  # a template that needs a turn, or a question, in front
        before = ""
    # A generation prompt may have more than the rendered answer, such as `<think>`. Then the answer begins
    # with its content.
    kept = bool(before) and text.startswith(before)
    start = len(before) if kept else _content_span(talk, number, text, render)[0]
    until = render(talk.messages[: number + 1])
    if text.startswith(until) and len(until) >= start:
        return start, len(until)
    # The template may render the last answer in another way. Then the end of the answer is the text that
    # follows the content in both renderings.
    _, last = _content_span(talk, number, text, render)
    _, there = _content_span(talk, number, until, lambda messages: render(messages[: number + 1]))
    return start, last + _end(text[last:], until[there:], tokenizer)


def _end(behind: str, behind_the_last: str, tokenizer: TransformersTokenizer) -> int:
    """Return the number of characters that end an answer.

    These are the marks and line ends that follow it both inside a conversation and at its end, or else the
    first mark.
    """
    if not tokenizer.inner.is_fast:
        return _common(behind, behind_the_last)
    (here, places), (there, _) = map(tokenizer.encode_with_places, (behind, behind_the_last))
    marks = set(tokenizer.inner.all_special_ids) | set(tokenizer.inner.added_tokens_decoder)
    same = _common(here.tolist(), there.tolist())
    if same < len(there):
        stops = [n + 1 for n in range(same) if int(here[n]) in marks or behind[places[n, 1] - 1] == "\n"]
        same = max(stops, default=0)
    if not same and len(here) and int(here[0]) in marks:
        same = 1
    return int(places[same - 1, 1]) if same else 0


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common start of two texts or lists."""
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _content_span(talk: Conversation, number: int, text: str, render: Render) -> Span:
    """Find a turn's content in a text by rendering another content in its place."""
    content = talk.messages[number]["content"] or ""
    mark = next(chr(code) for code in range(ord("A"), 0x10FFFF) if chr(code) not in content)
    other = render(_with_content(talk.messages, number, mark))
    first = _common(text, other)
    return first, len(text) - _common(text[first:][::-1], other[first:][::-1])


def _with_content(messages: Sequence[Message], number: int, content: str) -> tuple[Message, ...]:
    return (*messages[:number], {**messages[number], "content": content}, *messages[number + 1 :])


def _require_complete(talk: Conversation, text: str, render: Render, tokenizer: Tokenizer) -> None:
    """Refuse a conversation if the template leaves out some of its contents, calls or tools."""

    def require(what: str, messages: Sequence[Message], **rest: Any) -> None:
        """Refuse `what` if the text is the same without it, or with another value in its place."""
        try:
            is_same = render(messages, **rest) == text
        except ConfigError:  # the template needs it, so it is in the text
            return
        if is_same:
            must = f"must be what the chat template of {tokenizer.name} writes"
            todo = "Leave it out, or use a template that writes it."
            raise ConfigError(talk.where, must, got=f"{what}, which it leaves out", do=todo)

    for number, turn in enumerate(talk.messages):
        content = (turn["content"] or "").strip()
        if content and content not in text:
            changed = _with_content(talk.messages, number, "A" + content)
            require(f"turn {number}, of the role {turn['role']!r}", changed)
    for key in _other_keys(talk):
        require(f"`{key}` of a turn", tuple({k: turn[k] for k in turn if k != key} for turn in talk.messages))
    if talk.tools:
        require("`tools`", talk.messages, tools=())


def _other_keys(talk: Conversation) -> list[str]:
    """Return the keys of turns beside role, content and references; a tool's name is a reference."""
    keys = {key for turn in talk.messages for key in turn if key != "name" or turn["role"] != TOOL}
    return sorted(keys - {"role", "content"} - _REFERENCES)
