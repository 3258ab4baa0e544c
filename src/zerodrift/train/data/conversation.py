"""Read a row of data as a conversation, in the usual formats.

The formats are `messages` of `role` and `content`, ShareGPT's `conversations` of `from` and `value`, TRL's
`prompt` and `completion` as texts or turns, questions with answers under their usual names, and Alpaca's
`system` and `history`. `chat_template` turns a conversation into tokens.

A row with an unknown part is refused by its place. A value that is not a text is never converted to one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerodrift.errors import ConfigError, did_you_mean
from zerodrift.train.data.formats import type_name

Message = Mapping[str, Any]
"""`role`, `content`, and whatever else a chat template may write for a turn."""

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = (SYSTEM, "developer", USER, ASSISTANT, TOOL)
SPEAKERS = {
    SYSTEM: SYSTEM,
    **dict.fromkeys(("human", USER), USER),
    **dict.fromkeys(("gpt", "chatgpt", "bot", ASSISTANT), ASSISTANT),
    **dict.fromkeys(("observation", TOOL), TOOL),
}
"""ShareGPT's speakers -> roles. Its `function_call` is a tool call of the assistant."""

MESSAGES = "messages"
TURNS = (MESSAGES, "conversations", "conversation")
PAIRS = (
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("input", "output"),
)
"""Columns of a question and of its answer."""
ASKED = {asked for asked, _ in PAIRS}
_CONTEXT = ("input", "context")
_SYSTEM = ("system", "system_prompt")
_UNSUPPORTED = (
    *("image", "images", "video", "videos", "audio", "audios"),
    *("functions", "function_call", "documents", "chat_template_kwargs"),
)
"""Columns that would change the conversation and cannot be written."""
_LEARNED = ("weight", "train")
"""Keys of a turn that say whether it is learned."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, and what a template needs to write them."""

    messages: tuple[Message, ...]
    where: str
    """File and row."""
    tools: tuple[Any, ...] = ()
    given: int = 0
    """Number of turns at the start that are a prompt and not learned."""
    muted: frozenset[int] = frozenset()
    """Turns that the row excludes from learning."""
    form: str = ""
    """Columns of the conversation, in words."""
    columns: frozenset[str] = frozenset()
    """All columns that were read."""

    @property
    def answers(self) -> tuple[int, ...]:
        return tuple(
            number
            for number in self._spoken
            if (turn := self.messages[number]).keys() > {"role", "content"} or (turn["content"] or "").strip()
        )

    @property
    def silent(self) -> int:
        """Number of empty answers, which are not learned."""
        return len(self._spoken) - len(self.answers)

    @property
    def _spoken(self) -> list[int]:
        """Numbers of the turns of the assistant that the row does not exclude."""
        later = list(enumerate(self.messages))[self.given :]
        return [number for number, turn in later if turn["role"] == ASSISTANT and number not in self.muted]


def turns_column(row: Mapping[str, Any], key: str) -> str | None:
    for column in (key, *TURNS):
        value = row.get(column)
        if isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("[")):
            return column
    return None


def pair_columns(row: Mapping[str, Any]) -> tuple[str, str] | None:
    return next((pair for pair in PAIRS if row.keys() >= set(pair)), None)


