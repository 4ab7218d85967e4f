# Every target sets up what it needs: Python 3.11 or newer with venv, git and make are enough.
#   make run [SCENARIO=kimi-k2/ep8/prefill] [SOURCE=auto|live|replay|predict] [OUT=folder]
#   make test-gpu PYTHON=python3   uses that interpreter as it is, without .venv
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu make run   takes torch's CPU build (Linux, no GPU)

SHELL := /bin/bash
SCENARIO ?= kimi-k2/ep8/decode
SOURCE ?= auto
JOBS ?= 2
GPU_JOBS ?= 4
# The first Python that is new enough and can make an environment; a version manager's stand-in may exist and not run.
FIND_PYTHON = for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done
BASE_PYTHON := $(or $(PYTHON),$(shell $(FIND_PYTHON)),python3)
VENV_PYTHON := .venv/bin/python
# Targets that measure: an interpreter named by the caller is used as it is, because it has the right torch for the GPU.
GPU_PYTHON := $(or $(PYTHON),$(VENV_PYTHON))
# Other tests import what a machine with a GPU may lack (notebooks, plots).
GPU_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)
GPU_PATH := PYTHONPATH=$(CURDIR):$(CURDIR)/kernels$(if $(PYTHONPATH),:$(PYTHONPATH))
GPU_SETUP := $(if $(PYTHON),,setup)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup run test lab lint format notebooks browser test-gpu record bench tables nsight lock gallery readme clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup:
	@$(BASE_PYTHON) scripts/bootstrap.py

run: setup ## the main job: sweep, winners, tuning table and report of one scenario, into runs/
	@$(VENV_PYTHON) -m chord_lab tune $(SCENARIO) --source $(SOURCE) $(if $(OUT),--out $(OUT))

test: ## everything that needs no GPU, and lint; skips are counted by reason at the end
	@$(BASE_PYTHON) scripts/bootstrap.py --tritons
	@$(MAKE) --no-print-directory lint
	@$(VENV_PYTHON) -m pytest -n $(JOBS) -m "not browser"; status=$$?; \
	  $(VENV_PYTHON) -m pytest -m browser || status=$$?; exit $$status

lab: setup ## open the notebooks in JupyterLab on 127.0.0.1
	@$(VENV_PYTHON) -m chord_lab lab

lint: setup ## ruff, types, layers, stripped notebooks
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@git ls-files -z '*.ipynb' | xargs -0 -r .venv/bin/nbstripout --keep-id --verify

format: setup ## rewrite sources and notebooks the way lint wants them
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .
	@git ls-files -z '*.ipynb' | xargs -0 -r .venv/bin/nbstripout --keep-id

notebooks: setup ## execute every notebook without a browser
	@$(VENV_PYTHON) -m pytest -n $(JOBS) tests/notebooks

browser: setup ## drive JupyterLab in Chromium; screenshots in out/browser
	@$(VENV_PYTHON) -m pytest tests/browser

test-gpu: $(GPU_SETUP) ## tests that need a CUDA GPU
	@export $(GPU_PATH); $(GPU_PYTHON) -m pytest -m "gpu and not alone" $(GPU_TESTS) $(if $(shell $(GPU_PYTHON) -c "import xdist" 2>&1),,-n $(GPU_JOBS) --dist loadgroup --no-loadscope-reorder); \
	  status=$$?; $(GPU_PYTHON) -m pytest -m "gpu and alone" $(GPU_TESTS) || status=$$?; exit $$status

record: $(GPU_SETUP) ## measure again what data/ ships, on this machine's GPU
	@$(GPU_PATH) $(GPU_PYTHON) -m chord_lab record --out out/record

bench: $(GPU_SETUP) ## our kernels against the peers that are installed, on this machine's GPU
	@$(GPU_PATH) $(GPU_PYTHON) -m benchmarks.compare

tables: setup ## the kernel package's tuning tables, from the records and traffic in data/
	@$(VENV_PYTHON) -m chord_lab export data/nvidia_h200 --into-package
	@rm -rf out/tables && for mix in data/traffic/*.yaml; do \
	  $(VENV_PYTHON) -m chord_lab tune --source replay --data data/nvidia_h200 --traffic $$mix --into-package \
	    --out out/tables/$$(basename $$mix .yaml) || exit; done

nsight: $(GPU_SETUP) ## capture again what data/nsight ships, on this machine's GPU (needs ncu)
	@$(GPU_PATH) $(GPU_PYTHON) -m benchmarks.record_nsight

gallery: setup ## draw docs/gallery from the shipped records
	@$(VENV_PYTHON) -m scripts.gallery

readme: setup ## fill README's figures from the shipped records
	@$(VENV_PYTHON) -m scripts.readme

lock: ## resolve requirements.lock anew
	@$(BASE_PYTHON) -m venv .venv-lock && .venv-lock/bin/pip install -q uv
	@PATH="$(CURDIR)/.venv-lock/bin:$$PATH" $(BASE_PYTHON) scripts/lock.py

clean: ## remove .venv, caches and out/
	rm -rf .venv .venv-lock .venv.lock out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
