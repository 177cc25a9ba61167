"""What ``deepspeed --num_gpus 8 ds_gpt/train.py`` and ``torchrun ds_gpt/train.py`` start on every rank.

It only finds the package and hands over to ``ds_gpt.commands.train``. It defines no classes: run as a script, this
file is ``__main__``, and objects of its classes would not be recognised by the rest of the package.
"""

import sys
from pathlib import Path

# A launcher runs this file by path, which puts ds_gpt/ itself first on sys.path: `import ds_gpt` would fail in a
# checkout that is not installed, and every file beside this one would shadow a top-level module of its name.
if not sys.flags.safe_path:
    del sys.path[0]
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_gpt.commands.train import main  # noqa: E402

if __name__ == "__main__":
    main()
