"""What is remembered about a parameter. One file per family; a new mechanism is one class and one line here."""

from __future__ import annotations

from baoc.core.mechanisms.adafactor import Adafactor
from baoc.core.mechanisms.adam import Adam, AdamW
from baoc.core.mechanisms.sgd import SGD, SGDM, SGDW, SGDWM
from baoc.core.spec import Mechanism

MECHANISMS: dict[str, Mechanism] = {
    mechanism.name: mechanism for mechanism in (SGD(), SGDM(), SGDW(), SGDWM(), Adam(), AdamW(), Adafactor())
}