def read_conversation(row: Mapping[str, Any], key: str, where: str) -> Conversation:
    """Return the conversation of a row in any of the formats; `key` is `data.messages`."""
    got = names(row) or "nothing"
    if key != TURNS[0] and key not in row:
        raise ConfigError(where, f"must have `{key}`, which `data.messages` names", got=got)
    column = turns_column(row, key) or next((name for name in (key, *TURNS) if name in row), None)
    pair = pair_columns(row)
    if column is not None:
        turns, given, columns = _turns(row, column, where), 0, {column}
        form = f"`{column}`"
    elif pair is not None:
        turns, given, columns = _question_and_answer(row, pair, where)
        form = f"`{pair[0]}` and `{pair[1]}`"
    else:
        must = f"must have `{key}`, or columns such as `prompt` and `completion`, `instruction` and `output`"
        raise ConfigError(where, must, got=got)
    if (before := _first(row, _SYSTEM)) and not (turns and turns[0]["role"] == SYSTEM):
        turns = [{"role": SYSTEM, "content": text_of(row, before, where)}, *turns]
        given += bool(given)
        columns |= {before}
    muted = set()
    for number, turn in enumerate(turns):
        for mark in [name for name in _LEARNED if turn.get(name) is not None]:
            if turn[mark] not in (0, 1):
                place = f"{where}: turn {number}: {mark}"
                raise ConfigError(place, "must be 0 or 1, or left out", got=repr(turn[mark]))
            muted |= set() if turn[mark] else {number}
    messages = tuple({name: turn[name] for name in turn if name not in _LEARNED} for turn in turns)
    tools = _json(row.get("tools"), f"{where}: tools")
    if not has_content(tools):
        tools = []
    elif not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConfigError(f"{where}: tools", "must be a list of descriptions of tools", got=type_name(tools))
    if other := [name for name in _UNSUPPORTED if name not in columns and has_content(row.get(name))]:
        raise ConfigError(where, "must be a conversation of text", got=names(other))
    columns |= {"tools"} if tools else set()
    return Conversation(messages, where, tuple(tools), given, frozenset(muted), form, frozenset(columns))


def _question_and_answer(
    row: Mapping[str, Any], pair: tuple[str, str], where: str
) -> tuple[list[dict[str, Any]], int, set[str]]:
    """Return the turns, the number of prompt turns, and the columns that were read."""
    asked, answered = pair
    turns = _history(row, where)
    columns = {asked, answered} | ({"history"} if turns else set())
    if isinstance(row[asked], list):
        turns += _turns(row, asked, where)
    else:
        question = text_of(row, asked, where)
        if more := _first(row, [name for name in _CONTEXT if name not in pair]):
            context = text_of(row, more, where)
            question = f"{question}\n\n{context}" if question else context
            columns.add(more)
        turns.append({"role": USER, "content": question})
    given = len(turns)
    if isinstance(row[answered], list):
        turns += _turns(row, answered, where)
    else:
        turns.append({"role": ASSISTANT, "content": text_of(row, answered, where)})
    # Answers of Alpaca's history are learned; turns that TRL calls a prompt are not.
    return turns, given if isinstance(row[asked], list) else 0, columns


