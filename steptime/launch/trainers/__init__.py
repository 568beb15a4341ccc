"""Trainers whose files a table of keys translates: Hugging Face Trainer and what is built on it, torchtune, OLMo, GPT-NeoX ..."""
