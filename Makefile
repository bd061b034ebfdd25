# Two commands do all set-up: `make demo` and `make test`. Needed: Python 3.11+ with venv, make, git.
# Environments and models are made once and kept in $LMKV_CACHE (default ~/.cache/lmkv).
PYTHON ?= python3
ARGS ?=

# Recursive on purpose: a target that does not use an environment does not make it.
DEV = $(shell $(PYTHON) -m tools.env dev)
ENGINE = $(shell $(PYTHON) -m tools.env vllm)
# The code of this checkout, whichever one installed lmkv into the cached environment last.
export PYTHONPATH := $(CURDIR)
