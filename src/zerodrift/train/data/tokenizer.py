"""Text to token numbers and back: bytes, or a tokenizer in a folder.

Bytes need nothing and know every text. A folder is read by `transformers`, without network and without
code of its own. What a conversation looks like is `chat.py`'s affair.

Invariant: `fingerprint` changes whenever the tokens of some text could.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zerodrift.errors import ModelError
from zerodrift.train.data.hub import advice

Tokens = np.ndarray
"""One-dimensional, whole numbers."""

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""What a folder with a tokenizer has some of."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MODELS = (".model", ".spm", ".bpe", ".vocab")
"""What its other files end in."""


class Tokenizer(Protocol):
    """What the trainer asks of a tokenizer."""

    name: str
    vocabulary: int
    """Every token is below it."""
    start: tuple[int, ...]
    """Begins a text, where its models are used to that: a tokenizer of Llama's puts `<s>` there."""
    end: int
    """Ends a document, and pads."""
    marks: Mapping[str, int]
    """What stands for something else than its text, an end say, by its spelling."""
    has_template: bool
    """Whether it says how a conversation is written."""
    fingerprint: str

    def encode(self, text: str) -> Tokens: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def shown(self, tokens: Sequence[int]) -> str:
        """The same, with marks such as the end as they are spelled."""


class ByteTokenizer:
    """A text's UTF-8 bytes, and 256 for its end."""

    name = "bytes"
    vocabulary = 257
    start: tuple[int, ...] = ()
    marks: Mapping[str, int] = {}
    has_template = False
    end = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def shown(self, tokens: Sequence[int]) -> str:
        spelled = b"".join(bytes([token]) if token < 256 else b"<end>" for token in tokens)
        return spelled.decode("utf-8", "replace")


class TransformersTokenizer:
    """A tokenizer that `transformers` reads."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.fingerprint = _digest(folder)
        self.inner = _load(folder)
        self._wants_parts: bool | None = None
        """Whether its chat template writes texts in parts alone; None where nobody has asked yet."""
        # Numbers may have holes: how many there are does not say which is the last.
        self.vocabulary = 1 + max([len(self.inner) - 1, *self.inner.get_vocab().values()])
        end = self.inner.eos_token_id
        end = self.inner.pad_token_id if end is None else end
        if end is None:
            raise ModelError(
                f"{folder}",
                "must have an end-of-text or a padding token",
                got="neither",
                do="Name one in `tokenizer_config.json`.",
            )
        self.end = int(end)
        self.start = self._put_in_front()
        added = self.inner.added_tokens_decoder
        self.marks: Mapping[str, int] = {
            str(token): number for number, token in added.items() if token.special
        }
        self.has_template = bool(self.inner.chat_template)

    def _put_in_front(self) -> tuple[int, ...]:
        plain, whole = self.encode("a").tolist(), self.inner.encode("a")
        if not plain or len(whole) == len(plain):
            return ()
        return tuple(whole[: next(n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)])

    def encode(self, text: str) -> Tokens:
        return np.asarray(self.inner.encode(text, add_special_tokens=False), dtype=np.int64)

    def encode_with_places(self, text: str) -> tuple[Tokens, np.ndarray]:
        """Its tokens, and for each from which character to before which it stands, `[tokens, 2]`."""
        made = self.inner(text, add_special_tokens=False, return_offsets_mapping=True)
        places = np.asarray(made["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.asarray(made["input_ids"], dtype=np.int64), places

    def turns(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Turns in the form that its chat template expects: those of models that see want parts for texts."""
        if self._wants_parts is None:
            self._wants_parts = self._writes(_in_parts) and not self._writes(str)
        made = [{key: held for key, held in turn.items() if held is not None} for turn in messages]
        for turn in made if self._wants_parts else []:
            turn["content"] = _in_parts(turn.get("content", ""))
        return made

    def _writes(self, form: Callable[[str], Any]) -> bool:
        """Whether its chat template writes what a user says in this form."""
        turns = [[{"role": "user", "content": form(said)}] for said in "AB"]
        try:
            text, other = (self.inner.apply_chat_template(turn, tokenize=False) for turn in turns)
        except Exception:  # the template is a program of its owner's
            return False
        return bool(text != other)

    def marks_answers(self, tools: Sequence[Any]) -> bool:
        """Whether its chat template says itself what the assistant says."""
        template = self.inner.get_chat_template(tools=list(tools) or None)
        return bool(self.inner.is_fast and _GENERATION.search(template))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))

    def shown(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))


def _in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def tokenizer(written: str, model: str) -> Tokenizer:
    """The tokenizer of a job: `auto` is the one in the model's folder, else bytes."""
    if written == "bytes":
        return ByteTokenizer()
    if written == "auto":
        return TransformersTokenizer(Path(model)) if holds(Path(model)) else ByteTokenizer()
    folder = Path(written).expanduser()
    if not holds(folder):
        got = "a folder without one" if folder.is_dir() else "no such folder"
        must = "must be `bytes`, `auto` or a folder with a tokenizer"
        raise ModelError("data.tokenizer", must, got=f"{written!r}, {got}", do=advice(written, "model"))
    return TransformersTokenizer(folder)


def holds(folder: Path) -> bool:
    """Whether a folder has a tokenizer."""
    return folder.is_dir() and any((folder / name).is_file() for name in FILES)


def _digest(folder: Path) -> str:
    """Of every file of words, rules and templates: which of them a class reads is its own affair."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (*sorted(folder.glob("*")), *sorted(folder.glob("*_templates/*"))):
        if path.suffix in _SUFFIXES and path.is_file() and not str(path).endswith(_OTHERS):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


_SUFFIXES = (".json", ".txt", ".jinja", *MODELS)
_OTHERS = ("/config.json", "/generation_config.json", ".index.json")
"""Files of a model's folder that say nothing of its tokens."""


def _load(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        todo = "Run `pip install 'zerodrift[hf]'`."
        must = "`transformers` must be installed to read a tokenizer"
        raise ModelError("data.tokenizer", must, got="no such package", do=todo) from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        must = "must hold a tokenizer that `transformers` can read"
        raise ModelError(str(folder), must, got=f"{type(error).__name__}: {reason}") from error
