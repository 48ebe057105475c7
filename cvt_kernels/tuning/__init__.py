"""Tuning on request: which backend is the fastest correct one on this machine.

``run`` is what :func:`cvt_kernels.tune` does: ``calls`` collects a model's calls, ``worker`` is the process
that checks and times them by ``tuner``, with the rule of ``accuracy`` and the ``clock``, and ``choices`` is
the file of what was chosen, for a machine (``key``). ``choose`` reads that file; nothing else here runs in a
user's calls.
"""
