"""How a slot is stored. One file per family; a new codec is one class, its format, and one line here."""

from __future__ import annotations

from baoc.core.codecs.base import Codec, Format, Held, SummedFormat
from baoc.core.codecs.dense import BF16, FP32
from baoc.core.codecs.factored import Factored, FactoredBF16, FactoredInt8
from baoc.core.codecs.int4 import Int4
from baoc.core.codecs.int8 import Int8
from baoc.core.codecs.mean import ColMean, RowMean

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (FP32(), BF16(), Int8(), Int4(), Factored(), FactoredBF16(), FactoredInt8(), RowMean(), ColMean())
}

__all__ = ["CODECS", "Codec", "Format", "Held", "SummedFormat", "register_codec"]


def register_codec(codec: Codec) -> Codec:
    """Make a codec of your own known by its name, in spellings, plans and checkpoints.

    >>> class Plain(FP32):
    ...     name = "plain"
    >>> register_codec(Plain()).name
    'plain'
    >>> del CODECS["plain"]
    """
    known = CODECS.get(codec.name)
    if known is not None and known != codec:
        raise ValueError(
            f"there is a codec {codec.name!r} already ({type(known).__qualname__}). Give yours another name."
        )
    return CODECS.setdefault(codec.name, codec)
