"""What the matrix varies, and which combinations must be refused with which words."""

from dataclasses import asdict, dataclass
from typing import Any

AXES: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "precision": ["fp32", "bf16", "bf16 sent as fp32", "fp16", "fp16 static", "autocast"],
    "accumulation": [1, 3],
    "clipping": [0.0, 0.2],
    "backward": ["engine", "own", "two", "losses", "own losses"],
    "optimizer": [
        "client AdamW",
        "client Adam",
        "client SGD",
        "client Adagrad",
        "client RMSprop",
        "client Lion",
        "client Adafactor",
        "client LBFGS",
        "client unknown",
        "config AdamW",
        "config Adam",
        "config Adam, L2",
        "config SGD",
        "config Adagrad",
        "config RMSprop",
        "config Lion",
        "config Lamb",
        "config Muon",
    ],
}
"""The axes of the whole product."""

SIDE_AXES: dict[str, list[Any]] = {
    "ranks": [1, 2, 3, 4],
    "limits": ["default", "small", "smallest"],
    "overflow": [False, True],
}
"""Further axes of the pairwise cover; the whole product takes them in turn."""

LIMITS: dict[str, dict[str, Any]] = {
    "default": {},
    "small": {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 700,
        "stage3_max_live_parameters": 1500,
        "reduce_bucket_size": 600,
        "overlap_comm": True,
    },
    "smallest": {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "reduce_bucket_size": 1,
        "overlap_comm": False,
    },
}


GRIDS: dict[str, dict[str, Any]] = {
    "hpZ": {**LIMITS["small"], "zero_hpz_partition_size": 2},
    "MiCS": {**LIMITS["small"], "mics_shard_size": 2},
}
"""Limits with groups of two ranks that share the parameters, for stage 3 on four ranks."""


@dataclass(frozen=True)
class Cell:
    """One combination."""

    stage: int
    precision: str
    accumulation: int
    clipping: float
    backward: str
    optimizer: str
    ranks: int
    limits: str
    overflow: bool

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())

    @property
    def refusal(self) -> str | None:
        """A pattern that the refusal at ``initialize`` must match, or None if the cell must train."""
        name = self.optimizer.removeprefix("client ").removeprefix("config ")
        if name == "LBFGS":
            return r"LBFGS.*closure|LBFGS.*whole parameter vector"
        if name == "Adafactor" and self.stage >= 1:
            return r"Adafactor.*stage.*matrix"
        if name == "unknown" and self.stage >= 1:
            return r"Homemade.*stage.*zero_allow_untested_optimizer"
        if name == "Lamb" and self.precision == "fp16 static":
            return r"fp16.loss_scale.*Lamb"
        return None

    def config(self) -> dict[str, Any]:
        """The configuration of the cell, its optimizer section apart."""
        made: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "zero_optimization": {"stage": self.stage, **{**LIMITS, **GRIDS}[self.limits]},
        }
        if self.precision.startswith("bf16"):
            made["bf16"] = {"enabled": True}
        if self.precision == "bf16 sent as fp32":
            made["communication_data_type"] = "fp32"
        if self.precision == "fp16":
            made["fp16"] = {"enabled": True, "initial_scale_power": 9, "loss_scale_window": 2, "hysteresis": 1}
        if self.precision == "fp16 static":
            made["fp16"] = {"enabled": True, "loss_scale": 128}
        if self.precision == "autocast":
            made["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        return made


def cell(row: dict[str, Any]) -> Cell:
    return Cell(**row)
