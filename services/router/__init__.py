"""The router: what clients talk to and workers register with. The life of a request is told in `relay`."""
