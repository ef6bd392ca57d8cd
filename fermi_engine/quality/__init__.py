"""How good a model's logits are, over texts, beside another model's."""
