"""Policies, training, evaluation, export."""

if __name__ != "cuewalk.rl":  # a second copy would break isinstance
    raise ImportError("import cuewalk.rl, not rl (run `make install` once)")

from cuewalk.rl.config import Config, ConfigError, load_config
from cuewalk.rl.export import ExportError, Retrieval, Retriever, export_policy

__all__ = ["Config", "ConfigError", "ExportError", "Retrieval", "Retriever", "export_policy", "load_config"]
