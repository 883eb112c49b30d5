# make demo: set up everything and train a small model on this machine.    make test: the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.ready
PIP = $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN) # of pytest
TIMES = 1
PYTEST = $(BIN)/python -m pytest -n $$(($(TIMES) * $(WORKERS))) --dist worksteal
KIND ?= cpu
unexport PYTHONDONTWRITEBYTECODE # where it is set, each worker compiles all tests at each start

.PHONY: help setup demo test-quick test test-all test-sample test-ci test-long test-kubernetes test-docker image-cpu image-gpu image-toolkit image-push promises strategies test-versions lint types format docs docs-serve dist bench clean

help:
	@sed -n 's/^# //p;s/^\([a-z-]*\):.*## \(.*\)/  make \1: \2/p' Makefile

setup: $(STAMP) ## virtual environment with the pinned dependencies

# Two steps: what the demo needs, then what tests, linters and pages need in the same environment.
# torch of PyPI brings CUDA, gigabytes. Without an NVIDIA GPU here it is PyTorch's wheel for CPUs, where its index can be reached.
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cloudtrain needs Python 3.11 or newer; set PYTHON, for example to python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables setuptools
	@test "$$(uname)" != Linux || command -v nvidia-smi >/dev/null || \
	  $(PIP) --no-deps --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu torch 2>/dev/null || true
	$(PIP) --no-build-isolation -e '.[train]'
	@touch $@

$(STAMP): $(DEMO)
	$(PIP) --no-build-isolation -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/|transformers/models/|v1beta1/|/vertexai/|/agentplatform/|plotly/validators' \
	  cloudtrain entrypoints $(VENV)/lib || true # on all cores, but for what is hardly imported; some packages hold files of Python 2
	@touch $@

demo: $(DEMO) ## train the quickstart on this machine and follow it
	$(BIN)/cloudtrain submit examples/quickstart/job.yaml --follow

test-quick: $(STAMP) ## tier 0: tests of decisions, which start no process and wait for nothing
	$(PYTEST) --tier 0 tests

test test-all test-sample test-ci: TIMES = 2 # half of their time is waiting, for platforms and processes
test: $(STAMP) ## tier 1: the quick tests and a real local process for each behaviour
	$(PYTEST) --tier 1 tests

test-all: $(STAMP) ## tier 2: contract suites on simulators, the console, the trainer's matrix, pages too
	$(PYTEST) --durations 100 --durations-min 2 --tier 2 tests

test-sample: $(STAMP) ## the tests of tier 3 that belong to what differs from the last landed commit (tests/sample.py)
	$(PYTEST) --durations 100 --durations-min 2 --tier sample tests

test-ci: $(STAMP) ## test-all and test-sample in one run, as .ci/run has them
	$(PYTEST) --durations 100 --durations-min 2 --tier ci tests

test-long: $(STAMP) ## tier 3: hosts with sshd and Slurm, scripts of third parties, long draws too, by a seed that it draws
	seed=$${CLOUDTRAIN_SEED:-$$($(BIN)/python -c 'import random; print(random.randrange(1 << 32))')}; \
	echo "CLOUDTRAIN_SEED=$$seed"; CLOUDTRAIN_SEED=$$seed $(PYTEST) --tier 3 tests

test-kubernetes: $(STAMP) ## the tests on the cluster that $$KUBECONFIG names; tests/backends/kubernetes/README.md lists what else they need
	@test -n "$$KUBECONFIG" || { echo "KUBECONFIG is not set: it names the cluster that the tests may use" >&2; exit 2; }
	$(BIN)/python -m pytest tests/backends/kubernetes/real_kubernetes.py

test-docker: $(STAMP) ## the tests in real containers: needs a running Docker engine and the image of images/build.sh
	CLOUDTRAIN_REQUIRE="docker,docker-registry,$(CLOUDTRAIN_REQUIRE)" $(BIN)/python -m pytest -n $(WORKERS) -m docker tests/backends/sagemaker tests/backends/test_keep.py tests/backends/results tests/backends/test_trainer_image.py tests/test_scripts_page.py

image-cpu: $(STAMP) ## the image of the shared trainer on CPUs, for sagemaker-local and for a registry of yours
	PYTHON=$(abspath $(BIN)/python) images/build.sh

image-gpu: $(STAMP) ## the same with torch for NVIDIA GPUs
	PYTHON=$(abspath $(BIN)/python) KIND=gpu images/build.sh

image-toolkit: $(STAMP) ## image-cpu with SageMaker's training toolkit (options.sagemaker.entry: toolkit)
	PYTHON=$(abspath $(BIN)/python) TOOLKIT=1 images/build.sh

image-push: ## push an image to a registry that docker is logged in to: make image-push TARGET=registry/name:tag [KIND=gpu]
	@test -n "$(TARGET)" || { echo "TARGET is not set: make image-push TARGET=registry/name:tag [KIND=gpu]" >&2; exit 2; }
	docker tag cloudtrain-train:$(KIND) "$(TARGET)"
	docker push "$(TARGET)"

promises: $(STAMP) ## run the tests of the laws and write docs/promises.md with their figures
	WORKERS=$(WORKERS) $(BIN)/python docs/promises.py --run

strategies: $(STAMP) ## every training strategy; writes docs/tables-evidence.md
	$(BIN)/python docs/strategies.py --run
	$(BIN)/python docs/own_strategies.py --run
	$(BIN)/python docs/generate.py

test-versions: $(STAMP) ## the shared trainer with older torch and transformers: builds environments of several GB in build/versions
	$(BIN)/python docs/versions.py --run
	$(BIN)/python docs/generate.py

lint: $(STAMP) ## ruff: rules and format; codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell *.md docs cloudtrain entrypoints examples

format: $(STAMP) ## ruff: correct what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

docs: $(STAMP) ## write the generated pages again and build the site into build/site
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

docs-serve: $(STAMP) ## show the site at http://127.0.0.1:8000, built again whenever a page changes
	$(BIN)/mkdocs serve

dist: ## build the wheel and the sdist into dist/ and run a script with each, in an environment of its own
	rm -rf dist build/try
	$(PYTHON) -m venv build/try/build
	build/try/build/bin/python -m pip install -q -c constraints.txt build
	build/try/build/bin/python -m build
	for file in dist/*; do \
		$(PYTHON) -m venv --clear build/try/run && build/try/run/bin/python -m pip install -q -c constraints.txt "$$file" && \
		folder=$$(mktemp -d) && echo 'print("trained")' >$$folder/train.py && \
		(cd $$folder && CLOUDTRAIN_HOME=$(CURDIR)/build/try/home $(CURDIR)/build/try/run/bin/cloudtrain submit train.py --follow) || exit 1; \
	done

bench: $(STAMP) ## every benchmark, one after the other
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean: ## remove what the targets above made
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
