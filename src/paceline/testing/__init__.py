"""What tests and benchmarks share: a cluster of real processes, and servers whose answers are scripted."""
