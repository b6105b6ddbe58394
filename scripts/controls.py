"""What a sceptic asks of GRPO: another training from the same warm start, for as long.

It takes the warm start of a finished run and writes a run directory of its own, which `cuewalk evaluate` measures as
any other (its policy `trained` is then the control); the same command again goes on where it ended.

  grpo      GRPO itself under other settings: an ablation, such as judge.preset=paper
  placebo   GRPO with its advantages shuffled over each step's rows: all of it but what was right
  rft       rejection sampling: the best trajectories of a group are imitated, the others count for nothing
  per_pick  GRPO with credit a pick: what was found from that pick on, less what the group's others found from there
  enumerated  groups of all first actions, STOP and each letter once, weighted by their probabilities: none is sampled
  more_sft  the warm start goes on with other walks, for as many steps as fit in the time that GRPO took

For example:

  python -m cuewalk.scripts.controls placebo --config configs/locomo_cpu.yaml --out checkpoints/locomo_cpu_placebo
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.nn.utils.rnn import pad_sequence

from cuewalk.env import Question, RetrievalEnv, Tasks
from cuewalk.env.tasks import select
from cuewalk.judges import TrajectoryJudge, covered
from cuewalk.memory import SentenceEncoder
from cuewalk.memory.models import load_tokenizer
from cuewalk.rl.adapters import load_adapter
from cuewalk.rl.config import Config, ConfigError, load_config
from cuewalk.rl.data import Memories, load_graphs, load_part
from cuewalk.rl.grpo import Group, Rollouts, WalkTrainer, prepare_arguments, train_grpo
from cuewalk.rl.order import training_rank
from cuewalk.rl.rollout import Row, Sampler
from cuewalk.rl.run import last_step, open_run
from cuewalk.rl.transcript import Chat
from cuewalk.rl.warm_start import teach_rows, warm_start
from cuewalk.scripts.calibrate import check_judge
from cuewalk.scripts.cli import MENDABLE
from cuewalk.scripts.results import read_metrics


class Placebo(WalkTrainer):
    """Each row gets the advantage of a row of its step, drawn without repetition."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)
        own = scored["advantages"]
        draw = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
        scored["advantages"] = own[torch.randperm(len(own), generator=draw).to(own.device)]
        return scored


class Rejecting(WalkTrainer):
    """The best rows of a live group have an advantage of 1, the others of 0 (RAFT, arXiv 2504.11343)."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)
        groups = scored["advantages"].view(-1, self.num_generations)
        best = groups.amax(1, keepdim=True)
        scored["advantages"] = ((groups == best) & (best > 0)).float().flatten()
        return scored


class PerPick(WalkTrainer):
    """Each id has the advantage of its pick; `Picks` knows them."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)
        names, credit = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), self.rollout_func.credit
        rows = [
            torch.tensor(credit.get((tuple(prompt[shown.bool()].tolist()), tuple(said[kept.bool()].tolist())), [0.0]))
            for prompt, shown, said, kept in zip(*(scored[name] for name in names), strict=True)
        ]
        width = scored["completion_ids"].shape[1]
        padded = pad_sequence([*rows, torch.zeros(width)], batch_first=True)[:-1]
        scored["advantages"] = padded.to(scored["advantages"].device)
        return scored


@dataclass
class Picks(Rollouts):
    """Rollouts that note each id's credit, by prompt and completion."""

    credit: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = field(default_factory=dict)

    def collect(self, questions: Sequence[Question], size: int, sampler: Sampler) -> list[Group]:
        """Walk and judge one group a question, and note what each pick brought."""
        groups = super().collect(questions, size, sampler)
        for group in groups:
            judged = [(row, own.reward) for row, own in zip(group.rows, group.verdicts, strict=True) if own is not None]
            told = pick_advantages([self.returns(row, reward) for row, reward in judged])
            for (row, _), advantages in zip(judged, told, strict=True):
                self.credit[tuple(row.prompt), tuple(row.completion)] = spread(row, advantages, self.chat.end)
        return groups

    def returns(self, row: Row, reward: float) -> list[float]:
        """Return what a walk earned from its first pick on, from its second, …, and after its last: (picks + 1,).

        A pick earns the share of the evidence it adds less the price; the rest of the reward is of the end.
        """
        walked, gold = row.trajectory, self.tasks.gold[row.env.question.id]
        price = self.config.judge.price if walked.price is None else walked.price
        wanted, held = set(gold.evidence), covered(row.env.graph, walked.first)
        earned = []
        for entry in walked.added:
            new = covered(row.env.graph, [entry]) & wanted - held
            held |= new
            earned.append(len(new) / len(wanted) - price)
        return [reward - sum(earned[:pick]) for pick in range(len(earned) + 1)]


