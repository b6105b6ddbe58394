"""GRPO with TRL's GRPOTrainer through its public `rollout_func`.

One row a trajectory, scored inside the rollout: a group without signal is replaced before it costs a training step.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import _ForwardRedirection
from trl.trainer.utils import split_tensor_dict

from cuewalk.env import Ending, Question, RetrievalEnv, Tasks
from cuewalk.env.actions import BAD_REASONS
from cuewalk.judges import JudgeError, TrajectoryJudge, Verdict, covered, evidence_recall
from cuewalk.rl.config import Config, ConfigError, check_options
from cuewalk.rl.data import Memories
from cuewalk.rl.rollout import Row, Sampler, walk
from cuewalk.rl.run import MetricsLog, run_trainer, trainer_defaults
from cuewalk.rl.sampler import fitting_sampler
from cuewalk.rl.scoring import score_actions, score_plainly, shares_prompts
from cuewalk.rl.transcript import Chat
from cuewalk.rl.vllm_sampler import InProcess, Server, VLLMSampler

WEIGHT_CAP = 3.0  # of an importance weight, as in TRL: a token that the sampler took for unlikely must not rule a step
COUNTS = ("groups/all", "groups/live", "groups/replaced", "judge/failed")
DEAD_CAUSES = ("one_trajectory", "all_malformed", "solved_at_start", "nothing_reachable", "equal_rewards")
CLIPS = "one update a batch makes every ratio 1, so nothing is ever clipped"
CUTS = "it would cut the distribution that is trained; the rollout samples from all of it"
INERT = {
    **dict.fromkeys(("epsilon", "epsilon_high", "delta"), CLIPS),
    **dict.fromkeys(("top_p", "top_k", "min_p"), CUTS),
    "repetition_penalty": "it would change the distribution that is trained",
    "temperature": "set sampling.temperature",
    "max_completion_length": "set sampling.max_action_tokens and sampling.max_tokens",
    "mask_truncated_completions": "a cut action is bad text, counted and trained on",
    "num_iterations": "more than one update a batch is not supported: the shared forward pass needs ratio 1",
    "use_vllm": "set sampling.engine",
    **dict.fromkeys(("steps_per_generation", "generation_batch_size"), "set grpo.gradient_accumulation_steps"),
    **dict.fromkeys(("entropy_coef", "use_adaptive_entropy"), "the entropies that are logged carry no gradient"),
    "shuffle_dataset": "questions are always shuffled",
    "num_train_epochs": "set grpo.max_steps",
    "output_dir": "set run_dir",
    "seed": "set seed",
}


@dataclass(slots=True)
class Group:
    """One question's trajectories, with what the judge said of each (None where it failed)."""

    question: Question
    rows: list[Row]
    verdicts: list[Verdict | None]

    @property
    def live(self) -> bool:
        """Tell whether the rewards differ, so that there is something to learn."""
        rewards = [verdict.reward for verdict in self.verdicts if verdict is not None]
        return len(rewards) > 1 and max(rewards) - min(rewards) > 1e-9


