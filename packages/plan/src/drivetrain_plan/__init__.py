"""Choose how to train a model on given hardware: plans with memory, traffic and step time, before anything runs.

`plan_training(source, hardware, job, mode)` runs the program of a rank on tensors without data, for a few blocks of
the model, and searches what divides the model and the batch. `parse_hardware("8x80GB h100")` describes hardware,
`find_source` names a model, and `run_rank` is the program of one choice alone.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_plan.choice import PlanChoice as PlanChoice
    from drivetrain_plan.choice import pins_of as pins_of
    from drivetrain_plan.detected import measure_hardware as measure_hardware
    from drivetrain_plan.errors import PlanError as PlanError
    from drivetrain_plan.hardware import RunHardware as RunHardware
    from drivetrain_plan.hardware import parse_hardware as parse_hardware
    from drivetrain_plan.model.source import BuiltSource as BuiltSource
    from drivetrain_plan.model.source import ConfigSource as ConfigSource
    from drivetrain_plan.model.source import FactorySource as FactorySource
    from drivetrain_plan.model.source import ModelSource as ModelSource
    from drivetrain_plan.model.source import ModuleSource as ModuleSource
    from drivetrain_plan.model.source import find_source as find_source
    from drivetrain_plan.model.training_modes import MODES as MODES
    from drivetrain_plan.model.training_modes import TrainingMode as TrainingMode
    from drivetrain_plan.picture import draw_plans as draw_plans
    from drivetrain_plan.planner import plan_training as plan_training
    from drivetrain_plan.program.figures import StepFigures as StepFigures
    from drivetrain_plan.program.rank_step import run_rank as run_rank
    from drivetrain_plan.search.candidates import TrainingJob as TrainingJob
    from drivetrain_plan.search.ranking import PlanTable as PlanTable
    from drivetrain_plan.search.ranking import TrainingPlan as TrainingPlan

# Module -> its public names.
_NAMES = {
    "choice": "PlanChoice pins_of",
    "detected": "measure_hardware",
    "errors": "PlanError",
    "hardware": "RunHardware parse_hardware",
    "model.source": "BuiltSource ConfigSource FactorySource ModelSource ModuleSource find_source",
    "model.training_modes": "MODES TrainingMode",
    "picture": "draw_plans",
    "planner": "plan_training",
    "program.figures": "StepFigures",
    "program.rank_step": "run_rank",
    "search.candidates": "TrainingJob",
    "search.ranking": "PlanTable TrainingPlan",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
