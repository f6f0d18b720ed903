"""What SGLang loads, in each of its processes, before its scheduler exists (entry point group `sglang.srt.plugins`)."""


def register() -> None:
    """Called by SGLang once per process."""
