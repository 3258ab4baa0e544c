"""HF Trainer with `bf16=True` on a model that was loaded in bf16.

Asked for: mixed precision. What happens: `bf16=True` turns autocast on, it does not upcast what was
loaded: since transformers 5 a bf16 checkpoint is loaded as bf16 by default, so AdamW updates bf16 weights
with bf16 moments (verl #5308 and many others).
"""

import tempfile
from typing import Any

import torch
import transformers

from tiny import VOCABULARY, WIDTH, batch

transformers.set_seed(0)
sizes: dict[str, Any] = dict(
    hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
config = transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes)
with tempfile.TemporaryDirectory() as folder:
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
examples = [{"input_ids": tokens, "labels": tokens} for tokens in batch(0, 0, size=32)[0]]
arguments = transformers.TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    bf16=True,
    max_steps=4,
    per_device_train_batch_size=4,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = transformers.Trainer(model=model, args=arguments, train_dataset=examples)
trainer.train()
