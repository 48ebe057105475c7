"""The benchmarks: suites of the operators and of the model for pytest-benchmark, and what runs them."""
