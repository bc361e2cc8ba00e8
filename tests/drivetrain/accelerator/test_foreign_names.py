import pytest
from torch import nn

from drivetrain import Accelerator


def test_a_misspelt_argument_or_attribute_is_told_as_python_does() -> None:
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'mixed_precison'; did you mean mixed_prec"
    ):
        Accelerator(cpu=True, mixed_precison="no")
    accelerator = Accelerator(cpu=True)
    with pytest.raises(AttributeError, match=r"^'Accelerator' object has no attribute 'prepair'$"):
        accelerator.prepair(nn.Linear(1, 1))
    accelerator.note_of_mine = "kept"
    assert accelerator.note_of_mine == "kept"
