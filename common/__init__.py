"""The ground floor: types and helpers for every process.

Belongs here: settings, keys, messages, errors, logs, facts about models, and the rooms http, media, process and text.
Does not: anything that only one process uses, sockets to other processes, computation. Imports nothing of Triptych
and never torch; http servers are common because the proxy and the workers both have one.
"""
