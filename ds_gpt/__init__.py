"""ds_gpt: train and scale GPT models with DeepSpeed, from a CPU laptop to a cluster.

Packages, from the lowest floor to the highest (a package imports only from floors below its own):
``config`` < ``model | data | learning`` < ``generation | engine`` < ``checkpoint`` < ``trainer`` < ``commands``.
``tests/test_architecture.py`` holds them to it.
"""

__version__ = "0.1.0"
