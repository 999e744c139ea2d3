"""A load generator for Paceline's routers and for OpenAI-compatible servers: what `paceline bench` runs.

A run: `config` says what is asked for; `workload` makes of it each request's moment and prompt, a function of the seed
and of the request's number alone; `fleet` starts generator processes, of which each (`generator`) sends its share to a
`target` and stamps each piece of an answer as it arrives; `summary` makes figures of the stamps. All moments are
readings of one clock, the kernel's monotonic one, which the processes of a machine share.
"""
