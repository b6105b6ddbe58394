"""The command `cuewalk`: build, train, evaluate, export."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cuewalk.env import DataError
from cuewalk.env.tasks import PARTS
from cuewalk.memory import SentenceEncoder, StoreError
from cuewalk.memory.models import ModelError
from cuewalk.rl.config import ConfigError, load_config
from cuewalk.rl.export import ExportError, export_policy
from cuewalk.rl.transcript import TranscriptError

DESCRIPTION = """Train a small language model to walk an agent's memory: expand, refine or stop, under a budget.

  cuewalk train    --config configs/demo.yaml     warm start and GRPO; goes on where it was stopped
  cuewalk evaluate --config configs/demo.yaml     every policy on the held-out conversations, one table
  cuewalk export   checkpoints/demo policy/       adapter, merged model, policy.json
  cuewalk build    --config configs/demo.yaml     the memories alone

Any setting can be overridden after the command: env.budget=4 grpo.max_steps=50 run_dir=checkpoints/mine
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that a user can mend are one line on stderr and exit status 2."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except (ConfigError, DataError, ExportError, ModelError, StoreError, TranscriptError) as error:
        print(f"cuewalk: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="cuewalk", description=DESCRIPTION, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("build", _build, "build the memory graphs of all parts and say what is in them"),
        ("train", _train, "build memories, warm up on oracle walks, train with GRPO; resumable"),
        ("evaluate", _evaluate, "measure all policies on the held-out part; writes evaluation.json, .md and plots"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--config", required=True, help="a YAML file, such as configs/demo.yaml")
        command.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to override")
        if name == "evaluate":
            command.add_argument("--out", help="folder and name of the files, instead of run_dir/evaluation")
        command.set_defaults(run=run)
    export = commands.add_parser("export", help="write a trained policy into a directory of its own")
    export.add_argument("run_dir", help="the run directory of `cuewalk train`")
    export.add_argument("out", help="a new directory")
    export.add_argument("--no-merged", action="store_true", help="leave out the merged model (the adapter is enough)")
    export.set_defaults(run=_export)
    return parser


def _build(options: argparse.Namespace) -> None:
    from cuewalk.rl.data import load_graphs, load_part

    config = load_config(options.config, options.overrides)
    encoder = SentenceEncoder(config.encoder)
    for part in PARTS:
        conversations = load_part(config.data, part).conversations
        for id_, graph in load_graphs(config, conversations, encoder).items():
            messages = len(graph.conversation.messages)
            print(f"{part:5} {id_}: {messages} messages, {len(graph.entries)} entries, {len(graph.anchors)} anchors")


def _train(options: argparse.Namespace) -> None:
    from cuewalk.rl.train import train

    run = train(load_config(options.config, options.overrides))
    print(f"trained policy in {run}/trained; next: cuewalk evaluate --config {options.config}")


def _evaluate(options: argparse.Namespace) -> None:
    from cuewalk.rl.evaluate import evaluate
    from cuewalk.rl.report import same_questions, table

    config = load_config(options.config, options.overrides)
    result, paths = evaluate(config, Path(options.out) if options.out else None)
    print(table(same_questions(result["rows"])))
    if training := result["training"]:
        print(f"\nGRPO: {training['groups_live']} of {training['groups']} groups were live.")
    print("\nWritten:", *paths, sep="\n  ")


def _export(options: argparse.Namespace) -> None:
    out = export_policy(options.run_dir, options.out, merged=not options.no_merged)
    print(f"exported to {out}; use it with cuewalk.rl.Retriever.from_pretrained({str(out)!r})")


if __name__ == "__main__":
    sys.exit(main())
