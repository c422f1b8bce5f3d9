"""Structural units of models seen and unseen, and the laws of Algorithm 2."""

from __future__ import annotations

import functools
import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from baoc.planners.paper.refine import refine
from baoc.planners.paper.units import GRANULARITIES, Unit, blocks, structural_units
from baoc.tools.models import MODELS

PAPER_MODELS = ["gpt2-small", "t5-base", "llama-3.2-1b", "sd15-unet", "vit"]


@functools.cache
def paper_model(name: str) -> nn.Module:
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    with torch.device("meta"):
        return MODELS[name]()


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters() if param.requires_grad}


def names(model: nn.Module | dict[str, tuple[int, ...]], granularity: str = "module") -> list[str]:
    return [unit.name for unit in structural_units(model, granularity)]


def assert_partition(units: tuple[Unit, ...], shapes: dict[str, tuple[int, ...]], *, in_order: bool = True) -> None:
    """The law: every parameter in exactly one unit."""
    held = [name for unit in units for name in unit.parameters]
    assert held == list(shapes) if in_order else sorted(held) == sorted(shapes)
    assert all(unit.parameters for unit in units)
    assert len({unit.name for unit in units}) == len(units)
    for unit in units:
        assert unit.numel == sum(math.prod(shapes[name]) for name in unit.parameters)


# Models that are written down here ------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)


class Layer(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Parts(nn.Module):
    """A module with the given children, which is no list."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Bottleneck(nn.Module):
    def __init__(self, width: int, *, shortcut: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3)
        self.norm2 = nn.BatchNorm2d(width)
        if shortcut:
            self.shortcut = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))


class Odd(nn.Module):
    """Everything that no model should do, and some do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.zeros(5, 8))
        self.embed = nn.Embedding(10, 8)
        self.branches = nn.ModuleDict(
            {
                "left": nn.ModuleDict({"deep": nn.ModuleDict({"attn": Attention(), "norm": nn.LayerNorm(8)})}),
                "right": nn.Bilinear(3, 3, 2),
            }
        )
        shared = nn.Linear(8, 8)
        self.first = shared
        self.again = shared  # a module used twice
        self.prompts = nn.ParameterList([torch.zeros(4), torch.zeros(4, 4)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))})
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.nothing = nn.Sequential(nn.ReLU(), nn.Dropout())
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.spectrum = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight  # shared weights


def random_module(rng: random.Random, depth: int, made: list[nn.Module]) -> nn.Module:
    if made and rng.random() < 0.1:
        return rng.choice(made)  # used twice
    if depth == 0 or rng.random() < 0.2:
        module: nn.Module = rng.choice(
            [
                lambda: nn.Linear(rng.randint(1, 9), rng.randint(1, 9), bias=rng.random() < 0.5),
                lambda: nn.LayerNorm(rng.randint(1, 9)),
                lambda: nn.Embedding(rng.randint(1, 9), 3),
                lambda: nn.Conv2d(2, 3, 1),
                lambda: nn.ParameterList([torch.zeros(2)] * rng.randint(0, 3)),
                lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
                nn.ReLU,
            ]
        )()
    else:
        parts = [random_module(rng, depth - 1, made) for _ in range(rng.randint(0, 4))]
        kind = rng.choice(["list", "sequential", "dict", "class"])
        if kind == "class":
            module = Parts(**{f"part{index}": part for index, part in enumerate(parts)})
            if rng.random() < 0.5:
                module.own = nn.Parameter(torch.zeros(2, 2))
        elif kind == "dict":
            module = nn.ModuleDict({f"key{index}": part for index, part in enumerate(parts)})
        else:
            module = nn.ModuleList(parts) if kind == "list" else nn.Sequential(*parts)
    if rng.random() < 0.1:
        module.requires_grad_(False)
    made.append(module)
    return module


# The structural scan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", PAPER_MODELS)
def test_every_parameter_of_the_papers_models_is_in_one_unit(name, granularity):
    model = paper_model(name)
    units = structural_units(model, granularity)
    assert_partition(units, shapes_of(model))
    assert units == structural_units(shapes_of(model), granularity), "names alone show the same"


