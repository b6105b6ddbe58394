"""Sampling with vLLM, in this process or on a server; it gets the adapter under a new name each step, never merged."""

import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import openai
import torch

from cuewalk.memory.models import resolve_model
from cuewalk.rl.config import Config
from cuewalk.rl.sampler import Allowed
from cuewalk.rl.scoring import score_plainly

#: Mean difference of log-probabilities that rounding explains, by the base weights' dtype (measured: .00001, .05).
TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 0.15}
START = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --logprobs-mode processed_logprobs"
REMEDY = f"Start `{START}` where it can read the run's directory, and the run again: it goes on where it was"
Completion = tuple[list[int], list[float]]  # sampled ids and their log-probabilities


class SamplerError(RuntimeError):
    """Raised when vLLM can't be used, can't be asked, or does not sample from the policy that is trained."""


def check_vllm(server: str | None, processes: int) -> None:
    """Make sure, before a run starts, that vLLM is there, in a version that was tried; a SamplerError if not."""
    if server is not None:
        version = Server(server).ask("version")
    elif find_spec("vllm") is None:
        raise SamplerError("vLLM is not installed: `pip install cuewalk[vllm]`, or set sampling.engine=transformers")
    elif processes > 1:
        raise SamplerError(
            f"{processes} processes need a server: start `{START}` and set sampling.server to its address"
        )
    else:
        import vllm

        version = vllm.__version__  # importlib.metadata does not know it of the CPU build
    if re.search(r"(?<![\d.])0\.(29|30)\.", version) is None:
        raise SamplerError(f"vLLM of version {version[:99]} was not tried: install vllm>=0.29,<0.31")


