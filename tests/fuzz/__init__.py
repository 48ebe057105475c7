"""The fuzzer: random calls of every operator, mutated command lines and damaged files; see docs/fuzz.md."""
