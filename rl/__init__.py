"""Policies, training, evaluation, export."""

if __name__ != "cuewalk.rl":  # a second copy would break isinstance
    raise ImportError("import cuewalk.rl, not rl (run `make install` once)")

import os as _os

# No usage statistics of the libraries below, unless the user asked for them.
for _name in ("HF_HUB_DISABLE_TELEMETRY", "VLLM_NO_USAGE_STATS"):
    _os.environ.setdefault(_name, "1")

from cuewalk.rl.config import Config, ConfigError, load_config
from cuewalk.rl.export import ExportError, Retrieval, Retriever, export_policy

__all__ = ["Config", "ConfigError", "ExportError", "Retrieval", "Retriever", "export_policy", "load_config"]
