"""Meaning: which versions exist, what each holds, and the cheapest verified path between two of them.

In: chunk references and tensor digests. Out: committed manifests, plans. I/O only through a chunkstore Store.
Knows nothing of optimizers or engines.
"""
