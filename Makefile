# Everything from a fresh checkout; needs make, Python 3.11 or later and a C compiler.
#
#   make serve     run a broker with deploy/quickstart.toml        ARGS="--amqp-port 5673"
#   make test      the tests that a change must pass, in 8 minutes; or those of files or folders    ARGS="tests/partition"
#   make test-changed  those that what was changed since main can reach, in their own process  ARGS="--since HEAD~3"
#   make test-landing  the longer ones, with SDKs and Spark where they are installed, which .ci/run has as well
#   make test-all  all tests with all examples, and once more without the extension
#   make test-one-process  the tests that start a broker, with all of it in one process
#   make lint      formatting, lint, types
#   make bench     the broker beside RabbitMQ and Artemis          bench/README.md says what it needs
#   make terminal  record the terminal of the README: a broker is killed and loses nothing
#   make scaling   the cost of a message with more workers and gateways, and a model of it
#   make model     the model tests, each with many examples       EXAMPLES=20000
#   make structure  modules by folder, longest functions, circles of imports
#   make dead-code  unused code; make coverage  code that no test runs    ARGS="tests/partition"
#   make long-runs  lists what runs for minutes or hours: kills, full disks, hostile peers, fuzzing
#   make image     the steps of the Dockerfiles in a clean Debian root; needs root and debootstrap
#   make lock      newer versions, with hashes, of all that the images install
#   make pipeline-demo  a broker under load and kill -9, and the jobs over its journal, with planted faults; needs Java
#   make tools     all that the longer tests need, with the SDKs of five languages
#   make spark     also install Spark and the jobs, for tests/pipeline; they need Java 17 or later
#   make spark-wheel  pyspark-peeklock in dist/, for clusters that bring their own Spark
#   make install   only make .venv, with the command peeklock in it
#   make clean     remove what these made, but no data of brokers

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3,$(shell command -v $(name))))
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCH_INSTALLED := $(VENV)/.bench-installed
SPARK_PACKAGES := $(VENV)/.spark-packages
SPARK_INSTALLED := $(VENV)/.spark-installed
COMPILED := $(VENV)/.compiled
EXTENSION := protocol/_native.abi3.so
CONFIG ?= deploy/quickstart.toml
ARGS ?=
EXAMPLES ?= 2000
OF_BROKERS := $(addprefix tests/,end_to_end sessions forwarding operations client_commands protocol_client crash_ledger)

unexport PYTHONDONTWRITEBYTECODE # else each process of the tests compiles all of them again

.DEFAULT_GOAL := help
.PHONY: help install spark spark-packages spark-wheel tools pipeline-demo serve test test-landing test-all test-changed test-one-process lint bench terminal scaling model lock image structure dead-code coverage clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(EXTENSION)

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo 'Peeklock needs Python 3.11 or later: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Peeklock needs Python 3.11 or later, $(PYTHON) is older: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo '$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv' >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@echo 'Installing Peeklock in $(VENV), which takes about half a minute'
	$(BIN)/python -m pip install --quiet --editable . --group dev || \
		{ echo 'If something did not compile: on Debian, apt install gcc python3-dev' >&2; exit 1; }
	$(BIN)/python -m compileall -q broker protocol storage # else the first start compiles them, which takes a second
	@touch $@

