# Two commands do all set-up: `make demo` and `make test`. Needed: Linux, Python 3.11+ with venv, make, git.
# Environments and models are made once and kept in $LMKV_CACHE (default ~/.cache/lmkv).
PYTHON ?= python3
PORT ?= 8000
MODEL ?= smollm2-135m
ARGS ?=

# A recipe begins with the environment that it needs, which is made at that moment if it is missing.
DEV = python=$$($(PYTHON) -m tools.env dev)
ENGINE = python=$$($(PYTHON) -m tools.env vllm)
RIVALS = python=$$($(PYTHON) -m tools.env rivals)
SGLANG = python=$$($(PYTHON) -m tools.env sglang)
MODELS = smollm2-135m gemma3-270m tiny-llama tiny-gemma3 tiny-deepseek-v2
SGLANG_MODELS = smollm2-135m gemma3-270m tiny-llama tiny-deepseek-v2-dense tiny-mellum

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
# The code of this checkout, whichever one was last installed into the cached environment.
export PYTHONPATH := $(CURDIR)
# GiB of KV memory of an engine on a CPU: enough for 40,000 tokens of SmolLM2. No GPU build reads it.
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
serve serve-sglang: export LMKV_FILE_PATH ?= $(CURDIR)/build/kv
serve serve-sglang: export LMKV_FILE_CAPACITY ?= 10GiB
serve-sglang: export SGLANG_USE_CPU_ENGINE ?= 1

.PHONY: help demo demo-sglang demo-shared demo-prefill-decode serve serve-sglang test lint test-unit test-engine test-sglang
.PHONY: torture compat models models-sglang bench bench-rivals clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-20s %s\n", $$1, $$2 }' Makefile

demo: ## a real engine cold, warm from host memory, and after SIGKILL and a restart (ARGS="...")
	@$(ENGINE); model=$$($$python -m tools.models $(MODEL)); \
	$$python examples/demo_vllm.py --model "$$model" $(ARGS)

demo-sglang: ## the same with SGLang
	@$(SGLANG); model=$$($$python -m tools.models $(MODEL)); \
	$$python examples/demo_sglang.py --model "$$model" $(ARGS)

# SGLang's pair runs only where its environment was made before (make demo-sglang).
demo-shared: ## two engines and a Redis server: one computes, the other loads (ARGS="--redis-url ...")
	@$(ENGINE); model=$$($$python -m tools.models $(MODEL)); \
	sglang=$$($(PYTHON) -m tools.env --existing sglang); \
	$$python examples/demo_shared.py --model "$$model" $${sglang:+--sglang-python "$$sglang"} $(ARGS)

demo-prefill-decode: ## one engine prefills, another decodes, a proxy in front of both
	@$(ENGINE); model=$$($$python -m tools.models $(MODEL)); \
	$$python examples/prefill_decode.py --model "$$model" $(ARGS)

serve: ## an OpenAI-compatible server with lmkv on (PORT=8000 MODEL=smollm2-135m ARGS="...")
	@$(ENGINE); model=$$($$python -m tools.models $(MODEL)); \
	exec $$python -m vllm.entrypoints.cli.main serve "$$model" --served-model-name $(MODEL) \
	  --host 127.0.0.1 --port $(PORT) --enforce-eager --dtype float32 \
	  --kv-transfer-config '{"kv_connector": "LMKVConnector", "kv_role": "kv_both"}' $(ARGS)

# The flags are those of a machine without a GPU.
serve-sglang: ## the same with SGLang
	@$(SGLANG); model=$$($$python -m tools.models $(MODEL)); \
	exec $$python -m sglang.launch_server --model-path "$$model" --served-model-name $(MODEL) \
	  --host 127.0.0.1 --port $(PORT) --device cpu --attention-backend torch_native \
	  --sampling-backend pytorch --dtype float32 --max-total-tokens 16384 --enable-cache-report $(ARGS)

# Two at a time: an engine mostly waits for one core.
test: lint ## everything that has to pass
	$(MAKE) -j2 test-engine test-unit test-sglang

lint: ## ruff and mypy
	$(DEV); $$python -m ruff check .; $$python -m ruff format --check .; $$python -m mypy

test-unit: ## tests that need no engine and no torch (ARGS="-k name")
	$(DEV); $$python -m pytest tests $(ARGS)

test-engine: models ## tests with a real vLLM (ARGS="-k name")
	$(ENGINE); $$python -m pytest tests/engine $(ARGS)

test-sglang: models-sglang ## tests with a real SGLang (ARGS="-k name")
	$(SGLANG); $$python -m pytest tests/sglang --ignore tests/sglang/test_compat.py $(ARGS)

torture: ## every promise of docs/reliability.md by force, ~20 minutes (ARGS="--share 0.1 kill flips")
	$(DEV); $$python -m tests.torture $(ARGS)

bench-rivals: ## lmkv's Redis tier beside other clients on one server (ARGS="--rounds 3")
	@$(RIVALS); $$python -m benchmarks.redis_rivals $(ARGS)

compat: models models-sglang ## one end-to-end test per engine version, into docs/compatibility.md (ARGS="sglang 0.5.22")
	$(PYTHON) -m tools.compat $(ARGS)

models: ## the models of demo, tests and benchmarks
	@$(ENGINE); $$python -m tools.models $(MODELS)

models-sglang: ## the same for SGLang
	@$(SGLANG); $$python -m tools.models $(SGLANG_MODELS)

bench: ## measure everything; writes build/bench/*.json (fio must be installed)
	@$(ENGINE); model=$$($$python -m tools.models smollm2-135m); \
	$$python -m benchmarks.host_tier; \
	$$python -m benchmarks.file_tier; \
	$$python -m benchmarks.redis_tier; \
	$$python -m benchmarks.vllm_engine --model "$$model"
	@$(SGLANG); $$python -m benchmarks.sglang_storage

clean: ## remove what was built in this directory
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the cached environments and models too
	rm -rf "$${LMKV_CACHE:-$$HOME/.cache/lmkv}"
