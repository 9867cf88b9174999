"""The small model that ships with the project: its text, tokenizer, network, training and evaluation."""
