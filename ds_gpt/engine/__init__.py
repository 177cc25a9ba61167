"""The only package that imports DeepSpeed: ranks, engine build, step, and the way around DeepSpeed's defects.

Importing DeepSpeed takes seconds, so it happens inside the functions that need it, after bad input has been refused.
"""
