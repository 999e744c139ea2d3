"""The prefill tier: computes prompts in chunks and writes finished KV blocks into decode workers' pools."""
