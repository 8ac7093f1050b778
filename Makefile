# `make demo` and `make test` set up all they need in .venv. They want a Python >= 3.12, which Megatron's wheels are for.
PYTHON ?= $(shell .ci/find-python)
NEMO_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.13*/bin/python) python3.13)
MEGATRON := 0.19.2
OTHERS := 0.17.1 0.18.2
CORE_ALONE := 0.16.1
# Releases of OpenTelemetry between the oldest and the newest whose OTLP exporters retry in a way of their own; the last
# of those that do so over HTTP in three modules is in `make test`.
OTLP := 1.44.0
OTHER_OTLP := 1.35.0 1.41.1 1.42.1
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find megatron_autoinstrument -name '*.py') pyproject.toml megatron_autoinstrument.pth README.md
PIP := $(BIN)/pip --disable-pip-version-check -q
# The tiny model gains nothing from compiling, or from many threads.
export TORCHDYNAMO_DISABLE := 1
export OMP_NUM_THREADS := 1
export CUDA_DEVICE_MAX_CONNECTIONS := 1

.PHONY: demo benchmark device-check test test-all test-unit test-processes test-megatron test-matrix lint clean

demo: $(VENV)/megatron $(VENV)/installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" MEGATRON_OTEL_SPAN_GROUPS=all MEGATRON_OTEL_RANK_STRATEGY=all_ranks \
	  megatron-autoinstrument show -- \
	  opentelemetry-instrument torchrun --nproc-per-node 2 fixtures/pretrain_tiny_gpt.py \
	  $$(cat fixtures/tiny_gpt.args) --pipeline-model-parallel-size 2 --global-batch-size 6

# The tables of docs/cost.md: a quarter of an hour, on a quiet machine.
benchmark: $(VENV)/megatron $(VENV)/installed $(VENV)/nemo-lens
	@python=$(VENV)/nemo-lens/bin/python; test -x $$python || python=$(BIN)/python; \
	  for part in machine per_call instructions; do PYTHONPATH=. $$python benchmarks/$$part.py && echo || exit 1; done
	@for part in machine processes; do $(BIN)/python benchmarks/$$part.py && echo || exit 1; done

# On one GPU, in ten minutes at most. Where there is no such virtual environment: python3 tests/device/check.py
device-check: $(VENV)/megatron $(VENV)/installed
	$(BIN)/python tests/device/check.py

# Real runs have two ranks and leave no core to others, so that they come one after the other.
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n 2

test: lint test-unit test-processes test-megatron

test-unit: $(VENV)/installed
	$(PYTEST) $(PARALLEL) tests/unit

# What takes processes of its own, and signals: no torch either, but a minute and a half.
test-processes: $(VENV)/installed $(VENV)/otel-oldest $(VENV)/vendors $(VENV)/otlp-$(OTLP)
	$(PYTEST) $(PARALLEL) tests/processes

test-megatron: $(VENV)/megatron $(VENV)/installed $(VENV)/otel-oldest $(patsubst %,$(VENV)/megatron-%,$(OTHERS) $(CORE_ALONE))
	$(PYTEST) tests/megatron

# All scenarios on every Megatron, and the unit tests on every Python. Two files choose their Megatrons themselves.
test-all: export SWEEP := all
test-all: test test-matrix $(patsubst %,$(VENV)/otlp-%,$(OTHER_OTLP))
	TEST_OTLP="$(patsubst %,$(CURDIR)/$(VENV)/otlp-%,$(OTHER_OTLP))" $(PYTEST) tests/processes/test_retries.py
	for version in $(OTHERS); do \
	  TEST_MEGATRON=$(CURDIR)/$(VENV)/megatron-$$version $(PYTEST) tests/megatron \
	    $(patsubst %,--ignore tests/megatron/test_%.py,versions own_loop) || exit 1; \
	done

# The unit tests on each supported Python that is here, with the oldest and the newest OpenTelemetry.
test-matrix:
	.ci/test-matrix

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .venv-matrix

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.12 found. Name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/tools: $(BIN)/python pyproject.toml
	$(PIP) install -U pip
	$(PIP) install --group test --group lint
	@touch $@

# The wheel itself, not an editable install: its .pth file is one of the ways in.
$(VENV)/installed: $(VENV)/tools $(SOURCES)
	$(PIP) install --upgrade .
	$(PIP) install --no-deps --force-reinstall .
	@touch $@

$(VENV)/megatron: $(VENV)/tools
	@echo "Installing torch and megatron-core $(MEGATRON): some minutes and 6 GB, once."
	$(PIP) install torch megatron-core==$(MEGATRON) triton psutil pyyaml six
	@touch $@

$(VENV)/megatron-%: $(VENV)/megatron
	$(PIP) install --no-deps --target $@ megatron-core==$*
	@touch $@

# Megatron's own telemetry, to compare with: it wants Python 3.13. Apart, as this package stands aside where it is on.
$(VENV)/nemo-lens: | $(BIN)/python
	@$(NEMO_PYTHON) -m venv $@ && $@/bin/pip --disable-pip-version-check -q install nemo-lens==0.1.0 opentelemetry-sdk \
	  opentelemetry-instrumentation opentelemetry-exporter-otlp-proto-grpc 'wrapt<3' || \
	  { rm -rf $@; echo "No nemo-lens 0.1.0, or no Python 3.13 for it: make NEMO_PYTHON=/path/to/python3.13 benchmark"; }

# Beside the newest, for PYTHONPATH: what opentelemetry-instrument was in the oldest supported release.
$(VENV)/otel-oldest: $(VENV)/tools
	$(PIP) install --target $@.new opentelemetry-distro==0.54b0 opentelemetry-exporter-otlp-proto-grpc==1.33.0 \
	  opentelemetry-exporter-otlp-proto-http==1.33.0 'wrapt<2' 'setuptools<80' 2>/dev/null
	@rm -rf $@ && mv $@.new $@

$(VENV)/otlp-%: $(VENV)/tools
	$(PIP) install --target $@.new opentelemetry-distro opentelemetry-sdk==$* opentelemetry-exporter-otlp-proto-grpc==$* \
	  opentelemetry-exporter-otlp-proto-http==$* 2>/dev/null
	@rm -rf $@ && mv $@.new $@

# Other people's packages that bring providers of their own, with the OpenTelemetry that they accept.
$(VENV)/vendors: $(VENV)/tools
	$(PIP) install --target $@.new arize-phoenix-otel logfire ddtrace opentelemetry-distro \
	  opentelemetry-exporter-otlp-proto-grpc 'wrapt<3' 2>/dev/null
	@rm -rf $@ && mv $@.new $@
