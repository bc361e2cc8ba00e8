"""Megatron-Core, imported on demand: what the package uses of it, by its public names."""

import warnings

from drivetrain_backends.errors import BackendNotInstalledError

with warnings.catch_warnings():
    # Megatron's modules tell on import which of their optional libraries are missing, and warn of each other.
    warnings.simplefilter("ignore")
    try:
        from megatron.core import ModelParallelConfig as ModelParallelConfig
        from megatron.core import parallel_state as parallel_state
        from megatron.core.dist_checkpointing.mapping import ShardedTensor as ShardedTensor
        from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory as ShardedTensorFactory
        from megatron.core.models.gpt import GPTModel as GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_local_spec as get_gpt_layer_local_spec,
        )
        from megatron.core.pipeline_parallel.schedules import (
            forward_backward_pipelining_without_interleaving as forward_backward_pipelining_without_interleaving,
        )
        from megatron.core.tensor_parallel.random import (
            model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed,
        )
        from megatron.core.transformer import TransformerConfig as TransformerConfig
        from megatron.core.transformer.moe import moe_utils as moe_utils
        from megatron.core.transformer.transformer_block import TransformerBlock as TransformerBlock
        from megatron.core.transformer.transformer_block import (
            TransformerBlockSubmodules as TransformerBlockSubmodules,
        )
        from megatron.core.transformer.transformer_block import (
            get_num_layers_to_build as get_num_layers_to_build,
        )
    except ModuleNotFoundError as error:
        raise BackendNotInstalledError(
            f"backend='megatron': the module {error.name} is not installed; megatron-core comes with "
            "pip install 'drivetrain[megatron]', or 'drivetrain-megatron[megatron]'"
        ) from error
