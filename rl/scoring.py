"""Log-probabilities of actions, each token computed once.

A group's prompt is shared, and only action positions go through the vocabulary head (TRL on a CPU sends every
position through it).
"""

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from cuewalk.memory.models import decoder_and_head, run_decoder

Tensors = Sequence[torch.Tensor]


_SHARING: "WeakKeyDictionary[Any, dict[int, bool]]" = WeakKeyDictionary()


@torch.no_grad()
def shares_prompts(model: Any, max_tokens: int) -> bool:
    """Tell whether this model's hidden states, past a shared prefix and on two branches, give its own logits.

    If not (it scales or caps its logits, keeps another kind of cache, or attends to fewer than `max_tokens` tokens),
    a warning says so, and `score_plainly` and `PlainSampler` compute each row whole. Tried once a model, on eight ids.
    """
    known = _SHARING.setdefault(model, {})
    if max_tokens not in known:
        known[max_tokens] = not (reason := _what_differs(model, max_tokens))
        if reason:
            warnings.warn(
                f"{model.config.model_type} models can't share a prompt's forward pass here ({reason}): each row is "
                f"computed whole, which is right but several times slower. Models with plain attention and an unscaled "
                f"head, like Llama or Qwen, loaded with attn_implementation='sdpa', share it",
                stacklevel=2,
            )
    return known[max_tokens]


def _what_differs(model: Any, max_tokens: int) -> str:
    """Return why a prompt can't be shared, or nothing."""
    window = getattr(model.config, "sliding_window", None) or max_tokens
    if window < max_tokens and "sliding_attention" in (getattr(model.config, "layer_types", None) or []):
        return f"it sees {window} of {max_tokens} tokens"
    decoder, head = decoder_and_head(model)
    ids = torch.arange(5, 13, device=model.device)[None] % model.config.vocab_size
    expected = model(input_ids=ids).logits[0].float().log_softmax(-1)
    cache = DynamicCache(config=model.config)
    slots = torch.arange(11, device=model.device)  # five of the prompt, three of each branch
    mask = (slots <= slots[5:, None]) & ((slots < 5) | ((slots < 8) == (slots[5:, None] < 8)))
    positions = torch.arange(5, 8, device=model.device).repeat(2)[None]
    try:  # a model with another kind of cache or mask fails in its own way
        run_decoder(decoder, ids[:, :5], cache)
        branches = head(run_decoder(decoder, ids[:, 5:].repeat(1, 2), cache, mask[None, None], positions))[0].float()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    off = (branches.log_softmax(-1) - expected[5:].repeat(2, 1)).abs().max().item()
    return f"its logits differ by {off:.3f}" if off > (1e-3 if model.dtype == torch.float32 else 0.5) else ""


def score_actions(
    model: Any, prompts: Tensors, completions: Tensors, masks: Tensors, temperature: float = 1.0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Score the masked tokens of completions: log-probabilities and entropies, a row each (masks_i.sum(),) float32.

    Rows with one prompt share its forward pass, and equal completions of it share theirs; rows without a masked
    token cost nothing. Gradients flow as if each row had been computed apart.

    Args:
        model: A causal language model, with or without adapters.
        prompts: Row by row, (P_i,) ids.
        completions: Row by row, (C_i,) ids: actions and observations in turn.
        masks: Row by row, (C_i,) bool: True on sampled tokens.
        temperature: Of the softmax.
    """
    decoder, head = decoder_and_head(model)
    empty = torch.zeros(0, device=model.device)
    logps, entropies = [empty] * len(prompts), [empty] * len(prompts)
    groups: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for row, (prompt, completion, mask) in enumerate(zip(prompts, completions, masks, strict=True)):
        if bool(mask.any()):
            groups.setdefault(tuple(prompt.tolist()), {}).setdefault(tuple(completion.tolist()), []).append(row)
    for prompt_ids, group in groups.items():
        prompt = torch.tensor([prompt_ids], device=model.device)
        cache = DynamicCache(config=model.config)
        prefix = run_decoder(decoder, prompt, cache)[:, -1:]
        for part in _alike([completions[rows[0]] for rows in group.values()]):
            places = [list(group.values())[i] for i in part]
            ids, valid = pad_rows([completions[rows[0]].tolist() for rows in places], model.device)
            past = torch.ones(len(part), len(prompt_ids), dtype=torch.long, device=model.device)
            positions = (len(prompt_ids) + torch.arange(ids.shape[1], device=model.device)).expand_as(ids)
            mask = torch.cat([past, valid], dim=1)
            hidden = run_decoder(decoder, ids, _copies(cache, len(part)), mask, positions)
            before = torch.cat([prefix.expand(len(part), -1, -1), hidden[:, :-1]], dim=1)  # (U, C, H), one back
            for place, rows in enumerate(places):
                kept = masks[rows[0]].to(model.device)
                at = before[place, : len(kept)][kept]
                scored = _score(head(at), ids[place, : len(kept)][kept], temperature)
                for row in rows:
                    logps[row], entropies[row] = scored
    return logps, entropies


def score_plainly(
    model: Any, prompts: Tensors, completions: Tensors, masks: Tensors, temperature: float = 1.0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Score as `score_actions` does, each row in a forward pass of its own: for models that can't share a prompt."""
    scored = []
    for prompt, completion, mask in zip(prompts, completions, masks, strict=True):
        if bool(mask.any()):
            ids = torch.cat([prompt, completion]).to(model.device)
            kept = mask.to(model.device)
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1][kept]
            scored.append(_score(logits, ids[len(prompt) :][kept], temperature))
        else:
            scored.append((torch.zeros(0, device=model.device),) * 2)
    return [logps for logps, _ in scored], [entropies for _, entropies in scored]


def _score(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of ids (N,) under logits (N, V), and the entropies, which carry no gradient."""
    scores = (logits.float() / temperature).log_softmax(-1)
    return scores.gather(1, ids[:, None]).squeeze(1), -(scores.exp() * scores).sum(-1).detach()


def _alike(rows: Tensors) -> list[list[int]]:
    """Return the places of rows in batches of about one length: none is shorter than four fifths of its longest."""
    batches: list[list[int]] = []
    for place in sorted(range(len(rows)), key=lambda place: -len(rows[place])):
        if not batches or len(rows[place]) < 0.8 * len(rows[batches[-1][0]]):
            batches.append([])
        batches[-1].append(place)
    return batches


def _copies(cache: DynamicCache, count: int) -> DynamicCache:
    """Return a cache of so many rows that starts as this one row; nothing is copied, and gradients flow back."""
    copies = DynamicCache()
    for layer, own in enumerate(cache.layers):
        copies.update(*(kept.expand(count, -1, -1, -1) for kept in (own.keys, own.values)), layer)
    return copies


def pad_rows(rows: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad id lists on the right; return ids and validity, both (B, longest) int64."""
    ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    valid = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
    return ids.to(device), valid.to(device)
