"""The kinds of memory that are told apart. Imports no torch: reports need the names alone."""

# "gathered": weights that ZeRO-3 has made whole for a while; "buffers": of communication and of the optimizer's arithmetic.
KINDS = ("weights", "gathered", "gradients", "optimizer", "activations", "buffers")
