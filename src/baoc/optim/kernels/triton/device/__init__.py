"""What runs on the GPU. Every module here imports triton, so only :mod:`baoc.optim.kernels.triton` imports them, late."""
