"""Measurements of ds_gpt, kept as records with the command that made them."""
