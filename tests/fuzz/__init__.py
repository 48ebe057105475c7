"""The fuzzer: random calls of every operator, mutated command lines and damaged files: CONTRIBUTING.md."""
