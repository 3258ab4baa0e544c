"""Make a small tokenizer in a folder."""

from __future__ import annotations

from pathlib import Path

PLAIN = (
    "{% for turn in messages %}[{{ turn['role'] }}]{{ turn['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A chat template of roles and contents alone."""

MARKED = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif -%}
{%- for turn in messages -%}
{%- if turn.role == 'assistant' -%}
[assistant]{% generation %}
{%- if turn.reasoning_content %}<think>{{ turn.reasoning_content }}</think>{% endif -%}
{{ turn.content }}
{%- for call in turn.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor -%}
;{% endgeneration %}
{%- else -%}
[{{ turn.role }}]{{ turn.content }};
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}[assistant]{% endif -%}"""
"""A template with tools, their calls and reasoning, which marks the assistant's tokens."""


def byte_tokenizer(folder: Path, template: str = PLAIN) -> Path:
    """Return a folder with a tokenizer whose tokens are bytes, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate([*letters, "<end>"])}
    inner = Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    made.chat_template = template
    made.save_pretrained(str(folder))
    return folder
