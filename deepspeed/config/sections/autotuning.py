"""``autotuning``: the search for a fast configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, FilePath, Int

TUNING_VARIABLE = "DS_AUTOTUNING"
"""Environment variable that names the file of an experiment; ``deepspeed --autotuning`` sets it for the script."""


class ModelInfo(Section):
    """Facts about the model, so that the tuner needs no profile."""

    profile: Bool = key(False, "Measure the facts.")
    num_params: Int | None = key(None, "Number of parameters.", unit="elements", above=0)
    hidden_size: Int | None = key(None, "Hidden size.", above=0)
    num_layers: Int | None = key(None, "Number of layers.", above=0)


_PLANNED = "the model itself is planned"


class Autotuning(Section):
    """The search of ``deepspeed --autotuning``. While tuning, batch sizes and ``zero_optimization`` may have lists."""

    enabled: Bool = key(False, "Has an effect with deepspeed --autotuning only, and is not needed there.")
    fast: Bool = key(True, "Do not tune bucket sizes and overlap_comm.")
    results_dir: str = key("autotuning_results", "Folder of results; not empty.")
    exps_dir: str = key("autotuning_exps", "Folder of experiment files; not empty.")
    overwrite: Bool = key(True, "true: replace old results. false: reuse the trials in the folder.")
    metric: Annotated[Literal["throughput", "latency", "flops"], AnyCase] = key(
        "throughput",
        "Metric in the table. All candidates have the same global batch, so all three metrics give the same order.",
    )
    metric_path: FilePath = key(None, "File with the metric.", no_effect="each trial writes metrics.json in its folder")
    start_profile_step: Int = key(3, "First step measured.", unit="steps", minimum=0)
    end_profile_step: Int = key(12, "Last step measured; the trial ends. Upstream: 5.", unit="steps", minimum=0)
    tuner_type: Annotated[Literal["gridsearch", "random", "model_based"], AnyCase] = key(
        "model_based", "Search strategy.", no_effect="candidates are tried in the order of their predicted time"
    )
    tuner_early_stopping: Int = key(5, "Stop after this many trials without improvement.", unit="tries", above=0)
    tuner_num_trials: Int = key(3, "Maximum number of trials. Upstream: 50.", unit="tries", above=0)
    arg_mappings: dict[str, Any] | None = key(
        None,
        'Arguments of the script that set configuration values, by key: {"train_micro_batch_size_per_gpu": '
        '"--per_device_train_batch_size"}.',
    )
    model_info: ModelInfo | None = key(None, "Facts about the model.", no_effect=_PLANNED)
    model_info_path: FilePath = key(None, "File with the facts about the model.", no_effect=_PLANNED)
    mp_size: Int = key(1, "Model-parallel size.", unit="ranks", above=0, no_effect="use tensor_parallel.autotp_size")
    max_train_batch_size: Int | None = key(
        None, "Global batch size, if the configuration does not give one.", unit="samples", above=0
    )
    min_train_batch_size: Int = key(
        1, "Smallest global batch.", unit="samples", above=0, no_effect="all candidates have the same global batch"
    )
    max_train_micro_batch_size_per_gpu: Int = key(1024, "Largest micro-batch to try.", unit="samples", above=0)
    min_train_micro_batch_size_per_gpu: Int = key(1, "Smallest micro-batch to try.", unit="samples", above=0)
    num_tuning_micro_batch_sizes: Int = key(
        3,
        "Number of micro-batch sizes to try.",
        above=0,
        no_effect="all divisors of the batch are planned; planning starts no run",
    )
    num_gpus: Int | None = key(None, "Number of devices.", above=0, no_effect="the launcher decides")
    num_nodes: Int | None = key(None, "Number of nodes.", above=0, no_effect="the launcher decides")