def _history(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    earlier = _json(row.get("history"), f"{where}: history")
    if not has_content(earlier):
        return []
    turns: list[dict[str, Any]] = []
    for number, pair in enumerate(earlier if isinstance(earlier, list) else [earlier]):
        place = f"{where}: history[{number}]"
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
            raise ConfigError(place, "must be pairs of question and answer", got=type_name(pair))
        said = zip((USER, ASSISTANT), pair, strict=True)
        turns += [{"role": role, "content": unicode(text, place)} for role, text in said]
    return turns


def _turns(row: Mapping[str, Any], column: str, where: str) -> list[dict[str, Any]]:
    where = f"{where}: {column}"
    value = _json(row.get(column), where)
    if not isinstance(value, list) or not value:
        must = "must be a list of `role` and `content`, or of `from` and `value`"
        raise ConfigError(where, must, got=type_name(value))
    return [_turn(turn, f"{where}[{number}]") for number, turn in enumerate(value)]


def _turn(turn: Any, where: str) -> dict[str, Any]:
    keys = turn.keys() if isinstance(turn, Mapping) else set()
    if keys >= {"from", "value"} and "role" not in keys:
        speaker, content, roles = "from", "value", SPEAKERS
    elif "role" in keys and keys & {"content", "tool_calls"}:
        speaker, content, roles = "role", "content", dict(zip(ROLES, ROLES, strict=True))
    else:
        must = "must be `role` and `content`, or `from` and `value`"
        raise ConfigError(where, must, got=names(keys) or type_name(turn))
    role = turn[speaker]
    if content == "value" and role == "function_call":
        calls = _calls([_json(turn[content], where)], where)
        return {"role": ASSISTANT, "content": "", "tool_calls": calls}
    if not isinstance(role, str) or role not in roles:
        got = repr(role) if isinstance(role, str) else type_name(role)
        near = did_you_mean(str(role), roles)
        raise ConfigError(f"{where}: {speaker}", f"must be one of {', '.join(roles)}", got=got, do=near)
    read: dict[str, Any] = {"role": roles[role], "content": None}
    others = {key: turn[key] for key in turn if key not in (speaker, content) and has_content(turn[key])}
    if turn.get(content) is not None or "tool_calls" not in others:
        beside = [key for key in others if key not in _LEARNED]
        read["content"] = _content(turn.get(content), f"{where}: {content}", beside)
    # Other keys are kept. A template that does not render one of them is refused later.
    for key, value in others.items():
        place = f"{where}: {key}"
        if key == "tool_calls":
            read[key] = _calls(_json(value, place), place)
        elif isinstance(value, str):
            read[key] = unicode(value, place)
        elif key in _LEARNED:
            read[key] = value
        else:
            must = "must be a text, or left out"
            raise ConfigError(place, must, got=type_name(value), do="Leave it out.")
    return read


def _content(value: Any, where: str, beside: Sequence[str]) -> str:
    if isinstance(value, str):
        return unicode(value, where)
    if not isinstance(value, list) or not value:
        got = type_name(value) + (f" beside {names(beside)}" if beside else "")
        raise ConfigError(where, "must be a text, or a list of parts that are texts", got=got)
    texts = []
    for number, part in enumerate(value):
        place = f"{where}[{number}]"
        if isinstance(part, str):
            texts.append(unicode(part, place))
            continue
        got = type_name(part)
        if isinstance(part, Mapping):
            named = part.get("type")
            more = [key for key in part if key not in ("type", "text") and has_content(part[key])]
            if named in (None, "text", "input_text", "output_text") and not more and "text" in part:
                texts.append(text_of(part, "text", place))
                continue
            what = f"a part of the type {named!r}" if isinstance(named, str) else "a part"
            got = f"{what} with {names(part)}"
        raise ConfigError(place, "must be a part that is a text", got=got)
    return "".join(texts)


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls as templates expect them: `{"type": "function", "function": {"name",
    "arguments"}}`."""
    if not isinstance(value, list) or not value:
        raise ConfigError(where, "must be a list of calls", got=type_name(value))
    calls = []
    for number, call in enumerate(value):
        inner = call.get("function", call) if isinstance(call, Mapping) else {}
        is_named = isinstance(inner, Mapping) and isinstance(inner.get("name"), str)
        if not is_named or not isinstance(inner.get("arguments", {}), (Mapping, str)):
            got = names(call) if isinstance(call, Mapping) else type_name(call)
            raise ConfigError(f"{where}[{number}]", "must be a call with `name` and `arguments`", got=got)
        calls.append(dict(call) if "function" in call else {"type": "function", "function": dict(inner)})
    return calls


def names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text under a key. Refuse any other type, which would be learned in Python's spelling."""
    if not isinstance(row[key], str):
        raise ConfigError(f"{where}: {key}", "must be a text", got=type_name(row[key]))
    return unicode(row[key], f"{where}: {key}")


def unicode(text: str, where: str) -> str:
    """Return the text, or refuse half of a surrogate pair, which JSON allows."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a character, {text[error.start]!a}, at {error.start:,}"
        raise ConfigError(where, "must be valid Unicode", got=half) from None
    return text


def _json(value: Any, where: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ConfigError(where, "must be JSON if it is a text", got=repr(value[:60])) from None


def has_content(value: Any) -> bool:
    """Return True unless a value is null or empty; 0 says something."""
    return value is not None and value not in ("", [], {}, ())


def _first(row: Mapping[str, Any], columns: Iterable[str]) -> str | None:
    return next((name for name in columns if has_content(row.get(name))), None)
