"""KV blocks on their way from one worker's pool into another's. It knows pieces and handles, and no requests.

`layout` says what a block holds, `region` where a pool lies, `transports` how bytes move, `transfer` what a hand-off
says to its target, and `agent` joins them for one worker. The engine is never imported: block ids are ints.
"""
