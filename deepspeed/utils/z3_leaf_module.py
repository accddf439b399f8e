"""Upstream's import path for names of ``zero.gather.leaf_modules``."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.zero.gather.leaf_modules import get_z3_leaf_modules as get_z3_leaf_modules
    from deepspeed.zero.gather.leaf_modules import set_z3_leaf_module as set_z3_leaf_module
    from deepspeed.zero.gather.leaf_modules import set_z3_leaf_modules as set_z3_leaf_modules
    from deepspeed.zero.gather.leaf_modules import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
    from deepspeed.zero.gather.leaf_modules import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
    from deepspeed.zero.gather.leaf_modules import unset_z3_leaf_modules as unset_z3_leaf_modules
    from deepspeed.zero.gather.leaf_modules import z3_leaf_module as z3_leaf_module
    from deepspeed.zero.gather.leaf_modules import z3_leaf_parameter as z3_leaf_parameter

lazy_names(__name__)
