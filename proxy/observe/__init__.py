"""Rooms for monitoring systems: the metrics of all instances at one address, where each instance is, and traces.

`scrape` asks the instances and merges their answers, and lists them for Prometheus; `otlp` exports traces. May import
`proxy.service` and the layers below.
"""
