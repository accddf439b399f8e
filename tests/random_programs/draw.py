"""Draws a program from a seed. Leaves out combinations that the documents exclude."""

import random
from typing import Any

from tests.random_programs.program import Action, Layout, Model, Optimizer, Options, Phase, Program

ACTIONS = (
    "evaluate", "compare", "get gradient", "set gradient", "set master", "set state", "gathered", "freeze", "unfreeze",
    "return", "away", "modes", "two forwards", "lost forward",
)  # fmt: skip
_PIPELINE = ("evaluate", "compare", "set master", "set state", "gathered", "return")
_WORLDS = (1, 2, 2, 3, 4, 4)

# eps is large beside the rounding of a gradient, so that rounding does not decide the direction of an update.
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1},
    "Adam": {"lr": 0.02, "eps": 1e-3},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.05, "eps": 1e-2},
    "RMSprop": {"lr": 0.01, "eps": 1e-2, "momentum": 0.5},
    "Adamax": {"lr": 0.02, "eps": 1e-3},
    "NAdam": {"lr": 0.02, "eps": 1e-3},
    "RAdam": {"lr": 0.02, "eps": 1e-3},
    "Adadelta": {"lr": 0.5, "eps": 1e-3},
}
_SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "ExponentialLR": {"gamma": 0.8},
    "CosineAnnealingLR": {"T_max": 9, "eta_min": 0.001},
}


def draw(seed: int) -> Program:
    """Returns the program of a seed."""
    dice = random.Random(seed)
    kind = dice.choices(("own", "row", "llama", "gpt2", "mixtral"), (10, 4, 6, 2, 2))[0]
    steps = dice.choice((4, 5, 6))
    layouts = _layouts(dice, kind)
    model = _model(dice, kind, layouts)
    splits = sorted(dice.sample(range(1, steps), len(layouts) - 1))
    lengths = [stop - start for start, stop in zip([0, *splits], [*splits, steps], strict=True)]
    phases: tuple[Phase, ...] = ()
    for layout, length in zip(layouts, lengths, strict=True):
        phases += (_phase(dice, model, layout, length, phases),)
    routes = model.kind == "mixtral" or "experts" in model.given.get("blocks", ())
    # The choice of experts is not continuous, so with rounded activations there is nothing to compare.
    precision = "fp32" if routes else dice.choices(("fp32", "bf16", "fp16"), (7, 1, 1))[0]
    changes = any(action.name in ("freeze", "unfreeze") for phase in phases for action in phase.actions)
    optimizer = _optimizer(dice, changes, layouts)
    clip = dice.choice((0.0, 0.0, 0.3, 1.0, 5.0))
    return Program(seed, model, optimizer, precision, clip, phases)


def _options(given: dict[str, Any]) -> Options:
    return tuple(sorted(given.items()))


# -- layouts ----------------------------------------------------------------------------------------------------------


def _layouts(dice: random.Random, kind: str) -> list[Layout]:
    layouts = [_layout(dice, kind) for _ in range(dice.choice((1, 1, 2, 2, 3)))]
    return layouts


