"""What prefill and decode workers have in common: a front process and an engine process that live and die together."""
