"""Data sets, training, evaluation, explanation and pruning of models, and the command ``cvt``.

The model imports none of it, but for names of ``cvt`` at their first use.
"""
