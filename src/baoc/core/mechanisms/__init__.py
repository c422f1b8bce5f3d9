"""Update rules. One file per family; a new rule is one class and one line here."""

from __future__ import annotations

from baoc.core.mechanisms.base import Evidence, Mechanism, pooled_rms
from baoc.core.mechanisms.classic import SGD, SGDM, SGDW, SGDWM, Adafactor, Adam, AdamW
from baoc.core.mechanisms.muon import Muon, NorMuon, Spectral
from baoc.core.mechanisms.normalised import ColNorm, Lion, Normalised, RowNorm, Sinkhorn
from baoc.core.spec import Setting

MECHANISMS: dict[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        *(SGD(), SGDM(), SGDW(), SGDWM(), Adam(), AdamW(), Adafactor(), Lion()),
        *(Muon(), NorMuon(), Spectral(), Sinkhorn(), ColNorm(), RowNorm()),
    )
}
"""Every known update rule, by name."""

__all__ = [
    "MECHANISMS",
    "SGD",
    "SGDM",
    "SGDW",
    "SGDWM",
    "Adafactor",
    "Adam",
    "AdamW",
    "ColNorm",
    "Evidence",
    "Lion",
    "Mechanism",
    "Muon",
    "NorMuon",
    "Normalised",
    "RowNorm",
    "Sinkhorn",
    "Spectral",
    "known_settings",
    "pooled_rms",
    "register_mechanism",
]


def register_mechanism(mechanism: Mechanism) -> Mechanism:
    """Register an update rule, so that spellings, plans and checkpoints can use its name.

    Args:
        mechanism: the rule. Its name must consist of lowercase letters.

    Returns:
        The registered rule. Registering the same class twice returns the first one.

    Raises:
        ValueError: if the name is invalid or taken, or if a setting's name is taken.

    Example:
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
            f"update rule {mechanism.name!r} exists already ({type(known).__qualname__}). Give yours another name."
        )
    if not mechanism.name.isalpha() or not mechanism.name.islower():
        raise ValueError(f"the name of an update rule must be lowercase letters, got {mechanism.name!r}.")
    for setting in mechanism.settings:
        other = known_settings().get(setting.name)
        if other is not None and other != setting:
            raise ValueError(
                f"{mechanism.name}: another update rule has a setting {setting.name!r} with default {other.default!r}. "
                "Use that one, or give yours another name."
            )
    return MECHANISMS.setdefault(mechanism.name, mechanism)


def known_settings(*mechanisms: Mechanism) -> dict[str, Setting]:
    """Return the settings of update rules.

    Args:
        *mechanisms: the rules; all that are known if none is given.

    Returns:
        Setting by name.
    """
    return {setting.name: setting for each in mechanisms or MECHANISMS.values() for setting in each.settings}
