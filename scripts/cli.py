"""The command `cuewalk`: from public data or your own to a policy in use; each subcommand's --help teaches it."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from cuewalk.env import DataError, RetrievalEnv
from cuewalk.env.render import plain
from cuewalk.env.tasks import PARTS, select
from cuewalk.judges import JudgeError, TrajectoryJudge
from cuewalk.memory import SentenceEncoder, StoreError, load_graph
from cuewalk.memory.endpoint import EndpointError
from cuewalk.memory.models import ModelError
from cuewalk.rl.config import ConfigError, load_config
from cuewalk.rl.data import load_graphs, load_part, rank_of
from cuewalk.rl.export import ExportError, Retriever, export_policy
from cuewalk.rl.transcript import TranscriptError
from cuewalk.rl.vllm_sampler import SamplerError
from cuewalk.scripts.baselines import run_scripted, searching_oracle
from cuewalk.scripts.calibrate import JUDGES, RIGHT, calibrate, check_judge, judge_of

DESCRIPTION = """Train a small language model to walk an agent's memory: expand, refine or stop, under a budget.

  cuewalk train    --config configs/demo.yaml     warm start and GRPO; goes on where it was stopped
  cuewalk evaluate --config configs/demo.yaml     every policy on the held-out conversations, one table
  cuewalk compare  --config configs/demo.yaml     every kind of system of the papers on the same questions, one table
  cuewalk export   checkpoints/demo policy/       adapter, merged model, policy.json, model card
  cuewalk retrieve policy/ checkpoints/memory/NAME "Where was it?"   memories, the walk, and why it stopped
  cuewalk serve    policy/ checkpoints/memory/NAME    the same for an agent, as an MCP server
  cuewalk build    --config configs/demo.yaml     the memories alone; --check FILE says what a file of yours lacks
  cuewalk download locomo                         public data sets, at a fixed commit, checked by digest
  cuewalk inspect  checkpoints/memory/NAME        what is in one; --query draws the graph around a question
  cuewalk play     --config configs/demo.yaml     walk a memory yourself, and see what a judge says
  cuewalk calibrate answer_f1 --config configs/demo.yaml     how often a judge accepts right and wrong answers
  cuewalk benchmark sample train                             speed, beside the usual way and beside the floor

