"""Muon and its kin: against torch's, in matrices of every kind, with the length of AdamW's updates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from baoc import BlockOptimizer, Plan, parse
from baoc.core.configuration import EXTENDED
from baoc.core.mechanisms import Normalised
from baoc.core.mechanisms.muon import MAX_UPDATE_RMS, Muon
from baoc.core.mechanisms.newton_schulz import MUON, workspace
from baoc.core.mechanisms.normalised import UPDATE_RMS
from baoc.core.roles import Role, as_matrices
from baoc.core.spec import Hyper
from baoc.optim.kernels import eager
from baoc.optim.kernels.job import Job
from baoc.optim.state import new_state
from tests.cases import gradients, train
from tests.memory import PeakMemory

NORMALISED = [configuration for configuration in EXTENDED if isinstance(configuration.mechanism, Normalised)]
FOLLOWING = [configuration for configuration in NORMALISED if isinstance(configuration.mechanism, Muon)]
"""Those whose updates have a length that follows the signal."""


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64)], ids=str)
def test_it_follows_torch_where_the_settings_agree(shape):
    """Torch iterates in bf16, so the two stay close and are not equal."""
    start = torch.randn(shape)
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    optimizer = BlockOptimizer(
        [ours],
        lr=0.02,
        weight_decay=0.1,
        plan="muon-32",
        newton_schulz=MUON,
        update_rms=1e9,
        max_update_rms=0.2,
        nesterov_momentum=0.9,
        momentum_rise=0,
    )
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for grad in gradients(shape, 20):
        for param, each in ((ours, optimizer), (theirs, reference)):
            param.grad = grad.clone()
            each.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    torch.testing.assert_close(
        optimizer.state[ours]["m"], reference.state[theirs]["momentum_buffer"], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("configuration", NORMALISED, ids=str)
def test_the_first_update_has_its_length_at_once(configuration):
    """Whatever the size of the gradients; and the next ones, of which momentum averages few."""
    for shape in ((96, 160), (160, 96), (32, 16, 3, 3), (4, 48, 64)):
        for scale in (1e-6, 1e3):
            param = nn.Parameter(torch.zeros(shape))
            optimizer = BlockOptimizer([param], lr=1e-2, weight_decay=0.0, plan=configuration)
            for _ in range(3):
                before = param.detach().clone()
                param.grad = torch.randn(shape) * scale
                optimizer.step()
                rms = (param - before).square().mean().sqrt().item() / 1e-2
                length = MAX_UPDATE_RMS.default if configuration in FOLLOWING else UPDATE_RMS.default
                assert rms == pytest.approx(length, rel=0.15), (shape, scale)


def lengths(configuration, stream, shape=(48, 64), **settings) -> list[float]:
    """The RMS of every update, in units of lr."""
    param = nn.Parameter(torch.zeros(shape))
    optimizer = BlockOptimizer([param], lr=1e-2, weight_decay=0.0, plan=configuration, **settings)
    found = []
    for grad in stream:
        before = param.detach().clone()
        param.grad = grad
        optimizer.step()
        found.append((param - before).square().mean().sqrt().item() / 1e-2)
    return found


@pytest.mark.parametrize("configuration", FOLLOWING, ids=str)
def test_updates_have_their_usual_length_where_gradients_are_noise(configuration):
    generator = torch.Generator().manual_seed(0)
    found = lengths(configuration, (torch.randn(48, 64, generator=generator) * 1e-4 for _ in range(700)))
    assert sum(found[-100:]) / 100 == pytest.approx(UPDATE_RMS.default, rel=0.05)
    assert max(found) == pytest.approx(MAX_UPDATE_RMS.default, rel=0.05)  # while the momentum rises


@pytest.mark.parametrize("configuration", FOLLOWING, ids=str)
def test_updates_shrink_as_gradients_vanish_and_grow_with_agreement(configuration):
    """As AdamW's do: the running mean square remembers for longer than the momentum."""
    signal = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    found = lengths(configuration, [signal] * 500 + [signal / 100] * 200)
    assert found[:500] == pytest.approx([MAX_UPDATE_RMS.default] * 500, rel=0.15)
    assert found[-1] < MAX_UPDATE_RMS.default / 4
    noise = (torch.randn(48, 64, generator=torch.Generator().manual_seed(step)) for step in range(500))
    assert sum(lengths(configuration, noise)[-100:]) / 100 < 0.95 * MAX_UPDATE_RMS.default


