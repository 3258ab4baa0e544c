"""Published forms of data files have the tokens and masks of `transformers` for the same conversation."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_files import arrow_stream, data, parquet, parts_of
from tests.unit.letters import MARKED, PLAIN, byte_tokenizer
from zerodrift.errors import ConfigError
from zerodrift.train.data import chat_template as rendering
from zerodrift.train.data.blocks import IGNORED
from zerodrift.train.data.conversation import Conversation
from zerodrift.train.data.prepare import PreparedData, prepare
from zerodrift.train.data.tokenizer import ByteTokenizer, TransformersTokenizer

pytest.importorskip("transformers")
arrow = pytest.importorskip("pyarrow")
BLOCK = 512
Turns = list[dict[str, Any]]


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def talk(question: str, answer: str) -> Turns:
    return [turn("user", question), turn("assistant", answer)]


HI, YO = talk("Hi", "Yo")
TALK = [turn("system", "Be brief"), HI, YO, turn("user", "Größe?"), turn("assistant", "2 m\n")]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Paris", "days": 2}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLED = [
    HI,
    turn("assistant", "", tool_calls=[CALL]),
    turn("tool", "12 °C", tool_call_id="1"),
    turn("assistant", "Cold"),
]
CALLED_AS_TEXT = json.loads(json.dumps(CALLED))
CALLED_AS_TEXT[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
CALLED_AS_TEXT[1]["content"] = None


@dataclass
class File:
    """A file, the conversation in its row, and the learned end unless all answers are learned."""

    name: str
    content: bytes
    meant: Turns = field(default_factory=list)
    tools: list[Any] | None = None
    learned: str | None = None


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def shape(meant: Turns, with_tools: Any = None, /, learned: str | None = None, **row: Any) -> File:
    return File("a.jsonl", lines(row), meant, with_tools, learned)


def row(**written: Any) -> File:
    return shape([], **written)


def sharegpt(**said: str) -> Turns:
    return [{"from": role, "value": text} for role, text in said.items()]


THOUGHT = {**YO, "reasoning_content": "Hm"}
PART = {"type": "text", "text": "Hi", "image_url": None}
ROW = lines({"messages": TALK})
FILES: dict[str, File] = {
    "messages": shape(TALK, messages=TALK),
    "contents in parts": shape(talk("Hi", "Yo, you"),
        messages=[
            turn("user", [PART]),
            turn("assistant", [{"type": "text", "text": "Yo, "}, {"text": "you"}]),
        ]),
    "what is null is not there": shape([HI, THOUGHT], messages=[{**HI, "tool_calls": None}, THOUGHT]),
    "weights of turns": shape(
        TALK, learned="2 m\n;", messages=[*TALK[:2], {**YO, "weight": 0}, TALK[3], {**TALK[4], "weight": 1}]
    ),
    "ShareGPT with calls": shape(*([*CALLED[:2], turn("tool", "12"), *CALLED[3:]], TOOLS),
        conversations=sharegpt(
            human="Hi", function_call=json.dumps(CALL["function"]), observation="12", gpt="Cold"
        ),
        tools=json.dumps(TOOLS)),
    "prompt and completion": shape([HI, YO], prompt="Hi", completion="Yo"),
    "turns of a prompt": shape(TALK, learned="2 m\n;", prompt=TALK[:4], completion=TALK[4:]),
    "calls as texts": shape(CALLED, TOOLS, messages=CALLED_AS_TEXT, tools=json.dumps(TOOLS)),
    "Alpaca with an input": shape(talk("Add\n\n1", "3"), instruction="Add", input="1", output="3"),
    "Alpaca with a history": shape(
        TALK, instruction="Größe?", output="2 m\n", system="Be brief", history=[["Hi", "Yo"]]
    ),
    "OpenOrca": shape(TALK[:3], id="1", system_prompt="Be brief", question="Hi", response="Yo"),
    "a JSON array": File("a.json", json.dumps([{"messages": TALK}], indent=1).encode(), TALK),
    "CSV": File("a.csv", b'id,prompt,completion\r\n1,"Hi, ""Bo""\n007",NA\r\n', talk('Hi, "Bo"\n007', "NA")),
    "CSV of a Windows program": File("a.csv", "\ufeffprompt;completion\r\nHi;Yo\r\n".encode(), [HI, YO]),
    "zstd": File("a.jsonl.zst", bytes(arrow.compress(ROW, "zstd", asbytes=True)), TALK),
    "parquet": File(
        "a.parquet", parquet([{"id": 1, "conversations": CALLED, "tools": json.dumps(TOOLS)}]), CALLED, TOOLS
    ),
    "Arrow": File("a.arrow", arrow_stream([{"messages": TALK}]), TALK),
}  # fmt: skip


def expected(inner: Any, file: File) -> tuple[list[int], list[bool]]:
    """Return the tokens and the loss mask of `transformers` for the file's conversation."""
    made = inner.apply_chat_template(
        file.meant, tools=file.tools, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, learned = list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]]
    if file.learned is not None:
        count = len(inner.encode(file.learned, add_special_tokens=False))
        learned = [False] * (len(tokens) - count) + [True] * count
    return tokens, learned


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> TransformersTokenizer:
    return TransformersTokenizer(byte_tokenizer(tmp_path_factory.mktemp("letters"), MARKED))


