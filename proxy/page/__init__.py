"""The page at the proxy's root, and the JSON about the cluster and its requests that the page reads.

`files/` is the page: HTML, CSS and modules as they stand, without a build. `assets` serves them under a strict content
policy, `overview` makes the JSON of /v1/cluster and /v1/requests, `routes` has the routes. Requests that generate
belong to `proxy.api`. May import `proxy.service` and the layers below.
"""
