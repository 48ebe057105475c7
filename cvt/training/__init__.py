"""Training of a CvT by the recipe of the paper."""
