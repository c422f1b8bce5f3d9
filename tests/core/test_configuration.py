"""One spelling, parsed and printed; every tuple of Definition 1 is a configuration or refused with a reason."""

from __future__ import annotations

import itertools

import pytest

from baoc.core.configuration import CATALOG, ConfigurationError, Switches, from_switches, parse
from tests.cases import by_configuration

PAPER_NAMES = [
    f"{name}-{b}" for name in ("adamw", "adam", "sgd", "sgdm", "sgdw", "sgdwm", "adafactor") for b in (32, 16, 8)
]


@pytest.mark.parametrize(**by_configuration)
def test_spelling_round_trips(configuration):
    assert parse(str(configuration)) == configuration
    assert parse(configuration.alias) == configuration
    assert parse(f" {str(configuration).upper()} ") == configuration


@pytest.mark.parametrize("name", PAPER_NAMES)
def test_the_papers_21_names_are_in_the_catalog(name):
    assert parse(name) in CATALOG


def test_stateless_configurations_are_one_at_every_width():
    assert parse("sgd-8") == parse("sgd-16") == parse("sgd-32") == parse("sgd")
    assert len({parse(name) for name in PAPER_NAMES}) == 17


@pytest.mark.parametrize("code", list(itertools.product([False, True], repeat=4)))
@pytest.mark.parametrize("bits", [32, 16, 8])
def test_every_tuple_is_a_configuration_or_refused(code, bits):
    switches = Switches(*code, bits)
    senseless = (switches.factored and not switches.adaptive) or (
        switches.adaptive and not switches.momentum and not switches.decoupled
    )
    if senseless:
        with pytest.raises(ConfigurationError, match=r"needs adaptive=True|decoupled"):
            from_switches(switches)
        return
    configuration = from_switches(switches)
    assert configuration in CATALOG
    read = configuration.switches
    stateless = not configuration.mechanism.slots
    assert (read.adaptive, read.momentum, read.decoupled, read.factored) == code
    assert stateless or read.bits == bits


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("adamx-8", "unknown update rule 'adamx'.*Did you mean 'adam'"),
        ("adamw[m=int9]", "unknown codec 'int9'.*Did you mean 'int8'"),
        ("sgd[m=int8]", "keeps no state"),
        ("sgdm[v=int8]", "sgdm has no slot 'v'.*it keeps m"),
        ("sgdm[m=factored]", "'m' is signed. Use fp32, bf16, int8"),
        ("adamw[m=int8,m=bf16]", "given twice"),
        ("adamw[m]", "has no codec"),
        ("adamw-7", "cannot read"),
        ("adamw-4", "int4 cannot store 'v'.*Use fp32"),
        ("adafactor-4", "'factored' has no 4-bit variant"),
        ("muon[m=factored]", "factored cannot store 'm'.*signed"),
        ("normuon[o=fp32]", "fp32 cannot store 'o'.*Use row-mean"),
        ("spectral[m=int8]", "spectral has no slot 'm'.*keeps no state"),
        ("muon-8 else", "cannot read"),
        ("", "cannot read"),
    ],
)
def test_a_wrong_spelling_says_what_would_be_right(spelling, message):
    with pytest.raises(ConfigurationError, match=message):
        parse(spelling)
