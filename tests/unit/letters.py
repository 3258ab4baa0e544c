"""A tokenizer in a folder, small and made here."""

from __future__ import annotations

from pathlib import Path


def byte_tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer whose tokens are characters, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate([*letters, "<end>"])}
    inner = Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    made.chat_template = (
        "{% for turn in messages %}[{{ turn['role'] }}]{{ turn['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    made.save_pretrained(str(folder))
    return folder
