"""``cvt bench``: parity, speed and memory of a CvT beside its peers."""
