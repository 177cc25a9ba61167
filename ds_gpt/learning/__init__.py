"""What the optimizer is told: the loss, the learning rate, the parameter groups. Pure functions.

This file imports no torch, so ``schedule`` loads without it.
"""
