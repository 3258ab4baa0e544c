"""Conversations: what a row of data means as one, in the forms that people publish them in.

`messages` of `role` and `content`, ShareGPT's `conversations` of `from` and `value`, TRL's `prompt` and
`completion` as texts or as turns, questions with their answers under the usual names, Alpaca's with `system`
and `history`. How a conversation becomes tokens is `rendering.py`'s affair.

Invariant: what is said in a row is said in the conversation, and nothing else: a row that says it in a way
that is not known here is refused by its place, and no value becomes what Python prints of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerodrift.errors import ConfigError
from zerodrift.train.data.texts import kind

Message = Mapping[str, Any]
"""`role` and `content`, and what else a chat template may write of a turn."""

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = (SYSTEM, "developer", USER, ASSISTANT, TOOL)
SPEAKERS = {
    SYSTEM: SYSTEM,
    "human": USER,
    USER: USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    ASSISTANT: ASSISTANT,
    "observation": TOOL,
    TOOL: TOOL,
}
"""Who speaks in ShareGPT's form, beside `function_call`, which is a call of the assistant's."""

_TURNS = ("messages", "conversations", "conversation")
"""Columns of turns, where the job does not name another."""
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
"""Columns of what is asked, and of what is answered."""
ASKED = {asked for asked, _ in PAIRS}
_MORE = ("input", "context")
"""Columns of what an instruction or a question is about."""
_BEFORE = ("system", "system_prompt")
_ELSEWHERE = (
    *("image", "images", "video", "videos", "audio", "audios"),
    *("functions", "function_call", "documents", "chat_template_kwargs"),
)
"""Columns that would change what is said, and that cannot be written."""
_LEARNED = ("weight", "train")
"""Keys of a turn that say whether it is learned."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, with what a template needs to write them."""

    messages: tuple[Message, ...]
    where: str
    """Its file and row."""
    tools: tuple[Any, ...] = ()
    """What the assistant may call."""
    given: int = 0
    """How many turns at its start are there to be answered, and not learned."""
    muted: frozenset[int] = frozenset()
    """Turns that their row says are not to be learned."""
    form: str = ""
    """The columns that it is written in, in words."""
    columns: frozenset[str] = frozenset()
    """All that were read."""

    @property
    def answers(self) -> tuple[int, ...]:
        """The turns that are learned."""
        return tuple(number for number in self._asked_for if not _is_silent(self.messages[number]))

    @property
    def silent(self) -> int:
        """How many answers say nothing, and so are not learned."""
        return len(self._asked_for) - len(self.answers)

    @property
    def _asked_for(self) -> list[int]:
        return [
            number
            for number, turn in enumerate(self.messages)
            if turn["role"] == ASSISTANT and number >= self.given and number not in self.muted
        ]


def _is_silent(turn: Message) -> bool:
    """Whether a turn has nothing but spaces and its role."""
    return not (turn["content"] or "").strip() and turn.keys() == {"role", "content"}


def talk(messages: Sequence[Message], where: str = "a conversation") -> Conversation:
    """A conversation of plain turns."""
    return Conversation(tuple(messages), where)


def is_conversation(row: Mapping[str, Any], key: str) -> bool:
    """Whether a row is meant as one."""
    return any(column in row for column in (key, *_TURNS)) or pair_columns(row) is not None


def turns_column(row: Mapping[str, Any], key: str) -> str | None:
    """The column of a row that has turns."""
    for column in (key, *_TURNS):
        value = row.get(column)
        if isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("[")):
            return column
    return None


