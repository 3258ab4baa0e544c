"""`deepspeed.runtime.activation_checkpointing`: torch's own, by DeepSpeed's names."""
