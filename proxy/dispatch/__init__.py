"""Jobs on workers: placement, dispatch to encoders, prefill workers and decoders, retries, text of the tokens.

A `JobRunner` runs one job; the `Dispatcher` routes worker messages to it; the `WorkerPool` keeps the connections.
HTTP, JSON and media formats do not belong here. May import `proxy.server`, `broker.cluster` and `common`.
"""
