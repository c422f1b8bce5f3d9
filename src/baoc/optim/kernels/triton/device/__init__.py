"""Code that runs on the GPU. Every module here imports Triton, so nothing imports them before a kernel is made."""
