"""Log-probabilities of actions, each token computed once.

A group's prompt is shared, and only action positions go through the vocabulary head (TRL on a CPU sends every
position through it).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from cuewalk.memory.models import ModelError, decoder_and_head, run_decoder

Tensors = Sequence[torch.Tensor]


@torch.no_grad()
def check_model(model: Any) -> None:
    """Make sure that hidden states through the head are the model's logits, also past a cached prefix.

    A ModelError if not: the model scales or caps its logits, or keeps another kind of cache.
    """
    decoder, head = decoder_and_head(model)
    ids = torch.arange(5, 13, device=model.device)[None] % model.config.vocab_size
    expected = model(input_ids=ids).logits.float()
    cache = DynamicCache(config=model.config)
    hidden = [run_decoder(decoder, part, cache) for part in (ids[:, :5], ids[:, 5:])]
    found = head(torch.cat(hidden, dim=1)).float()
    error = (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
    if error > (1e-3 if model.dtype == torch.float32 else 0.5):
        raise ModelError(
            f"{model.config.model_type} models give other logits (by {error:.3f}) when hidden states are cached and "
            f"sent through the head alone; use a model with plain attention and an unscaled head, like Llama"
        )


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
        firsts = [rows[0] for rows in group.values()]
        prompt = torch.tensor([prompt_ids], device=model.device)
        cache = DynamicCache(config=model.config)
        prefix = run_decoder(decoder, prompt, cache)[:, -1:]
        cache.batch_repeat_interleave(len(firsts))
        ids, valid = pad_rows([completions[row].tolist() for row in firsts], model.device)
        past = torch.ones(len(firsts), len(prompt_ids), dtype=torch.long, device=model.device)
        positions = (len(prompt_ids) + torch.arange(ids.shape[1], device=model.device)).expand_as(ids)
        hidden = run_decoder(decoder, ids, cache, torch.cat([past, valid], dim=1), positions)
        before = torch.cat([prefix.expand(len(firsts), -1, -1), hidden[:, :-1]], dim=1)  # (U, C, H), one token back
        for place, rows in enumerate(group.values()):
            mask = masks[rows[0]].to(model.device)
            at = before[place, : len(mask)][mask]
            scores = (head(at).float() / temperature).log_softmax(-1)
            chosen = scores.gather(1, ids[place, : len(mask)][mask][:, None]).squeeze(1)
            entropy = -(scores.exp() * scores).sum(-1).detach()
            for row in rows:
                logps[row], entropies[row] = chosen, entropy
    return logps, entropies


def pad_rows(rows: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad id lists on the right; return ids and validity, both (B, longest) int64."""
    ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    valid = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
    return ids.to(device), valid.to(device)