class Weighing(WalkTrainer):
    """Each row's loss has its probability as weight: K π(a), for the gradient of Σ_a π(a) Q(a) over K rows a group."""

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **rest: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*arguments, **rest)
        if self._inputs is not None and self._scored is not None:
            chances = (found[0].detach() * self._scored).sum(1).exp()
            self._inputs["advantages"] = self._inputs["advantages"] * chances * self.num_generations
        return found


class Enumerated(Rollouts):
    """Groups of every action of the first state once, STOP and each letter alone, with a stop then: none is sampled.

    Only what is decided counts: whether to stop, and the letter. Where there are fewer letters than rows, the rest
    fill up: nothing of them is masked in, and they get no verdict.
    """

    def walk(self, envs: Sequence[Sequence[RetrievalEnv]], sampler: Sampler, seeds: Sequence[int]) -> list[list[Row]]:
        """Take the actions; nothing is asked of the sampler."""
        return [
            [self._row(env, place, seed) for place, env in enumerate(group)]
            for group, seed in zip(envs, seeds, strict=True)
        ]

    def _row(self, env: RetrievalEnv, place: int, seed: int) -> Row:
        prompt = self.chat.first(env.reset(seed=seed, options={"shuffle_labels": True})[0])
        labels = [label for label, _ in env.state.frontier]
        action = "STOP" if place == 0 or place > len(labels) else f"EXPAND {labels[place - 1]}"
        said = self.chat.action(action)
        if not env.step(action)[2]:
            env.step("STOP")
        decided = {0} if place == 0 else {0, len(said) - 2} if place <= len(labels) else set[int]()
        return Row(env, prompt, said, [int(at in decided) for at in range(len(said))], [0.0] * len(said))


