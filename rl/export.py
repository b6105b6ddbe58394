"""Exporting a trained policy, and using it: `Retriever` needs neither trl nor vllm."""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch
from pydantic import ValidationError

from cuewalk.env import Expand, Question, Rank, RetrievalEnv, Stop, Trajectory, format_action
from cuewalk.env.render import INSTRUCTION, RENDERER
from cuewalk.memory import Entry, MemoryGraph
from cuewalk.memory.models import load_language_model, load_tokenizer, weights_digest
from cuewalk.rl.config import Config, config_tree, parse_config
from cuewalk.rl.data import rank_of
from cuewalk.rl.ranker import Ranker
from cuewalk.rl.reading import Reading
from cuewalk.rl.rollout import walk, walk_greedily
from cuewalk.rl.scoring import score_plainly
from cuewalk.rl.transcript import Chat, TranscriptError
from cuewalk.rl.vllm_sampler import TOLERANCE, SamplerError, Server, VLLMSampler

GRAMMAR = "1"
UNUSED: dict[str, Any] = {"evaluation": {}, "compare": {}, "warm_start": {}}  # those of older versions had other keys


class ExportError(ValueError):
    """Raised when there is nothing to export, or an exported policy can't be used here."""


def export_policy(run: str | Path, out: str | Path, *, merged: bool = True) -> Path:
    """Write a run's trained policy into a new directory.

    It holds `adapter/` (PEFT), `merged/` (a plain model, in the configured dtype), the tokenizer in both, `reader/`
    (PEFT) where one was trained, and `policy.json`: grammar and renderer version, configuration, digest of the base
    weights. Of a run that has no policy (yet), its order alone, for `Retriever.from_pretrained(…, order_only=True)`.

    An ExportError if the run has neither, or `out` is not empty, or can't be written: all of it, or nothing.
    """
    run, out = Path(run), Path(out)
    trained = (run / "trained" / "adapter_config.json").exists()
    if not trained and not (run / "ranker.json").exists():
        raise ExportError(f"no trained adapter and no order in {run}; train first with `cuewalk train --config …`")
    if out.exists() and any(out.iterdir()):
        raise ExportError(f"{out} is not empty; nothing was overwritten. Choose a new directory")
    from peft import PeftModel

    config = _config(json.loads((run / "config.json").read_text(encoding="utf-8"))["config"])
    ranker = None if config.env.order == "search" else Ranker.load(run / "ranker.json")
    tokenizer = load_tokenizer(config.model)
    base = load_language_model(config.model, config.dtype, device="cpu")
    data, sampling = replace(config.data, path=None), replace(config.sampling, server=None)
    # Without the places of this machine:
    own = replace(config, run_dir=Config.run_dir, memory_dir=Config.memory_dir, data=data, sampling=sampling)
    policy: dict[str, Any] = {"grammar": GRAMMAR, "renderer": RENDERER, "base": config.model,
                              "base_digest": weights_digest(base), "config": config_tree(own)}  # fmt: skip
    adapters = {"adapter": run / "trained"} if trained else {}
    if config.env.order == "reader" and config.reading.epochs:
        adapters["reader"] = run / "reader"
    model = base
    for name, path in adapters.items():  # the first is the active one
        if model is not base:
            model.load_adapter(str(path), name)
        model = PeftModel.from_pretrained(base, str(path), name) if model is base else model
        model.peft_config[name].base_model_name_or_path = config.model  # not this machine's path
    if trained:  # how likely an action is to this policy, by which a server is known to have it
        asked, said = (chat := Chat(tokenizer)).first(INSTRUCTION), chat.action("STOP")
        with torch.no_grad():
            rows = [torch.tensor(asked)], [torch.tensor(said)], [torch.ones(len(said)).bool()]
            (logps,), _ = score_plainly(model, *rows)
        policy["probe"] = {"asked": asked, "said": said, "logps": logps.tolist()}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
            new = Path(folder) / "policy"
            new.mkdir()
            if adapters:
                model.save_pretrained(new)  # each in a folder of its name,
                (new / "README.md").unlink()  # and an empty card
            if trained:
                tokenizer.save_pretrained(new / "adapter")
            if trained and merged:
                model.merge_and_unload().save_pretrained(new / "merged")
                tokenizer.save_pretrained(new / "merged")
            if ranker is not None:
                ranker.save(new / "ranker.json")
            (new / "policy.json").write_text(json.dumps(policy, indent=1) + "\n", encoding="utf-8")
            new.rename(out)
    except Exception as error:  # on a full disk tokenizers and safetensors raise no OSError
        raise ExportError(f"cannot write the policy to {out} ({error}); nothing of it was kept") from error
    return out


