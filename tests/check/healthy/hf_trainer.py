"""HF Trainer on fp32 weights: `hf_trainer.py [bf16] [tied]`."""

import sys
import tempfile
from typing import Any

import transformers

from tiny import VOCABULARY, WIDTH, batch

transformers.set_seed(0)
sizes: dict[str, Any] = dict(
    hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
config = transformers.LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings="tied" in sys.argv, **sizes)
examples = [{"input_ids": tokens, "labels": tokens} for tokens in batch(0, 0, size=64)[0]]
arguments = transformers.TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    bf16="bf16" in sys.argv,
    max_steps=4,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
model = transformers.LlamaForCausalLM(config)
transformers.Trainer(model=model, args=arguments, train_dataset=examples).train()
