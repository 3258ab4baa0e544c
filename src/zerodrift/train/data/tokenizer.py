"""Turn text into token numbers and back, by bytes or by a tokenizer in a folder.

Bytes can encode every text. `transformers` reads a folder, without network and without code from it.

A long text is encoded in windows, into the same tokens as in one piece. The tokens of a place depend on the
text around it, so windows overlap: the last tokens of a window are taken from the next window, which must
begin with the tokens before them. If it does not, it is encoded again with more text before it. A tokenizer
without offsets gets the whole text.

The `fingerprint` changes with every change of the files that may change tokens.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerodrift.errors import ModelError
from zerodrift.model import attempt, require_installed
from zerodrift.train.data.files import advice

Tokens = np.ndarray
"""Shape [tokens], an integer dtype."""

_NAMES = "tokenizer.json tokenizer_config.json tokenizer.model vocab.json merges.txt vocab.txt"
FILES = tuple(_NAMES.split())
BESIDE = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
MODELS = (".model", ".spm", ".bpe", ".vocab")
_FINGERPRINTED = (".json", ".txt", ".jinja", *MODELS)
_NOT_FINGERPRINTED = ("/config.json", "/generation_config.json", ".index.json")
"""Files of a model's folder that do not affect its tokens."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

WINDOW, OVERLAP = 1 << 18, 1 << 12
"""Characters encoded at once, and those at the end of a window whose tokens wait for the next."""
SHARED = 4
"""Tokens that two windows must share in front of the place where the second goes on."""


class ByteTokenizer:
    """UTF-8 bytes, and 256 for the end of a text."""

    name = fingerprint = "bytes"
    vocabulary = 257
    start: tuple[int, ...] = ()
    marks: Mapping[str, int] = {}
    has_template = False
    end = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def shown(self, tokens: Sequence[int]) -> str:
        """Decode, with special tokens as they are spelled."""
        spelled = b"".join(bytes([token]) if token < 256 else b"<end>" for token in tokens)
        return spelled.decode("utf-8", "replace")


class TransformersTokenizer:
    """A tokenizer that `transformers` reads.

    Every token is below `vocabulary`. The `start` tokens begin a text, as Llama's `<s>` does; `end` ends a
    document and pads; `marks` are the special tokens by their spelling.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.fingerprint = _fingerprint(folder)
        self.inner = _load(folder)
        self._needs_parts: bool | None = None
        """Whether the chat template only renders contents in parts; None until it was tried."""
        # The largest number may exceed the count: numbers may have gaps.
        self.vocabulary = 1 + max([len(self.inner) - 1, *self.inner.get_vocab().values()])
        end = self.inner.eos_token_id
        end = self.inner.pad_token_id if end is None else end
        if end is None:
            must, todo = "must have an end-of-text or a padding token", "Name one in `tokenizer_config.json`."
            raise ModelError(f"{folder}", must, got="neither", do=todo)
        self.end = int(end)
        plain, whole = self.encode("a").tolist(), self.inner.encode("a")
        starts = [n for n in range(len(whole)) if whole[n : n + len(plain)] == plain]
        self.start: tuple[int, ...] = tuple(whole[: starts[0]]) if plain and starts else ()
        added = self.inner.added_tokens_decoder.items()
        self.marks: Mapping[str, int] = {str(token): number for number, token in added if token.special}
        self.has_template = bool(self.inner.chat_template)

    def encode(self, text: str) -> Tokens:
        return np.asarray(self.inner.encode(text, add_special_tokens=False), dtype=np.int64)

    def encode_with_places(self, text: str) -> tuple[Tokens, np.ndarray]:
        """Return tokens and their first and end characters. Shape [tokens, 2]."""
        encoded = self.inner(text, add_special_tokens=False, return_offsets_mapping=True)
        places = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoded["input_ids"], dtype=np.int64), places

    def turns(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return turns as the chat template expects them: with contents in parts for some vision models."""
        if self._needs_parts is None:
            self._needs_parts = self._writes(_in_parts) and not self._writes(str)
        turns = [{key: value for key, value in turn.items() if value is not None} for turn in messages]
        for turn in turns if self._needs_parts else []:
            turn["content"] = _in_parts(turn.get("content", ""))
        return turns

    def _writes(self, form: Callable[[str], Any]) -> bool:
        """Return True if the chat template writes contents of this form."""
        turns = [[{"role": "user", "content": form(content)}] for content in "AB"]
        try:
            text, other = (self.inner.apply_chat_template(turn, tokenize=False) for turn in turns)
        except Exception:  # the template is a program of its owner
            return False
        return bool(text != other)

    def marks_answers(self, tools: Sequence[Any]) -> bool:
        """Return True if the chat template marks what the assistant says."""
        template = self.inner.get_chat_template(tools=list(tools) or None)
        return bool(self.inner.is_fast and _GENERATION.search(template))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))

    def shown(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))


