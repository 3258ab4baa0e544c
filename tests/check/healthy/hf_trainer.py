"""HF Trainer on fp32 weights: `hf_trainer.py [bf16] [tied]`."""

import sys

import transformers

from tiny import llama_config, train_by_transformers

transformers.set_seed(0)
model = transformers.LlamaForCausalLM(llama_config(tie_word_embeddings="tied" in sys.argv))
train_by_transformers(model, bf16="bf16" in sys.argv, gradient_accumulation_steps=2)
