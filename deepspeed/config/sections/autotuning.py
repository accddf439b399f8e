"""``autotuning``: the search for a fast configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, FilePath, Int

TUNING_VARIABLE = "DS_AUTOTUNING"
"""Environment variable that names the file of an experiment; ``deepspeed --autotuning`` sets it for the script."""


class ModelInfo(Section):
    """Facts about the model that spare the tuner a profile."""

    profile: Bool = key(False, "Measure them.")
    num_params: Int | None = key(None, "Parameters.", unit="elements", above=0)
    hidden_size: Int | None = key(None, "Width.", above=0)
    num_layers: Int | None = key(None, "Layers.", above=0)


_PLANNED = "the model itself is planned"


class Autotuning(Section):
    """The search of ``deepspeed --autotuning``. While tuning, batch sizes and ``zero_optimization`` may have lists."""

    enabled: Bool = key(False, "Has an effect under deepspeed --autotuning only, where it need not be given.")
    fast: Bool = key(True, "Leave bucket sizes and overlap_comm as they are.")
    results_dir: str = key("autotuning_results", "Folder of results; not empty.")
    exps_dir: str = key("autotuning_exps", "Folder of experiment files; not empty.")
    overwrite: Bool = key(True, "Replace old results; false takes up the trials that are there.")
    metric: Annotated[Literal["throughput", "latency", "flops"], AnyCase] = key(
        "throughput", "What the table shows. The global batch is the same for all, so all three rank them alike."
    )
    metric_path: FilePath = key(None, "File of a metric.", no_effect="each trial writes metrics.json in its folder")
    start_profile_step: Int = key(3, "First step measured.", unit="steps", minimum=0)
    end_profile_step: Int = key(12, "Last step measured; the trial ends. Upstream: 5.", unit="steps", minimum=0)
    tuner_type: Annotated[Literal["gridsearch", "random", "model_based"], AnyCase] = key(
        "model_based", "Strategy.", no_effect="candidates are tried in the order of their predicted time"
    )
    tuner_early_stopping: Int = key(5, "Stop after so many tries without gain.", unit="tries", above=0)
    tuner_num_trials: Int = key(3, "Most tries. Upstream: 50.", unit="tries", above=0)
    arg_mappings: dict[str, Any] | None = key(
        None, "Script arguments that carry configuration values: from a key, such as train_micro_batch_size_per_gpu."
    )
    model_info: ModelInfo | None = key(None, "Facts about the model.", no_effect=_PLANNED)
    model_info_path: FilePath = key(None, "File with the facts about the model.", no_effect=_PLANNED)
    mp_size: Int = key(
        1, "Model-parallel size.", unit="ranks", above=0, no_effect="tensor_parallel.autotp_size says it"
    )
    max_train_batch_size: Int | None = key(
        None, "The global batch where the configuration gives none.", unit="samples", above=0
    )
    min_train_batch_size: Int = key(
        1, "Least batch.", unit="samples", above=0, no_effect="all candidates have the same global batch"
    )
    max_train_micro_batch_size_per_gpu: Int = key(1024, "Greatest micro-batch.", unit="samples", above=0)
    min_train_micro_batch_size_per_gpu: Int = key(1, "Least micro-batch.", unit="samples", above=0)
    num_tuning_micro_batch_sizes: Int = key(
        3, "Micro-batches tried.", above=0, no_effect="all divisors of the batch are planned, which starts nothing"
    )
    num_gpus: Int | None = key(None, "Ignored.", above=0, no_effect="the launcher decides")
    num_nodes: Int | None = key(None, "Ignored.", above=0, no_effect="the launcher decides")