@dataclass
class Rollouts:
    """What a training step needs: questions, graphs, gold, judge and sampler; called by TRL as `rollout_func`.

    A group whose rewards are all equal is replaced by another question's up to `sampling.replacements` times.
    What is dead then keeps its rows (TRL wants them), with nothing in the mask. Causes are logged of the first round.
    """

    config: Config
    tasks: Tasks
    memories: Memories
    chat: Chat
    judge: TrajectoryJudge
    log: dict[str, float] = field(default_factory=dict)
    step: int = 0
    vllm: VLLMSampler | None = None  #: Made at the first step, with `sampling.engine` vllm.

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return rows for TRL: prompt and completion ids, log-probabilities, mask, reward."""
        started = time.perf_counter()
        size = trainer.num_generations
        model = trainer.accelerator.unwrap_model(trainer.model)
        was_training = model.training
        model.eval()
        self.step = trainer.state.global_step
        draw = random.Random(f"{self.config.seed}/{self.step}/{trainer.accelerator.process_index}")
        sampling = self.config.sampling
        sampler = self.sampler(model, trainer, draw)
        by_id = {question.id: question for question in self.tasks.questions}
        asked = [by_id[prompt[0]["question_id"]] for prompt in prompts[::size]]
        groups, replaced = self.collect(asked, size, sampler), 0
        causes = Counter(self.cause(group) for group in groups if not group.live)
        tried = {question.id for question in asked}
        for _ in range(sampling.replacements):
            dead = [place for place, group in enumerate(groups) if not group.live]
            fresh = [question for question in self.tasks.questions if question.id not in tried]
            if not dead or not fresh:
                break
            others = draw.sample(fresh, min(len(dead), len(fresh)))
            replaced += len(others)
            tried |= {question.id for question in others}
            for place, group in zip(dead, self.collect(others, size, sampler), strict=False):
                groups[place] = group
        model.train(was_training)
        told = summarise(groups, causes, replaced)  # TRL logs means over the processes
        self.log = told | {name: trainer.accelerator.num_processes * told[name] for name in COUNTS}
        self.log |= {
            "rollout/seconds": (seconds := time.perf_counter() - started),
            "rollout/tokens": float(sampler.tokens),
            "rollout/tokens_per_second": sampler.tokens / seconds,
        }
        rows = [row for group in groups for row in group.rows]
        return {
            "prompt_ids": [row.prompt for row in rows],
            "completion_ids": [row.completion for row in rows],
            "logprobs": [row.logps for row in rows],
            "env_mask": [row.mask if group.live else [0] * len(row.mask) for group in groups for row in group.rows],
            "walk_reward": [None if v is None else v.reward for group in groups for v in group.verdicts],
        }

    def sampler(self, model: Any, trainer: Any, draw: random.Random) -> Sampler:
        """Return the configured engine with the policy's weights of this step."""
        sampling = self.config.sampling
        action = (self.chat.end, sampling.max_action_tokens)
        if sampling.engine == "transformers":
            generator = torch.Generator(model.device).manual_seed(draw.getrandbits(62))
            return fitting_sampler(model, sampling.max_tokens)(model, *action, sampling.temperature, generator)
        if self.vllm is None:
            rank, process = model.peft_config["default"].r, trainer.accelerator.process_index
            engine = Server(sampling.server) if sampling.server else InProcess(self.config, rank)
            folder, seed = Path(self.config.run_dir, "sampler", str(process)), f"{self.config.seed}/{process}"
            self.vllm = VLLMSampler(engine, *action, folder, sampling.temperature, seed)
        self.vllm.hand_over(model, trainer.state.global_step)
        return self.vllm

    def collect(self, questions: Sequence[Question], size: int, sampler: Sampler) -> list[Group]:
        """Walk and judge one group a question."""
        config = self.config
        # The letters hang on question and step alone: several processes show what one would.
        seeds = [random.Random(f"{config.seed}/{self.step}/{question.id}").getrandbits(31) for question in questions]
        rules = [config.training_rules(seed) for seed in seeds]
        envs = [[self.memories.env(*pair) for _ in range(size)] for pair in zip(questions, rules, strict=True)]
        walked = self.walk(envs, sampler, seeds)
        at_once = config.judge.llm.concurrency if config.judge.correctness == "llm" else 1
        with ThreadPoolExecutor(at_once) as pool:
            judged = [list(pool.map(self.verdict, rows)) for rows in walked]
        return [Group(*whole) for whole in zip(questions, walked, judged, strict=True)]

    def walk(self, envs: Sequence[Sequence[RetrievalEnv]], sampler: Sampler, seeds: Sequence[int]) -> list[list[Row]]:
        """Walk a question's group of environments, letters given out by its seed."""
        return walk(envs, sampler, self.chat, max_tokens=self.config.sampling.max_tokens, seeds=seeds)

    def walk_reward(self, walk_reward: list[float | None], log_metric: Callable[[str, float], None], **_: Any) -> Any:
        """Hand TRL the rewards that the rollout computed, and log what it saw."""
        for name, value in self.log.items():
            log_metric(name, value)
        return walk_reward

    def verdict(self, row: Row) -> Verdict | None:
        """Return the judge's verdict; None where the row only fills up its group, or, counted, where the judge failed.

        TRL leaves such a row out of its group.
        """
        if not any(row.mask):
            return None
        try:
            return self.judge.score(row.trajectory, row.env.graph, self.tasks.gold[row.env.question.id])
        except JudgeError:
            return None

    def cause(self, group: Group) -> str:
        """Return why a group's rewards are all equal, one of `DEAD_CAUSES`."""
        graph, gold = self.memories.graphs[group.question.conversation_id], self.tasks.gold[group.question.id]
        trajectories = [row.trajectory for row in group.rows]
        if len({tuple(step.text for step in trajectory.steps) for trajectory in trajectories}) == 1:
            return "one_trajectory"
        if all(t.ending is Ending.MALFORMED for t in trajectories):
            return "all_malformed"
        if evidence_recall(graph, trajectories[0].first, gold) == 1:
            return "solved_at_start"
        found = set().union(*(covered(graph, t.added) for t in trajectories))
        return "equal_rewards" if found & set(gold.evidence) else "nothing_reachable"