@pytest.fixture(scope="module")
def unmarked(tmp_path_factory: pytest.TempPathFactory) -> TransformersTokenizer:
    """Return a tokenizer whose template does not mark the assistant's tokens."""
    template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return TransformersTokenizer(byte_tokenizer(tmp_path_factory.mktemp("unmarked"), template))


def read(folder: Path, letters: Any, file: File, **rest: Any) -> PreparedData:
    (folder / file.name).write_bytes(file.content)
    return prepare(data(folder / file.name, block=BLOCK, **rest), letters, folder / "cache")


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_the_conversation_that_is_meant(
    name: str, tmp_path: Path, letters: TransformersTokenizer, unmarked: TransformersTokenizer
) -> None:
    file = FILES[name]
    tokens, learned = expected(letters.inner, file)
    assert len(tokens) < BLOCK
    kind = "chat" if b"completion" in file.content else "auto"
    for tokenizer in (letters, unmarked):
        found, labels = parts_of(read(tmp_path, tokenizer, file, format=kind).train, 0)
        assert found[0, : len(tokens)].tolist() == tokens
        assert (found[0, len(tokens) :] == letters.end).all()
        assert (labels[0] != IGNORED)[: len(tokens)].tolist() == learned
        assert (labels[0, len(tokens) :] == IGNORED).all()


def test_without_a_template_turns_have_roles_and_contents_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only `role` and `content`.*tool_calls"):
        read(tmp_path, ByteTokenizer(), row(messages=[HI, turn("assistant", "", tool_calls=[CALL])]))


