"""SGLang as an engine: stock servers, updated in place through a plugin in each of their scheduler processes.

In: the catalog and resolved updates in canonical coordinates. Out: live weights that equal a committed version.
`boxes` and `regions` are shared by both sides and need numpy only; `trace`, `coverage` and `refusals` run inside
SGLang's scheduler. Nothing here may import SGLang at module level: the daemon and the tests work without it.
"""
