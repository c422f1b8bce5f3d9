"""Every method of the comparison keeps the same promises, and the paper's StateMem column is explained."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import baoc
from baoc import PlanError, state_bytes
from baoc.core.budget import memory_budget
from baoc.core.plan import Plan
from experiments import methods, statemem
from experiments.methods import Method, MethodError, Settings, by_role, cosmos, galore, rules
from experiments.methods.base import GRID
from experiments.methods.chained import Chained
from experiments.methods.roles import parts
from experiments.packages import PackageError

LR = 3e-3
SETTINGS = Settings(weight_decay=0.1, steps=40, warmup=3)


def cases(names: list[str]) -> list[object]:
    """The methods of some names. Those whose packages are not here are skipped, and the report says so."""
    found = []
    for name in names:
        missing = methods.get(name).missing
        skip = pytest.mark.skipif(bool(missing), reason=f"{name} needs {', '.join(missing)}")
        found.append(pytest.param(methods.get(name), id=name, marks=skip))
    return found


pytestmark = pytest.mark.usefixtures("without_compiling")
every_method = pytest.mark.parametrize("method", cases(methods.names()))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads=4)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Tiny(nn.Module):
    """All kinds of parameters, with sizes on both sides of every threshold."""

    def __init__(self, width: int = 64, hidden: int = 150, vocabulary: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.smear = nn.Conv1d(width, width, 3, padding=1)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.smear(x.mT).mT
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


BATCH = torch.randint(0, 96, (4, 17), generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(BATCH[:, :-1]).flatten(0, 1), BATCH[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def build(method: Method, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model or Tiny()
    return model, method.build(model, LR * method.lr_factors[GRID // 2], SETTINGS)


# Promises of every method


@every_method
def test_learns(method: Method) -> None:
    losses = train(*build(method), steps=12)
    assert losses[-1] < 0.9 * losses[0]


@every_method
def test_goes_on_identically_from_a_checkpoint(method: Method) -> None:
    model, optimizer = build(method)
    train(model, optimizer, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other, resumed = build(method, copy.deepcopy(model))
    resumed.load_state_dict(torch.load(file, weights_only=False))  # GaLore keeps objects in its state
    assert train(model, optimizer, 8) == train(other, resumed, 8)  # past a new subspace of GaLore, at step 10
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(ours, theirs)


@every_method
def test_a_scheduler_sets_every_lr(method: Method) -> None:
    model, optimizer = build(method)
    before = [float(group["lr"]) for group in optimizer.param_groups]
    schedule = LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.0][min(step, 2)])
    train(model, optimizer, 1)
    schedule.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([lr / 2 for lr in before])
    train(model, optimizer, 1)
    schedule.step()
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, 1)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


@every_method
def test_leaves_random_numbers_alone(method: Method) -> None:
    model = Tiny()
    before = torch.get_rng_state()
    train(*build(method, model), steps=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_spam_leaves_random_numbers_alone_when_it_forgets() -> None:
    pytest.importorskip("pytorch_optimizer")
    model, optimizer = build(methods.get("spam"))
    optimizer.state["total_step"] = 496  # it forgets every 500 steps, and draws new masks then
    before = torch.get_rng_state()
    train(model, optimizer, 5)
    assert optimizer.state["current_step"] < 5
    assert torch.equal(torch.get_rng_state(), before)


@every_method
def test_every_parameter_moves_and_is_in_one_group(method: Method) -> None:
    model, optimizer = build(method)
    grouped = [param for group in optimizer.param_groups for param in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, 3)
    assert not [name for name, weight in model.state_dict().items() if torch.equal(weight, before[name])]


@pytest.mark.parametrize("method", cases([*rules.RULES, "by-type@0.4", "by-size@0.4"]))
def test_holds_what_the_rule_says(method: Method) -> None:
    model, optimizer = build(method)
    train(model, optimizer, 2)
    assert state_bytes(optimizer) == rules.state_bytes(method.name, model)
    assert state_bytes(optimizer) == rules.state_bytes(method.name, copy.deepcopy(model).to("meta"))


def test_every_method_but_baoc_has_a_rule() -> None:
    assert {name for name in methods.names() if "@" not in name} == set(rules.RULES)
    with pytest.raises(MethodError, match=r"no rule for 'baoc@0\.5'"):
        rules.state_bytes("baoc@0.5", Tiny())


# Budgets


@pytest.mark.parametrize("family", ["baoc", "by-type", "by-size"])
@pytest.mark.parametrize("share", [0.4, 0.5, 1.0, 1.2])
def test_budgets_hold_at_every_step(family: str, share: float) -> None:
    model, optimizer = build(methods.get(f"{family}@{share}"))
    budget = memory_budget(share, optimizer.plan.reference_bytes)
    for _ in range(5):
        train(model, optimizer, 1)
        assert state_bytes(optimizer) <= budget
    keeps_samples = getattr(optimizer, "has_profile", False)  # where the budget has room for them
    assert (state_bytes(optimizer) > optimizer.plan.state_bytes) == keeps_samples


@pytest.mark.parametrize("family", ["by-type", "by-size"])
def test_more_budget_never_means_less_state(family: str) -> None:
    held = [rules.state_bytes(f"{family}@{share}", Tiny()) for share in (0.35, 0.5, 0.7, 1.0, 1.5, 2.0)]
    assert held == sorted(held)
    assert held[-1] == rules.state_bytes("adamw32", Tiny()) - 4 * len(list(Tiny().parameters()))


def plan_of(name: str) -> Plan:
    return build(methods.get(name))[1].plan


def test_by_type_lowers_mlps_from_the_last_before_embeddings() -> None:
    def configurations(share: float) -> list[str]:
        plan = plan_of(f"by-type@{share}")
        names = ("layers.0.mlp.0.weight", "layers.1.mlp.0.weight", "layers.1.attention.v_proj.weight", "head.weight")
        return [plan.block_of(name).configuration.alias for name in names]

    assert configurations(1.9) == ["adamw-32", "adamw-16", "adamw-32", "adamw-32"]
    assert configurations(1.3) == ["adamw-16", "adamw-16", "adamw-16", "adamw-32"]
    assert configurations(1.0)[-1] == "adamw-16"


def test_by_size_lowers_the_largest_first() -> None:
    plan = plan_of("by-size@1.5")
    lowered = [block.numel for block in plan.blocks if str(block.configuration) != "adamw[m=fp32,v=fp32]"]
    others = [block.numel for block in plan.blocks if block.numel not in lowered and block.name != "vectors"]
    assert lowered and others and min(lowered) >= max(others)


def test_a_budget_that_no_ladder_reaches_names_the_smallest() -> None:
    with pytest.raises(PlanError, match=r"the smallest holds \d+"):
        plan_of("by-type@0.001")


# Names


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(MethodError, match=r"no method 'moun'\. Did you mean muon\?") as error:
        methods.get("moun")
    assert all(name in str(error.value) for name in methods.names())


def test_a_configuration_is_a_method() -> None:
    model, optimizer = build(methods.get("muon-8 else colnorm else adamw-16; update_rms=0.3"))
    roles = {part.name: part.role for part in parts(model)}
    held = {name: block.configuration.alias for block in optimizer.plan.blocks for name in block.parameters}
    assert {held[name] for name, role in roles.items() if role in ("matrix", "kernel")} == {"muon-8"}
    assert {held[name] for name, role in roles.items() if role in ("embedding", "head")} == {"colnorm"}
    assert {held[name] for name, role in roles.items() if role == "vector"} == {"adamw-16"}
    assert {group["update_rms"] for group in optimizer.param_groups} == {0.3}
    losses = train(model, optimizer, steps=5)
    assert losses[-1] < losses[0]
    with pytest.raises(MethodError, match=r"no method 'muon-7'.* Nor is it a configuration: cannot read"):
        methods.get("muon-7")
    with pytest.raises(MethodError, match=r"cannot read the setting 'update_rms' of .* like 'muon-8; update_rms=0\.2'"):
        methods.get("muon-8; update_rms")


def test_roles_and_parameters_get_what_they_are_given_and_the_rest_adamw() -> None:
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 128))
    optimizer = methods.get("hidden=spectral; 2.weight=lion-8; head=adafactor-32").build(model, 1e-3, Settings())
    assert isinstance(optimizer, baoc.BlockOptimizer)
    chosen = {name: optimizer.plan.block_of(name).configuration.alias for name, _ in model.named_parameters()}
    assert {name: alias for name, alias in chosen.items() if alias != "adamw-32"} == {
        "1.weight": "spectral",
        "2.weight": "lion-8",
        "3.weight": "adafactor-32",
    }
    rms = model[3].weight.detach().square().mean().sqrt().item()  # Adafactor's step is relative to it
    assert optimizer.plan.block_of("3.weight").lr_scale == pytest.approx(0.2 / rms, rel=0.01)


def test_small_embeddings_and_heads_keep_adamw() -> None:
    model = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    plan = by_role.plan_of(model, by_role.parse("embedding=colnorm; head=colnorm"))
    assert {block.configuration.alias for block in plan.blocks} == {"adamw-32"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hidden=muon-8; spectral", "cannot read 'spectral'"),
        ("hidden=muon-8; hidden=spectral", "twice"),
        ("hidden=muon-7", "no method"),
    ],
)
def test_what_is_no_method_by_role_is_an_error_that_says_why(name: str, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        methods.get(name)


def test_a_parameter_that_is_not_there_is_named() -> None:
    with pytest.raises(MethodError, match=r"'h\.0\.weight' is neither a parameter"):
        methods.get("h.0.weight=spectral").build(nn.Linear(4, 4), 1e-3, Settings())


@pytest.mark.parametrize("name", ["baoc@", "baoc@half", "by-size@0", "baoc@-1", "baoc@inf"])
def test_a_budget_is_a_positive_share(name: str) -> None:
    with pytest.raises(MethodError, match="not a share"):
        methods.get(name)


def test_baocs_budget_may_be_nothing() -> None:
    assert methods.get("baoc@0").label == "baoc default 0"


@pytest.mark.parametrize("name", [name for name in methods.names() if methods.get(name).needs])
def test_a_missing_package_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = methods.get(name)
    for package in [name for name in sys.modules if name.partition(".")[0] in method.needs]:
        monkeypatch.delitem(sys.modules, package)
    for package in method.needs:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PackageError, match=r"is not installed: pip install 'baoc\[experiments\]'"):
        build(method)


OWN = """
import torch
from experiments.methods import Method

