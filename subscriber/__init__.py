"""Rollout side: follow a stream and bring an engine from the version it holds to the newest, verified.

In: manifests and chunks. Out: weights in an engine, bit-identical to the trainer's. Knows nothing of optimizers.
"""
