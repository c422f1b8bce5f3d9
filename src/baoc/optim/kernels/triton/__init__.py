"""The update in Triton, for CUDA and ROCm devices: one launch for all tensors of a family.

:mod:`~baoc.optim.kernels.triton.families` names what has Triton code. Another kernel updates everything else, and the
log says what and why. Launches read addresses, sizes and scalars on the device: a step copies its scalars in one piece,
and addresses only if they have changed. No step waits for the device, and there is no auto-tuning. Before its first use
in a process, a family is compared with the eager update: see :mod:`~baoc.optim.kernels.triton.verify`.

``import baoc`` does not import Triton; the first kernel does.
"""

from __future__ import annotations

import importlib.util

import torch

from baoc.optim.kernels.triton.kernel import INTERPRETER, TritonKernel, is_interpreted
from baoc.optim.kernels.triton.verify import Verifier

__all__ = ["INTERPRETER", "TritonKernel", "Verifier", "is_interpreted", "obstacle"]


def obstacle(device: torch.device) -> str | None:
    """Return why the Triton kernel cannot run on a device, or ``None`` if it can.

    >>> obstacle(torch.device("meta"))
    'it runs on CUDA and ROCm devices'
    """
    if device.type not in ("cuda", "cpu"):
        return "it runs on CUDA and ROCm devices"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install 'baoc[triton]')"
    if device.type == "cpu" and not is_interpreted():
        return f"it runs on GPUs; on a CPU only in Triton's interpreter, with {INTERPRETER}=1 in the environment"
    if device.type == "cuda" and is_interpreted():
        return f"{INTERPRETER} is set, and Triton's interpreter reads the memory of CPUs only"
    return None