def test_the_length_is_that_of_the_look_ahead_over_the_root_of_s():
    """Written out, for a momentum that rises."""
    shape, beta2, most = (48, 64), 0.99, 0.95
    stream = list(gradients(shape, 60))
    momentum, square, left = torch.zeros(shape), 0.0, 1.0
    expected = []
    for age, grad in enumerate(stream, 1):
        keep = min(most, age / (age + 20))
        now, full = (k**4 * (1 - k) / (1 + k) + (1 - k**2) ** 2 for k in (keep, most))
        noise = (now * full) ** 0.25
        momentum, left = keep * momentum + (1 - keep) * grad, left * keep
        square = beta2 * square + (1 - beta2) * grad.square().mean().item()
        ahead = (keep * momentum + (1 - keep) * grad) / (keep * (1 - left) + 1 - keep)
        ratio = ahead.square().mean().sqrt().item() / math.sqrt(square / (1 - beta2**age))
        expected.append(min(3.0, 0.3 / noise * ratio))
    found = lengths("normuon-32", stream, betas=(0.9, beta2), update_rms=0.3, max_update_rms=3.0, normuon_beta2=0.0)
    assert found == pytest.approx(expected, rel=1e-3)


def test_each_matrix_of_a_stack_has_its_own_length():
    """An expert whose gradients vanish takes short steps, whatever the others do."""
    grad = torch.randn(3, 32, 48)
    fading = torch.tensor([1.0, 1.0, 0.01]).view(3, 1, 1)
    param = nn.Parameter(torch.zeros(3, 32, 48))
    optimizer = BlockOptimizer([param], lr=1.0, weight_decay=0.0, plan="normuon-32")
    for step in range(120):
        before = param.detach().clone()
        param.grad = grad if step < 20 else grad * fading
        optimizer.step()
    found = (param - before).square().mean((1, 2)).sqrt()
    assert optimizer.state[param]["s"].shape == (3,)
    assert found[:2].tolist() == pytest.approx([MAX_UPDATE_RMS.default] * 2, rel=1e-3) and found[2] < 0.1


@pytest.mark.parametrize("spelling", ["muon-32", "spectral", "sinkhorn", "colnorm", "rownorm"])
def test_a_convolution_is_one_matrix_and_a_stack_is_many(spelling):
    grad = torch.randn(6, 24, 32)
    stacked, flat = (nn.Parameter(torch.zeros(shape)) for shape in ((6, 24, 32), (32, 12, 3, 3)))
    apart = [nn.Parameter(torch.zeros(24, 32)) for _ in range(6)]
    matrix = nn.Parameter(torch.zeros(32, 108))
    optimizer = BlockOptimizer([stacked, flat, *apart, matrix], lr=1.0, weight_decay=0.0, plan=spelling)
    stacked.grad, flat.grad = grad, torch.randn(32, 12, 3, 3)
    matrix.grad = flat.grad.flatten(1)
    for param, each in zip(apart, grad):
        param.grad = each.clone()
    optimizer.step()
    torch.testing.assert_close(stacked.detach(), torch.stack([param.detach() for param in apart]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flat.detach().flatten(1), matrix.detach(), rtol=1e-4, atol=1e-5)


def test_lines_are_brought_to_one_size():
    for spelling, dims in (("colnorm", [0]), ("rownorm", [1]), ("sinkhorn", [0, 1])):
        param = nn.Parameter(torch.zeros(80, 120))
        param.grad = next(iter(gradients((80, 120), 1)))
        BlockOptimizer([param], lr=1.0, weight_decay=0.0, plan=spelling, update_rms=1.0).step()
        for dim in dims:
            sizes = param.detach().square().mean(dim).sqrt()
            torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=0.02, atol=0)


def test_normuon_brings_rows_to_one_size():
    param = nn.Parameter(torch.zeros(80, 120))
    param.grad = next(iter(gradients((80, 120), 1)))
    BlockOptimizer([param], lr=1.0, weight_decay=0.0, plan="normuon-32").step()
    rows = param.detach().square().mean(1)  # (80,)
    torch.testing.assert_close(rows, rows.mean().expand(80))


def test_lion_is_lion():
    """Sign of the blend of the momentum before the step with the gradient, from the paper."""
    param, lr = nn.Parameter(torch.zeros(70, 80)), 1e-2
    optimizer = BlockOptimizer([param], lr=lr, weight_decay=0.0, plan="lion-32", update_rms=1.0)
    momentum, expected = torch.zeros(70, 80), torch.zeros(70, 80)
    for grad in gradients((70, 80), 5):
        expected -= lr * (0.9 * momentum + 0.1 * grad).sign()
        momentum = 0.99 * momentum + 0.01 * grad
        train(optimizer, param, iter([grad]))
    torch.testing.assert_close(param.detach(), expected)


