"""Worker processes: an engine, driven by messages of the proxy and by handoffs with other workers.

Floors, top to bottom: worker, worker_process, membership, roles, encode, handoff, worker_context, process.
Not here: computation (engine), transports and registry (broker), starting of clusters (launch).
May import engine, broker and common; never proxy.
"""
