"""How risky a configuration is for a block, by one of several models.

A risk model turns a block's metrics and a configuration into named terms, whose sum the planner minimises:

- ``"measured"``: the expected change of the final loss, from ablations. The default;
- ``"paper"``: Eq. 9 to the letter;
- ``"update"``: Eq. 9, repaired.

``register`` adds others.
"""

from __future__ import annotations

from collections.abc import Callable

from baoc.planning.risk.measured import REGIMES, Effect, Table, TableError, elements, measured, role_shares
from baoc.planning.risk.paper import (
    DEFAULT_ANCHORS,
    GAMMA,
    TERMS,
    Anchors,
    BlockMetrics,
    Needs,
    Prior,
    RiskModel,
    Settings,
    aggressiveness,
    needs,
    paper,
    precision_risk,
    update,
)

__all__ = [
    "DEFAULT_ANCHORS",
    "GAMMA",
    "MEASURED",
    "REGIMES",
    "RISKS",
    "TERMS",
    "Anchors",
    "BlockMetrics",
    "Effect",
    "Needs",
    "Prior",
    "RiskModel",
    "Settings",
    "Table",
    "TableError",
    "aggressiveness",
    "elements",
    "find",
    "measured",
    "needs",
    "paper",
    "precision_risk",
    "register",
    "role_shares",
    "update",
]

MEASURED = "measured"
RISKS: dict[str, RiskModel] = {MEASURED: measured, "paper": paper, "update": update}


def register(name: str) -> Callable[[RiskModel], RiskModel]:
    """Give a risk model a name that ``risk=`` accepts.

    >>> @register("only-bits")
    ... def only_bits(metrics, configuration, settings):
    ...     return {"precision": 32 / configuration.switches.bits}
    >>> "only-bits" in RISKS
    True
    >>> del RISKS["only-bits"]
    """

    def add(model: RiskModel) -> RiskModel:
        RISKS[name] = model
        return model

    return add


def find(risk: str | RiskModel) -> RiskModel:
    if not isinstance(risk, str):
        return risk
    if risk not in RISKS:
        raise ValueError(f"unknown risk model {risk!r}. Known: {', '.join(RISKS)}; register() adds your own.")
    return RISKS[risk]