@dataclass(frozen=True)
class Retrieval:
    """What a retriever found: entries in order of entry, the walk that led there, and why it stopped."""

    entries: tuple[Entry, ...]
    trajectory: Trajectory | None  #: None where plain search answered instead.
    fallback: str | None = None  #: Why it did.

    @property
    def ending(self) -> str:
        """Return how the walk ended: `stopped`, `budget` or `malformed`; `search` where there was none."""
        return "search" if self.trajectory is None else self.trajectory.ending.value

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: memories with date, speaker and sources, the walk, its ending, and why search answered."""
        memories = [
            {"id": e.id, "date": e.time.isoformat(), "speaker": e.speaker, "sources": list(e.sources), "text": e.value}
            for e in self.entries
        ]
        walked = [
            {"action": step.text, "added": list(step.change.added), "bad": step.change.bad, "budget": step.budget}
            for step in (self.trajectory.steps if self.trajectory else ())
        ]
        return {"memories": memories, "walk": walked, "ending": self.ending, "fallback": self.fallback}


@dataclass
class Retriever:
    """A trained policy in use, greedy; or plain search, where there is none (`without_policy`).

    Safe to call from many threads: the model is used by one at a time, a server by all at once; a call reads its graph
    as it stands when it begins, whatever is added meanwhile.

    Example:
        >>> retriever = Retriever.from_pretrained("policy")  # doctest: +SKIP
        >>> retriever.retrieve(graph, "When did Ann adopt the dog?").entries  # doctest: +SKIP
    """

    model: Any  #: None where a server has it.
    chat: Chat | None  #: None without a policy.
    config: Config
    rank: Rank | None
    server: Server | None = None
    timeout: float = 60.0  #: Seconds that a call waits for the model while other threads use it.
    #: `search`: where a walk can't be finished, plain search answers, and the result says why. None: that is an error.
    fallback: Literal["search"] | None = None
    order_only: bool = False  #: Nothing is asked of the policy: the best candidates are taken, to the budget's end.
    _lock: Any = field(default_factory=Lock, repr=False, compare=False)

    @classmethod
    def without_policy(cls) -> "Retriever":
        """Return a retriever that only searches, for a first try."""
        return cls(None, None, Config(), None, fallback="search")

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        base: str | None = None,
        server: str | None = None,
        timeout: float = 60.0,
        fallback: Literal["search"] | None = None,
        order_only: bool = False,
    ) -> "Retriever":
        """Load an exported policy: the adapter on its base model, or the address of a server that has it.

        Args:
            path: A directory that `cuewalk export` wrote, or a hub id such as `owner/name`.
            base: Name or path of the base model, where it is not to be had under its own name here.
            server: Address of `vllm serve PATH/merged --served-model-name cuewalk`; here a reader alone is loaded.
            timeout: As the field; and seconds that a server may take for one request, which is tried three times.
            fallback: As the field; search gives as many entries as a walk may gather.
            order_only: As the field; what `env.order` is worth by itself. No server is asked then.

        An ExportError if the directory is no export, of another grammar or renderer, or the base's or the server's
        weights are not the right ones; a ModelError if the base can't be loaded; a SamplerError without the server.
        """
        path = _fetched(path)
        if not (path / "policy.json").is_file():
            raise ExportError(f"{path} is no exported policy: policy.json is missing. Make one with `cuewalk export`")
        try:
            policy = json.loads((path / "policy.json").read_text(encoding="utf-8"))
            theirs = {"grammar": policy["grammar"], "renderer": policy["renderer"]}
            name, digest, tree = policy["base"], policy["base_digest"], policy["config"]
        except (ValueError, KeyError, TypeError) as error:
            raise ExportError(f"{path}/policy.json is damaged ({error!r}); export the policy again") from error
        for key, ours in (("grammar", GRAMMAR), ("renderer", RENDERER)):
            if theirs[key] != ours:
                raise ExportError(
                    f"{path} speaks {key} {theirs[key]!r}, this version of cuewalk {ours!r}; use the version that "
                    f"exported it, or train again"
                )
        config = _config(tree)
        rank = rank_of(replace(config, model=base or name), path)
        if isinstance(rank, Reading) and weights_digest(rank.reader.model) != digest:
            raise ExportError(f"{path} was trained on other weights than {base or name!r} has here; pass base=")
        if order_only:
            return cls(None, None, config, rank, None, timeout, fallback, order_only=True)
        if not (path / "adapter").is_dir():
            raise ExportError(
                f"{path} holds an order without a policy: pass order_only=True, or train one and export it"
            )
        chat = Chat(load_tokenizer(str(path / "adapter")))
        if server is not None:
            asked = _checked(server, timeout, path, policy.get("probe"), config)
            return cls(None, chat, config, rank, asked, timeout, fallback)
        from peft import PeftModel

        model = load_language_model(base or name, config.dtype)
        if weights_digest(model) != digest:
            raise ExportError(
                f"{path} was trained on other weights than {base or name!r} has here; pass base= with the "
                f"right ones, or use its merged/ model"
            )
        model = PeftModel.from_pretrained(model, str(path / "adapter")).eval()
        return cls(model, chat, config, rank, None, timeout, fallback)

    def retrieve(
        self, graph: MemoryGraph, question: str, *, budget: int | None = None, price: float | None = None
    ) -> Retrieval:
        """Walk a graph for one question; `budget` and `price` may be given, else they are the configuration's.

        A price is for a policy trained with several (`prices`): a higher one asks for fewer entries. An ExportError
        if one is not allowed; without a fallback, a SamplerError if the server is gone or replies oddly, or the model
        stays busy for `timeout` seconds, a TranscriptError if the walk gets too long.
        """
        return self.retrieve_batch([(graph, question)], budget=budget, price=price)[0]

    async def aretrieve(self, graph: MemoryGraph, question: str, **rules: Any) -> Retrieval:
        """Do as `retrieve`, in a thread of its own."""
        return await asyncio.to_thread(self.retrieve, graph, question, **rules)

    def retrieve_batch(
        self, asked: Sequence[tuple[MemoryGraph, str]], *, budget: int | None = None, price: float | None = None
    ) -> list[Retrieval]:
        """Walk many, each a graph and a question, in lockstep: the same walks in less time."""
        if not asked:
            return []
        own = self.config.env
        if price is not None and own.price is None:
            raise ExportError(f"price = {price!r}: this policy was trained without prices, and is never told one")
        try:
            budget, price = own.budget if budget is None else budget, own.price if price is None else price
            rules = replace(own, budget=budget, price=price)
        except ValidationError as error:
            given = f"budget = {budget!r}" + (f", price = {price!r}" if price is not None else "")
            raise ExportError(f"{given}: {error.errors()[0]['msg']}") from error
        views = [(graph.snapshot(), text) for graph, text in asked]
        questions = [(graph, Question("question", graph.conversation.id, text)) for graph, text in views]
        try:
            walked = self._walk([RetrievalEnv(graph, one, rules, rank=self.rank) for graph, one in questions])
        except (SamplerError, TranscriptError) as error:
            if self.fallback is None:
                raise
            many = rules.k + rules.budget
            found = [[graph.entries[hit.entry] for hit in graph.search(text, many)] for graph, text in views]
            return [Retrieval(tuple(entries), None, str(error)) for entries in found]
        pairs = zip(views, walked, strict=True)
        return [Retrieval(tuple(graph.entries[e] for e in taken.working), taken) for (graph, _), taken in pairs]

    def _walk(self, envs: Sequence[RetrievalEnv]) -> list[Trajectory]:
        sampling = self.config.sampling
        if self.order_only:
            return [_take_best(env) for env in envs]
        if self.chat is None:
            raise SamplerError("no policy was given")
        if self.server is not None:
            sampler = VLLMSampler(self.server, self.chat.end, sampling.max_action_tokens, Path(), temperature=0.0)
            groups = walk([[env] for env in envs], sampler, self.chat, max_tokens=sampling.max_tokens)
            return [row.trajectory for (row,) in groups]
        if not self._lock.acquire(timeout=self.timeout):
            raise SamplerError(f"other threads used the model for {self.timeout} s; raise timeout, or ask in batches")
        try:
            return [row.trajectory for row in walk_greedily(envs, self.model, self.chat, sampling)]
        finally:
            self._lock.release()


def _config(tree: dict[str, Any]) -> Config:
    """Return what a policy needs of a configuration, that of an older version too."""
    for section, key in (("env", "first"), ("sampling", "groups")):  # left at their defaults by policies that had them
        tree.get(section, {}).pop(key, None)
    return parse_config(tree | UNUSED)


def _take_best(env: RetrievalEnv) -> Trajectory:
    """Take the candidates of the highest scores until the budget is spent."""
    env.reset()
    while env.state.ending is None:
        best = sorted(env.state.frontier, key=lambda shown: -shown[1].score)[: env.affordable]
        env.step(format_action(Expand(tuple(label for label, _ in best)) if best else Stop()))
    return env.trajectory()


def _fetched(path: str | Path) -> Path:
    """Return where a policy lies: the directory, or the one that a hub id was fetched to (no pickle among it)."""
    if Path(path).exists() or not isinstance(path, str) or path[:1] in "./~" or path.count("/") != 1:
        return Path(path)
    from huggingface_hub import snapshot_download

    plain = ("adapter/*.json", "adapter/*.safetensors", "adapter/*.txt", "adapter/*.jinja")
    kept = ["policy.json", "ranker.json", *plain, "reader/*.json", "reader/*.safetensors"]
    try:
        return Path(snapshot_download(path, allow_patterns=kept))
    except (OSError, ValueError) as error:  # what the hub raises is one of them
        raise ExportError(f"{path!r} is no directory here, and can't be fetched from the hub: {error}") from error


def _checked(address: str, timeout: float, path: Path, probe: dict[str, Any] | None, config: Config) -> Server:
    """Return a server that has this policy: it finds the exported action as likely as the export did."""
    start = f"Start `vllm serve {path}/merged --served-model-name cuewalk --dtype {config.dtype}`"
    if probe is None or config.sampling.stop_offset:
        raise ExportError(
            f"a server can't have {path}: it comes from an older version, or its sampling.stop_offset is not 0, which "
            f"a server can't add; export it again, or leave out server="
        )

    def read(reply: Any) -> list[float]:
        scores = reply["choices"][0]["prompt_logprobs"][-len(probe["said"]) :]
        return [at[str(id_)]["logprob"] for id_, at in zip(probe["said"], scores, strict=True)]

    server, prompt = Server(address, timeout, "cuewalk", start), [*probe["asked"], *probe["said"]]
    body = {"model": "cuewalk", "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
    off = (torch.tensor(server.ask("v1/completions", body, read)) - torch.tensor(probe["logps"])).abs().mean().item()
    if not off <= (allowed := TOLERANCE[getattr(torch, config.dtype)]):
        raise ExportError(
            f"the server at {address} has another model than {path}: log-probabilities of the same action differ by "
            f"{off:.4f} on average, {allowed} is allowed in {config.dtype}. {start}"
        )
    return server
