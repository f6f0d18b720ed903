"""Trainer side: find what changed, prove it, and commit it as a version.

In: a live optimizer and model. Out: chunks and one manifest per version. Knows nothing of subscribers or engines.
"""
