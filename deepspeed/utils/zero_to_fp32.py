"""Upstream's import path for names of 3 modules."""

import sys

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.checkpoint.consolidate import (
        convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
    )
    from deepspeed.checkpoint.consolidate import (
        convert_zero_checkpoint_to_state_dict as convert_zero_checkpoint_to_state_dict,
    )
    from deepspeed.checkpoint.consolidate import (
        get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
    )
    from deepspeed.checkpoint.consolidate import (
        load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint,
    )
    from deepspeed.checkpoint.consolidate import main as main
    from deepspeed.checkpoint.consolidate import to_torch_tensor as to_torch_tensor
    from deepspeed.checkpoint.names import get_checkpoint_files as get_checkpoint_files
    from deepspeed.checkpoint.names import get_model_state_file as get_model_state_file
    from deepspeed.checkpoint.names import get_model_state_files as get_model_state_files
    from deepspeed.checkpoint.names import get_optim_files as get_optim_files
    from deepspeed.checkpoint.upstream.files import parse_optim_states as parse_optim_states

lazy_names(__name__)

if __name__ == "__main__":
    from deepspeed.checkpoint.consolidate import main

    sys.argv[0] = "python -m deepspeed.utils.zero_to_fp32"  # shown in the usage
    sys.exit(main())
