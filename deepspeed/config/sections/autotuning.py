"""``autotuning``: the search for a fast configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, FilePath, Int


class ModelInfo(Section):
    """Facts about the model that spare the tuner a profile."""

    profile: Bool = key(False, "Measure them.")
    num_params: Int | None = key(None, "Parameters.", unit="elements", above=0)
    hidden_size: Int | None = key(None, "Width.", above=0)
    num_layers: Int | None = key(None, "Layers.", above=0)


class Autotuning(Section):
    """The search for a fast configuration. While tuning, values elsewhere may be lists of candidates."""

    enabled: Bool = key(False, "Search a configuration.")
    fast: Bool = key(True, "Tune only micro-batch and stage.")
    results_dir: str = key("autotuning_results", "Folder of results; not empty.")
    exps_dir: str = key("autotuning_exps", "Folder of experiment files; not empty.")
    overwrite: Bool = key(True, "Replace old results.")
    metric: Annotated[Literal["throughput", "latency", "flops"], AnyCase] = key("throughput", "What is optimised.")
    metric_path: FilePath = key(None, "File with a metric of one's own.")
    start_profile_step: Int = key(3, "First step measured.", unit="steps", minimum=0)
    end_profile_step: Int = key(5, "Last step measured.", unit="steps", minimum=0)
    tuner_type: Annotated[Literal["gridsearch", "random", "model_based"], AnyCase] = key("gridsearch", "Strategy.")
    tuner_early_stopping: Int = key(5, "Stop after so many tries without gain.", unit="tries", above=0)
    tuner_num_trials: Int = key(50, "Most tries.", unit="tries", above=0)
    arg_mappings: dict[str, Any] | None = key(None, "Script arguments that carry configuration values.")
    model_info: ModelInfo | None = key(None, "Facts about the model.")
    model_info_path: FilePath = key(None, "File with the facts about the model.")
    mp_size: Int = key(1, "Model-parallel size.", unit="ranks", above=0)
    max_train_batch_size: Int | None = key(None, "Greatest batch.", unit="samples", above=0)
    min_train_batch_size: Int = key(1, "Least batch.", unit="samples", above=0)
    max_train_micro_batch_size_per_gpu: Int = key(1024, "Greatest micro-batch.", unit="samples", above=0)
    min_train_micro_batch_size_per_gpu: Int = key(1, "Least micro-batch.", unit="samples", above=0)
    num_tuning_micro_batch_sizes: Int = key(3, "Micro-batches tried.", above=0)
    num_gpus: Int | None = key(None, "Ignored.", above=0, no_effect="the launcher decides")
    num_nodes: Int | None = key(None, "Ignored.", above=0, no_effect="the launcher decides")
