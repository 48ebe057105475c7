"""The operators: one folder each, with public functions, the compiled extension's and Triton's kernels."""
