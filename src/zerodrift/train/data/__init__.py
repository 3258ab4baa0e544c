"""Data: files to documents, tokens, blocks and micro-batches."""