@pytest.mark.parametrize("seed", range(150))
def test_every_parameter_of_any_model_is_in_one_unit(seed):
    model = random_module(random.Random(seed), depth=4, made=[])
    finer: tuple[Unit, ...] | None = None
    for granularity in GRANULARITIES:
        units = structural_units(model, granularity)
        assert_partition(units, shapes_of(model))
        if finer is not None:
            unit_of = {parameter: unit.name for unit in units for parameter in unit.parameters}
            assert all(len({unit_of[name] for name in unit.parameters}) == 1 for unit in finer), "granularities nest"
        finer = units


@pytest.mark.parametrize("seed", range(100))
def test_every_name_of_any_mapping_is_in_one_unit(seed):
    rng = random.Random(seed)
    parts = ["a", "b", "0", "1", "10", "weight", "layer", "parametrizations", "x-y", ""]
    shapes = {
        ".".join(rng.choices(parts, k=rng.randint(1, 5))): tuple(rng.choices(range(4), k=rng.randint(0, 3)))
        for _ in range(rng.randint(0, 40))
    }
    for granularity in GRANULARITIES:
        assert_partition(structural_units(shapes, granularity), shapes, in_order=False)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("gpt2-small", {"tensor": 148, "module": 51, "layer": 15, "coarse": 3}),
        ("t5-base", {"tensor": 257, "module": 123, "layer": 27, "coarse": 5}),
        ("llama-3.2-1b", {"tensor": 146, "module": 66, "layer": 18, "coarse": 3}),
        ("sd15-unet", {"tensor": 686, "module": 176, "layer": 15, "coarse": 6}),
        ("vit", {"tensor": 80, "module": 29, "layer": 11, "coarse": 3}),
    ],
)
def test_counts_of_the_papers_models(name, counts):
    assert {each: len(names(paper_model(name), each)) for each in GRANULARITIES} == counts


def test_attention_and_mlp_of_each_layer_are_units_of_their_own():
    parts = {
        "gpt2-small": ("transformer.h", 12, ["ln_1", "attn", "ln_2", "mlp"]),
        "llama-3.2-1b": ("model.layers", 16, ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]),
        "vit": ("blocks", 6, ["norm1", "attn", "norm2", "mlp"]),
    }
    for name, (stack, layers, modules) in parts.items():
        found = names(paper_model(name))
        assert [unit for unit in found if unit.startswith(stack)] == [
            f"{stack}.{index}.{module}" for index in range(layers) for module in modules
        ]
    encoder = ["layer.0.SelfAttention", "layer.0.layer_norm", "layer.1.DenseReluDense", "layer.1.layer_norm"]
    assert names(paper_model("t5-base")) == [
        "shared",
        *(f"encoder.block.{index}.{module}" for index in range(12) for module in encoder),
        "encoder.final_layer_norm",
        *(
            f"decoder.block.{index}.{module}"
            for index in range(12)
            for module in [
                *encoder[:2],
                "layer.1.EncDecAttention",
                "layer.1.layer_norm",
                "layer.2.DenseReluDense",
                "layer.2.layer_norm",
            ]
        ),
        "decoder.final_layer_norm",
    ]


def test_what_stands_around_the_layers():
    assert names(paper_model("vit"))[:3] == ["cls_token", "pos_embed", "patch_embed"]
    assert names(paper_model("vit"), "coarse") == ["cls_token..patch_embed", "blocks", "norm..head"]
    assert names(paper_model("gpt2-small"), "coarse") == ["transformer.wte..wpe", "transformer.h", "transformer.ln_f"]
    assert names(paper_model("t5-base"), "coarse") == [
        "shared",
        "encoder.block",
        "encoder.final_layer_norm",
        "decoder.block",
        "decoder.final_layer_norm",
    ]
    assert names(paper_model("llama-3.2-1b"), "layer") == [
        "model.embed_tokens",
        *(f"model.layers.{index}" for index in range(16)),
        "model.norm",
    ]