# Made by the installation as well; here it is made anew when a source has changed.
$(EXTENSION): $(INSTALLED) $(wildcard protocol/native/*.[ch]) protocol/native/build.py
	$(BIN)/python protocol/native/build.py
	@touch $@

serve: $(EXTENSION)
	@exec $(BIN)/peeklock serve --config $(CONFIG) $(ARGS)

# Tests of brokers mostly wait, so several run on each processor: see tests/conftest.py.
PYTEST := $(BIN)/python -m pytest --numprocesses auto

# One process compiles the tests, in place of all of them at once.
$(COMPILED): $(EXTENSION)
	$(BIN)/python -m pytest --collect-only -q >/dev/null
	@touch $@

test: $(COMPILED)
	@$(BIN)/python -m tests.tools
	$(PYTEST) $(or $(ARGS),--tier change)

test-landing: $(COMPILED)
	$(PYTEST) --tier landing $(ARGS)

test-all: $(COMPILED)
	@$(BIN)/python -m tests.tools
	PEEKLOCK_TEST_STARTS=whole PEEKLOCK_TEST_EXAMPLES=all $(PYTEST) $(ARGS)
	PEEKLOCK_PURE=1 $(PYTEST) $(ARGS)

test-changed: $(EXTENSION)
	$(BIN)/python -m tests.changed $(ARGS)

test-one-process: $(EXTENSION)
	PEEKLOCK_TEST_WORKERS=0 $(BIN)/python -m pytest $(or $(ARGS),$(OF_BROKERS))

lint: $(EXTENSION)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BENCH_INSTALLED): $(EXTENSION)
	$(BIN)/python -m pip install --quiet --group bench
	@touch $@

spark: $(SPARK_INSTALLED)

spark-packages: $(SPARK_PACKAGES)

# Only what the extras ask for: Peeklock is there, and may be in use.
EXTRAS := import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	print(*extras["spark"], *extras["jobs"], sep="\n")
$(SPARK_PACKAGES): $(EXTENSION)
	$(BIN)/python -c '$(EXTRAS)' | $(BIN)/python -m pip install --quiet --requirement /dev/stdin
	@touch $@

$(SPARK_INSTALLED): $(SPARK_PACKAGES)
	-@$(BIN)/peeklock jobs prepare # jobs are slower without it, and say themselves if there is no Java
	@touch $@

spark-wheel: $(INSTALLED)
	cd pipeline && ../$(BIN)/python -m hatchling build -t wheel -d ../dist

# kubectl builds the manifests of deploy/kubernetes. Where there is none, or one as old as Debian 12's, kustomize does.
tools: $(SPARK_PACKAGES) $(BENCH_INSTALLED)
	kubectl version --client 2>/dev/null | grep -qE 'Kustomize Version: v([5-9]|[0-9]{2})\.' || \
		GOBIN="$$PWD/$(BIN)" go install sigs.k8s.io/kustomize/kustomize/v5@v5.0.3
	-$(BIN)/python tests/interop/sdks.py # the tests try again what fails

pipeline-demo: $(SPARK_INSTALLED)
	$(BIN)/python -m tests.pipeline.demo $(ARGS)

bench: $(BENCH_INSTALLED)
	$(BIN)/python -m bench.run $(ARGS)

terminal: $(EXTENSION)
	$(BIN)/python -m bench.terminal $(ARGS)

scaling: $(EXTENSION)
	$(BIN)/python -m bench.scaling $(ARGS)

model: $(EXTENSION)
	PEEKLOCK_MODEL_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -v tests/*/test_*_model.py $(ARGS)

structure: $(EXTENSION)
	$(BIN)/python bench/structure.py

dead-code: $(EXTENSION)
	$(BIN)/vulture

coverage: $(EXTENSION)
	$(BIN)/coverage erase
	-PEEKLOCK_TEST_STARTS=whole $(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# What the images install, with the hashes of all files that may be downloaded.
LOCK = $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header
lock: $(EXTENSION)
	$(BIN)/python -m pip install --quiet uv
	$(LOCK) pyproject.toml -o deploy/requirements.lock
	$(LOCK) --no-annotate deploy/build.in -o deploy/build.lock
	$(LOCK) --no-annotate --extra spark --extra jobs pyproject.toml -o deploy/spark.lock

image: $(EXTENSION)
	PEEKLOCK_BUILD_IMAGE=1 $(BIN)/python -m pytest tests/deployment/test_image.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis tests/interop/.build
	find broker protocol storage pipeline bench tests -name __pycache__ -type d -prune -exec rm -rf {} +

include tests/long-runs.mk