TEXT = "a text of some length, with Übung in it\n" * 20
ROW_OF_TEXT = lines({"text": TEXT})
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
REFUSED: dict[str, tuple[File, str]] = {
    "Latin-1": (File("a.txt", TEXT.encode("latin1")), "must be UTF-8 text; got byte 0xdc at offset 28"),
    "half a gzip": (File("a.jsonl.gz", gzip.compress(ROW)[:-9]), "a gzip file that ends early"),
    "a key twice": (File("a.jsonl", b'{"text": "a", "text": "b"}'), "a key twice"),
    "a text of null": (File("a.jsonl", ROW_OF_TEXT + lines({"text": None})), r"a\.jsonl:2.*must have a text"),
    "marks of good and bad": (row(prompt="Hi", completion="Yo", label=False), "with a `label`"),
    "a text beside a question": (row(instruction="Hi", output="Yo", text="Hi Yo"),
        r"a\.jsonl:1.*must be a text or a conversation.*Set `data\.format: text`"),
    "what is said in another key": (row(messages=[HI, {**YO, "content": None, "refusal": "No"}]),
        r"messages\[1\]: content.*got null beside `refusal`"),
    "a part that is an image": (
        row(messages=[turn("user", [{"type": "image_url", "image_url": {"url": "x"}}]), YO]),
        r"a\.jsonl:1: messages\[0\]: content\[0\].*'image_url'",
    ),
    "an image beside it": (row(messages=[HI, YO], images=["a.png"]), r"a\.jsonl:1.*`images`"),
    "an odd weight": (row(messages=[HI, {**YO, "weight": 0.5}]), r"weight.*must be 0 or 1"),
    "a say in the template": (row(messages=[HI, YO], chat_template_kwargs={"enable_thinking": False}),
        "must be a conversation of text; got `chat_template_kwargs`"),
    "an unknown role": (row(messages=[turn("boss", "Hi"), YO]), r"messages\[0\]: role.*got 'boss'"),
    "a key that no template writes": (row(messages=[HI, {**YO, "mood": "glad"}]),
        r"a\.jsonl:1.*chat template.*`mood` of a turn, which it leaves out"),
    "preferences": (row(prompt="a", chosen="b", rejected="c"), "`chosen`, `rejected`. TRL trains on"),
    "a pointer": (File("a.parquet", POINTER), "a pointer of Git LFS"),
    "a second value": (File("a.json", b'{"text": 1} {"text": 2}'), r"line 1, column 13 on\. Run `jq -c \. "),
    "a comma": (File("a.json", b'{"text": 1,}'), "must be JSON; got [^`]*$"),
    "an open quote": (File("a.csv", b'prompt,completion\na,"b\n'), "must be CSV"),
    "a cell too many": (File("a.csv", b"prompt,completion\na,b,c\n"), "got 3. Put a cell in quotes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_learned_as_it_is_is_refused_by_its_place(
    name: str, tmp_path: Path, letters: TransformersTokenizer
) -> None:
    file, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, letters, file)
    assert "None" not in str(caught.value)
    left = {path.name for path in (tmp_path / "cache").glob("*")}
    assert all(name == "digests.json" or name.endswith(".lock") for name in left)


# --- templates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[7].content }}", "{% if"])
def test_a_template_that_fails_is_an_error_with_its_name(template: str, tmp_path: Path) -> None:
    letters = TransformersTokenizer(byte_tokenizer(tmp_path, template))
    with pytest.raises(ConfigError, match=r"a\.jsonl:3.*that the chat template of .*user, assistant"):
        rendering.encode_conversation(Conversation((HI, YO), "a.jsonl:3"), letters, learn_all=True)


def test_a_template_that_leaves_out_a_turn_or_tools_is_told(tmp_path: Path) -> None:
    deaf = PLAIN.replace("[{{", "{% if turn['role'] != 'system' %}[{{").replace("};{%", "};{% endif %}{%")
    tokenizer = TransformersTokenizer(byte_tokenizer(tmp_path, deaf))
    for messages, more, words in (
        (TALK, {}, r"a\.jsonl:1.*turn 0, of the role 'system'"),
        ([HI, YO], {"tools": TOOLS}, "`tools`"),
        ([HI, {**YO, "tool_calls": [CALL]}], {}, "`tool_calls` of a turn"),
    ):
        with pytest.raises(ConfigError, match=f"{words}, which it leaves out"):
            read(tmp_path, tokenizer, row(messages=messages, **more))


