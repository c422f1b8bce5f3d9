"""Which parameters are several matrices: sizes, patterns, and detection in real modules."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

import baoc
from baoc import BlockOptimizer, Plan, PlanError, Split, splits_of
from baoc.core.mechanisms import MECHANISMS
from baoc.core.splits import describe, matched, operations, workspace
from baoc.tools.models import ViT

transformers = pytest.importorskip("transformers")

TINY = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 50}
GROUPED = {**TINY, "num_key_value_heads": 2}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 50}


def hf(name: str, **settings: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**settings)
        return getattr(transformers, f"{name}Model")(config)

    return build


def falcon(**settings: object) -> Callable[[], nn.Module]:
    return hf("Falcon", hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=50, **settings)


THIRDS, THIRDS_OF_COLUMNS, HALVES = Split((64, 64, 64)), Split((64, 64, 64), dim=1), Split((96, 96))
BY_HEAD = Split((16, 16, 16), repeat=4)
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Split]]] = {
    "GPT-2": (hf("GPT2", **GPT), {"h.0.attn.c_attn.weight": THIRDS_OF_COLUMNS}),
    "Phi-3": (
        hf("Phi3", **GROUPED, pad_token_id=0),
        {"layers.0.self_attn.qkv_proj.weight": Split((64, 32, 32)), "layers.0.mlp.gate_up_proj.weight": HALVES},
    ),
    "GPT-NeoX": (hf("GPTNeoX", **TINY), {"layers.0.attention.query_key_value.weight": BY_HEAD}),
    "Bloom": (hf("Bloom", **GPT | {"hidden_size": 64}), {"h.0.self_attention.query_key_value.weight": BY_HEAD}),
    "Falcon 40B": (
        falcon(new_decoder_architecture=True, num_kv_heads=2),
        {"h.0.self_attention.query_key_value.weight": Split((32, 16, 16), repeat=2)},
    ),
    "Falcon 7B": (
        falcon(new_decoder_architecture=False, multi_query=True),
        {"h.0.self_attention.query_key_value.weight": Split((64, 16, 16))},
    ),
    "StarCoder": (hf("GPTBigCode", **GPT), {"h.0.attn.c_attn.weight": Split((64, 16, 16))}),
    "CodeGen": (
        hf("CodeGen", **GPT, n_ctx=32, rotary_dim=8),
        {"h.0.attn.qkv_proj.weight": Split((16, 16, 16), repeat=4)},
    ),
    "MPT": (hf("Mpt", d_model=64, n_heads=4, n_layers=1, vocab_size=50), {"blocks.0.attn.Wqkv.weight": THIRDS}),
    "Mixtral": (hf("Mixtral", **GROUPED, num_local_experts=3), {"layers.0.mlp.experts.gate_up_proj": HALVES}),
    "Llama 4": (
        hf(
            "Llama4Text", **GROUPED | {"intermediate_size": 32}, head_dim=16, intermediate_size_mlp=96,
            num_local_experts=3, pad_token_id=0,
        ),
        {"layers.0.feed_forward.experts.gate_up_proj": Split((32, 32), dim=1)},
    ),
    "GPT-OSS": (
        hf("GptOss", **GROUPED | {"intermediate_size": 32}, head_dim=16, num_local_experts=3),
        {"layers.0.mlp.experts.gate_up_proj": Split((1, 1), dim=1, repeat=32)},
    ),
    "DeepSeek-V3": (
        hf(
            "DeepseekV3", **TINY | {"num_key_value_heads": 4}, moe_intermediate_size=32, q_lora_rank=24,
            kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=20, first_k_dense_replace=0,
            n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
        ),
        {
            "layers.0.self_attn.kv_a_proj_with_mqa.weight": Split((32, 8)),
            "layers.0.self_attn.kv_b_proj.weight": Split((16, 20), repeat=4),
            "layers.0.mlp.experts.gate_up_proj": Split((32, 32)),
        },
    ),
    "T5": (hf("T5", d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, vocab_size=50), {}),
    "Llama": (hf("Llama", **GROUPED), {}),
    "ViT of transformers": (hf("ViT", **TINY, image_size=32), {}),
    "Mamba-2": (
        hf("Mamba2", hidden_size=64, num_heads=4, head_dim=32, state_size=16, n_groups=1, num_hidden_layers=1,
           vocab_size=50),
        {},
    ),
    "ViT of timm": (
        lambda: ViT(image=32, patch=8, classes=10, dim=64, depth=1, heads=4),
        {"blocks.0.attn.qkv.weight": THIRDS},
    ),
    "nn.TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(64, 4), {"self_attn.in_proj_weight": THIRDS}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_fused_matrices_are_detected(name):
    build, expected = MODELS[name]
    with torch.device("meta"):
        model = build()
    assert splits_of(model) == expected


@pytest.mark.parametrize("name", [name for name, (_, splits) in MODELS.items() if splits])
def test_each_head_may_be_a_matrix(name):
    build, expected = MODELS[name]
    with torch.device("meta"):
        model = build()
    by_head = splits_of(model, heads=True)
    assert expected.keys() <= by_head.keys()
    for name, split in by_head.items():
        is_attention = "attn" in name or "attention" in name
        if is_attention and "kv_a_proj" not in name:
            assert split.repeat == 1 and max(split.sizes) <= 20, name  # the largest head dim above
        elif name in expected:
            assert split == expected[name]


def attention(shape: tuple[int, int], name: str = "qkv", **attributes: object) -> nn.Module:
    """A module that owns a fused layer, and says what it is told to."""
    module = nn.Module()
    setattr(module, name, nn.Linear(shape[1], shape[0], device="meta"))
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


def test_what_does_not_add_up_is_not_split():
    assert splits_of(attention((96, 32), num_heads=2, head_dim=16)) == {"qkv.weight": Split((32, 32, 32))}
    assert splits_of(attention((96, 32))) == {"qkv.weight": Split((32, 32, 32))}  # three as wide as the input
    for attributes in ({"num_heads": 2, "head_dim": 15}, {"num_heads": 5}, {"num_heads": 2, "head_dim": 32}):
        assert splits_of(attention((96, 32), **attributes)) == {}, attributes
    assert splits_of(attention((90, 32))) == {}  # no heads, and its thirds are not as wide as its input
    assert splits_of(attention((96, 32), "query_key_value", num_heads=2)) == {}  # of which nobody knows the order
    assert splits_of(attention((96, 32), "q_proj", num_heads=2)) == {}


def test_sizes_for_grouped_queries_come_from_the_config_too():
    class Config:
        num_attention_heads, num_key_value_heads, head_dim = 4, 1, 16

    assert splits_of(attention((96, 32), "qkv_proj", config=Config())) == {"qkv_proj.weight": Split((64, 16, 16))}


def test_a_gated_projection_is_split_only_if_the_next_layer_reads_half():
    def mlp(width: int) -> nn.Module:
        return nn.ModuleDict({"fc1": nn.Linear(8, 64, device="meta"), "fc2": nn.Linear(width, 8, device="meta")})

    assert splits_of(mlp(32)) == {"fc1.weight": Split((32, 32))}
    assert splits_of(mlp(64)) == {}


# ---- splits and plans ----

SPLITS = [Split((64, 16, 16)), Split((8, 8), dim=1), Split((16, 8), repeat=4), Split((1, 1), dim=1, repeat=8)]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_pieces_are_all_of_the_matrix_once(split):
    stacked = torch.arange(2 * 96 * 16).view(2, 96, 16)
    views = [view for group in split.views(stacked) for view in group]
    assert torch.equal(torch.cat([view.reshape(-1) for view in views]).sort().values, stacked.view(-1))
    assert sorted(view[0].numel() for view in views) == sorted(r * c for r, c in split.pieces(96, 16))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_plan_file_keeps_splits(split):
    plan = Plan.uniform("muon-8", {"qkv": (96, 16), "experts": (4, 96, 16), "out": (96, 16)})
    plan = plan.split({"qkv": split, "experts": split})
    assert Plan.from_json(plan.to_json()) == plan and plan.splits == {"qkv": split, "experts": split}
    assert plan.renamed({"qkv": "0.0", "out": "0.2"}).splits == {"0.0": split}
    assert describe(split, (96, 16)) in str(plan)


def test_only_rules_that_work_on_whole_matrices_have_splits():
    plan = Plan.uniform("muon-8 else adamw-8", {"h.qkv": (96, 32), "wte.qkv": (96, 32)})
    assert list(plan.split({"*": Split((32, 32, 32))}).splits) == ["h.qkv"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sizes": [64, 64]}, "96 rows, but .* make 128"),
        ({"sizes": [48, 48], "dim": 2}, "dim of a split must be 0"),
        ({"sizes": []}, "at least 1"),
        ({"sizes": [48.0, 48.0]}, "whole numbers"),
        ({"sizes": 96}, "an object with 'sizes'"),
        ({"size": [96]}, "an object with 'sizes'"),
        (None, "an object with 'sizes'"),
    ],
)
def test_a_damaged_split_is_refused(change, says):
    content = json.loads(Plan.uniform("muon-8", {"qkv": (96, 32)}).to_json())
    content["blocks"][0]["splits"] = {"qkv": change}
    with pytest.raises(PlanError, match=says):
        Plan.from_json(json.dumps(content))
    content["blocks"][0]["splits"] = {"kqv": {"sizes": [96]}}
    with pytest.raises(PlanError, match="'kqv', but has no parameter of that name"):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ({"*.qvk": (32, 32, 32)}, "'\\*.qvk', which matches no parameter. Matrices: 'a.qkv'"),
        ({"*.qkv": (32, 32)}, "does not fit parameter 'a.qkv': its matrices have 96 rows"),
        ({"*.bias": (48, 48)}, "is no matrix"),
        ({"*.qkv": 3}, "must be sizes of rows"),
        ({"*.qkv": (32, 0, 64)}, "at least 1"),
        ({3: (32, 32, 32)}, "Keys must be names"),
        ("head", "split must be True"),
        ((32, 32, 32), "split must be True"),
    ],
)
@pytest.mark.parametrize("make", [BlockOptimizer, baoc.BAOC])
def test_bad_requests_are_refused_by_name(make, split, says):
    params = [("a.qkv", nn.Parameter(torch.zeros(96, 32))), ("a.bias", nn.Parameter(torch.zeros(96)))]
    with pytest.raises(ValueError, match=says):
        make(params, split=split)


def test_the_first_pattern_counts_and_names_before_patterns():
    shapes = {"a.qkv": (96, 32), "b.qkv": (96, 32), "a.out": (96, 32)}
    found = matched({"*qkv": Split((48, 48)), "*": Split((32, 64)), "a.qkv": Split((32, 32, 32))}, shapes)
    assert [split.sizes for split in found.values()] == [(32, 32, 32), (48, 48), (32, 64)]


@pytest.mark.parametrize("name", ["muon", "normuon", "spectral"])
def test_costs_are_those_of_the_pieces(name):
    mechanism, split = MECHANISMS[name], Split((64, 16, 16))
    assert operations(mechanism, split, 96, 32) == sum(mechanism.operations(rows, 32) for rows in split.sizes)
    assert operations(mechanism, None, 96, 32) == mechanism.operations(96, 32)
    assert workspace(mechanism, None, 96, 32) == mechanism.workspace(96, 32)
    # besides the whole, the largest pieces of one shape and what they need
    assert workspace(mechanism, split, 96, 32) == 96 * 32 + mechanism.workspace(64, 32)
