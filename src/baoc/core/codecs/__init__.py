"""How a slot is stored. One file per family; a new codec is one class and one line here."""

from __future__ import annotations

from baoc.core.codecs.dense import BF16, FP32
from baoc.core.codecs.factored import Factored, FactoredBF16, FactoredInt8
from baoc.core.codecs.int8 import Int8
from baoc.core.spec import Codec

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (FP32(), BF16(), Int8(), Factored(), FactoredBF16(), FactoredInt8())
}