def test_unet():
    found = names(paper_model("sd15-unet"))
    attention = "down_blocks.0.attentions.0"
    assert found[:12] == [
        "conv_in",
        "time_embedding",
        f"{attention}.norm",
        f"{attention}.proj_in",
        *(f"{attention}.transformer_blocks.0.{part}" for part in ("norm1", "attn1", "norm2", "attn2", "norm3", "ff")),
        f"{attention}.proj_out",
        "down_blocks.0.attentions.1.norm",
    ]
    assert {"down_blocks.3.resnets.0", "up_blocks.0.resnets.2", "down_blocks.0.downsamplers", "conv_out"} <= set(found)
    layers = names(paper_model("sd15-unet"), "layer")
    assert [name for name in layers if name.startswith("down")] == [f"down_blocks.{index}" for index in range(4)]


def test_multilayer_perceptron():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert names(model) == ["1", "3", "5"]
    assert names(model, "coarse") == ["all"]
    assert names(nn.Sequential(nn.Linear(4, 8))) == ["0"]
    assert names(nn.Linear(4, 8)) == ["weight", "bias"]


def test_convolutional_nets():
    features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2))
    vgg = Parts(features=features, classifier=nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    assert names(vgg) == ["features.0", "features.2", "classifier.0", "classifier.2"]
    assert names(vgg, "coarse") == ["features", "classifier"]
    resnet = Parts(
        conv1=nn.Conv2d(3, 8, 7),
        bn1=nn.BatchNorm2d(8),
        layer1=nn.Sequential(Bottleneck(8, shortcut=False), Bottleneck(8, shortcut=False)),
        layer2=nn.Sequential(Bottleneck(8, shortcut=True), Bottleneck(8, shortcut=False)),
        fc=nn.Linear(8, 2),
    )
    # A shortcut does not make a residual block fall apart.
    for granularity in ("module", "layer"):
        found = names(resnet, granularity)
        assert found == ["conv1", "bn1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]
    assert names(resnet, "coarse") == ["conv1..bn1", "layer1", "layer2", "fc"]


def test_a_model_never_seen():
    model = Odd()
    units = structural_units(model)
    assert_partition(units, shapes_of(model) | {"spectrum": (3, 2)})
    assert [unit.name for unit in units] == [
        "scale",
        "table",
        "empty",
        "spectrum",
        "embed",
        "branches.left.deep.attn",
        "branches.left.deep.norm",
        "branches.right",
        "first",
        "prompts",
        "named",
        "unused",
    ]


def test_transformer_layers_built_in_other_ways():
    def mlp() -> nn.Module:
        return Parts(up=nn.Linear(8, 32), down=nn.Linear(32, 8))

    def layer() -> nn.Module:
        return Parts(attn=Attention(), mlp=mlp())

    plain = names(nn.ModuleDict({"embed": nn.Embedding(4, 8), "h": nn.ModuleList([Layer(), Layer()])}))
    assert plain == [
        "embed",
        *(f"h.{index}.{part}" for index in range(2) for part in ("norm1", "attn", "norm2", "mlp")),
    ]
    # attributes instead of a list
    assert names(Parts(stem=nn.Linear(8, 8), body=Parts(one=layer(), two=layer()))) == [
        "stem",
        *(f"body.{name}.{part}" for name in ("one", "two") for part in ("attn", "mlp")),
    ]
    # torch's own layer keeps the MLP's two maps beside the attention
    torch_layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = names(nn.TransformerEncoder(torch_layer, 2))
    assert found[:5] == [f"layers.0.{part}" for part in ("self_attn", "linear1", "linear2", "norm1", "norm2")]
    # an attention in two parts, as BERT's
    attention = Parts(inner=Attention(), output=Parts(dense=nn.Linear(8, 8), norm=nn.LayerNorm(8)))
    bert = Parts(embed=nn.Embedding(4, 8), layer=nn.ModuleList([Parts(attention=attention, mlp=mlp())]))
    assert names(bert) == ["embed", "layer.0.attention", "layer.0.mlp"]


def test_a_list_of_unlike_things_is_no_stack_of_layers():
    features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model = nn.Sequential(features, nn.Flatten(), classifier)
    assert names(model) == names(model, "layer") == ["0.0", "0.2", "2.0", "2.2"]
    body = nn.Sequential(nn.Embedding(4, 8), nn.ModuleList([Layer(), Layer()]), nn.Sequential(nn.Linear(8, 4)))
    assert names(body, "layer") == ["0", "1.0", "1.1", "2"]


def test_layers_of_hybrid_models():
    def mixer() -> nn.Module:
        return Parts(mixer=Parts(inward=nn.Linear(8, 8), outward=nn.Linear(8, 8)))

    def model(*layers: nn.Module) -> nn.Module:
        return Parts(embed=nn.Embedding(4, 8), layers=nn.ModuleList(layers), head=nn.Linear(8, 4))

    expected = ["embed", *(f"layers.{index}" for index in range(5)), "head"]
    among = model(mixer(), mixer(), Layer(), mixer(), mixer())
    assert names(among, "layer") == names(shapes_of(among), "layer") == expected
    # All of one class, and nothing else in common.
    attention = [Parts(attn=Attention()) for _ in range(2)]
    in_turns = model(mixer(), attention[0], mixer(), attention[1], mixer())
    assert [name.removesuffix(".mixer").removesuffix(".attn") for name in names(in_turns, "layer")] == expected
    assert names(in_turns, "coarse") == ["embed", "layers", "head"]


def test_experts_are_units():
    def layer() -> nn.Module:
        experts = nn.ModuleList(Parts(w1=nn.Linear(8, 16), w2=nn.Linear(16, 8)) for _ in range(3))
        return Parts(attn=Attention(), moe=Parts(gate=nn.Linear(8, 3), experts=experts))

    model = Parts(layers=nn.ModuleList(layer() for _ in range(2)), head=nn.Linear(8, 4))
    assert names(model)[:5] == ["layers.0.attn", "layers.0.moe.gate", *(f"layers.0.moe.experts.{i}" for i in range(3))]
    assert names(model, "layer") == ["layers.0", "layers.1", "head"]


def test_wrappers_are_looked_through():
    def build(wrap=lambda module: module) -> nn.Module:
        return Parts(embed=nn.Embedding(4, 8), h=nn.ModuleList(wrap(Layer()) for _ in range(2)))

    plain = names(build())
    assert names(Wrapper(Wrapper(build()))) == [f"module.module.{name}" for name in plain]
    assert names(build(Wrapper)) == [name.replace(".0.", ".0.module.").replace(".1.", ".1.module.") for name in plain]
    assert names(torch.compile(build())) == plain
    assert names({f"_orig_mod.{name}": shape for name, shape in shapes_of(build()).items()}) == plain
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    assert names(build(checkpoint_wrapper)) == plain


def test_frozen_parameters_show_boundaries_but_are_in_no_unit():
    model = Parts(embed=nn.Embedding(4, 8), h=nn.ModuleList(Layer() for _ in range(2))).requires_grad_(False)
    for layer in model.h:
        for linear in (layer.attn.qkv, layer.attn.out):  # as LoRA does
            linear.adapters = nn.ModuleDict({"a": nn.Linear(8, 1), "b": nn.Linear(1, 8)})
    assert [(unit.name, len(unit.parameters)) for unit in structural_units(model)] == [("h.0.attn", 8), ("h.1.attn", 8)]
    assert structural_units(model.requires_grad_(False)) == ()


def test_parametrized_tensors_stay_with_their_module():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
    assert [(unit.name, len(unit.parameters)) for unit in structural_units(model)] == [("0", 3), ("1", 2)]


def test_nameless_parameters_are_one_unit_each():
    shapes = {"0.0": (8, 8), "0.1": (8,), "1.0": (8, 8), "layers.0.weight": (2, 2), "layers.0.bias": (2,)}
    assert [unit.parameters for unit in structural_units(shapes)] == [
        ("0.0",),
        ("0.1",),
        ("1.0",),
        ("layers.0.weight", "layers.0.bias"),
    ]


def test_names_in_any_order():
    """As param groups give them: matrices first, then what does not decay."""
    shapes = shapes_of(Parts(embed=nn.Embedding(4, 8), h=nn.ModuleList(Layer() for _ in range(2))))
    split = {name: shape for name, shape in shapes.items() if len(shape) > 1} | shapes
    assert set(names(split)) == set(names(shapes))
    assert_partition(structural_units(split), split, in_order=False)


def test_units_know_their_layer():
    units = structural_units(Parts(embed=nn.Embedding(4, 8), h=nn.ModuleList(Layer() for _ in range(2))))
    assert [unit.layer for unit in units] == [""] + 4 * ["h.0"] + 4 * ["h.1"]


def test_unknown_granularity_is_refused():
    with pytest.raises(ValueError, match="granularity 'fine' is not one of tensor, module, layer, coarse"):
        structural_units({"a": (1,)}, "fine")


# Algorithm 2 ----------------------------------------------------------------------------------------------------------


def sized(*sizes: int) -> list[Unit]:
    return [Unit(f"u{index}", (f"u{index}.weight",), size) for index, size in enumerate(sizes)]


def assert_blocks(groups: tuple[tuple[int, ...], ...], units: list[Unit], min_share: float) -> None:
    """The laws: runs of neighbours, every unit once, none too small unless alone."""
    assert [index for group in groups for index in group] == list(range(len(units)))
    assert all(after == before + 1 for group in groups for before, after in pairwise(group))
    assert all(groups)
    smallest = min_share * sum(unit.numel for unit in units)
    assert len(groups) <= 1 or all(sum(units[index].numel for index in group) >= smallest for group in groups)


@pytest.mark.parametrize("seed", range(300))
def test_laws_of_refine(seed):
    rng = np.random.default_rng(seed)
    count, diagnostics = int(rng.integers(1, 40)), int(rng.integers(0, 6))
    units = sized(*(int(10 ** rng.uniform(0, 12)) * int(rng.random() > 0.05) for _ in range(count)))
    vectors = rng.normal(size=(count, diagnostics)) * 10.0 ** rng.integers(-6, 6)
    vectors = np.round(vectors, int(rng.integers(0, 4)))  # so that some are equal
    vectors[rng.random(vectors.shape) < rng.choice([0.0, 0.3, 0.9])] = rng.choice([np.nan, np.inf])
    weights = rng.choice([0.0, 0.5, 3.0], size=diagnostics)
    min_share = float(rng.choice([0.0, 0.001, 0.01, 0.1, 0.6, 2.0]))
    threshold = rng.choice([None, 0.0, 0.5, np.inf])
    arguments = {"weights": weights, "min_share": min_share, "threshold": threshold}
    groups = refine(units, vectors, **arguments)
    assert_blocks(groups, units, min_share)
    assert groups == refine(units, vectors.copy(), **arguments), "deterministic"
    nowhere = np.full((count, 1), np.nan)
    wider = arguments | {"weights": [*weights, 1.0]}
    assert groups == refine(units, np.hstack([vectors, nowhere]), **wider), "what no unit has changes nothing"
    order = rng.permutation(diagnostics)
    assert groups == refine(units, vectors[:, order], **(arguments | {"weights": weights[order]}))


@pytest.mark.parametrize("seed", range(50))
def test_blocks_are_neither_too_coarse_nor_out_of_order(seed):
    rng = np.random.default_rng(seed)
    units = sized(*(int(size) for size in rng.permutation(np.arange(100, 1000, 40))))
    vectors = rng.random((len(units), 3))
    groups = refine(units, vectors, threshold=0.4, min_share=0.05)

    def mean(group):
        return np.average(vectors[list(group)], axis=0, weights=[units[index].numel for index in group])

    minimum = 0.05 * sum(unit.numel for unit in units)
    for group in groups:
        for cut in range(1, len(group)):
            parts = group[:cut], group[cut:]
            if all(sum(units[index].numel for index in part) >= minimum for part in parts):
                assert np.abs(mean(parts[0]) - mean(parts[1])).max() <= 0.4 + 1e-6
    # Without a minimum, no two neighbours that differ by more than tau share a block.
    firsts = {group[0] for group in refine(units, vectors, threshold=0.4, min_share=0.0)}
    jumps = np.abs(np.diff(vectors, axis=0)).max(axis=1) > 0.4
    assert {int(index) + 1 for index in np.flatnonzero(jumps)} <= firsts
    # Backwards is the same.
    mirrored = refine(units[::-1], vectors[::-1], threshold=0.4, min_share=0.05)
    last = len(units) - 1
    assert groups == tuple(tuple(last - index for index in group[::-1]) for group in mirrored[::-1])


def test_equal_units_are_one_block():
    assert refine(sized(*range(1, 21)), np.full((20, 3), 0.1)) == (tuple(range(20)),)
    assert refine(sized(*range(1, 21)), np.full((20, 3), np.nan)) == (tuple(range(20)),)
    # one that differs does not make rounding errors count: tau is 0 here
    vectors = np.full((20, 3), 0.1)
    vectors[10] = 0.7
    assert refine(sized(*range(1, 21)), vectors) == (tuple(range(10)), (10,), tuple(range(11, 20)))


def test_one_unit_and_none():
    assert refine(sized(5), [[0.1, 0.2]]) == ((0,),)
    assert refine([], []) == ()
    assert refine(sized(5, 5), np.zeros((2, 0))) == ((0, 1),)


def test_tau_is_the_upper_quartile_of_all_pairs():
    vectors = np.array([[0.0], [1.0], [10.0], [0.0], [3.0]])
    pairs = [abs(a - b) for index, a in enumerate(vectors[:, 0]) for b in vectors[index + 1 :, 0]]
    tau = float(np.quantile(pairs, 0.75))
    assert tau == 8.5  # 0 1 1 2 3 3 7 9 10 10
    assert refine(sized(9, 9, 9, 9, 9), vectors) == ((0, 1), (2,), (3, 4))
    assert refine(sized(9, 9, 9, 9, 9), vectors, threshold=tau) == ((0, 1), (2,), (3, 4))
    assert refine(sized(9, 9, 9, 9, 9), vectors, quantile=1.0) == ((0, 1, 2, 3, 4),)


def test_weights_scale_and_drop_diagnostics():
    units, vectors = sized(9, 9), [[0.0, 0.0], [1.0, 0.1]]
    assert refine(units, vectors, threshold=0.5) == ((0,), (1,))
    assert refine(units, vectors, threshold=0.5, weights=[0.4, 1.0]) == ((0, 1),)
    assert refine(units, vectors, threshold=0.5, weights=[0.0, 6.0]) == ((0,), (1,))


def test_missing_diagnostics_are_passed_over():
    nan = np.nan
    assert refine(sized(9, 9), [[0.1, nan], [0.2, 0.9]], threshold=0.5) == ((0, 1),)
    # No gradient ever came to unit 1 and 2: they are like each other, and like nothing else.
    assert refine(sized(9, 9, 9, 9), [[0.1], [nan], [nan], [0.1]], threshold=0.5) == ((0,), (1, 2), (3,))
    # The middle unit lends its block the diagnostic that the first one does not have.
    vectors = [[0.1, nan], [0.1, 0.2], [0.1, 0.9]]
    assert refine(sized(9, 9, 9), vectors, threshold=0.5) == ((0, 1), (2,))


def test_small_units_join_the_neighbour_they_resemble():
    units = sized(1000, 1, 1000)
    assert refine(units, [[0.0], [0.9], [1.0]], threshold=0.5) == ((0,), (1, 2))
    assert refine(units, [[0.0], [0.1], [1.0]], threshold=0.5) == ((0, 1), (2,))
    assert refine(units, [[0.0], [0.9], [1.0]], threshold=0.5, min_share=0.0) == ((0,), (1, 2))
    assert refine(units, [[0.0], [5.0], [1.0]], threshold=0.5, min_share=0.0) == ((0,), (1,), (2,))


def test_ties_go_to_the_size_closer_to_the_minimum_then_to_the_earlier():
    assert refine(sized(2000, 1, 1000), [[0.0], [0.5], [1.0]], threshold=0.6) == ((0,), (1, 2))
    assert refine(sized(1000, 1, 1000), [[0.0], [0.5], [1.0]], threshold=0.6) == ((0, 1), (2,))


def test_small_units_can_make_a_block_together():
    sizes, vectors = [100, 3, 4, 5, 100], [[0.0], [1.0], [1.0], [1.0], [0.0]]
    assert refine(sized(*sizes), vectors, threshold=0.5, min_share=0.05) == ((0,), (1, 2, 3), (4,))


def test_too_large_a_minimum_gives_one_block():
    vectors = np.arange(6.0)[:, None]
    assert refine(sized(1, 2, 3, 4, 5, 6), vectors, threshold=0.1, min_share=0.9) == (tuple(range(6)),)
    assert refine(sized(1, 2, 3, 4, 5, 6), vectors, threshold=0.1, min_share=7.0) == (tuple(range(6)),)


def test_a_block_that_drifted_is_split():
    """Each unit is close to the one before it, but the first is far from the mean of the others."""
    vectors = [[0.0], [0.8], [1.6]]
    assert refine(sized(10, 100, 100), vectors, threshold=1.0) == ((0,), (1, 2))
    assert refine(sized(10, 100, 100), vectors, threshold=1.0, min_share=0.1) == ((0, 1, 2),)


def test_attention_and_mlp_that_differ_become_blocks():
    units = structural_units(paper_model("gpt2-small"))
    rng = np.random.default_rng(0)
    vectors = [[0.8 if unit.name.endswith("attn") else 0.2] + 0.01 * rng.normal(size=1) for unit in units]
    found = dict(blocks(units, refine(units, vectors, threshold=0.4)))
    assert {f"transformer.h.{index}.attn" for index in range(12)} <= set(found)
    assert "transformer.wte..h.0.ln_1" in found
    assert "transformer.h.0.ln_2..1.ln_1" in found
    assert len(found) == 25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vectors": [[0.0]]}, r"vectors have shape \(1, 1\); for 2 units they must be \(2, diagnostics\)"),
        ({"vectors": [0.0, 1.0]}, r"vectors have shape \(2,\)"),
        ({"weights": [1.0, 1.0]}, "they must be 1 finite numbers >= 0"),
        ({"weights": [-1.0]}, "they must be 1 finite numbers >= 0"),
        ({"min_share": -0.1}, "min_share is -0.1; it must be a number >= 0"),
        ({"threshold": float("nan")}, "threshold is nan; it must be a number >= 0"),
        ({"quantile": 75}, r"quantile is 75; it must be in \[0, 1\]"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        refine(sized(1, 1), **({"vectors": [[0.0], [1.0]]} | arguments))


# Names of blocks ------------------------------------------------------------------------------------------------------


def block_names(model: nn.Module, *cuts: int) -> list[str]:
    units = structural_units(model)
    bounds = [0, *cuts, len(units)]
    named = blocks(units, [range(*run) for run in pairwise(bounds)])
    assert [name for _, parameters in named for name in parameters] == list(shapes_of(model))
    return [name for name, _ in named]


def test_block_names():
    gpt2 = paper_model("gpt2-small")  # wte, wpe, 12 x (ln_1, attn, ln_2, mlp), ln_f
    assert block_names(gpt2, 1, 2, 6, 7, 10, 50) == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.1.ln_1",
        "transformer.h.1.attn..mlp",
        "transformer.h.2..11",
        "transformer.ln_f",
    ]
    assert block_names(gpt2, 2, 50) == ["transformer.wte..wpe", "transformer.h", "transformer.ln_f"]
    assert block_names(gpt2, 9) == ["transformer.wte..h.1.ln_2", "transformer.h.1.mlp..ln_f"]
    assert block_names(gpt2) == ["all"]


def test_block_names_are_unique():
    units = [Unit("a", ("a",), 1), Unit("a.b", ("a.b.w",), 1), Unit("a", ("a.c",), 1)]
    assert [name for name, _ in blocks(units, [(0,), (1,), (2,)])] == ["a", "a.b", "a#2"]


@pytest.mark.parametrize("seed", range(50))
def test_names_of_any_blocks_of_any_model_are_unique(seed):
    rng = random.Random(seed)
    model = random_module(rng, depth=4, made=[])
    count = len(structural_units(model))
    cuts = sorted(rng.sample(range(1, count), rng.randint(0, count - 1))) if count else []
    if count:
        found = block_names(model, *cuts)
        assert len(set(found)) == len(found) == len(cuts) + 1


@pytest.mark.parametrize("groups", [[(0,)], [(0, 1), (1,)], [(0, 1), ()], [(0, 2)]])
def test_groups_that_are_no_partition_are_refused(groups):
    with pytest.raises(ValueError, match="each of the 2 units exactly once"):
        blocks(sized(1, 1), groups)
