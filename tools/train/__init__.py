"""The reference model, the corpus and the trainer."""
