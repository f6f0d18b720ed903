"""Against the real, unmodified SGLang, on the CPU, in its own environment (`make venv-sglang`)."""
