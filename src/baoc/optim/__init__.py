"""The optimizer: param groups, state, migration, checkpoints, and the kernels that run an update."""