Tokenizer = ByteTokenizer | TransformersTokenizer


def _in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def load_tokenizer(written: str, model: str) -> Tokenizer:
    """Return the tokenizer of a job: `auto` is the one in the model's folder, else bytes."""
    if written == "auto":
        return TransformersTokenizer(Path(model)) if has_tokenizer(Path(model)) else ByteTokenizer()
    if written == "bytes":
        return ByteTokenizer()
    folder = Path(written).expanduser()
    if not has_tokenizer(folder):
        got = "a folder without one" if folder.is_dir() else "no such folder"
        must = "must be `bytes`, `auto` or a folder with a tokenizer"
        raise ModelError("data.tokenizer", must, got=f"{written!r}, {got}", do=advice(written, "model"))
    return TransformersTokenizer(folder)


def has_tokenizer(folder: Path) -> bool:
    return folder.is_dir() and any((folder / name).is_file() for name in FILES)


def copy_tokenizer(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and (file.name in (*FILES, *BESIDE) or file.suffix in MODELS):
            shutil.copyfile(file, folder / file.name)


def _fingerprint(folder: Path) -> str:
    """Return a digest of every file of words, rules and templates, whichever of them a class reads."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (*sorted(folder.glob("*")), *sorted(folder.glob("*_templates/*"))):
        is_read = path.suffix in _FINGERPRINTED and not str(path).endswith(_NOT_FINGERPRINTED)
        if is_read and path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _load(folder: Path) -> Any:
    require_installed("data.tokenizer", "a tokenizer")
    from transformers import AutoTokenizer

    how = {"local_files_only": True, "trust_remote_code": False}
    load = functools.partial(AutoTokenizer.from_pretrained, str(folder), **how)
    return attempt(load, str(folder), "must hold a tokenizer that `transformers` can read")


def encode_pieces(pieces: Iterable[str], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Yield the tokens of a text that comes in pieces; memory does not grow with the text."""
    if isinstance(tokenizer, ByteTokenizer):
        yield from map(tokenizer.encode, pieces)
    elif isinstance(tokenizer, TransformersTokenizer) and tokenizer.inner.is_fast:
        yield from _windows(iter(pieces), tokenizer)
    else:
        yield tokenizer.encode("".join(pieces))


def _windows(pieces: Iterator[str], tokenizer: TransformersTokenizer) -> Iterator[Tokens]:
    text, done = "", 0  # `done` characters of the text have been yielded as tokens
    last = np.zeros(0, np.int64)
    window, ended = WINDOW, False
    while not ended:
        while len(text) - done < window and not ended:
            piece = next(pieces, None)
            ended, text = piece is None, text + (piece or "")
        tokens, places = _tokens_from(text, done, last, tokenizer)
        count = len(tokens) if ended else _settled(places, len(text) - OVERLAP)
        window = WINDOW if count else 2 * window
        if count:
            yield tokens[:count]
            last = np.concatenate([last, tokens[:count]])[-SHARED:]
            done = int(places[count - 1, 1])
        if not ended and done > 2 * WINDOW:
            text, done = text[done - WINDOW :], WINDOW


def _tokens_from(
    text: str, done: int, last: Tokens, tokenizer: TransformersTokenizer
) -> tuple[Tokens, np.ndarray]:
    """Return the tokens from `done` on and their places.

    Encoding begins some characters earlier, so that the tokens before `done` are the `last` ones. If they are
    not, as in an endless run of spaces, encoding begins at `done`.
    """
    met: tuple[Tokens, np.ndarray] | None = None
    for before in (OVERLAP, WINDOW) if done else ():
        first = max(0, text.rfind("\n", 0, max(0, done - before)))
        tokens, places = tokenizer.encode_with_places(text[first:])
        places += first
        cut = int(np.searchsorted(places[:, 0], done))
        shared = min(SHARED, cut, len(last))
        if not shared or int(places[:cut, 1].max()) > done:
            continue
        met = tokens[cut:], places[cut:]
        if np.array_equal(tokens[cut - shared : cut], last[len(last) - shared :]):
            return met
    if met is not None:
        return met
    tokens, places = tokenizer.encode_with_places(text[done:])
    return tokens, places + done


def _settled(places: np.ndarray, until: int) -> int:
    """Return how many tokens end before a place and share no character with a later token."""
    count = int(np.searchsorted(places[:, 1], until, side="right"))
    while count and count < len(places) and places[count, 0] < places[count - 1, 1]:
        count -= 1
    return count
