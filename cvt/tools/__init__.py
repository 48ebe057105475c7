"""Data sets, training, evaluation and explanation of models, and the command ``cvt``; no model needs it."""