def pair_columns(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The columns of a row that have what is asked and what is answered."""
    return next((pair for pair in PAIRS if row.keys() >= set(pair)), None)


def conversation(row: Mapping[str, Any], key: str, where: str) -> Conversation:
    """The conversation of a row, in any of the forms that a row may have."""
    if key != _TURNS[0] and key not in row:
        must, got = f"must have `{key}`, which `data.messages` names", ", ".join(f"`{name}`" for name in row)
        raise ConfigError(where, must, got=got or "nothing")
    column = turns_column(row, key)
    if column is None and (named := [name for name in (key, *_TURNS) if name in row]):
        column = named[0]
    pair = pair_columns(row)
    if column is not None:
        turns = _messages(_parsed(row[column], f"{where}: {column}"), f"{where}: {column}")
        given, columns, form = 0, {column}, f"`{column}`"
    elif pair is not None:
        turns, given, columns = _pair(row, pair, where)
        form = f"`{pair[0]}` and `{pair[1]}`"
    else:
        must = f"must have `{key}`, or columns such as `prompt` and `completion`, `instruction` and `output`"
        raise ConfigError(where, must, got=", ".join(f"`{name}`" for name in row) or "nothing")
    if (before := _first(row, _BEFORE)) and not (turns and turns[0]["role"] == SYSTEM):
        turns = [{"role": SYSTEM, "content": text_of(row, before, where)}, *turns]
        given += bool(given)
        columns |= {before}
    muted = {number for number, turn in enumerate(turns) if not _is_learned(turn, f"{where}: turn {number}")}
    messages = tuple({key: turn[key] for key in turn if key not in _LEARNED} for turn in turns)
    tools = _tools(row, where)
    if other := [name for name in _ELSEWHERE if name not in columns and says(row.get(name))]:
        raise ConfigError(
            where, "must be a conversation of text", got=", ".join(f"`{name}`" for name in other)
        )
    columns |= {"tools"} if tools else set()
    return Conversation(messages, where, tools, given, frozenset(muted), form, frozenset(columns))


# --- a question and its answer ----------------------------------------------------------------------------


def _pair(
    row: Mapping[str, Any], pair: tuple[str, str], where: str
) -> tuple[list[dict[str, Any]], int, set[str]]:
    """The turns of what is asked and answered, how many are only there to be answered, and the columns."""
    asked, answered = pair
    turns = _history(row, where)
    columns = {asked, answered} | ({"history"} if turns else set())
    if isinstance(row[asked], list):
        turns += _messages(row[asked], f"{where}: {asked}")
    else:
        text = text_of(row, asked, where)
        if more := _first(row, [name for name in _MORE if name not in pair]):
            said = text_of(row, more, where)
            text = f"{text}\n\n{said}" if text else said
            columns.add(more)
        turns.append({"role": USER, "content": text})
    given = len(turns)
    if isinstance(row[answered], list):
        turns += _messages(row[answered], f"{where}: {answered}")
    else:
        turns.append({"role": ASSISTANT, "content": text_of(row, answered, where)})
    # What went before a question is learned with its answer; turns that TRL calls a prompt are not.
    return turns, given if isinstance(row[asked], list) else 0, columns


def _history(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Earlier questions with their answers, as Alpaca's form has them."""
    earlier = _parsed(row.get("history"), f"{where}: history")
    if not says(earlier):
        return []
    turns: list[dict[str, Any]] = []
    for number, pair in enumerate(earlier if isinstance(earlier, list) else [earlier]):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
            must = "must be pairs of what was asked and answered"
            raise ConfigError(f"{where}: history[{number}]", must, got=kind(pair))
        for role, said in zip((USER, ASSISTANT), pair, strict=True):
            turns.append({"role": role, "content": unicode(said, f"{where}: history[{number}]")})
    return turns


# --- turns ------------------------------------------------------------------------------------------------


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        must = "must be a list of `role` and `content`, or of `from` and `value`"
        raise ConfigError(where, must, got=kind(value))
    return [_turn(turn, f"{where}[{number}]") for number, turn in enumerate(value)]


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if isinstance(turn, Mapping) and turn.keys() >= {"from", "value"} and "role" not in turn:
        role, told, known = turn["from"], "value", tuple(SPEAKERS)
    elif isinstance(turn, Mapping) and "role" in turn and (turn.keys() & {"content", "tool_calls"}):
        role, told, known = turn["role"], "content", ROLES
    else:
        must = "must be `role` and `content`, or `from` and `value`"
        got = ", ".join(f"`{key}`" for key in turn) if isinstance(turn, Mapping) and turn else kind(turn)
        raise ConfigError(where, must, got=got)
    speaker = "role" if told == "content" else "from"
    if told == "value" and role == "function_call":
        return {"role": ASSISTANT, "content": "", "tool_calls": _calls([_parsed(turn[told], where)], where)}
    if role not in known or not isinstance(role, str):
        must = f"must be one of {', '.join(known)}"
        raise ConfigError(
            f"{where}: {speaker}", must, got=repr(role) if isinstance(role, str) else kind(role)
        )
    made: dict[str, Any] = {"role": role if told == "content" else SPEAKERS[role]}
    calls = turn.get("tool_calls")
    if turn.get(told) is None and says(calls):
        made["content"] = None  # as the one who wrote it said; a template is not given it
    else:
        made["content"] = _content(turn.get(told), f"{where}: {told}", _beside_it(turn, (speaker, told)))
    for key, held in turn.items():
        if key in (speaker, told) or not says(held):
            continue
        made[key] = _beside(key, held, f"{where}: {key}")
    return made


def _beside_it(turn: Mapping[str, Any], known: tuple[str, str]) -> str:
    """What a turn has, where it may stand for what is said in it."""
    more = [f"`{key}`" for key in turn if key not in (*known, *_LEARNED) and says(turn[key])]
    return f" beside {', '.join(more)}" if more else ""


def _beside(key: str, held: Any, where: str) -> Any:
    """What a turn has beside who says what: a template writes it, or it is refused when that is tried."""
    if key == "tool_calls":
        return _calls(held, where)
    if key in _LEARNED:
        return held
    if isinstance(held, str):
        return unicode(held, where)
    raise ConfigError(where, "must be a text, or not be there", got=kind(held), do="Leave it out.")


def _content(value: Any, where: str, beside: str) -> str:
    """What is said: a text, or texts in parts, which are joined."""
    if isinstance(value, str):
        return unicode(value, where)
    if not isinstance(value, list) or not value:
        must = "must be a text, or a list of parts that are texts"
        raise ConfigError(where, must, got=kind(value) + beside)
    return "".join(_part(part, f"{where}[{number}]") for number, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return unicode(part, where)
    if not isinstance(part, Mapping):
        raise ConfigError(where, "must be a part that is a text", got=kind(part))
    named = part.get("type")
    more = [key for key, held in part.items() if key not in ("type", "text") and says(held)]
    if named not in (None, "text", "input_text", "output_text") or more or "text" not in part:
        what = f"a part of the type {named!r}" if isinstance(named, str) else "a part"
        got = f"{what} with {', '.join(f'`{key}`' for key in part)}"
        raise ConfigError(where, "must be a part that is a text", got=got)
    return text_of(part, "text", where)


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls of tools, as templates expect them: `{"type": "function", "function": {"name", "arguments"}}`."""
    value = _parsed(value, where)
    if not isinstance(value, list) or not value:
        raise ConfigError(where, "must be a list of calls", got=kind(value))
    calls = []
    for number, call in enumerate(value):
        inner = call.get("function", call) if isinstance(call, Mapping) else {}
        named = isinstance(inner, Mapping) and isinstance(inner.get("name"), str)
        if not named or not isinstance(inner.get("arguments", {}), (Mapping, str)):
            must = "must be a call with `name` and `arguments`"
            got = ", ".join(f"`{key}`" for key in call) if isinstance(call, Mapping) else kind(call)
            raise ConfigError(f"{where}[{number}]", must, got=got)
        calls.append(dict(call) if "function" in call else {"type": "function", "function": dict(inner)})
    return calls


def _is_learned(turn: Mapping[str, Any], where: str) -> bool:
    for key in _LEARNED:
        if (held := turn.get(key)) is None:
            continue
        if held not in (0, 1):
            raise ConfigError(f"{where}: {key}", "must be 0 or 1, or not be there", got=repr(held))
        if not held:
            return False
    return True


def _tools(row: Mapping[str, Any], where: str) -> tuple[Any, ...]:
    tools = _parsed(row.get("tools"), f"{where}: tools")
    if not says(tools):
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        must = "must be a list of descriptions of tools"
        raise ConfigError(f"{where}: tools", must, got=kind(tools))
    return tuple(tools)


# --- values -----------------------------------------------------------------------------------------------


def text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """What is under a key, if it is a text: anything else would be learned as Python prints it."""
    if not isinstance(row[key], str):
        raise ConfigError(f"{where}: {key}", "must be a text", got=kind(row[key]))
    return unicode(row[key], f"{where}: {key}")


def unicode(text: str, where: str) -> str:
    """A text as it is, where it is one: JSON may spell half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a character, {text[error.start]!a}, at {error.start:,}"
        raise ConfigError(where, "must be valid Unicode", got=half) from None
    return text


def _parsed(value: Any, where: str) -> Any:
    """What is written as JSON inside of a text, as in a CSV or a table with one type per column."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ConfigError(where, "must be JSON where it is a text", got=repr(value[:60])) from None


def says(value: Any) -> bool:
    """Whether there is anything: numbers say something, 0 too."""
    return value is not None and value not in ("", [], {}, ())


def _first(row: Mapping[str, Any], columns: Iterable[str]) -> str | None:
    return next((name for name in columns if says(row.get(name))), None)
