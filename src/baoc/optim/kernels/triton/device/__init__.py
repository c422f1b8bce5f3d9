"""What runs on the GPU. Every module here imports triton, so they are imported when a kernel is made, not before."""
