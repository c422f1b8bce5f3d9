"""Codecs: how state is stored. One file per family; a new codec is one class, its format, and one line here."""

from __future__ import annotations

from baoc.core.codecs.base import BF16, FP32, BF16Format, Codec, Format, FP32Format, Held, SummedFormat
from baoc.core.codecs.factored import (
    ColMean,
    ColMeanFormat,
    Factored,
    FactoredBF16,
    FactoredFormat,
    FactoredInt8,
    MatrixMean,
    MatrixMeanFormat,
    MeanFormat,
    RowMean,
    RowMeanFormat,
)
from baoc.core.codecs.quantized import Int4, Int4Format, Int8, Int8Any, Int8Format
from baoc.core.codecs.small import FP8, BF16Any, FP8Format, Int4Any, Log4, Log4Format, ShortInt4Format
from baoc.core.codecs.weights import Nearest, Rest8, Rest16, Stochastic, WeightFormat

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        *(FP32(), BF16(), Int8(), Int8Any(), Int4(), Factored(), FactoredBF16(), FactoredInt8(), RowMean(), ColMean()),
        *(BF16Any(), FP8(), Int4Any(), Log4()),
        *(MatrixMean(), Rest16(), Rest8(), Stochastic(), Nearest()),
    )
}
"""Every known codec, by name."""

__all__ = [
    "CODECS",
    "BF16Format",
    "Codec",
    "ColMeanFormat",
    "FP8Format",
    "FP32Format",
    "FactoredFormat",
    "Format",
    "Held",
    "Int4Format",
    "Int8Format",
    "Log4Format",
    "MatrixMeanFormat",
    "MeanFormat",
    "RowMeanFormat",
    "ShortInt4Format",
    "SummedFormat",
    "WeightFormat",
    "register_codec",
]


def register_codec(codec: Codec) -> Codec:
    """Register a codec, so that spellings, plans and checkpoints can use its name.

    Args:
        codec: the codec.

    Returns:
        The registered codec. Registering the same class twice returns the first one.

    Raises:
        ValueError: if the name is taken.

    Example:
        >>> class Plain(FP32):
        ...     name = "plain"
        >>> register_codec(Plain()).name
        'plain'
        >>> del CODECS["plain"]
    """
    known = CODECS.get(codec.name)
    if known is not None and known != codec:
        raise ValueError(f"codec {codec.name!r} exists already ({type(known).__qualname__}). Give yours another name.")
    return CODECS.setdefault(codec.name, codec)
