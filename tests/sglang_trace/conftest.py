"""Tests inside SGLang's Python: real model classes on the CPU, one rank at a time, without a server.

Run by `make test` as `.venv-sglang/bin/pytest tests/sglang_trace`. Importing SGLang takes longer than most tests here.
"""

import os

os.environ.update(
    SGLANG_USE_MESSAGE_QUEUE_BROADCASTER="0",  # it would wait for the other ranks
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