class InProcess:
    """vLLM in this process: no server to start, no child process to leave behind."""

    def __init__(self, config: Config, rank: int) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        length = config.sampling.max_tokens + config.sampling.max_action_tokens
        fast = {"enable_prefix_caching": True, "enforce_eager": not torch.cuda.is_available(), "dtype": config.dtype}
        lora = {"enable_lora": True, "max_lora_rank": max(8, 1 << (rank - 1).bit_length())}  # it takes powers of two
        memory = {"max_model_len": length, "gpu_memory_utilization": 0.3}  # of a GPU it shares with the trainer
        self._llm = LLM(resolve_model(config.model), logprobs_mode="processed_logprobs", **fast, **lora, **memory)
        self._adapter = ("", 0, "")

    def load(self, name: str, path: Path) -> None:
        """Take an adapter; there is room for one, so that the older one goes."""
        self._adapter = (name, self._adapter[1] + 1, str(path))

    def complete(self, prompts: Sequence[list[int]], seeds: Sequence[int], options: dict[str, Any]) -> list[Completion]:
        """Sample one completion a prompt with the adapter that was loaded last."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = [SamplingParams(seed=seed, detokenize=False, **options) for seed in seeds]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self._llm.generate(asked, params, lora_request=LoRARequest(*self._adapter), use_tqdm=False)
        found = [(list(reply.outputs[0].token_ids), reply.outputs[0].logprobs) for reply in done]
        return [(ids, [at[id_].logprob for id_, at in zip(ids, scores, strict=True)]) for ids, scores in found]


class Server:
    """A vLLM server, for runs alone: on a CPU vLLM applies an adapter also to rows of the base model beside it."""

    def __init__(self, address: str, timeout: float = 300.0, model: str = "", remedy: str = REMEDY) -> None:
        self._address, self._model, self._remedy = address.rstrip("/").removesuffix("/v1"), model, remedy
        key = os.environ.get("OPENAI_API_KEY") or "none"  # a local server wants no key, but the client does
        self._client = openai.OpenAI(base_url=self._address, api_key=key, timeout=timeout)

    def ask(self, path: str, body: dict[str, Any] | None = None, read: Callable[[Any], Any] = str) -> Any:
        """Return what `read` finds in the reply; a SamplerError if there is none, the server refuses, or it is odd."""
        try:
            if body is None:
                return read(self._client.get(path, cast_to=object))
            return read(self._client.post(path, cast_to=object, body=body))
        except (openai.OpenAIError, KeyError, TypeError, ValueError) as error:
            raise SamplerError(
                f"the server at {self._address} can't be asked for {path}, or does not reply as vLLM: "
                f"{type(error).__name__}: {error}. {self._remedy}"
            ) from error

    def load(self, name: str, path: Path) -> None:
        """Take an adapter, and forget the older one."""
        self.ask("v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        if self._model:
            self.ask("v1/unload_lora_adapter", {"lora_name": self._model})
        self._model = name

    def complete(self, prompts: Sequence[list[int]], seeds: Sequence[int], options: dict[str, Any]) -> list[Completion]:
        """Sample one completion a prompt with the adapter that was loaded last, all prompts at once."""

        def read(reply: Any) -> Completion:
            (choice,) = reply["choices"]
            return choice["token_ids"], choice["logprobs"]["token_logprobs"]

        # One request a prompt: in a request of many they share one seed, and a prompt's copies would act alike.
        same = {"model": self._model, "return_token_ids": True, **options}
        bodies = [{"prompt": prompt, "seed": seed, **same} for prompt, seed in zip(prompts, seeds, strict=True)]
        with ThreadPoolExecutor(64) as pool:
            return list(pool.map(lambda body: self.ask("v1/completions", body, read), bodies))


@dataclass(eq=False)
class VLLMSampler:
    """A `Sampler` that is kept for a whole run and handed new weights each step.

    It acts as a TransformersSampler; ids and log-probabilities are kept as vLLM gives them.
    """

    engine: InProcess | Server
    end: int
    max_action_tokens: int
    folder: Path  #: For the adapter alone, emptied each time; a server must be able to read it.
    temperature: float = 1.0
    seed: str = ""  #: With the step it decides what is sampled.
    margins: list[float] = field(default_factory=list)  #: Not told.
    tokens: int = 0
    _draw: random.Random = field(default_factory=random.Random)  #: The seeds of what is sampled.

    def hand_over(self, model: Any, step: int) -> None:
        """Give vLLM the model's adapter as it is now, and `check` it.

        The name is new each time: vLLM's prefix cache goes by the name, and would keep what older weights computed.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        path = self.folder.resolve() / f"cuewalk-{step}-{uuid4().hex}"
        model.save_pretrained(path, selected_adapters=["default"], save_embedding_layers=False)
        self._draw, self.tokens = random.Random(f"{self.seed}/{step}"), 0
        self.engine.load(path.name, path)
        self.check(model)

    def check(self, model: Any) -> None:
        """Score ids sampled after a prompt of several cache blocks; a SamplerError if the model's scores are others."""
        prompt = [7 * place % 500 % model.config.vocab_size for place in range(300)]
        ((ids, logps),) = self._complete([prompt], 16, [])
        rows = [torch.tensor(prompt)], [torch.tensor(ids)], [torch.ones(len(ids), dtype=torch.bool)]
        with torch.no_grad():
            (expected,), _ = score_plainly(model, *rows, self.temperature or 1.0)
        differences = (torch.tensor(logps) - expected.cpu()).abs()
        if not differences.mean() <= (allowed := TOLERANCE[model.dtype]):
            raise SamplerError(
                f"vLLM does not sample from the policy that is trained: log-probabilities of the same ids differ by "
                f"{differences.mean():.4f} on average, {differences.max():.4f} at most; in "
                f"{model.dtype} {allowed} on average is allowed. A server must have the run's --dtype: `{START}`"
            )

    def begin(self, prompts: Sequence[Sequence[int]], copies: int) -> None:
        """Give each prompt `copies` rows, side by side, in the order of the prompts."""
        self._rows = [list(prompt) for prompt in prompts for _ in range(copies)]
        self.tokens += sum(len(prompt) for prompt in prompts)

    def act(self, allowed: Sequence[Allowed] | None = None) -> tuple[list[list[int]], list[list[float]]]:
        """Sample one action for each row: its ids (with the end of turn, where it came) and log-probabilities."""
        if allowed is not None:
            raise ValueError("the action grammar needs a TransformersSampler: vLLM decodes freely")
        found = self._complete(self._rows, self.max_action_tokens, [self.end])
        self._rows = [row + ids for row, (ids, _) in zip(self._rows, found, strict=True)]
        self.tokens += sum(len(ids) - 1 for ids, _ in found)  # the last one counts with what follows it
        return [ids for ids, _ in found], [logps for _, logps in found]

    def observe(self, rows: Sequence[int], observations: Sequence[Sequence[int]]) -> None:
        """Keep only these rows (numbered as now), and append what the environment answered."""
        self._rows = [[*self._rows[row], *new] for row, new in zip(rows, observations, strict=True)]
        self.tokens += sum(1 + len(new) for new in observations)

    def _complete(self, prompts: Sequence[list[int]], limit: int, stop: list[int]) -> list[Completion]:
        # All that a model's own generation_config could set is set; `stop` alone ends an action.
        plain = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "logprobs": 0}
        options = {"temperature": self.temperature, "max_tokens": limit, "stop_token_ids": stop, **plain}
        found = self.engine.complete(prompts, [self._draw.getrandbits(31) for _ in prompts], options)
        for ids, logps in found:  # -9999 is how a server writes an impossible one
            if not 0 < len(ids) == len(logps) <= limit or not all(type(p) is float and p > -9999 for p in logps):
                raise SamplerError(f"vLLM gave the ids {ids} with log-probabilities {logps}, of at most {limit}")
        return found
