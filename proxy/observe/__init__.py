"""What monitoring systems read: the metrics of all instances at one address, and where each instance is.

`scrape` asks the instances and merges their answers, `targets` lists them for Prometheus. May import `proxy.service`
and the layers below.
"""
