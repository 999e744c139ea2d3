"""The decode tier: reserves room for prompts' KV, receives it, batches continuously and streams tokens."""
