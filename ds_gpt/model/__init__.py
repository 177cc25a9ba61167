"""The GPT in plain PyTorch, and its parameter and FLOP counts. Nothing here knows of parallelism.

Tensor names end in their dimensions, one letter each (``x_BTD``, ``q_BHTK``):

    B  batch              H  query heads         F  hidden width of the feed-forward
    T  time               G  key/value heads     V  vocabulary
    S  attended time      K  head width          R  adapter rank
    D  width

Under tensor parallelism H, G and F are what this rank holds. ``tests/model/test_shape_suffixes.py``
compares every suffix with the real shape. This file imports no torch, so ``counts`` loads without it.
"""
