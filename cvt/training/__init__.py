"""Training of a CvT by the recipe of the paper, the same as DeiT's (Touvron et al. 2021).

``cvt.training.recipe.TrainConfig`` is its configuration, ``cvt.training.trainer.Trainer`` the loop.
"""
