"""Muon: orthogonalization, the division into parts, and fragments against whole matrices."""

import copy
import math
import re

import pytest
import torch

from deepspeed.comm.job.job import axis_of
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.elementwise import supports_flat_update
from deepspeed.ops.fragments import FragmentTable, SharedTensor, TensorFragment
from deepspeed.ops.muon import Muon, set_optimizer_flags
from deepspeed.ops.muon.muon import orthogonalize
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks, run_ranks
from tests.ops.fragments import SHAPES, Layout, ThreadedAxis, use_threaded_collectives

OPTIONS = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
STEPS = 3


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return weights, [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(STEPS)]


def whole(weights, gradients, **options):
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = Muon(params, **{**OPTIONS, **options})
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (16, 16), (8, 200), (200, 8)])
def test_singular_values_end_near_one(shape, method):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonalize(matrix, method=method))
    assert values.min() > 0.5 and values.max() < 1.4
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    alignment = (orthogonalize(matrix, method=method) * (left @ right)).sum() / min(shape)
    assert alignment > 0.7, "the singular vectors stay"


@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (8, 200), (3, 2, 5, 5)])
def test_gram_is_the_same_polynomial(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    torch.testing.assert_close(
        orthogonalize(matrix, method="gram"), orthogonalize(matrix, method="standard"), rtol=1e-3, atol=1e-4
    )


def test_gram_stands_rank_deficiency_and_zeros():
    torch.manual_seed(0)
    thin = torch.randn(32, 2) @ torch.randn(2, 64)
    torch.testing.assert_close(
        orthogonalize(thin, method="gram"), orthogonalize(thin, method="standard"), rtol=1e-2, atol=1e-3
    )
    assert orthogonalize(torch.zeros(4, 6)).abs().max() == 0


def test_parameters_without_elements_are_passed_over():
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((0, 3), (3, 0), (2, 0, 3), (4, 4))]
    optimizer = Muon(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert not params[-1].eq(1).any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
def test_step_agrees_with_torch():
    """Torch iterates in bf16, so the directions agree to bf16's precision."""
    torch.manual_seed(0)
    start = torch.randn(24, 10)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [
        Muon([ours], lr=0.1, momentum=0.9, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.1, adjust_lr_fn="original"),
    ]
    for _ in range(3):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - start).abs().max().item()
    assert (ours - theirs).abs().max().item() < 0.03 * moved


def test_one_step_by_hand():
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(12, 4))
    start, param.grad = param.detach().clone(), torch.randn(12, 4)
    Muon([param], lr=0.1, momentum=0.9, weight_decay=0.5).step()
    update = param.grad * (1 - 0.9) + 0.9 * (param.grad * (1 - 0.9))
    expected = start * (1 - 0.05) - 0.1 * math.sqrt(12 / 4) * orthogonalize(update)
    torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-6)


def test_groups_are_divided():
    matrix, vector, flagged_off = (torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 4), (5,), (6, 7)))
    flagged_off.use_muon = False
    optimizer = Muon([matrix, vector, flagged_off], weight_decay=0.1)
    parts = {group["use_muon"]: group for group in optimizer.param_groups}
    assert parts[True]["params"] == [matrix] and parts[True]["lr"] == 0.02 and parts[True]["momentum"] == 0.95
    assert len(parts[False]["params"]) == 2 and parts[False]["lr"] == 3e-4 and parts[False]["eps"] == 1e-10
    assert parts[False]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("given", "matrix_lr", "rest_lr"),
    [({}, 0.02, 3e-4), ({"lr": 0.5}, 0.5, 0.5), ({"muon_lr": 0.5}, 0.5, 3e-4), ({"lr": 0.1, "adam_lr": 0.2}, 0.1, 0.2)],
)
def test_learning_rates_of_the_parts(given, matrix_lr, rest_lr):
    optimizer = Muon([torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(4))], **given)
    assert [group["lr"] for group in optimizer.param_groups] == [matrix_lr, rest_lr]


