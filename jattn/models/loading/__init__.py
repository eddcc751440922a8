"""Hugging Face folders: reading and writing config.json, safetensors and tokenizer files."""
