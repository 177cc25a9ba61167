"""From logits to text: choosing a token, continuing many prompts together, showing whole characters."""
