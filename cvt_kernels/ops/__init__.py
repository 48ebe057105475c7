"""The operators: one folder each, with public functions, native operators and Triton kernels."""
