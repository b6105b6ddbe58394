"""The commands: the command line, benchmarks and measurements, and what writes their results for people."""

if __name__ != "cuewalk.scripts":  # a second copy would break isinstance
    raise ImportError("import cuewalk.scripts, not scripts (run `make install` once)")