def test_an_answer_ends_with_the_mark_of_its_template(tmp_path: Path) -> None:
    """Samples of conversations stop there, or at the end of a text."""
    asks = "{% if add_generation_prompt %}<assistant>{% endif %}"
    folder = byte_tokenizer(tmp_path, "{% for turn in messages %}{{ turn.content }}<turn>{% endfor %}" + asks)
    inner = TransformersTokenizer(folder).inner
    inner.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    inner.save_pretrained(str(folder))
    letters = TransformersTokenizer(folder)
    assert rendering.end_tokens(letters) == {letters.end, letters.marks["<turn>"]}
    assert rendering.end_tokens(ByteTokenizer()) == {256}
    assert letters.inner.decode(rendering.encode_prompt([HI], letters)) == "Hi<turn><assistant>"


LAST = (
    "{% for turn in messages %}[{{ turn.role }}]{% if turn.role == 'assistant' and loop.last %}<t></t>"
    "{% endif %}{{ turn.content.strip() }};\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]ASK{% endif %}"
)
LAST_WRITTEN = "[system]Be brief;\n[user]Hi;\n[assistant]Yo;\n[user]Größe?;\n[assistant]<t></t>2 m;\n"
OTHER_END = (
    "{% for turn in messages %}<{{ turn.role }}>\n{{ turn.content }}!\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% else %}<end>{% endif %}"
)
CALLS_AS_TEXT = (
    "{% for turn in messages %}[{{ turn.role }}]{% if turn.content is not defined %}"
    "{% for call in turn.tool_calls %}"
    "{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}{% else %}{{ turn.content }}"
    "{% endif %};\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WRITTEN = '[user]Hi;\n[assistant]f {"city": "Paris", "days": 2};\n[tool]12 °C;\n[assistant]Cold;\n'


@pytest.mark.parametrize(
    ("template", "messages", "starts", "learned"),
    [
        pytest.param(
            *(OTHER_END, [*TALK[1:4], turn("assistant", "2")]),
            *("<user>\nHi!\n<assistant>\nYo!\n<user>\n", "Yo!\n2!\n<end>"),
            id="another mark behind the last answer, as of Phi 3 and gpt-oss",
        ),
        pytest.param(
            *(CALLS_AS_TEXT, CALLED, WRITTEN, 'f {"city": "Paris", "days": 2};\nCold;\n'),
            id="arguments as a text and no content beside calls, as of DeepSeek",
        ),
        *(
            pytest.param(
                *(LAST.replace("ASK", asks), TALK, LAST_WRITTEN, f"Yo;\n{thought}2 m;\n"),
                id=f"thoughts in the last answer alone, as of Qwen 3 and DeepSeek R1, asked for by {asks!r}",
            )
            for asks, thought in (("", "<t></t>"), ("<t>", "</t>"), ("<s>", ""))
        ),
    ],
)
def test_a_template_is_given_what_it_writes(
    template: str, messages: Turns, starts: str, learned: str, tmp_path: Path
) -> None:
    tokenizer = TransformersTokenizer(byte_tokenizer(tmp_path, template))
    found, labels = parts_of(read(tmp_path, tokenizer, row(messages=messages)).train, 0)
    assert tokenizer.decode(found[0]).startswith(starts)
    assert tokenizer.shown(labels[0][labels[0] != IGNORED].tolist()) == learned


@pytest.mark.parametrize("keys", [{}, {"format": "text", "pack": False}])
@pytest.mark.parametrize("is_ended", [False, True])
def test_a_text_is_continued_as_it_is(
    tmp_path: Path, letters: TransformersTokenizer, keys: dict[str, Any], is_ended: bool
) -> None:
    """Two texts become what TRL makes of them: no template, one end mark, a learned completion."""
    end = letters.inner.eos_token if is_ended else ""
    file = File("a.jsonl", lines({"prompt": "The sky is", "completion": f" blue.{end}"}), [])
    made = read(tmp_path, letters, file, **keys)
    assert "without a chat template" in dict(made.sets[0].counts.facts())["made of"]
    found, labels = parts_of(made.train, 0)
    text = [*letters.encode("The sky is blue."), letters.end]
    assert found[0, : len(text)].tolist() == text
    assert np.flatnonzero(labels[0] != IGNORED).tolist() == list(range(10, 17))
