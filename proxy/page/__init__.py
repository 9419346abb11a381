"""The page at the proxy's root, and the JSON about the cluster and its requests that the page reads.

`files/` is the page: HTML, CSS and modules as they stand, without a build. `routes` serves them under a strict content
policy, and the JSON of /v1/cluster and /v1/requests, which `overview` makes. Requests that generate belong to
`proxy.api`. May import `proxy.service` and the layers below.
"""
