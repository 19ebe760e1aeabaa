"""Tokenizer, chat template, detokenizer, and the processes that run them."""
