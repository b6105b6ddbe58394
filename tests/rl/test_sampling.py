"""Sampler and scorer against the plain model: the same numbers, whatever was cached, shared, padded or dropped."""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GraniteConfig, GraniteForCausalLM

from cuewalk.env import EnvConfig, RetrievalEnv
from cuewalk.memory.models import load_language_model
from cuewalk.rl.rollout import walk
from cuewalk.rl.sampler import PlainSampler, TransformersSampler, fitting_sampler
from cuewalk.rl.scoring import score_actions, score_plainly, shares_prompts
from cuewalk.rl.transcript import TranscriptError
from cuewalk.scripts.grammar import lawful


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_language_model(str(tiny_model), "float32", device="cpu")


def plain_logps(model, prompt, completion, temperature=1.0):
    """Score every completion token the simple way: one row, one forward pass."""
    ids = torch.tensor([[*prompt, *completion]])
    scores = (model(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)
    return scores[:-1].gather(1, ids[0, 1:, None]).squeeze(1)[len(prompt) - 1 :]


def uneven_rows(model, temperature=1.0, seed=0, kind=TransformersSampler):
    """Two prompts of unequal length, three copies, three turns; after each turn some rows end."""
    generator = torch.Generator().manual_seed(seed)
    ids = lambda n: torch.randint(5, 20000, (n,), generator=generator).tolist()  # noqa: E731
    prompts = [ids(40), ids(27)]
    sampler = kind(model, 2, 6, temperature, generator)
    sampler.begin(prompts, 3)
    rows = [{"prompt": prompts[i // 3], "ids": [], "mask": [], "logps": []} for i in range(6)]
    live = list(range(6))
    for turn in range(3):
        actions, scores = sampler.act()
        for row, said, score in zip(live, actions, scores, strict=True):
            rows[row]["ids"] += said
            rows[row]["mask"] += [1] * len(said)
            rows[row]["logps"] += score
        kept = [place for place, row in enumerate(live) if (row + turn) % 3]
        answers = [ids(5 + 7 * place) for place in kept]
        sampler.observe(kept, answers)
        live = [live[place] for place in kept]
        for row, answer in zip(live, answers, strict=True):
            rows[row]["ids"] += answer
            rows[row]["mask"] += [0] * len(answer)
            rows[row]["logps"] += [0.0] * len(answer)
    return rows, sampler


def tensors(rows):
    return (
        [torch.tensor(row["prompt"]) for row in rows],
        [torch.tensor(row["ids"]) for row in rows],
        [torch.tensor(row["mask"]).bool() for row in rows],
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_samplers_log_probabilities_are_the_models(model, temperature):
    rows, _ = uneven_rows(model, temperature)
    assert len({len(row["ids"]) for row in rows}) > 2  # unequal lengths, or the test shows nothing
    for row in rows:
        mask = torch.tensor(row["mask"]).bool()
        plain = plain_logps(model, row["prompt"], row["ids"], temperature)
        assert torch.tensor(row["logps"])[mask] == pytest.approx(plain[mask].detach(), abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_scorers_log_probabilities_are_the_samplers(model, temperature):
    rows, _ = uneven_rows(model, temperature)
    scored, entropies = score_actions(model, *tensors(rows), temperature)
    for row, logps, entropy in zip(rows, scored, entropies, strict=True):
        mask = torch.tensor(row["mask"]).bool()
        assert logps.detach() == pytest.approx(torch.tensor(row["logps"])[mask], abs=1e-4)
        assert len(entropy) == mask.sum() and (entropy >= 0).all()


def test_gradients_are_those_of_rows_computed_apart(model):
    rows, _ = uneven_rows(model)
    rows.append(rows[0])  # an identical trajectory: computed once, counted twice
    weights = torch.linspace(-1, 1, len(rows))
    grads = []
    for shared in (True, False):
        model.zero_grad()
        if shared:
            scored, _ = score_actions(model, *tensors(rows))
        else:
            scored = [plain_logps(model, row["prompt"], row["ids"])[torch.tensor(row["mask"]).bool()] for row in rows]
        sum(weight * logps.sum() for weight, logps in zip(weights, scored, strict=True)).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        scale = grads[1][name].abs().max()
        assert (grad - grads[1][name]).abs().max() <= 1e-5 * max(1.0, float(scale)), name


def test_prompts_are_computed_once_and_actions_token_by_token(model):
    rows, sampler = uneven_rows(model)
    prompts = 40 + 27
    # The last id of a trajectory is never computed: nothing is asked after it.
    assert sampler.tokens == prompts + sum(len(row["ids"]) - 1 for row in rows)


def test_a_group_needs_no_padding_and_groups_only_to_the_longest_of_them(model):
    sampler = TransformersSampler(model, 2, 6, temperature=0)
    sampler.begin([[5] * 40], 3)
    sampler.act([lambda ids, n=n: [9] if len(ids) < n else [2] for n in (1, 3, 5)])
    sampler.observe([0, 2], [[7] * 11, [7] * 30])
    sampler.act()
    assert sampler.padding == 0
    sampler.begin([[5] * 40, [5] * 37], 1)
    assert sampler.padding == 3


def test_no_gradient_reaches_the_layers_below_the_adapters(tiny_model):
    base = load_language_model(str(tiny_model), "float32", device="cpu")
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj", "down_proj"], layers_to_transform=[1]))
    reached = {}
    for number, layer in enumerate(base.get_decoder().layers):

        def keep(layer, given, out, number=number):
            reached[number] = out.requires_grad

        layer.register_forward_hook(keep)
    rows = [torch.tensor([5, 6, 7]), torch.tensor([8, 2]), torch.tensor([True, True])]
    score_actions(adapted, *([row] for row in rows))[0][0].sum().backward()
    assert reached == {0: False, 1: True}
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert trained and all(".layers.1." in name for name in trained)


def test_the_likeliest_action_is_greedy_and_needs_no_generator(model):
    sampler = TransformersSampler(model, 2, 3, temperature=0)
    sampler.begin([[5, 6, 7]], 2)
    (first, second), _ = sampler.act()
    assert first == second
    assert first[0] == int(model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax())
    with pytest.raises(ValueError, match="needs a generator"):
        TransformersSampler(model, 2, 3, temperature=1.0)


def test_an_action_is_cut_at_its_limit_and_ends_at_the_end_of_turn(model):
    sampler = TransformersSampler(model, 2, 4, temperature=0)
    sampler.begin([[5, 6, 7]], 1)
    assert len(sampler.act()[0][0]) <= 4
    sampler.begin([[5, 6, 7]], 1)
    assert sampler.act([lambda ids: [9] if len(ids) < 2 else [2]])[0] == [[9, 9, 2]]


def test_a_model_with_plain_attention_shares_prompts_and_one_that_looks_back_too_little_does_not(model, monkeypatch):
    assert shares_prompts(model, 2048)
    monkeypatch.setattr(model.config, "sliding_window", 512, raising=False)
    monkeypatch.setattr(model.config, "layer_types", ["full_attention", "sliding_attention"], raising=False)
    assert shares_prompts(model, 512)
    with pytest.warns(UserWarning, match=r"llama models can't share .* \(it sees 512 of 1024 tokens\): each row"):
        assert not shares_prompts(model, 1024)
    with warnings.catch_warnings(action="error"):  # said once
        assert not shares_prompts(model, 1024)


@pytest.fixture(scope="module")
def scaled(model):
    """A model whose logits are not its hidden states through its head: Granite divides them."""
    sizes = {key: getattr(model.config, key) for key in ("vocab_size", "hidden_size", "intermediate_size")}
    torch.manual_seed(0)
    return GraniteForCausalLM(
        GraniteConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, logits_scaling=3.0)
    ).eval()


def test_a_model_that_scales_its_logits_takes_the_plain_path_and_gets_its_own_numbers(scaled):
    with pytest.warns(UserWarning, match=r"granite models can't share .* \(its logits differ by"):
        assert fitting_sampler(scaled, 2048) is PlainSampler
    rows, _ = uneven_rows(scaled, 0.7, kind=PlainSampler)
    scored, entropies = score_plainly(scaled, *tensors(rows), 0.7)
    for row, logps, entropy in zip(rows, scored, entropies, strict=True):
        mask = torch.tensor(row["mask"]).bool()
        expected = plain_logps(scaled, row["prompt"], row["ids"], 0.7)[mask].detach()
        assert logps.detach() == pytest.approx(expected, abs=1e-5) and len(entropy) == mask.sum()
        assert torch.tensor(row["logps"])[mask] == pytest.approx(expected, abs=1e-4)


def test_both_samplers_draw_the_same_from_one_seed(model):
    shared, plain = (uneven_rows(model, kind=kind)[0] for kind in (TransformersSampler, PlainSampler))
    for row, other in zip(shared, plain, strict=True):
        assert (row["ids"], row["mask"]) == (other["ids"], other["mask"])
        assert row["logps"] == pytest.approx(other["logps"], abs=1e-4)


def test_a_walk_keeps_sampled_ids_and_masks_observations(model, chat, graph, question):
    rules = EnvConfig(k=1, budget=3, frontier_cap=3, new_lines=1)
    envs = [[RetrievalEnv(graph, question, rules) for _ in range(3)]]
    sampler = TransformersSampler(model, chat.end, 24, 1.0, torch.Generator().manual_seed(0))
    ((*rows,),) = walk(envs, sampler, chat, seeds=[7], max_tokens=2048, allow=lawful(chat, 24))
    assert len({tuple(row.prompt) for row in rows}) == 1  # one state, one prompt
    for row, env in zip(rows, envs[0], strict=True):
        assert len(row.completion) == len(row.mask) == len(row.logps)
        assert row.mask[-1] == 1
        said = []
        for position, sampled in enumerate(row.mask):
            if sampled:
                if position == 0 or not row.mask[position - 1]:
                    said.append([])
                said[-1].append(row.completion[position])
        assert [chat.read(ids) for ids in said] == [step.text for step in row.trajectory.steps]
        assert row.trajectory == env.trajectory()
        assert not row.trajectory.bad  # under the grammar every action is legal


def test_a_transcript_that_is_too_long_says_what_to_lower(model, chat, graph, question):
    sampler = TransformersSampler(model, chat.end, 24, temperature=0)
    with pytest.raises(TranscriptError, match="more than sampling.max_tokens = 50; lower env.frontier_cap"):
        walk([[RetrievalEnv(graph, question)]], sampler, chat, max_tokens=50)


@pytest.mark.slow
def test_parity_holds_for_the_real_model(graph):
    model = load_language_model("smollm2-135m", "float32", device="cpu")
    assert shares_prompts(model, 2048)
    rows, _ = uneven_rows(model)
    with torch.no_grad():
        scored, _ = score_actions(model, *tensors(rows))
    for row, logps in zip(rows, scored, strict=True):
        mask = torch.tensor(row["mask"]).bool()
        assert logps == pytest.approx(torch.tensor(row["logps"])[mask], abs=1e-4)
        assert plain_logps(model, row["prompt"], row["ids"])[mask].detach() == pytest.approx(logps, abs=1e-4)
