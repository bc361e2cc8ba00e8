"""Names for packages that give the Accelerator another interface, or that read another library's runs.

Such packages may also use the Accelerator's methods `window`, `prepared_of`, `has_prepared`, `loss_scale_state` and
`load_loss_scale_state`. docs/howto/extending.md shows how the parts work together. Names not listed here may change
in any release.
"""

from drivetrain.saving.divided import as_in as as_in
from drivetrain.saving.divided import mark_replicas as mark_replicas
from drivetrain.saving.other_formats import RunFormat as RunFormat
from drivetrain.saving.registered import Stateful as Stateful
from drivetrain.saving.resume import RunState as RunState
from drivetrain.saving.resume import frozen_names as frozen_names
from drivetrain.saving.resume import reseed_generators as reseed_generators

__all__ = ["RunFormat", "RunState", "Stateful", "as_in", "frozen_names", "mark_replicas", "reseed_generators"]