def summarise(groups: Sequence[Group], causes: Counter[str], replaced: int) -> dict[str, float]:
    """Return one step's numbers: reward parts, endings, action shares, bad actions, dead groups, diversity."""
    rows = [row.trajectory for group in groups for row in group.rows]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    steps = [step for trajectory in rows for step in trajectory.steps]
    kinds = Counter(step.kind for step in steps)
    bad = Counter(reason for trajectory in rows for reason in trajectory.bad)
    known = [verdict for verdict in verdicts if verdict is not None]
    parts = {name: [v.components[name] for v in known] for name in (known[0].components if known else ())}
    distinct = [len({tuple(s.text for s in row.trajectory.steps) for row in group.rows}) for group in groups]
    return {
        **{f"reward/{name}": sum(values) / len(values) for name, values in parts.items()},
        **{f"ended/{ending}": sum(t.ending is ending for t in rows) / len(rows) for ending in Ending},
        **{f"actions/{kind}": kinds[kind] / len(steps) for kind in ("expand", "refine", "stop", "bad")},
        **{f"bad/{reason}": bad[reason] / len(steps) for reason in BAD_REASONS},
        **{f"groups/dead_{cause}": float(causes[cause]) for cause in DEAD_CAUSES},
        "groups/live": float(sum(group.live for group in groups)),
        "groups/replaced": float(replaced),
        "groups/all": float(len(groups)),
        "groups/distinct_trajectories": sum(distinct) / len(distinct),
        "judge/failed": float(sum(any(row.mask) for group in groups for row in group.rows) - len(known)),
        "entries_added": sum(len(t.added) for t in rows) / len(rows),
    }


