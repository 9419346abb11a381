"""Ray Serve: the policy that counts replicas, and a cluster of several raylets."""