def test_the_rest_is_adamw():
    torch.manual_seed(0)
    start = torch.randn(9)
    ours, reference = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [
        Muon([{"params": [ours], "use_muon": False, "weight_decay": 0.1}], lr=0.01),
        FusedAdam([reference], lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1),
    ]
    for _ in range(3):
        ours.grad = torch.randn_like(ours)
        reference.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, reference)


def fragment_steps(layout, weights, gradients, group, rank, **options):
    run = torch.nn.Parameter(layout.slice_of(weights, rank))
    optimizer = Muon([{"params": [run], "use_muon": True}], **{**OPTIONS, **options})
    optimizer.attach_segments(layout.table(run, rank, group))
    for grads in gradients:
        run.grad = layout.slice_of(grads, rank)
        optimizer.step()
    return run.detach(), sorted(
        {
            fragment.tensor.index
            for exchange_round in optimizer._exchanges[0]._rounds
            for fragment in exchange_round.received
        }
    )


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize(
    ("world_size", "cuts"),
    [(2, None), (3, None), (4, None), (3, [64, 128]), (2, [0]), (4, [640, 640, 1024]), (2, [320])],
)
def test_fragments_equal_whole_matrices(monkeypatch, world_size, cuts, method):
    use_threaded_collectives(monkeypatch)
    weights, gradients = data()
    expected = whole(weights, gradients, ns_method=method)
    layout, group = Layout(SHAPES, world_size, cuts), ThreadedAxis(world_size)
    results = group.run(lambda rank: fragment_steps(layout, weights, gradients, group, rank, ns_method=method))
    for found, value in zip(layout.tensors(run for run, _ in results), expected, strict=True):
        assert torch.equal(found, value)
    assert sorted(index for _, owned in results for index in owned) == list(range(len(SHAPES)))
    assert sum(name == "all_to_all_single" for name, _ in group.calls) == 2 * STEPS


def test_several_rounds(monkeypatch):
    use_threaded_collectives(monkeypatch)
    monkeypatch.setattr("deepspeed.ops.muon.fragments.ROUND_NUMEL_PER_RANK", 128)
    weights, gradients = data()
    layout, group = Layout(SHAPES, 3), ThreadedAxis(3)
    results = group.run(lambda rank: fragment_steps(layout, weights, gradients, group, rank))
    for found, value in zip(layout.tensors(run for run, _ in results), whole(weights, gradients), strict=True):
        assert torch.equal(found, value)
    assert sum(name == "all_to_all_single" for name, _ in group.calls) > 2 * STEPS


def test_one_rank_needs_no_group():
    weights, gradients = data()
    layout = Layout(SHAPES, 1)
    run, _ = fragment_steps(layout, weights, gradients, None, 0)
    for found, value in zip(layout.tensors([run]), whole(weights, gradients), strict=True):
        assert torch.equal(found, value)


def gloo_rank(cuts):
    import torch.distributed as dist

    weights, gradients = data()
    layout = Layout(SHAPES, dist.get_world_size(), cuts)
    return fragment_steps(layout, weights, gradients, axis_of(dist.group.WORLD, "data"), dist.get_rank())[0]


@pytest.mark.parametrize("cuts", [None, [0]])
def test_fragments_over_gloo(cuts):
    weights, gradients = data()
    runs = run_ranks(gloo_rank, 2, cuts)
    for found, value in zip(Layout(SHAPES, 2, cuts).tensors(runs), whole(weights, gradients), strict=True):
        assert torch.equal(found, value)


STACK_SHAPES = [(5, 6, 9), (3, 12, 4), (1, 7, 7), (2, 9, 33)]


