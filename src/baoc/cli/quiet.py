"""Known complaints of other packages about each other, which mean nothing to whoever runs a command."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

_MESSAGES = {
    # CUDA kernels that a CPU build of torch, or another GPU, cannot load. The 8-bit optimizers do not use them.
    "torchao": "Failed to load ",
    # torchao's enums, registered in a way that is about to go.
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
    # Only 4-bit matrix products would use it.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # A newer torchao than diffusers knows; only quantized checkpoints would notice.
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
}
"""By logger. Everything else that these say is shown."""

# Advice of torch to torchao's authors.
_WARNING = "OptimState8bit does not implement _stable_hash_for_caching"


def _without(message: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: message not in record.getMessage()


_FILTERS = {name: _without(message) for name, message in _MESSAGES.items()}


def hush() -> None:
    """Drop them from now on, in this process."""
    for name, keep in _FILTERS.items():
        logging.getLogger(name).addFilter(keep)
    warnings.filterwarnings("ignore", message=_WARNING, category=UserWarning)
