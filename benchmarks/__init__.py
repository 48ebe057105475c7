"""The benchmarks: scripts that measure models and kernels, and what runs them and makes their pages."""