def method():
    return Method("mine", "Mine", lambda model, lr, settings: torch.optim.SGD(model.parameters(), lr=lr))

def factors():
    return Method("mine", "Mine", method, lr_factors=(1.0,))

def nothing():
    return "a method"
"""


def test_a_persons_own_method_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    assert methods.load(path).name == "mine"
    losses = train(*build(methods.get(f"{path}:method")), steps=5)
    assert losses[-1] < losses[0]
    with pytest.raises(MethodError, match="returned str; it must return a Method"):
        methods.get(f"{path}:nothing")
    with pytest.raises(ValueError, match=r"lr factors \(1\.0,\); every method has 3"):
        methods.get(f"{path}:factors")


def test_every_method_has_as_many_lrs() -> None:
    assert {len(methods.get(name).lr_factors) for name in methods.names()} == {GRID}


# What is our own


def test_roles_are_found_by_structure() -> None:
    roles = {part.name: part for part in parts(Tiny())}
    assert [name for name, part in roles.items() if part.role == "embedding"] == ["tokens.weight"]
    assert [name for name, part in roles.items() if part.role == "head"] == ["head.weight"]
    assert [name for name, part in roles.items() if part.role == "kernel"] == ["smear.weight"]
    assert roles["layers.0.attention.k_proj.weight"].head_rows == 16
    assert roles["layers.0.attention.v_proj.weight"].head_rows is None
    assert roles["layers.1.mlp.2.weight"].role == "matrix"
    fused = {part.name: part for part in parts(nn.MultiheadAttention(32, 4))}
    assert fused["in_proj_weight"].head_rows == 8


def test_tied_weights_are_one_part() -> None:
    model = Tiny()
    model.head.weight = model.tokens.weight
    assert [part.role for part in parts(model) if part.name.startswith(("tokens", "head"))] == ["embedding"]


def test_chained_hands_a_checkpoint_to_its_members() -> None:
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Chained(torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW([second], lr=0.1))
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    assert optimizer.step(lambda: 1.5) == 1.5
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.0
    weight = second.detach().clone(), first.detach().clone()
    optimizer.step()
    assert torch.equal(first, weight[1])
    assert not torch.equal(second, weight[0])
    assert optimizer.state[second]["step"] == 2
    with pytest.raises(RuntimeError, match="one of the members"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_galores_hooks_do_what_galore_does() -> None:
    pytest.importorskip("galore_torch")
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((24, 16), (16, 24))]
    theirs = copy.deepcopy(ours)
    group = {"rank": 4, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}
    hooked = torch.optim.AdamW([{"params": ours, **group}], lr=0.01, weight_decay=0.0, eps=1e-12)
    before, after = galore.projecting_hooks()
    hooked.register_step_pre_hook(before)
    hooked.register_step_post_hook(after)
    official = sys.modules["galore_torch"].GaLoreAdamW(
        [{"params": theirs, **group}], lr=0.01, eps=1e-12, no_deprecation_warning=True
    )
    for _ in range(8):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        hooked.step()
        official.step()
        for a, b in zip(ours, theirs):
            assert a.shape == a.grad.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_cosmos_follows_the_leading_subspace() -> None:
    torch.manual_seed(0)
    leading = torch.linalg.qr(torch.randn(32, 4)).Q
    weight = nn.Parameter(torch.zeros(24, 32))
    optimizer = cosmos.COSMOS([weight], lr=0.01)
    for _ in range(60):
        weight.grad = 10 * torch.randn(24, 4) @ leading.mT + 0.1 * torch.randn(24, 32)
        before = weight.detach().clone()
        optimizer.step()
        assert (weight - before).square().mean().sqrt().item() == pytest.approx(0.01, rel=1e-3)
    basis = optimizer.state[weight]["basis"]
    rank = cosmos.rank((24, 32))
    torch.testing.assert_close(basis.mT @ basis, torch.eye(rank), atol=1e-5, rtol=0)
    assert torch.linalg.matrix_norm(leading.mT @ basis, 2).item() == pytest.approx(1.0, abs=1e-3)
    gram = optimizer.state[weight]["gram"]
    torch.testing.assert_close(gram, gram.mT, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (30, 30)])
def test_newton_schulz_evens_out_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape)
    found = torch.linalg.svdvals(cosmos.newton_schulz(matrix))
    assert found.max() < 1.3
    assert found.median() > 0.6


# The paper


def test_statemem_explains_the_paper() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    rows = statemem.rows()
    assert [f"{row.model} {row.method}" for row in rows if not row.is_explained] == []
    assert all(row.reason for row in rows)
    text = statemem.table()
    assert len(text.splitlines()) == 2 + len(rows)
    assert "leaves out transformer.ln_f.*" in text
