"""From logits to tokens: sampling one, and decoding many."""
