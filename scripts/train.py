"""Launch shim: the same as `cuewalk train`, for `accelerate launch scripts/train.py --config …`."""

import sys

from cuewalk.scripts.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