def _layout(dice: random.Random, kind: str) -> Layout:
    world = dice.choice(_WORLDS)
    sizes = dict.fromkeys(("pipe", "tensor", "sequence"), 1)
    axes = {
        "own": ("data", "data", "sequence"),
        "row": ("data", "pipe", "pipe", "sequence"),
        "llama": ("data", "tensor", "tensor", "sequence", "sequence", "pipe"),
        "gpt2": dice.choice((("data", "tensor", "sequence"), ("data", "pipe", "sequence"))),
        "mixtral": ("data", "data", "sequence", "tensor"),
    }[kind]
    left = world
    while left > 1:
        factor = 2 if left % 2 == 0 else left
        axis = dice.choice(axes)
        if axis != "data":
            sizes[axis] *= factor
        left //= factor
    has_pipe = kind == "row" or sizes["pipe"] > 1
    data = world // (sizes["pipe"] * sizes["tensor"] * sizes["sequence"])
    experts = dice.choice([n for n in (1, 2, 4) if data % n == 0])
    stage = dice.choice((0, 1, 2, 3, 3))
    if experts > 1 and stage == 3 and dice.random() < 0.3:
        stage = 2
    return Layout(
        world=world,
        stage=stage,
        pipe=sizes["pipe"] if has_pipe else 0,
        tensor=sizes["tensor"],
        sequence=sizes["sequence"],
        mode=dice.choice(("ulysses", "ulysses", "ring", "both")) if kind in ("llama", "mixtral") else "ulysses",
        experts=experts if kind in ("own", "row", "mixtral") else 1,
        zero=_zero(dice, stage, data * sizes["sequence"], experts),
        schedule=dice.choice(("1f1b", "1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev")),
        recompute=dice.choice((0, 0, 1)),
    )


def _zero(dice: random.Random, stage: int, sharers: int, experts: int) -> Options:
    """Returns further keys of ``zero_optimization``."""
    made: dict[str, Any] = {}
    if dice.random() < 0.5:
        made["reduce_bucket_size"] = dice.choice((50, 300, 2000))
    if stage > 0 and dice.random() < 0.35:
        made["offload_optimizer"] = dice.choice(("cpu", "cpu", "nvme"))  # nvme: see _optimizer
    if dice.random() < 0.3:
        made["overlap_comm"] = dice.random() < 0.5
    if stage == 3:
        made["stage3_param_persistence_threshold"] = dice.choice((0, 0, 40, 100_000))
        made["stage3_prefetch_bucket_size"] = dice.choice((0, 200, 100_000))
        made["stage3_max_reuse_distance"] = dice.choice((0, 1_000_000))
        if dice.random() < 0.3:
            made["offload_param"] = dice.choice(("cpu", "cpu", "nvme"))
        if sharers == 4 and experts == 1 and dice.random() < 0.5:
            made[dice.choice(("mics_shard_size", "zero_hpz_partition_size"))] = 2
    return _options(made)


# -- models -----------------------------------------------------------------------------------------------------------


def _model(dice: random.Random, kind: str, layouts: list[Layout]) -> Model:
    sequence = max(layout.sequence for layout in layouts)
    given: dict[str, Any] = {
        "vocabulary": dice.choice((11, 17, 23)),
        "tokens": 12,
        "ragged": sequence == 1 and dice.random() < 0.5,
        "mask": "none",
        "tied": dice.random() < 0.5,
    }
    if kind in ("own", "row"):
        given |= _own(dice, kind, layouts)
    else:
        given |= _transformers(dice, kind, layouts)
    return Model(kind, _options(given))


def _own(dice: random.Random, kind: str, layouts: list[Layout]) -> dict[str, Any]:
    shares_experts = max(layout.experts for layout in layouts)
    shares_sequences = max(layout.sequence for layout in layouts)
    kinds = ["mlp", "mlp", "attention", *(["experts"] if dice.random() < 0.3 else [])]
    count = dice.randint(2, 4)
    if kind == "row":
        count = max(count, 2 * max(layout.pipe for layout in layouts))  # two chunks on each stage
    blocks = [dice.choice(kinds) for _ in range(count)]
    if shares_sequences > 1:
        blocks[0] = "attention"
    if shares_experts > 1:
        blocks[-1] = "experts"
    heads, key_heads = dice.choice(((4, 2), (4, 4), (3, 1), (5, 5), (2, 1)))
    if heads < shares_sequences:
        heads, key_heads = shares_sequences, 1
    # At stage 3 ranks must run the same modules.
    branches = ("steps",) if any(layout.stage == 3 for layout in layouts) else ("some", "some")
    return {
        "width": dice.choice((5, 7, 9, 12)),
        "inner": dice.choice((9, 13, 16)),
        "blocks": tuple(blocks),
        "heads": heads,
        "key_heads": key_heads,
        "experts": 4,
        "k": dice.choice((1, 2)),
        "container": dice.choice(("list", "attributes", "dict")),
        "frozen": dice.choice(("none", "none", "block", "norms", "biases", "words", "places")),
        "unused": dice.random() < 0.4,
        "branch": dice.choice(("never", "always", "steps", *branches)),
        "recomputed": dice.choice(("none", "none", "reentrant", "plain")),
        "twice": dice.random() < 0.2,
        "borrowed": dice.random() < 0.2,
        "head_bias": dice.random() < 0.5,
    }


