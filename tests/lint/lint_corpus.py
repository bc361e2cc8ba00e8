"""The training scripts that packages ship, which the linter is held against, and the true findings in them.

The tests check those that are installed. To check the others too, install each into a folder of its own and name the
folder that holds them all:

    for name in $(python tests/lint/lint_corpus.py); do uv pip install --no-deps --target corpus/$name $name; done
    LINT_CORPUS=corpus pytest -m slow tests/lint/test_corpus.py
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Distribution -> files below the folder it is installed into: what the development environment has.
DEVELOPMENT = {
    "torch": """
        torch/testing/_internal/distributed/rpc/dist_optimizer_test.py
        torch/testing/_internal/distributed/rpc/examples/parameter_server_test.py
        torch/testing/_internal/distributed/rpc/examples/reinforcement_learning_rpc_test.py
        torch/testing/_internal/distributed/rpc/jit/dist_autograd_test.py
        torch/distributed/_tools/fsdp2_mem_tracker.py
        torch/distributed/_tools/memory_tracker.py
        torch/distributed/_tools/runtime_estimator.py
        torch/distributed/algorithms/ddp_comm_hooks/optimizer_overlap_hooks.py
        torch/distributed/algorithms/ddp_comm_hooks/post_localSGD_hook.py
        torch/distributed/algorithms/join.py
        torch/distributed/algorithms/model_averaging/averagers.py
        torch/distributed/algorithms/model_averaging/hierarchical_model_averager.py
        torch/distributed/fsdp/sharded_grad_scaler.py
        torch/distributed/optim/named_optimizer.py
        torch/distributed/optim/post_localSGD_optimizer.py
    """,
    "torchao": """
        test/prototype/blockwise_fp8_training/test_dtensor.py
        test/prototype/blockwise_fp8_training/test_fsdp2.py
        test/prototype/blockwise_fp8_training/test_fsdp2_tp.py
        test/prototype/moe_training/ep/test_compile.py
        test/prototype/moe_training/ep/test_integration.py
        test/prototype/moe_training/mxfp8/test_mxfp8_a2a.py
        test/prototype/moe_training/nvfp4_training/test_nvfp4_fsdp2_tp.py
        test/prototype/moe_training/test_distributed.py
        test/prototype/test_quantized_training.py
        torchao/testing/training/dtensor_utils.py
        torchao/testing/training/fsdp2_utils.py
        torchao/float8/fsdp_utils.py
    """,
    "deepspeed": """
        deepspeed/runtime/base_optimizer.py
        deepspeed/runtime/fp16/fused_optimizer.py
        deepspeed/runtime/fp16/unfused_optimizer.py
        deepspeed/runtime/superoffload/superoffload_stage3.py
        deepspeed/runtime/data_pipeline/data_sampling/variable_batch_size_and_lr.py
    """,
    "lightning-fabric": """
        lightning_fabric/fabric.py
        lightning_fabric/plugins/precision/deepspeed.py
        lightning_fabric/plugins/precision/fsdp.py
        lightning_fabric/strategies/strategy.py
        lightning_fabric/strategies/xla.py
    """,
    "diffusers": "diffusers/training_utils.py",
    "datasets": "datasets/distributed.py",
    "bitsandbytes": "bitsandbytes/diagnostics/main.py",
    "transformers": "transformers/integrations/tpu.py",
}
# The same, of thousands of lines.
LONG = {
    "transformers": "transformers/trainer.py transformers/trainer_pt_utils.py transformers/training_args.py "
    "transformers/integrations/integration_utils.py",
    "deepspeed": "deepspeed/runtime/engine.py deepspeed/runtime/pipe/engine.py deepspeed/runtime/zero/stage3.py",
    "peft": "peft/tuners/lora/model.py",
    "torch": "torch/testing/_internal/distributed/rpc/dist_autograd_test.py",
}
# What PyPI has: scripts and training loops of other projects.
ELSEWHERE = {
    "torchtune": """
        recipes/full_finetune_distributed.py recipes/full_dpo_distributed.py recipes/qat_distributed.py
        recipes/lora_finetune_distributed.py recipes/lora_dpo_distributed.py recipes/qat_lora_finetune_distributed.py
        recipes/knowledge_distillation_distributed.py recipes/dev/grpo_full_finetune_distributed.py
        recipes/dev/early_exit_finetune_distributed.py recipes/dev/lora_finetune_distributed_multi_dataset.py
    """,
    "litgpt": "litgpt/pretrain.py litgpt/finetune/lora.py litgpt/finetune/full.py litgpt/finetune/adapter.py",
    "trl": "trl/scripts/sft.py trl/scripts/dpo.py trl/scripts/grpo.py trl/scripts/reward.py trl/scripts/kto.py "
    "trl/experimental/online_dpo/online_dpo_trainer.py",
    "cleanrl": "cleanrl/ppo_atari_multigpu.py",
    "open-clip-torch": "open_clip_train/main.py open_clip_train/train.py",
    "ultralytics": "ultralytics/engine/trainer.py ultralytics/utils/torch_utils.py",
    "speechbrain": "speechbrain/core.py",
    "espnet": "espnet2/train/trainer.py espnet2/train/gan_trainer.py espnet2/train/uasr_trainer.py "
    "espnet2/train/deepspeed_trainer.py espnet/asr/pytorch_backend/asr.py espnet/lm/pytorch_backend/lm.py",
    "mosaicml": "composer/trainer/trainer.py composer/distributed/dist_strategy.py",
    "colbert-ai": "colbert/training/training.py",
    "simpletransformers": """
        simpletransformers/ner/ner_model.py simpletransformers/t5/t5_model.py
        simpletransformers/seq2seq/seq2seq_model.py simpletransformers/conv_ai/conv_ai_model.py
        simpletransformers/classification/classification_model.py
        simpletransformers/language_modeling/language_modeling_model.py
        simpletransformers/pretrain_retrieval/pretrain_retrieval_model.py
    """,
    "torchrl": "sota-implementations/dreamer/dreamer_isaac.py",
    "openrlhf": "openrlhf/utils/deepspeed/deepspeed.py openrlhf/trainer/ray/ppo_actor.py",
    "llamafactory": "llamafactory/v1/core/base_trainer.py llamafactory/v1/accelerator/helper.py",
    "verl": "verl/workers/engine/fsdp/transformer_impl.py verl/workers/engine/torchtitan/transformer_impl.py",
    "mmengine": "mmengine/optim/optimizer/optimizer_wrapper.py mmengine/dist/utils.py",
    "dalle2-pytorch": "dalle2_pytorch/trainer.py",
    "meshgpt-pytorch": "meshgpt_pytorch/trainer.py",
    "magvit2-pytorch": "magvit2_pytorch/trainer.py",
    "muse-maskgit-pytorch": "muse_maskgit_pytorch/trainers.py",
    "denoising-diffusion-pytorch": "denoising_diffusion_pytorch/denoising_diffusion_pytorch.py "
    "denoising_diffusion_pytorch/denoising_diffusion_pytorch_1d.py denoising_diffusion_pytorch/guided_diffusion.py "
    "denoising_diffusion_pytorch/repaint.py",
    "audiolm-pytorch": "audiolm_pytorch/trainer.py",
    "imagen-pytorch": "imagen_pytorch/trainer.py",
    "soundstorm-pytorch": "soundstorm_pytorch/trainer.py",
    "voicebox-pytorch": "voicebox_pytorch/trainer.py",
    "naturalspeech2-pytorch": "naturalspeech2_pytorch/naturalspeech2_pytorch.py",
    "axolotl": "axolotl/utils/callbacks/__init__.py axolotl/integrations/nemo_gym/plugin.py",
}  # fmt: skip

_ONE_RANK_GATHERS = (
    "get_state_dict gathers a sharded model from all ranks, and only the main process calls it"
)
# The true findings by path: their codes, and why each is true.
TRUE: dict[str, tuple[set[str], str]] = {
    "muse_maskgit_pytorch/trainers.py": ({"DT102"}, _ONE_RANK_GATHERS),
    "denoising_diffusion_pytorch/denoising_diffusion_pytorch.py": ({"DT101", "DT102"}, _ONE_RANK_GATHERS),
    "denoising_diffusion_pytorch/denoising_diffusion_pytorch_1d.py": ({"DT101", "DT102"}, _ONE_RANK_GATHERS),
    "denoising_diffusion_pytorch/guided_diffusion.py": ({"DT101", "DT102"}, _ONE_RANK_GATHERS),
    "denoising_diffusion_pytorch/repaint.py": ({"DT101", "DT102"}, _ONE_RANK_GATHERS),
    "naturalspeech2_pytorch/naturalspeech2_pytorch.py": ({"DT101", "DT102"}, _ONE_RANK_GATHERS),
    "audiolm_pytorch/trainer.py": ({"DT101"}, _ONE_RANK_GATHERS),
    "soundstorm_pytorch/trainer.py": ({"DT101"}, _ONE_RANK_GATHERS),
    "voicebox_pytorch/trainer.py": ({"DT101"}, _ONE_RANK_GATHERS),
    "imagen_pytorch/trainer.py": (
        {"DT102"},
        "save_to_checkpoint_folder returns on other ranks, and save() begins with wait_for_everyone",
    ),
    "open_clip_train/main.py": (
        {"DT102"},
        "the master returns when the experiment exists; the other ranks go on to train and wait at a barrier",
    ),
    "simpletransformers/pretrain_retrieval/pretrain_retrieval_model.py": (
        {"DT504"},
        "a shuffling DistributedSampler in a loop over epochs, and set_epoch is never called",
    ),
    "axolotl/integrations/nemo_gym/plugin.py": (
        {"DT102"},
        "the main process returns when a request fails, and the other ranks wait at the barrier below",
    ),
}


def files(corpus: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """The files of a corpus that are installed, with their paths as the corpus names them."""
    elsewhere = os.environ.get("LINT_CORPUS")
    for distribution, listed in corpus.items():
        folders = [Path(place) for place in sys.path if place]
        folders += [Path(elsewhere) / distribution] if elsewhere else []
        for name in listed.split():
            found = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if found is not None:
                yield name, found


if __name__ == "__main__":
    print("\n".join(ELSEWHERE))