def stack_data():
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator) for shape in STACK_SHAPES]
    return weights, [[torch.randn(shape, generator=generator) for shape in STACK_SHAPES] for _ in range(STEPS)]


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_a_stack_is_so_many_matrices(method):
    weights, gradients = stack_data()
    found = whole(weights, gradients, ns_method=method)
    for stack, initial, grads in zip(found, weights, zip(*gradients, strict=True), strict=True):
        alone = whole(list(initial), [list(grad) for grad in grads], ns_method=method)
        torch.testing.assert_close(stack, torch.stack(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("world_size", "cuts"), [(2, None), (3, None), (4, [64, 128, 640]), (3, [0, 320]), (1, None)])
def test_fragments_equal_whole_stacks(monkeypatch, world_size, cuts):
    use_threaded_collectives(monkeypatch)
    weights, gradients = stack_data()
    layout, group = Layout(STACK_SHAPES, world_size, cuts), ThreadedAxis(world_size)

    def body(rank):
        run = torch.nn.Parameter(layout.slice_of(weights, rank))
        optimizer = Muon([{"params": [run], "use_muon": True, "stacked": True}], **OPTIONS)
        optimizer.attach_segments(layout.table(run, rank, group if world_size > 1 else None))
        for grads in gradients:
            run.grad = layout.slice_of(grads, rank)
            optimizer.step()
        return run.detach()

    found = layout.tensors(group.run(body))
    for stack, expected in zip(found, whole(weights, gradients), strict=True):
        torch.testing.assert_close(stack, expected, rtol=1e-5, atol=1e-6)


def test_matrices_of_one_stack_are_shared_out(monkeypatch):
    """With a stack as one matrix, one rank had it all."""
    use_threaded_collectives(monkeypatch)
    weights = [torch.ones(8, 16, 16)]
    layout, group = Layout([(8, 16, 16)], 4), ThreadedAxis(4)

    def body(rank):
        run = torch.nn.Parameter(layout.slice_of(weights, rank))
        optimizer = Muon([{"params": [run], "use_muon": True, "stacked": True}], **OPTIONS)
        optimizer.attach_segments(layout.table(run, rank, group))
        (only,) = optimizer._exchanges[0]._rounds
        return sum(only.send_numels) - only.send_numels[rank], len({p.tensor.index for p in only.received})

    assert group.run(body) == [(0, 2)] * 4, "whole matrices stay where they are"


def test_stacks_and_convolutions_are_distinguished():
    model = torch.nn.Module()
    model.experts = torch.nn.Parameter(torch.ones(4, 3, 5))
    model.experts_bias = torch.nn.Parameter(torch.ones(4, 3))
    model.conv = torch.nn.Conv1d(3, 6, 2)
    model.conv2 = torch.nn.Conv2d(3, 6, 2)
    set_optimizer_flags({"optimizer": {"type": "Muon"}}, model)
    matrices, stacks, rest = Muon(model.parameters()).param_groups
    assert [p.shape for p in matrices["params"]] == [model.conv.weight.shape, model.conv2.weight.shape]
    assert stacks["params"] == [model.experts] and stacks["stacked"] and not matrices["stacked"]
    assert any(p is model.experts_bias for p in rest["params"])


@on_ranks(1)
def test_an_engine_refuses_a_convolution_in_a_group_of_stacks() -> None:
    import deepspeed
    from deepspeed.errors import DeepSpeedConfigError

    model = torch.nn.Sequential(torch.nn.Conv1d(3, 6, 2))
    for given in (Muon(model.parameters()), lambda params: Muon(params)):
        with pytest.raises(DeepSpeedConfigError, match=r"0\.weight.*kernel of a convolution"):
            deepspeed.initialize(model=model, optimizer=given, config={"train_batch_size": 1})


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.up = torch.nn.Parameter(torch.randn(3, 10, 6, generator=generator))
        self.down = torch.nn.Parameter(torch.randn(3, 6, 10, generator=generator))
        self.scale = torch.nn.Parameter(torch.ones(6))

    def forward(self, x):
        hidden = torch.einsum("bi,eoi->beo", x * self.scale, self.up).tanh()
        return torch.einsum("beo,eio->bei", hidden, self.down).sum(1)


def train_experts(stage, offload):
    import torch.distributed as dist

    import deepspeed

    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(
        model=Experts(),
        config={
            "train_micro_batch_size_per_gpu": 12 // dist.get_world_size(),
            "gradient_clipping": 0.0,
            "optimizer": {"type": "Muon", "params": {"lr": 0.05, "weight_decay": 0.1}},
            "zero_optimization": zero,
        },
    )
    for step in range(3):
        batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
        engine.backward((engine(mine) - 1).square().mean())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [p.detach().clone() for p in engine.module.parameters()]


def count_bytes(stage):
    import deepspeed
    from deepspeed.comm.base.counters import counted
    from deepspeed.logging import logger

    lines = []
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    engine, *_ = deepspeed.initialize(
        model=torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.Linear(17, 6), Experts()),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Muon", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    engine.backward(engine(torch.randn(2, 9)).square().mean())
    with counted() as traffic:
        engine.step()
    printed = next((line for line in lines if line.startswith("Muon: ")), "")
    return traffic.requested["all_to_all"].nbytes, engine.basic_optimizer.sent_bytes, printed


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (2, 1), (3, 3)])
def test_bytes_of_the_exchange_are_printed(world_size, stage):
    results = run_ranks(count_bytes, world_size, stage, fresh=True)
    assert all(sent == named for sent, named, _ in results), results
    total = sum(sent for sent, *_ in results)
    assert (total == 0) is (stage == 0)
    expected = f"of 8 matrices .* exchange {total:,} bytes .* this rank sends {results[0][0]:,}$"
    assert re.search(expected, results[0][2]) if stage else not results[0][2]


