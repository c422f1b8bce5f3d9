"""Which parameters and configurations a person means by the patterns of ``forbid`` and ``prefer``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from baoc.core.configuration import Configuration, parse
from baoc.core.mechanisms import MECHANISMS
from baoc.core.plan import PlanError

Patterns = str | Sequence[str] | Mapping[str, "str | Sequence[str]"]
"""Configurations, for all parameters or by a pattern on the names of parameters, of units and of blocks."""
Row = NDArray[np.bool_]


def chosen(
    patterns: Patterns,
    candidates: Sequence[Configuration],
    names_of: Mapping[str, Sequence[str]],
    known: Sequence[Configuration] = (),
) -> dict[str, Row]:
    """For every parameter which candidates the patterns name. Each must name one, or a configuration that is known.

    ``names_of`` has everything a parameter may be meant by, from its own name to its block's. Patterns are of
    parameters and not of blocks, so they hold however these are merged.

    >>> both = [parse("adamw-8"), parse("sgd")]
    >>> chosen({"h.*": "sgd*"}, both, {"h.0.weight": ["h.0.weight"], "head": ["head"]})["h.0.weight"].tolist()
    [False, True]
    """
    rules = patterns if isinstance(patterns, Mapping) else {"*": patterns}
    rows = {parameter: np.zeros(len(candidates), dtype=bool) for parameter in names_of}
    for where, what in rules.items():
        for pattern in [what] if isinstance(what, str) else list(what):
            columns = np.array([_names_configuration(pattern, c) for c in candidates], dtype=bool)
            if not columns.any() and not any(_names_configuration(pattern, c) for c in known):
                raise PlanError(f"{pattern!r} names no candidate configuration. Write one, or a pattern like 'sgd*'.")
            meant = [parameter for parameter, names in names_of.items() if any(_glob(where, name) for name in names)]
            if not meant:
                blocks = dict.fromkeys(names[-1] for names in names_of.values())
                raise PlanError(f"{where!r} names no block and no parameter. Blocks: {', '.join([*blocks][:8])} ...")
            for parameter in meant:
                rows[parameter] |= columns
    return rows


def _names_configuration(pattern: str, configuration: Configuration) -> bool:
    if pattern in MECHANISMS:  # a bare name means the whole family
        return configuration.mechanism_name == pattern
    try:
        return parse(pattern) == configuration
    except ValueError:
        return _glob(pattern, str(configuration)) or _glob(pattern, configuration.alias)


def _glob(pattern: str, text: str) -> bool:
    """``*`` matches anything, all else itself: configurations are spelled with brackets."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) is not None
