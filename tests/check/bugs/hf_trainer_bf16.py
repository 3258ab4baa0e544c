"""HF Trainer with `bf16=True`, which turns autocast on, on a model that was loaded in bf16 (verl #5308)."""

import tempfile

import torch
import transformers

from tiny import llama_config, train_by_transformers

transformers.set_seed(0)
with tempfile.TemporaryDirectory() as folder:
    transformers.LlamaForCausalLM(llama_config()).to(torch.bfloat16).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
train_by_transformers(model, bf16=True)
