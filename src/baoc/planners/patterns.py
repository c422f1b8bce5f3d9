"""Patterns of ``forbid`` and ``prefer``: which parameters and configurations they name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from baoc.core.configuration import Configuration, parse
from baoc.core.mechanisms import MECHANISMS
from baoc.core.plan import PlanError

Patterns = str | Sequence[str] | Mapping[str, "str | Sequence[str]"]
"""Configurations, for all parameters or by a pattern on names of parameters, units and blocks."""
Row = NDArray[np.bool_]


def check_patterns(name: str, patterns: object, known: Sequence[Configuration] = ()) -> None:
    """Raise unless patterns are strings, lists of strings, or a mapping from strings to these.

    Args:
        name: of the setting.
        patterns: its value.
        known: configurations, of which each pattern must name one. Empty: it is not checked.

    Raises:
        ValueError: they are something else, or name no configuration.
    """
    values = list(patterns.values()) if isinstance(patterns, Mapping) else [patterns]
    keys = list(patterns) if isinstance(patterns, Mapping) else []
    for value in (*keys, *values):
        is_list = value not in keys and isinstance(value, Sequence) and all(isinstance(each, str) for each in value)
        if not isinstance(value, str) and not is_list:
            raise ValueError(
                f"{name} must be a pattern such as 'sgd*', a list of patterns, or a mapping from parameters to them "
                f"such as {{'head.*': 'sgd*'}}; got {patterns!r}."
            )
    for what in values if known else ():
        for pattern in [what] if isinstance(what, str) else list(what):  # type: ignore[arg-type]
            if not any(_names_configuration(pattern, each) for each in known):
                raise ValueError(
                    f"{name} has {pattern!r}, which names no configuration. Write one such as 'adamw-8', an update "
                    "rule such as 'sgd', or a pattern such as 'sgd*'."
                )


def chosen(
    patterns: Patterns,
    candidates: Sequence[Configuration],
    names_of: Mapping[str, Sequence[str]],
    known: Sequence[Configuration] = (),
) -> dict[str, Row]:
    """Return which candidates the patterns name, for every parameter.

    Patterns apply to parameters and not to blocks, so they hold however blocks are merged.

    Args:
        patterns: configurations, or configurations by parameter.
        candidates: configurations to choose from.
        names_of: by parameter, all names that a pattern can match, from its own to that of its block.
        known: configurations that a pattern may name although they are not candidates.

    Returns:
        By parameter, whether each candidate is named.

    Raises:
        PlanError: a pattern matches no configuration, or no parameter.

    Example:
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
    """Match ``*`` only. Brackets are not special, because configurations are spelled with them."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) is not None
