"""A check for weights that are quantised and trained."""

from torch import nn

from drivetrain_precision.errors import PrecisionError

_TRAINED = "torchao.prototype.quantized_training."


def check_trained_weights(model: nn.Module) -> None:
    """Refuse trained weights of torchao's prototype for quantized training."""
    # Torch's optimizers lack operations on int8 weights, DDP and FSDP2 cannot send or divide them (torchao 0.18), and
    # a checkpoint could not hold them.
    for name, parameter in model.named_parameters():
        kind = type(parameter.data)
        if kind.__module__.startswith(_TRAINED) and parameter.requires_grad:
            raise PrecisionError(
                f"{name} is trained as a {kind.__name__} of torchao: under no backend can it be trained and saved. "
                "Train weights that stay plain: prepare_qat(model, QuantizedScheme(weight_bits=8)) for int8 "
                "inference, int8_mixed_precision_training(module_swap=True) of torchao for products in int8"
            )
