"""From logits to token ids: the rule, its noise, penalties, log-probabilities and grammars."""
