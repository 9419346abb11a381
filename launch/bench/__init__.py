"""`triptych bench`: load for any OpenAI server, figures by AIPerf's definitions, JSON, plots.

Not here: comparisons of engines and systems (tools.bench). May import launch.cli's client, requests and output, and
common.
"""
