"""The machine code of the GPU kernels, counted without a GPU: instructions, predicted bounds, budgets.

``python -m benchmarks.machine_code`` compiles the kernels that ``cvt compile`` does, and the CUDA kernels,
for authors of kernels. ``docs/kernels.md`` says what the numbers mean,
``CONTRIBUTING.md`` how budgets are kept.

- ``disassembly``, ``instructions`` and ``loops`` read machine code of ``examined`` and ``cuda_kernels``.
- ``work`` says what each launch must compute and move, and how often its loops run.
- ``bounds`` and ``rates`` predict times from both; ``budgets`` limits registers and instructions.
- ``jobs`` and ``report`` put all of it into a report, and ``page`` that into ``docs/kernels.md``.
- ``forward`` lists the launches of a model's forward, for ``docs/kernels.md``.
"""