def _transformers(dice: random.Random, kind: str, layouts: list[Layout]) -> dict[str, Any]:
    tensor = max(layout.tensor for layout in layouts)
    shares = max(layout.sequence for layout in layouts) > 1
    heads, key_heads = dice.choice(((4, 2), (4, 4), (6, 2), (3, 3), (5, 1)))
    if kind == "gpt2":
        key_heads = heads
    if heads < tensor * max(layout.sequence for layout in layouts):
        heads = key_heads = 4
    pipe = max(layout.pipe for layout in layouts)
    return {
        "heads": heads,
        "key_heads": key_heads,
        "inner": dice.choice((20, 37)),
        "layers": max(2, pipe, 2 * pipe if dice.random() < 0.5 else 0),
        "bias": dice.random() < 0.5,
        "experts": 4,
        "k": 2,
        "attention": "sdpa" if shares else dice.choice(("sdpa", "eager")),
        "mask": dice.choice(("none", "left", "right")),
    }


# -- phases and updates -----------------------------------------------------------------------------------------------


def _phase(dice: random.Random, model: Model, layout: Layout, steps: int, before: tuple[Phase, ...]) -> Phase:
    accumulation = dice.choice((1, 1, 2, 3))
    if layout.pipe:
        accumulation = dice.choice((1, 2, 4))
    names = list(_PIPELINE if layout.pipe else ACTIONS)
    if model.given.get("recomputed") == "reentrant":
        names = [name for name in names if name != "two forwards"]  # gradients arrive twice: refused by name
    if any(action.name == "freeze" for phase in before for action in phase.actions):
        # What is frozen when a checkpoint is loaded gets no state of it, which a warning states.
        names = [name for name in names if name != "unfreeze"]
    actions = []
    for step in range(steps):
        if dice.random() < 0.45:
            actions.append(Action(dice.choice(names), step, dice.randrange(100)))
    if not layout.pipe and accumulation > 1 and dice.random() < 0.25:
        actions.append(Action("no_sync", -1))
    compiled = not layout.pipe and layout.tensor == 1 and dice.random() < 0.03
    return Phase(layout, accumulation, steps, tuple(actions), compiled)


def _optimizer(dice: random.Random, changes: bool, layouts: list[Layout]) -> Optimizer:
    name = dice.choices(list(_OPTIMIZERS), [6, 2, 4, 2, 1, 1, 1, 1, 1])[0]
    if any(("offload_optimizer", "nvme") in layout.zero for layout in layouts):
        name = dice.choice(("AdamW", "SGD", "Adagrad"))
    by_config = dice.random() < 0.5 and name != "Adam"  # that of a configuration is AdamW unless told otherwise
    if name == "Adagrad" and any(layout.tensor > 1 or layout.experts > 1 for layout in layouts):
        by_config = True  # it has states from the beginning, which cannot be cut
    params = dict(_OPTIMIZERS[name])
    schedule = dice.choice(("", "", *_SCHEDULES))
    return Optimizer(
        name=name,
        params=_options(params),
        by_config=by_config,
        groups=dice.choice((1, 1, 2, 3)),
        with_frozen=changes or dice.random() < 0.3,
        schedule=schedule,
        schedule_params=_options(_SCHEDULES.get(schedule, {})),
    )