def importance_weights(trained: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return exp(trained - sampled), at most `WEIGHT_CAP`, of log-probabilities (B, T); 0 outside the mask."""
    return (trained - sampled).masked_fill(~mask, -torch.inf).exp().clamp(max=WEIGHT_CAP)


class WalkTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with private methods replaced, pinned by tests: the scoring of tokens, and the order of rows.

    Ours scores sampled tokens only, runs a group's prompt once, and skips rows without a sampled token that counts.
    """

    corrects = False  #: The sampler's log-probabilities are not the trainer's: each token's loss is weighted.
    _scored: torch.Tensor | None = None
    _inputs: dict[str, Any] | None = None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self._ordered = scored
        return scored

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        self._ordered = {}
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self.model.training and self._ordered:
            # TRL shuffled the rows: a group would be spread over micro-batches, and its prompt computed in each.
            parts = self.args.steps_per_generation
            self._buffered_inputs = split_tensor_dict(self._ordered, parts)
            inputs = self._buffered_inputs[self._step % parts]
        return inputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._scored = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        self._inputs = dict(inputs)
        loss: torch.Tensor = super()._compute_loss(model, self._inputs)
        self._scored = self._inputs = None
        return loss

    def _correct(self, inputs: dict[str, Any], logps: torch.Tensor, scored: torch.Tensor) -> None:
        """Weight the advantages token by token: TRL reads them after the scoring (its own way needs `use_vllm`)."""
        weights = importance_weights(logps, inputs["sampling_per_token_logps"], scored)
        inputs["advantages"] = inputs["advantages"].view(len(weights), -1) * weights  # (B, 1), or (B, T) of a control's
        differences = ((logps - inputs["sampling_per_token_logps"]) * scored).abs()
        sums = torch.stack([differences.sum(), weights.sum(), scored.sum()])[None]
        difference, weight, count = self.accelerator.gather(sums).sum(0).tolist()
        log, most = self._metrics["train"], self.accelerator.gather(differences.max()[None]).max()
        log["sampling/logp_difference_mean"].append(difference / max(count, 1))
        log["sampling/logp_difference_max"].append(most.item())
        log["sampling/weight_mean"].append(weight / max(count, 1))

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return log-probabilities and entropies, (B, logits_to_keep); 0 where no token counts."""
        rows = range(len(input_ids))
        prompt_mask, completion_mask = attention_mask[:, :-logits_to_keep], attention_mask[:, -logits_to_keep:]
        scored = completion_mask.bool() if self._scored is None else self._scored
        prompts = [input_ids[row, :-logits_to_keep][prompt_mask[row].bool()] for row in rows]
        lengths = completion_mask.sum(1).tolist()
        completions = [input_ids[row, -logits_to_keep:][: lengths[row]] for row in rows]
        masks = [scored[row, : lengths[row]] for row in rows]
        if nothing := not bool(scored.any()):  # every group is dead: the backward pass still wants a graph
            masks[0] = masks[0].clone()
            masks[0][0] = True
        inner = self.accelerator.unwrap_model(model)
        score = score_actions if shares_prompts(inner, self.max_completion_length) else score_plainly
        found = _ForwardRedirection()(model, inner, score, inner, prompts, completions, masks, self.temperature)
        whole = torch.zeros(scored.shape, device=input_ids.device)
        logps, entropies = (torch.cat(list(values)) for values in found)
        if nothing:
            logps, entropies = whole + 0.0 * logps.sum(), whole
        else:
            logps, entropies = whole.masked_scatter(scored, logps), whole.masked_scatter(scored, entropies)
        if self.corrects and self._inputs is not None:
            self._correct(self._inputs, logps.detach(), scored)
        return logps, entropies, None


def prepare_arguments(config: Config, run: Path) -> GRPOConfig:
    """Return TRL's arguments; a ConfigError if a setting is unknown or does nothing here."""
    check_options(config.grpo, GRPOConfig, "grpo")
    for key in config.grpo:
        if reason := INERT.get(key) or ("the rollout owns its engine" if key.startswith("vllm_") else ""):
            raise ConfigError(f"config: grpo.{key} has no effect here: {reason}; remove it")
    defaults = {
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
        "num_generations": 8,
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "max_steps": 20,
        "scale_rewards": "none",  # mean-centred, no std: Memora eq. 11
        "save_steps": 5,
        "save_total_limit": 2,
    }
    chosen = {**defaults, **config.grpo}
    size, batch = chosen["num_generations"], chosen["per_device_train_batch_size"]
    if batch % size:
        raise ConfigError(
            f"config: grpo.per_device_train_batch_size = {batch} must be a multiple of grpo.num_generations = {size}: "
            f"a group's rows are scored together"
        )
    fixed = {
        "temperature": config.sampling.temperature,
        "max_completion_length": config.sampling.max_tokens,
        "shuffle_dataset": False,  # question_order shuffles
        "steps_per_generation": chosen["gradient_accumulation_steps"],
    }
    return GRPOConfig(**{**trainer_defaults(run, "grpo", config), **chosen, **fixed})


def train_grpo(
    config: Config, run: Path, model: Any, rollouts: Rollouts, kind: type[WalkTrainer] = WalkTrainer
) -> None:
    """Train the model's adapter and save it as `run/trained`; goes on from the last checkpoint."""
    arguments = prepare_arguments(config, run)
    asked = question_order(rollouts.tasks.questions, arguments, config.seed)
    prompts = [[{"role": "user", "content": question.text, "question_id": question.id}] for question in asked]
    trainer = kind(
        model=model,
        args=arguments,
        reward_funcs=rollouts.walk_reward,
        rollout_func=rollouts,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=rollouts.chat.tokenizer,
        callbacks=[MetricsLog(run / "metrics.jsonl", "grpo")],
    )
    trainer.corrects = config.sampling.engine == "vllm"
    run_trainer(trainer, run / "trained")


def question_order(questions: Sequence[Question], arguments: GRPOConfig, seed: int) -> list[Question]:
    """Return the questions of all steps on all processes, shuffled anew each time round.

    The order is ours, in one epoch, because TRL's shuffling starts over where a run is resumed in a later epoch.
    """
    rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    needed = arguments.max_steps * rows // arguments.num_generations
    draw, rounds = random.Random(f"questions {seed}"), -(-needed // len(questions))
    return [question for _ in range(rounds) for question in draw.sample(questions, len(questions))][:needed]
