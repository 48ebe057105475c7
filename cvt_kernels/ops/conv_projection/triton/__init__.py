"""Triton kernels of ``conv_projection``: y = BatchNorm(depthwise_conv(x)), all branches from one read of x.

Layout: x (B, T, C) and every yᵢ (B, Tᵢ, C), channels contiguous, spatial tokens row-major, class token first.

Branches have 3×3 kernels, padding 1 and strides 1 or 2, such as CvT's (``sliding.py``). Other convolutions
and sums of several are PyTorch's, and so are averages over all batches and statistics of several processes.

Launches, in units of one B·T·C activation (read + written), for CvT's q (stride 1), k and v (stride 2):

- evaluation: 1 + 1.5, in one launch.
- training: the statistics (x: 1), a merge of the partials, which updates the running statistics, then the
  evaluation kernel: 3.5 in all.
- backward: Σdy and Σdy·x̂ (1 + 1.5), dconv and dw (2.5 + 1.5), dx (1.5 + 1); only x and the statistics are
  saved.

Every sum over pixels is a partial sum per region, merged in a fixed order: no atomics, equal bits every time.
"""
