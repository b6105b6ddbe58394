"""Policies, training, evaluation, export."""

if __name__ != "cuewalk.rl":  # a second copy would break isinstance
    raise ImportError("import cuewalk.rl, not rl (run `make install` once)")
