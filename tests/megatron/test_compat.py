"""What the package relies on in Megatron-Core and torch beside their public names."""

import inspect

import pytest
import torch.distributed as dist

from drivetrain_megatron.compat import is_alive, own_groups, routes_tokens
from drivetrain_megatron.groups import close_parallel_state, open_parallel_state
from drivetrain_megatron.library import (
    TransformerConfig,
    forward_backward_pipelining_without_interleaving,
    get_gpt_layer_local_spec,
    moe_utils,
    parallel_state,
)
from megatron_on_cpu import megatron_on_cpu
from plain_loop.backends import context


@pytest.mark.ranks(1)
def test_megatron_lists_the_groups_that_it_has_made_and_destroys_only_some() -> None:
    with context() as where:
        assert own_groups() == []
        open_parallel_state(where)
        groups = own_groups()
        assert parallel_state.get_tensor_model_parallel_group() in groups
        assert all(map(is_alive, groups))
        parallel_state.destroy_model_parallel()
        assert own_groups() == []
        assert any(map(is_alive, groups)), "it destroys all of them: close_parallel_state() need not"
        for group in filter(is_alive, groups):
            dist.destroy_process_group(group)
        close_parallel_state()


def test_routers_want_a_name_of_transformer_engine() -> None:
    if not routes_tokens():
        source = inspect.getsource(moe_utils.RouterGatingLinearFunction)
        assert "te_general_gemm is not None" in source, (
            "the name is no longer asked for: routes_tokens() can go"
        )
    with megatron_on_cpu():
        assert routes_tokens()


def test_the_local_layers_have_norms_to_exchange() -> None:
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm").submodules
    assert {"input_layernorm", "pre_mlp_layernorm", "self_attention"} <= set(vars(layer))
    assert {"q_layernorm", "k_layernorm"} <= set(vars(layer.self_attention.submodules))


def test_a_schedule_takes_what_a_batch_is_trained_with() -> None:
    taken = inspect.signature(forward_backward_pipelining_without_interleaving).parameters
    assert {
        "forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size",
    } <= set(taken)  # fmt: skip


def test_configs_have_the_options_that_are_refused() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, cuda_graph_scope=None)
    for name in (
        "gradient_accumulation_fusion", "defer_embedding_wgrad_compute", "delay_wgrad_compute",
        "moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_num_layers", "qk_layernorm", "sequence_parallel",
    ):  # fmt: skip
        assert hasattr(config, name)
