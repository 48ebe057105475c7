"""The operators: a folder for each, with its public functions, native operators and Triton kernels."""
