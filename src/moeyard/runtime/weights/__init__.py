"""Hugging Face safetensors in and out, each rank reading and holding its own share."""
