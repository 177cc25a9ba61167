"""Checkpoints of a run: written whole or not at all, checked when read, and resumed at any world size and ZeRO stage."""
