"""An exported policy for other people: its model card, and the way to the hub."""

import json
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCardData

from cuewalk.memory.models import PACKAGED
from cuewalk.rl.export import ExportError

NON_COMMERCIAL = ("cc-by-nc-4.0", "these weights are for non-commercial use, as the data they were trained on")
LICENCES = {
    "synthetic": ("apache-2.0", "conversations that come with Cuewalk (Apache-2.0)"),
    "locomo": (NON_COMMERCIAL[0], f"LoCoMo (CC BY-NC 4.0): {NON_COMMERCIAL[1]}"),
    "perltqa": (NON_COMMERCIAL[0], f"PerLTQA (CC BY-NC 4.0): {NON_COMMERCIAL[1]}"),
    "longmemeval": ("mit", "LongMemEval (MIT; its filler sessions come from ShareGPT and UltraChat)"),
}
"""What a policy was trained on (`data.source`) -> the licence that follows for its weights, and a note."""

MEASURES = ("n", "recall_at_8", "recall_at_300t", "reward", "entries", "context_tokens")
SHOWN = ("encoder", "env", "judge", "reading", "warm_start", "sampling", "grpo", "sft", "lora")

CARD = """---
{front}
---

# {title}

A policy that walks an agent's memory, trained with Cuewalk: given a question and a budget it expands along links,
refines the query, or stops.

## Use

```python
from cuewalk.memory import load_graph
from cuewalk.rl import Retriever

graph = load_graph("path/to/a/memory")  # made by `cuewalk build`, or cuewalk.memory.save_graph
found = Retriever.from_pretrained("{where}").retrieve(graph, "When did Ann adopt the dog?")
print([(entry.time, entry.sources, entry.value) for entry in found.entries], found.ending)
```

It needs the action grammar {grammar}, the renderer {renderer} and the base weights with the digest `{digest}`: others
are refused. {base}

## Data and licence

Trained on {data}. The base model's own licence holds too.

## Results

{results}

## Configuration

```yaml
{config}
```
"""


def write_card(run: Path, policy_dir: Path) -> Path:
    """Write `README.md` into an exported policy: licences, results of the run's `evaluation.json`, configuration.

    No folder of this machine is named in it.
    """
    policy = json.loads((policy_dir / "policy.json").read_text(encoding="utf-8"))
    base, tree = policy["base"], policy["config"]
    source = tree["data"]["source"]
    hub = PACKAGED[base][2] if base in PACKAGED else base
    local = hub.count("/") != 1 or Path(hub).exists()
    licence, note = LICENCES.get(source, (None, "conversations of its maker's, whose terms are for its maker to state"))
    if base not in PACKAGED and licence == "apache-2.0":
        licence = None  # the base may allow less
    front = ModelCardData(
        base_model=None if local else hub,
        library_name="peft",
        pipeline_tag="text-generation",
        license=licence,
        tags=["cuewalk", "agent-memory", "retrieval", "grpo", "lora"],
    )
    told = "Its base model is a local folder: pass `base=` with yours." if local else f"Its base model is {hub}."
    shown = {key: tree[key] for key in SHOWN}
    shown["judge"] = {key: value for key, value in shown["judge"].items() if key not in ("llm", "reader")}
    card = CARD.format(
        front=front.to_yaml(), title=policy_dir.name, where=policy_dir.name, grammar=policy["grammar"],
        renderer=policy["renderer"], digest=policy["base_digest"][:16], base=told, data=note,
        results=_results(run / "evaluation.json"), config=yaml.safe_dump(shown, sort_keys=False).strip(),
    )  # fmt: skip
    path = policy_dir / "README.md"
    path.write_text(card, encoding="utf-8")
    return path


def _results(path: Path) -> str:
    """Return an evaluation's rows as a Markdown table, with the command and commit that made them."""
    if not path.exists():
        return "Not measured yet: `cuewalk evaluate` writes them, and the next `cuewalk export` shows them here."
    found = json.loads(path.read_text(encoding="utf-8"))
    data = found["data"]
    rows = [["policy", *MEASURES], ["---"] * (1 + len(MEASURES))]
    rows += [[row["policy"], *(_number(row.get(name)) for name in MEASURES)] for row in found["rows"]]
    made = f"`{found['command']}`, commit {found['commit']}, {data['dataset']}, {data['split']} ({data['n']} questions)"
    return "\n".join([f"{made}:", "", *(f"| {' | '.join(row)} |" for row in rows)])


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def push_policy(policy_dir: Path, repository: str) -> str:
    """Upload an exported policy to the hub, and return its address; a new repository is private at first.

    An ExportError if the hub refuses, or can't be reached.
    """
    api = HfApi()
    try:
        address = str(api.create_repo(repository, private=True, exist_ok=True))
        api.upload_folder(repo_id=repository, folder_path=policy_dir, commit_message="A policy trained with Cuewalk")
    except (OSError, ValueError) as error:  # what the hub raises is one of them
        raise ExportError(
            f"{policy_dir} is written, but could not be pushed to {repository!r}: {error}. Log in with "
            f"`hf auth login`, and push it with `hf upload {repository} {policy_dir}`"
        ) from error
    return address