Any setting can be overridden after the command: env.budget=4 grpo.max_steps=50 run_dir=checkpoints/mine
"""

EXAMPLES = {
    "build": ("--config configs/demo.yaml", "--check my-chats.jsonl"),
    "train": ("--config configs/demo.yaml", "--config configs/demo.yaml grpo.max_steps=50 run_dir=checkpoints/mine",
              "--config configs/locomo_cpu.yaml --processes 2"),
    "evaluate": ("--config configs/demo.yaml", "--config configs/locomo_cpu.yaml evaluation.part=val"),
    "compare": ("--config configs/demo.yaml --out checkpoints/comparison",
                "--config configs/locomo_cpu.yaml compare.questions=200",
                "--config configs/demo.yaml 'compare.systems=[top_k=8, pagerank, oracle]' compare.reader=smollm2-135m",
                "--join docs/results/comparison_locomo docs/results/comparison_synthetic"),
    "play": ("--config configs/demo.yaml", "--config configs/demo.yaml --question 3 env.budget=2"),
    "calibrate": ("answer_f1 --config configs/demo.yaml", "llm --config configs/demo.yaml judge.llm.model=my-model"),
    "benchmark": ("sample train", "search --out checkpoints/speed"),
    "download": ("locomo --to data",),
    "inspect": ('checkpoints/memory/NAME --query "Where was the trip?"',),
    "export": ("checkpoints/demo my-policy", "checkpoints/demo my-policy --push-to-hub owner/name"),
    "retrieve": ('my-policy checkpoints/memory/NAME "Where was the trip?" --budget 4 --json',
                 'search checkpoints/memory/NAME "Where was the trip?"'),
    "serve": ("my-policy checkpoints/memory/NAME",),
}  # fmt: skip

MENDABLE = (
    ConfigError, DataError, EndpointError, ExportError, JudgeError, ModelError, SamplerError, StoreError,
    TranscriptError,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that a user can mend are one line on stderr and exit status 2."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not ("overrides" in options and all("=" in part and part[0] != "-" for part in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes positional arguments from one place only; settings may stand in several
        options.overrides += rest
    try:
        return int(options.run(options) or 0)
    except MENDABLE as error:
        print(f"cuewalk: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="cuewalk", description=DESCRIPTION, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        name = run.__name__.strip("_")
        examples = "\n".join(["examples:", *(f"  cuewalk {name} {example}" for example in EXAMPLES[name])])
        command = commands.add_parser(name, help=text, description=text, epilog=examples, formatter_class=raw)
        command.set_defaults(run=run)
        return command

    build = add(_build, "build the memory graphs of all parts and say what is in them")
    build.add_argument("--check", metavar="FILE", help="only say what a file of yours holds and lacks for training")
    train = add(_train, "build memories, warm up on oracle walks, train with GRPO; resumable")
    evaluate = add(_evaluate, "measure all policies on the held-out part; writes evaluation.json, .md and plots")
    evaluate.add_argument(
        "--out", help="folder and name of the files, instead of run_dir/evaluation (evaluation_val of that part)"
    )
    train.add_argument("--processes", type=int, default=1, help="so many processes: one a GPU, or on the CPU (1)")
    compare = add(_compare, "measure every kind of system on the same questions; goes on where it was stopped")
    compare.add_argument("--out", default="checkpoints/comparison", help="folder and name of the files")
    compare.add_argument("--join", nargs="+", metavar="OUT", help="measure nothing: put these results into one")
    play = add(_play, "walk a memory in the terminal; type EXPAND A, REFINE words, STOP")
    play.add_argument("--question", type=int, default=0, help="its number among the validation questions")
    asked = add(_calibrate, "ask a judge about right and wrong answers made from the validation questions")
    asked.add_argument("judge", choices=JUDGES, help="whose acceptance is measured; llm: see judge.llm")
    asked.add_argument("--per-kind", type=int, default=50, help="answers of each kind at most (50)")
    for command in (build, train, evaluate, compare, play, asked):
        needed = command not in (build, compare)
        command.add_argument("--config", required=needed, help="a YAML file, such as configs/demo.yaml")
        command.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to override")
    timed = add(_benchmark, "measure speed beside the usual way and the floor; writes a table")
    timed.add_argument("parts", nargs="*", metavar="PART", help="sample train step env search build serve workers; job")
    timed.add_argument("--out", default="checkpoints/speed", help="folder and name of the files")
    fetched = add(_download, "download a public data set; goes on where it broke off")
    fetched.add_argument(
        "name", metavar="NAME", help="locomo, longmemeval (oracle), longmemeval_s, longmemeval_m, perltqa"
    )
    fetched.add_argument(
        "--to", metavar="DIR", help="the folder it goes into (CUEWALK_DATA, or data where that is unset)"
    )
    inspect = add(_inspect, "say what is in a memory, and draw it around a query")
    inspect.add_argument("directory", help="a folder with a memory.sqlite")
    inspect.add_argument("--query", help="draw the graph around what this finds")
    inspect.add_argument("--out", default="memory.png", help="the picture (memory.png)")
    inspect.add_argument("--samples", type=int, default=3, help="entries shown whole (3)")
    export = add(_export, "write a trained policy into a directory of its own")
    export.add_argument("run_dir", help="the run directory of `cuewalk train`")
    export.add_argument("out", help="a new directory")
    export.add_argument("--no-merged", action="store_true", help="leave out the merged model (the adapter is enough)")
    export.add_argument("--push-to-hub", metavar="OWNER/NAME", help="upload it too; a new repository is private")
    asking = add(_retrieve, "ask a memory one question, with a trained policy or by plain search")
    serving = add(_serve, "serve a memory to agents, over MCP on stdin and stdout; where a walk fails, search answers")
    for command in (asking, serving):
        command.add_argument("policy", help="what `cuewalk export` wrote, a hub id, or the word search: no policy")
        command.add_argument("memory", help="a folder with a memory.sqlite")
        who = command.add_mutually_exclusive_group()
        who.add_argument("--order-only", action="store_true", help="do not ask the policy: take the first of its order")
        who.add_argument("--server", help="address of `vllm serve POLICY/merged --served-model-name cuewalk`")
    asking.add_argument("question")
    asking.add_argument("--budget", type=int, help="what the walk may spend (that of the training)")
    asking.add_argument("--price", type=float, help="what an entry is to be worth, for a policy trained with prices")
    asking.add_argument("--json", action="store_true", help="print all of it as JSON")
    return parser


def _build(options: argparse.Namespace) -> int:
    if options.check:
        from cuewalk.scripts.check import check

        lines, ready = check(options.check)
        print(*lines, sep="\n")
        return 0 if ready else 2
    if not options.config:
        raise ConfigError("give --config FILE to build memories, or --check FILE to look at conversations of yours")
    config = load_config(options.config, options.overrides)
    encoder = SentenceEncoder(config.encoder)
    for part in PARTS:
        conversations = load_part(config.data, part).conversations
        for id_, graph in load_graphs(config, conversations, encoder).items():
            messages = len(graph.conversation.messages)
            print(f"{part:5} {id_}: {messages} messages, {len(graph.entries)} entries, {len(graph.anchors)} anchors")
    print(f"Each in a folder of {config.memory_dir}: its id, and a digest of data, settings and encoder.")
    return 0


def _download(options: argparse.Namespace) -> None:
    from cuewalk.scripts.download import describe, download

    folder = options.to or os.environ.get("CUEWALK_DATA") or "data"
    paths = download(options.name, folder)
    print(*paths, describe(options.name), sep="\n")
    if not os.environ.get("CUEWALK_DATA"):
        print(f"Set CUEWALK_DATA={Path(folder).resolve()}, or data.path, to use it.")


def _inspect(options: argparse.Namespace) -> None:
    from cuewalk.scripts.inspection import draw, report

    graph = load_graph(options.directory)
    print(report(graph, options.samples))
    if options.query:
        print(f"\nDrawn: {draw(graph, options.query, options.out)}")


def _play(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    tasks = select(load_part(config.data, "val"), evidence=True)
    if not 0 <= options.question < len(tasks.questions):
        raise DataError(f"--question {options.question}: there are {len(tasks.questions)}, from 0")
    question = tasks.questions[options.question]
    conversation = {question.conversation_id: tasks.conversations[question.conversation_id]}
    graph = load_graphs(config, conversation, SentenceEncoder(config.encoder))[question.conversation_id]
    gold, judge = tasks.gold[question.id], TrajectoryJudge(config.judge)
    rules, rank = config.env, None
    if (Path(config.run_dir) / "ranker.json").exists():
        rank = rank_of(config, Path(config.run_dir))
    elif rules.order != "search":
        print("No ranker was trained yet: the candidates come in search order.\n")
        rules = replace(rules, order="search")
    env = RetrievalEnv(graph, question, rules, rank=rank)
    shown, ended = env.reset(seed=config.seed)[0], False
    while not ended:
        print(shown)
        try:
            shown, _, ended, _, _ = env.step(input("> "))
        except EOFError:  # nobody is there any more: that keeps what was gathered
            shown, _, ended, _, _ = env.step("STOP")
    verdict = judge.score(env.trajectory(), graph, gold)
    best = judge.score(run_scripted(searching_oracle, env, gold), graph, gold)
    print(f"{shown}\n\nAnswer: {gold.answer}\nReward {verdict.reward:.3f} ({verdict.reason})")
    print(*(f"  {name:16}{value:+.3f}" for name, value in verdict.components.items()), sep="\n")
    print(f"The oracle, who knows where it lies: {best.reward:.3f}")


def _calibrate(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    tasks = select(load_part(config.data, "val"), evidence=True)
    for rate in calibrate(judge_of(options.judge, config, tasks), tasks, options.per_kind, config.seed):
        share = f"{rate.accepted / rate.n:.2f} ({rate.interval[0]:.2f} to {rate.interval[1]:.2f})" if rate.n else "none"
        print(f"{'right' if rate.kind in RIGHT else 'wrong'}  {rate.kind:14} accepted {share} of {rate.n}")


def _benchmark(options: argparse.Namespace) -> None:
    from cuewalk.scripts.benchmark import PARTS, benchmark

    if unknown := set(options.parts) - set(PARTS):
        raise ConfigError(f"unknown parts {sorted(unknown)}; choose from {', '.join(PARTS)}")
    benchmark(options.parts or [part for part in PARTS if part != "job"], Path(options.out))


def launch_command(processes: int, arguments: Sequence[str], gpus: bool) -> list[str]:
    """Return the command that starts `cuewalk train` so many times: accelerate's on GPUs, torchrun on the CPU.

    On a CPU `accelerate launch` starts one process, whatever it is asked for.
    """
    start = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    if gpus:
        start = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
        start += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [sys.executable, "-m", *start, "-m", "cuewalk.scripts.train", *arguments]


def _train(options: argparse.Namespace) -> int | None:
    if options.processes < 1:
        raise ConfigError(f"--processes {options.processes}: at least 1")
    if options.processes > 1:
        import torch

        gpus = torch.cuda.is_available()
        command = launch_command(options.processes, ["--config", options.config, *options.overrides], gpus)
        where = {} if gpus else {"ACCELERATE_USE_CPU": "true"}
        return subprocess.run(command, env=os.environ | where, check=False).returncode
    from cuewalk.rl.train import train

    config = load_config(options.config, options.overrides)
    check_judge(config)
    run = train(config)
    print(f"trained policy in {run}/trained; next: cuewalk evaluate --config {options.config}")
    return None


def _evaluate(options: argparse.Namespace) -> None:
    from cuewalk.scripts.evaluate import evaluate
    from cuewalk.scripts.report import same_questions, table, write_report
    from cuewalk.scripts.results import evaluation_name

    config = load_config(options.config, options.overrides)
    result, run = evaluate(config), Path(config.run_dir)
    out = Path(options.out or run / evaluation_name(config.evaluation.part))
    paths = write_report(result, run / "metrics.jsonl", out)
    print(table(same_questions(result["rows"])))
    if training := result["training"]:
        print(f"\nGRPO: {training['groups_live']} of {training['groups']} groups were live.")
    print("\nWritten:", *paths, sep="\n  ")


def _compare(options: argparse.Namespace) -> None:
    from cuewalk.scripts.compare_report import COST, FOUND, join_comparisons, known_columns, write_comparison
    from cuewalk.scripts.report import table

    if options.join:
        print("Written:", *join_comparisons([Path(part) for part in options.join], Path(options.out)), sep="\n  ")
        return
    if not options.config:
        raise ConfigError("give --config FILE to compare, or --join OUT OUT to put results into one")
    result, paths = write_comparison(load_config(options.config, options.overrides), Path(options.out))
    columns = FOUND | {key: COST[key] for key in ("entries", "context_tokens", "inference_tokens")}
    print(table(result["rows"], known_columns(columns, result["rows"])))
    if failed := sum(row["failed"] for row in result["rows"]):
        print(f"\n{failed} questions failed or are missing (see {options.out}.rows); start again to ask them anew.")
    print("\nWritten:", *paths, sep="\n  ")


def _export(options: argparse.Namespace) -> None:
    from cuewalk.scripts.publish import push_policy, write_card

    out = export_policy(options.run_dir, options.out, merged=not options.no_merged)
    write_card(Path(options.run_dir), out)
    print(f"exported to {out}; use it with cuewalk.rl.Retriever.from_pretrained({str(out)!r})")
    if options.push_to_hub:
        print(f"pushed to {push_policy(out, options.push_to_hub)}")


def _retriever(options: argparse.Namespace, fallback: Literal["search"] | None) -> Retriever:
    if options.policy == "search":
        if options.server or options.order_only:
            raise ConfigError("search asks no policy: leave out --server and --order-only, or name a policy")
        return Retriever.without_policy()
    asked = {"server": options.server, "fallback": fallback, "order_only": options.order_only}
    return Retriever.from_pretrained(options.policy, **asked)


def _serve(options: argparse.Namespace) -> None:
    try:
        from cuewalk.scripts.mcp_server import make_server
    except ImportError as error:
        raise ConfigError(f"serving needs the extra: pip install 'cuewalk[mcp]' ({error})") from error
    make_server(load_graph(options.memory), _retriever(options, "search")).run("stdio")


def _retrieve(options: argparse.Namespace) -> None:
    rules = {"budget": options.budget, "price": options.price}
    found = _retriever(options, None).retrieve(load_graph(options.memory), options.question, **rules)
    if options.json:
        print(json.dumps(found.as_dict(), indent=1))
        return
    for entry in found.entries:
        print(f"{entry.id} [{', '.join(map(plain, entry.sources))}]", *map(plain, entry.value.splitlines()), sep="\n  ")
    for step in found.trajectory.steps if found.trajectory else ():
        print(f"> {plain(step.text)}   ({step.change.bad or ', '.join(step.change.added) or 'nothing added'})")
    print(f"Ended: {found.ending}" + (f" ({found.fallback})" if found.fallback else ""))


if __name__ == "__main__":
    sys.exit(main())
