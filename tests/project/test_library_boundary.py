"""Only ``deepspeed/models`` imports the Transformers library or names what is private to it.

A release of the library that renames something then breaks one package. What is still named elsewhere stands in
:data:`ALLOWED`, each with its reason; the list is to become shorter.
"""

import ast
from collections.abc import Iterator

from tests.project import graph

PACKAGE = "deepspeed.models"

PRIVATE = frozenset({
    "_apply_gate", "_attn_implementation", "_can_record_outputs", "_from_config", "_gradient_checkpointing_func",
    "_init_weights", "_is_hf_initialized", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict",
    "_name_or_path", "_tp_plan", "architectures", "base_model", "base_model_prefix", "get_base_model",
    "get_decoder", "get_input_embeddings", "get_output_embeddings", "get_text_config",
    "gradient_checkpointing_enable", "has_post_expert_norm", "image_size", "is_gradient_checkpointing",
    "layer_types", "loss_function", "loss_type", "main_input_name", "num_key_value_groups", "num_key_value_heads",
    "num_mel_bins",
    "output_router_logits", "qk_rope_head_dim", "rope_type", "router_aux_loss_coef", "set_attn_implementation",
    "supports_gradient_checkpointing", "tie_word_embeddings", "to_diff_dict", "use_experts_implementation",
    "vision_config",
})  # fmt: skip

ALLOWED = {
    ("deepspeed.parallel.pipe.transformers_models", "_tp_plan"): "a block of a pipeline brings the model's plan along",
    ("deepspeed.compression.cleaning", "num_key_value_heads"): "one of many names that attention modules have",
    ("deepspeed.parallel.sequence.fpdt", "num_key_value_heads"): "a field of Megatron's configuration, too",
    ("deepspeed.config.sections.zero", "transformers."): "names of classes that are defaults of the configuration",
    ("deepspeed.cli.report", "transformers"): "its version is reported",
}


def _named(module: str) -> Iterator[tuple[str, int]]:
    """Yields private names, imports and module names of the library in a module, with their lines."""
    kinds = (ast.Attribute, ast.keyword, ast.Constant, ast.Import, ast.ImportFrom)
    for node in graph.nodes_of(module, *kinds):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            yield node.attr, node.lineno
        elif isinstance(node, ast.keyword) and node.arg in PRIVATE:
            yield node.arg, node.value.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in PRIVATE or node.value == "transformers":
                yield node.value, node.lineno
            elif node.value.startswith("transformers.") and " " not in node.value:
                yield "transformers.", node.lineno
        elif isinstance(node, ast.Import) and any(one.name.partition(".")[0] == "transformers" for one in node.names):
            yield "import", node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
            yield "import", node.lineno


def _is_home(module: str) -> bool:
    return f"{module}.".startswith(f"{PACKAGE}.")


def test_only_one_package_imports_the_library():
    wrong = [
        f"{graph.path_of(module).relative_to(graph.ROOT)}:{line} names {name}"
        for module in graph.modules()
        if not _is_home(module)
        for name, line in _named(module)
        if (module, name) not in ALLOWED
    ]
    assert not wrong, "ask deepspeed/models instead:\n" + "\n".join(sorted(set(wrong)))


def test_nothing_is_allowed_without_need():
    found = {(module, name) for module in graph.modules() if not _is_home(module) for name, _ in _named(module)}
    assert set(ALLOWED) <= found, f"take out of ALLOWED: {sorted(set(ALLOWED) - found)}"
    assert any(name == "import" for module in graph.modules() if _is_home(module) for name, _ in _named(module))


def test_the_package_needs_the_library_only_inside_functions():
    """All of it can be imported without the library."""
    for module in filter(_is_home, graph.modules()):
        for node in graph.tree_of(module).body:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] == "transformers" for name in names), module
