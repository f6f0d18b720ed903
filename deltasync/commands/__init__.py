"""One module per command: `register` declares its options, `run` does the work and returns the exit code.

`register` must stay cheap: whatever is slow to import is imported by `run`.
"""
