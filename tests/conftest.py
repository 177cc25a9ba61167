"""Settings for all tests."""

import os

# Before anything imports torch: two ranks, or a rank and the test, share two cores better with a thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