def test_a_limit_beyond_all_fixed_width_integers_is_no_limit():
    """A damaged checkpoint had one, and the step raised an OverflowError."""
    ends = []
    for limit in (1e30, 10**30):
        param = nn.Parameter(torch.ones(70, 80))
        train(BlockOptimizer([param], plan="muon-8", max_update_rms=limit), param, gradients((70, 80), 2))
        ends.append(param.detach())
    assert torch.equal(*ends)


def test_a_batch_needs_no_more_than_it_may():
    layout = parse("muon-32").layout((512, 768))
    jobs = []
    for _ in range(16):
        param, grad = torch.zeros(512, 768), torch.randn(512, 768)
        jobs.append(Job.of(layout, param, grad, new_state(layout, param.device), Hyper(1e-2)))
    scalars = jobs[0].scalars
    jobs = [job._replace(scalars=scalars) for job in jobs]
    sizes = [len(batch) for batch in eager.batches(jobs)]
    assert sum(sizes) == 16 and max(sizes) * workspace(512, 768) <= eager.BATCH_NUMEL and len(sizes) > 1
    held = [tensor for job in jobs for tensor in (job.param, job.grad, *job.state.values()) if torch.is_tensor(tensor)]
    before = sum(tensor.numel() * 4 for tensor in held)
    with PeakMemory(held) as memory:
        eager.run_matrices(jobs, eager.EagerRows(1 << 16))
    assert memory.peak - before <= 4 * eager.BATCH_NUMEL + 16 * (1 << 16) * 4


def test_what_does_not_suit_falls_back_to_what_is_said():
    shapes = {"wte.weight": (512, 64), "h.weight": (64, 64), "h.bias": (64,), "lm_head.weight": (512, 64)}
    plan = Plan.uniform("spectral else colnorm else adamw-8", shapes)
    given = {name: block.configuration.mechanism_name for block in plan.blocks for name in block.parameters}
    assert given == {"wte.weight": "colnorm", "h.weight": "spectral", "h.bias": "adamw", "lm_head.weight": "colnorm"}
    assert parse("muon-8").suited((512, 64), Role.EMBEDDING) == parse("adamw-32")
    assert as_matrices((8, 16, 32)) == (8, 16, 32)


@pytest.mark.parametrize("kernel", ["native", "eager"])
@pytest.mark.parametrize("configuration", ["muon-8", "muon-4", "normuon-8", "spectral"])
@pytest.mark.parametrize(
    "shapes", [[(64, 384, 384)], [(512, 768)] * 16, [(1500, 3000)], [(20, 96, 128)], [(4, 3000, 1500)]], ids=str
)
def test_a_step_needs_no_more_memory_than_the_plan_says(shapes, configuration, kernel):
    """A stack of 64 matrices with 9 MiB of state needed 144 MiB for a moment, and one of 4 large matrices 262 MiB."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = BlockOptimizer(params, plan=configuration, kernel=kernel)
    for param in params:
        param.grad = torch.randn_like(param)
    with PeakMemory() as memory:
        optimizer.step()
    said = optimizer.plan.workspace_bytes
    assert said <= memory.peak <= said + 16 * eager.TILE_NUMEL * 4  # and tiles
    assert said <= max(64 << 20, 4 * workspace(*shapes[0][-2:]))


@pytest.mark.parametrize("configuration", ["muon-8", "normuon-8", "spectral"])
def test_a_stack_that_is_cut_is_updated_as_the_whole(configuration, monkeypatch):
    results = []
    for most in (eager.BATCH_NUMEL, 3 * workspace(64, 96), 1):
        monkeypatch.setattr(eager, "BATCH_NUMEL", most)
        param = nn.Parameter(torch.ones(7, 64, 96))
        optimizer = BlockOptimizer([param], plan=configuration)
        train(optimizer, param, gradients((7, 64, 96), 3))
        results.append((param, *optimizer.state[param].values()))
    for found in results[1:]:
        for one, other in zip(results[0], found):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "coefficients",
    ["abc", 5, (), [1, 2, 3], [(1, 2)], [[(1, 2, 3)]], [("a", "b", "c")], [(1, 2, math.nan)], [(1, 2, 10**400)]],
    ids=lambda x: str(x)[:20],
)
def test_coefficients_that_are_no_triples_of_finite_numbers_are_refused(coefficients):
    with pytest.raises(ValueError, match=r"invalid newton_schulz.*triples of finite numbers"):
        BlockOptimizer([nn.Parameter(torch.zeros(70, 80))], plan="muon-32", newton_schulz=coefficients)
