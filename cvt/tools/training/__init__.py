"""Training of a CvT by the recipe of the paper, the same as DeiT's (Touvron et al. 2021)."""
