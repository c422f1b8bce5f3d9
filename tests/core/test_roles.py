"""Roles follow from a model's modules, names and shapes, not from the order in which modules are registered."""

from __future__ import annotations

from itertools import permutations

import pytest
from torch import nn

import baoc
from baoc.core.roles import Role, roles_of


class Parts(nn.Module):
    """A model of named parts, registered in the order of the arguments."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class WithOutput(Parts):
    """As models of transformers, it says which module is its head."""

    def get_output_embeddings(self) -> nn.Module | None:
        return getattr(self, "project", None)


def block() -> nn.Module:
    # 96 outputs that no layer reads: queries, keys and values in one matrix
    return Parts(qkv=nn.Linear(32, 96), out=nn.Linear(32, 32), up=nn.Linear(32, 128), down=nn.Linear(128, 32))


def language_model(head: str) -> dict[str, nn.Module]:
    layers = nn.ModuleList([block(), block()])
    return {"tokens": nn.Embedding(100, 32), "layers": layers, "norm": nn.LayerNorm(32), head: nn.Linear(32, 100)}


MODELS = {
    "language model": (Parts, language_model("project"), "project"),
    "named head": (Parts, language_model("lm_head"), "lm_head"),
    "named by transformers": (WithOutput, language_model("project"), "project"),
    "classifier": (
        Parts,
        {"stem": nn.Conv2d(3, 8, 3), "body": nn.Linear(8, 64), "mix": nn.Linear(64, 8), "to_classes": nn.Linear(8, 5)},
        "to_classes",
    ),
    "modulated": (
        Parts,
        {"enter": nn.Linear(8, 32), "time": nn.Linear(16, 64), "classifier": nn.Linear(32, 8)},
        "classifier",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_the_same_in_every_order_of_registration(name: str) -> None:
    kind, parts, head = MODELS[name]
    for order in permutations(parts):
        roles = roles_of(kind(**{part: parts[part] for part in order}))
        assert [each for each, role in roles.items() if role is Role.HEAD] == [f"{head}.weight"], order


def test_a_plan_is_the_same_when_the_head_is_registered_first() -> None:
    parts = {**language_model("project"), "tokens": nn.Embedding(4096, 32), "project": nn.Linear(32, 4096)}
    plans = [
        baoc.make_plan(Parts(**{part: parts[part] for part in order}), memory=0.5)
        for order in (list(parts), sorted(parts, key=lambda part: part != "project"))
    ]
    chosen = [{name: str(plan.block_of(name).configuration) for name in ("project.weight",)} for plan in plans]
    assert chosen[0] == chosen[1]
    assert not chosen[0]["project.weight"].startswith("muon")


def test_the_last_layer_is_the_head_where_shapes_do_not_tell() -> None:
    autoencoder = Parts(encode=nn.Linear(64, 8), decode=nn.Linear(8, 64))
    roles = roles_of(autoencoder)
    assert roles["decode.weight"] is Role.HEAD
    assert roles["encode.weight"] is Role.MATRIX


def test_of_a_named_stack_of_layers_the_last_is_the_head() -> None:
    stack = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    roles = roles_of(Parts(features=nn.Conv2d(3, 64, 3), classifier=stack))
    assert roles["classifier.0.weight"] is Role.MATRIX
    assert roles["classifier.2.weight"] is Role.HEAD


def test_a_model_may_have_several_named_heads() -> None:
    parts = {"body": nn.Linear(16, 16), "policy": Parts(head=nn.Linear(16, 4)), "value": Parts(head=nn.Linear(16, 1))}
    roles = roles_of(Parts(**parts))
    assert [name for name, role in roles.items() if role is Role.HEAD] == ["policy.head.weight", "value.head.weight"]


def test_a_head_that_is_tied_to_an_embedding_is_an_embedding() -> None:
    parts = language_model("lm_head")
    parts["lm_head"].weight = parts["tokens"].weight
    for order in (list(parts), list(reversed(parts))):
        roles = roles_of(Parts(**{part: parts[part] for part in order}))
        assert Role.HEAD not in roles.values()
        assert [role for role in roles.values() if role is Role.EMBEDDING] == [Role.EMBEDDING]


def test_a_model_whose_head_is_not_built_yet() -> None:
    class Unfinished(Parts):
        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

    assert roles_of(Unfinished(only=nn.Linear(4, 2)))["only.weight"] is Role.HEAD
