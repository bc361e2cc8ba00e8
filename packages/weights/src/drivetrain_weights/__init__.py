"""Read and write model weight files: safetensors, torch's own, and Hugging Face's indices of shards.

`open_weights` maps a file, the shards of an index, or a folder into memory, so that a tensor is read on first use.
`read_torch_file` reads files of `torch.save` without running code from them. `find_ties` finds the names that share a
tensor; `find_tied_parameters` and `retie_parameters` keep tied weights tied.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_weights.aligned_file import write_aligned as write_aligned
    from drivetrain_weights.errors import NoWeightsError as NoWeightsError
    from drivetrain_weights.errors import SeveralWeightsError as SeveralWeightsError
    from drivetrain_weights.errors import TiedParametersError as TiedParametersError
    from drivetrain_weights.errors import UnsafePickleError as UnsafePickleError
    from drivetrain_weights.errors import WeightFilesError as WeightFilesError
    from drivetrain_weights.mapped_file import MappedFile as MappedFile
    from drivetrain_weights.tensor_box import Box as Box
    from drivetrain_weights.tensor_box import box_of_dtensor as box_of_dtensor
    from drivetrain_weights.tied_parameters import find_tied_parameters as find_tied_parameters
    from drivetrain_weights.tied_parameters import find_ties as find_ties
    from drivetrain_weights.tied_parameters import retie_parameters as retie_parameters
    from drivetrain_weights.torch_file import read_torch_file as read_torch_file
    from drivetrain_weights.weight_index import WeightIndex as WeightIndex
    from drivetrain_weights.weight_index import open_weights as open_weights
    from drivetrain_weights.weight_index import read_index as read_index

# Module -> its public names.
_NAMES = {
    "aligned_file": "write_aligned",
    "errors": "NoWeightsError SeveralWeightsError TiedParametersError UnsafePickleError WeightFilesError",
    "mapped_file": "MappedFile",
    "tensor_box": "Box box_of_dtensor",
    "tied_parameters": "find_tied_parameters find_ties retie_parameters",
    "torch_file": "read_torch_file",
    "weight_index": "open_weights read_index WeightIndex",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