@pytest.mark.parametrize(("world_size", "stage", "offload"), [(2, 0, False), (2, 1, False), (2, 3, True), (3, 2, True)])
def test_stacks_of_an_engine_equal_separate_matrices(world_size, stage, offload):
    """Against plain torch, every matrix by itself."""
    from tests.oracle.optimizers import Muon as Reference

    model = Experts()
    parts = torch.nn.ParameterList([*model.up.detach(), *model.down.detach()])
    scale = torch.nn.Parameter(model.scale.detach().clone())
    optimizer = Reference(
        [
            {"params": list(parts), "use_muon": True},
            {"params": [scale], "use_muon": False, "betas": (0.9, 0.95), "eps": 1e-10},
        ],
        lr=0.05,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
    )
    for step in range(3):
        batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        found = torch.func.functional_call(
            model, {"up": torch.stack(list(parts)[:3]), "down": torch.stack(list(parts)[3:]), "scale": scale}, (batch,)
        )
        optimizer.zero_grad()
        (found - 1).square().mean().backward()
        optimizer.step()
    for up, down, scaled in run_ranks(train_experts, world_size, stage, offload):
        torch.testing.assert_close(up, torch.stack(list(parts)[:3]), rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(down, torch.stack(list(parts)[3:]), rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(scaled, scale, rtol=1e-4, atol=2e-5)


def test_a_rank_without_gradient_takes_part_unchanged(monkeypatch):
    use_threaded_collectives(monkeypatch)
    weights, gradients = data()
    layout, group = Layout(SHAPES, 2), ThreadedAxis(2)

    def rank_step(rank):
        run = torch.nn.Parameter(layout.slice_of(weights, rank))
        optimizer = Muon([{"params": [run], "use_muon": True}], **OPTIONS)
        optimizer.attach_segments(layout.table(run, rank, group))
        if rank == 0:
            run.grad = layout.slice_of(gradients[0], rank)
        optimizer.step()
        return (run.detach() - layout.slice_of(weights, rank)).abs().max().item()

    moved = group.run(rank_step)
    assert moved[0] > 0 and moved[1] == 0


def test_runs_that_do_not_fit_the_table_are_refused():
    run = torch.nn.Parameter(torch.ones(64))
    optimizer = Muon([{"params": [run], "use_muon": True}])
    shared = (SharedTensor("w", 0, (8, 16), 0, 0, range(0, 129, 64)),)
    fragments = (TensorFragment("w", 0, 0, 64, 64, (8, 16)),)
    with pytest.raises(ValueError, match=r"matrix 0: expected its elements \(0, 64\) .* found \(64, 128\)"):
        optimizer.attach_segments(FragmentTable({id(run): fragments}, 1, None, shared, range(2), 0))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(5, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.lm_head = torch.nn.Linear(4, 5, bias=False)


@pytest.mark.parametrize("config", [{"optimizer": {"type": "Muon"}}, type("C", (), {"optimizer_name": "muon"})()])
def test_flags(config):
    model = Model()
    set_optimizer_flags(config, model)
    flags = {name: getattr(param, "use_muon", None) for name, param in model.named_parameters()}
    assert flags == {
        "embed_tokens.weight": False,
        "layer.weight": True,
        "layer.bias": False,
        "frozen.weight": None,
        "frozen.bias": None,
        "lm_head.weight": False,
    }


@needs_transformers
@on_ranks(1)
def test_flags_of_a_pipeline_are_those_of_its_transformers_model() -> None:
    from deepspeed.pipe import PipelineModule
    from tests.parallel.sequence.llama import llama

    config = {"optimizer": {"type": "Muon"}}
    for tied in (False, True):
        model = llama(tie_word_embeddings=tied)
        module = PipelineModule.from_transformers(model, num_stages=1)
        names = module.names_in_transformers()
        set_optimizer_flags(config, module)
        found = {}
        for own, parameter in module.named_parameters():
            beginning = next(one for one in names if own.startswith(one))
            found[names[beginning] + own.removeprefix(beginning)] = parameter.use_muon
        set_optimizer_flags(config, model)
        assert found == {name: parameter.use_muon for name, parameter in model.named_parameters()}
        assert not found["model.embed_tokens.weight"] and found["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize("config", [{"optimizer": {"type": "Adam"}}, {}, {"optimizer": None}])
def test_no_flags_for_other_optimizers(config):
    model = Model()
    set_optimizer_flags(config, model)
    assert not any(hasattr(param, "use_muon") for param in model.parameters())


def test_what_is_refused():
    matrix, run = torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(64))
    for bad in ({"ns_method": "newton"}, {"momentum": 1.0}, {"ns_steps": 0}, {"lr": -1.0}):
        with pytest.raises(ValueError):
            Muon([matrix], **bad)
    optimizer = Muon([{"params": [run], "use_muon": True}])
    run.grad = torch.ones(64)
    with pytest.raises(ValueError, match="attach_segments"):
        optimizer.step()
    table = FragmentTable({id(run): (TensorFragment("w", 0, 0, 64, 0, (8, 8)),)}, 1)
    optimizer.param_groups[0]["ns_method"] = "standard"
    with pytest.raises(ValueError, match="ns_method: expected the same"):
        optimizer.attach_segments(table)
    assert not supports_flat_update(optimizer)


def test_state_is_sent():
    weights, gradients = data()
    expected = whole(weights, gradients)
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = Muon(params, **OPTIONS)
    for step, grads in enumerate(gradients):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        if step == 1:
            successor = Muon(params, lr=9.0)
            successor.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = copy.copy(successor)
        optimizer.step()
    assert all(torch.equal(param, value) for param, value in zip(params, expected, strict=True))


@pytest.mark.parametrize("is_first", [True, False])
def test_the_heaviest_rank_is_that_of_the_largest_matrix_in_any_table(is_first):
    def table(name, rows, job_ranks):
        run = torch.nn.Parameter(torch.empty(rows * 4, device="meta"))
        tensor = SharedTensor(name, 0, (2 * rows, 4), 0, 0, range(0, rows * 8 + 1, rows * 4))
        fragment = TensorFragment(name, 0, 0, rows * 4, 0, tensor.shape)
        return run, FragmentTable(
            {id(run): (fragment,)}, 1, ThreadedAxis(2), (tensor,), range(2), 0, job_ranks=job_ranks
        )

    made = [table("experts", 8, (1, 3)), table("dense", 2, (0, 2))]
    runs, tables = zip(*(made if is_first else reversed(made)), strict=True)
    optimizer = Muon([{"params": list(runs), "use_muon": True, "stacked": False}])
    optimizer.attach_segments(*tables)
    assert optimizer.heaviest_rank in (1, 3)
