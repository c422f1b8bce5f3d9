"""What is remembered about a parameter. One file per family; a new mechanism is one class and one line here."""

from __future__ import annotations

from baoc.core.mechanisms.adafactor import Adafactor
from baoc.core.mechanisms.adam import Adam, AdamW
from baoc.core.mechanisms.balanced import ColNorm, RowNorm, Sinkhorn
from baoc.core.mechanisms.base import Evidence, Mechanism, pooled_rms
from baoc.core.mechanisms.lion import Lion
from baoc.core.mechanisms.muon import Muon, NorMuon, Spectral
from baoc.core.mechanisms.sgd import SGD, SGDM, SGDW, SGDWM
from baoc.core.spec import Setting

MECHANISMS: dict[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        *(SGD(), SGDM(), SGDW(), SGDWM(), Adam(), AdamW(), Adafactor(), Lion()),
        *(Muon(), NorMuon(), Spectral(), Sinkhorn(), ColNorm(), RowNorm()),
    )
}

__all__ = ["MECHANISMS", "Evidence", "Mechanism", "known_settings", "pooled_rms", "register_mechanism"]


def register_mechanism(mechanism: Mechanism) -> Mechanism:
    """Make a mechanism of your own known by its name, in spellings, plans and checkpoints.

    >>> class Sign(SGDW):
    ...     name = "sign"
    ...     def direction(self, grad, slots, scalars):
    ...         return grad.sign()
    >>> register_mechanism(Sign()).name
    'sign'
    >>> del MECHANISMS["sign"]
    """
    known = MECHANISMS.get(mechanism.name)
    if known is not None and type(known) is not type(mechanism):
        raise ValueError(
            f"there is a mechanism {mechanism.name!r} already ({type(known).__qualname__}). Give yours another name."
        )
    if not mechanism.name.isalpha() or not mechanism.name.islower():
        raise ValueError(f"a mechanism's name is spelled in configurations: {mechanism.name!r} must be small letters.")
    for setting in mechanism.settings:
        other = known_settings().get(setting.name)
        if other is not None and other != setting:
            raise ValueError(
                f"{mechanism.name}: another mechanism has a setting {setting.name!r} with default {other.default!r}. "
                "Use that one, or give yours another name."
            )
    return MECHANISMS.setdefault(mechanism.name, mechanism)


def known_settings(*mechanisms: Mechanism) -> dict[str, Setting]:
    """The settings of some mechanisms, or of all, by name."""
    return {setting.name: setting for each in mechanisms or MECHANISMS.values() for setting in each.settings}