def enumerating(config: Config) -> Config:
    """Return the settings under which enumerated groups have a row for every action, and an exact gradient."""
    if config.grpo.get("beta") or config.grpo.get("loss_type") in ("grpo", "sapo"):
        raise ConfigError(
            "config: enumerated groups have an exact gradient only without grpo.beta and with a grpo.loss_type that "
            "weighs tokens alike (dapo, the default); remove them"
        )
    size = config.env.frontier_cap + 1
    groups = max(1, int(config.grpo.get("per_device_train_batch_size", 32)) // size)
    grpo = config.grpo | {"num_generations": size, "per_device_train_batch_size": groups * size}
    return replace(config, grpo=grpo, sampling=replace(config.sampling, engine="transformers", server=None))


def pick_advantages(returns: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return each walk's returns less the mean of those that the group's walks have at the same pick."""
    longest = max(map(len, returns), default=0)
    alive = [[own[pick] for own in returns if pick < len(own)] for pick in range(longest)]
    means = [sum(values) / len(values) for values in alive]
    return [[value - means[pick] for pick, value in enumerate(own)] for own in returns]


def spread(row: Row, advantages: Sequence[float], end: int) -> list[float]:
    """Give each id the advantage of the pick it decides: a letter its own, an action's first ids that of its first.

    An action's end decides against one more pick, and so does STOP.
    """
    spread_out, pick, at = [0.0] * len(row.mask), 0, 0
    for step in row.trajectory.steps:
        while not row.mask[at]:
            at += 1
        until = next((place for place in range(at, len(row.mask)) if not row.mask[place]), len(row.mask))
        letters = len(step.change.added)
        last = until - 1 if letters and row.completion[until - 1] == end else until
        for place in range(at, until):
            own = min(letters, max(0, place - (last - letters)))
            spread_out[place] = advantages[pick + own]
        pick, at = pick + letters, until
    return spread_out


KINDS: dict[str, tuple[type[WalkTrainer], type[Rollouts]]] = {
    "grpo": (WalkTrainer, Rollouts),
    "placebo": (Placebo, Rollouts),
    "rft": (Rejecting, Rollouts),
    "per_pick": (PerPick, Picks),
    "enumerated": (Weighing, Enumerated),
}


def prepare(source: Path, config: Config) -> Path:
    """Open the control's run directory with the warm start and the ranker of the run it shares them with."""
    if not (source / "warm_start" / "adapter_config.json").exists():
        raise ConfigError(f"no warm start in {source}; train that run first with `cuewalk train --config …`")
    run = open_run(config)
    for name in ("warm_start", "walks", "reader", "blind"):
        if (source / name).exists() and not (run / name).exists():
            shutil.copytree(source / name, run / name)
    if (source / "ranker.json").exists():
        shutil.copy(source / "ranker.json", run)
    return run


def steps_for(source: Path) -> int:
    """Return how many steps of the warm start fit in the time that the same run's GRPO took."""
    path = source / "metrics.jsonl"
    steps, seconds = read_metrics(path) if path.exists() else ({}, {})
    if missing := {"warm_start", "grpo"} - set(seconds):
        raise ConfigError(
            f"{path} tells no time of {' or '.join(sorted(missing))}; finish that run with `cuewalk train`"
        )
    told = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rates = [row["train_steps_per_second"] for row in told if row["stage"] == "warm_start" and "train_runtime" in row]
    seconds_taken = sum(float(step["step_time"]) for step in steps.values())
    return round(seconds_taken * float(rates[-1]))  # right for runs that went on, too


def train_control(kind: str, source: Path, config: Config) -> Path:
    """Train a control from the warm start of `source` in the run directory of `config`, and return that."""
    config = enumerating(config) if kind == "enumerated" else config
    with PartialState(cpu=not torch.cuda.is_available()).main_process_first():
        run, chat = prepare(source, config), Chat(load_tokenizer(config.model))
    wants_more = 0 < last_step(run / "grpo") < prepare_arguments(config, run).max_steps
    if (run / "trained" / "adapter_config.json").exists() and not wants_more:
        return run
    check_judge(config)
    tasks: Tasks = select(load_part(config.data, "train"), evidence=True, clean=True)
    graphs = load_graphs(config, tasks.conversations, SentenceEncoder(config.encoder))
    memories = Memories(graphs, config.env, training_rank(config, run, tasks))
    model = load_adapter(config, run / "warm_start", trainable=True)
    if kind == "more_sft":
        steps, batch = steps_for(source), int(config.sft.get("per_device_train_batch_size", 4))
        more = replace(
            config, seed=config.seed + 1, warm_start=replace(config.warm_start, rows=steps * batch)
        )  # other letters, and each question from another k
        warm_start(more, run / "more_sft", model, chat, teach_rows(more, tasks, memories, chat))
        shutil.copytree(run / "more_sft" / "warm_start", run / "trained")
        return run
    trainer, rollouts = KINDS[kind]
    train_grpo(config, run, model, rollouts(config, tasks, memories, chat, TrajectoryJudge(config.judge)), trainer)
    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, train the control."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=(*KINDS, "more_sft"))
    parser.add_argument("--config", required=True, help="of the run whose warm start is shared, in its run_dir")
    parser.add_argument("--out", required=True, help="the control's own run directory")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to override")
    options, rest = parser.parse_known_args(arguments)
    if wrong := [part for part in rest if "=" not in part or part[0] == "-"]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    try:
        config = load_config(options.config, [*options.overrides, *rest])
        run = train_control(options.kind, Path(config.run_dir), replace(config, run_dir=options.out))
    except MENDABLE as error:
        parser.error(str(error))
    print(f"trained: {run}. Measure it: cuewalk evaluate --config {options.config} run_dir={run} …")


if __name__ == "__main__":
    main()
