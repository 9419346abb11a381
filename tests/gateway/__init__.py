"""Balancers and gateways that others wrote, in front of real proxies: `make gateway-test`."""
