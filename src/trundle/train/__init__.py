"""The one training loop, what it is fed, how its learning rate moves, and the losses it is given."""

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.train.adapters import Lora as Lora
    from trundle.train.adapters import add_adapters as add_adapters
    from trundle.train.alignment import Alignment as Alignment
    from trundle.train.alignment import make_alignment as make_alignment
    from trundle.train.batches import Batches as Batches
    from trundle.train.batches import ByLength as ByLength
    from trundle.train.batches import Order as Order
    from trundle.train.blocks import check_compiler as check_compiler
    from trundle.train.blocks import compiled_blocks as compiled_blocks
    from trundle.train.blocks import recomputed_blocks as recomputed_blocks
    from trundle.train.checkpoint import METRICS_FILE as METRICS_FILE
    from trundle.train.checkpoint import has_checkpoint as has_checkpoint
    from trundle.train.contrast_task import make_contrast as make_contrast
    from trundle.train.contrastive import angle as angle
    from trundle.train.contrastive import cosine as cosine
    from trundle.train.contrastive import distil as distil
    from trundle.train.contrastive import infonce as infonce
    from trundle.train.fisher import Gradients as Gradients
    from trundle.train.fisher import measure_gradients as measure_gradients
    from trundle.train.fisher import measure_norms as measure_norms
    from trundle.train.grouped import ByGroup as ByGroup
    from trundle.train.head_task import make_head_task as make_head_task
    from trundle.train.imitation import Imitator as Imitator
    from trundle.train.imitation import check_imitation as check_imitation
    from trundle.train.imitation import check_same_tokens as check_same_tokens
    from trundle.train.learner import precision_for as precision_for
    from trundle.train.loop import TrainResult as TrainResult
    from trundle.train.loop import TrainSettings as TrainSettings
    from trundle.train.loop import train as train
    from trundle.train.losses import Heads as Heads
    from trundle.train.losses import distilbert as distilbert
    from trundle.train.losses import leaf as leaf
    from trundle.train.losses import minilm as minilm
    from trundle.train.losses import tinybert as tinybert
    from trundle.train.losses import uniform_layers as uniform_layers
    from trundle.train.nesting import Nest as Nest
    from trundle.train.nesting import make_nesting as make_nesting
    from trundle.train.own_texts import rows_of_all_processes as rows_of_all_processes
    from trundle.train.ridge import LinearMap as LinearMap
    from trundle.train.ridge import fit_ridge as fit_ridge
    from trundle.train.schedule import constant as constant
    from trundle.train.schedule import leaf_cycles as leaf_cycles
    from trundle.train.schedule import linear as linear
    from trundle.train.tuple_batches import Prompts as Prompts
    from trundle.train.zeros import count_zeros as count_zeros
    from trundle.train.zeros import zeros_kept as zeros_kept

__getattr__ = lazy(
    __name__,
    {
        "Lora": "adapters",
        "add_adapters": "adapters",
        "Alignment": "alignment",
        "make_alignment": "alignment",
        "check_compiler": "blocks",
        "compiled_blocks": "blocks",
        "recomputed_blocks": "blocks",
        "METRICS_FILE": "checkpoint",
        "has_checkpoint": "checkpoint",
        "make_contrast": "contrast_task",
        "angle": "contrastive",
        "cosine": "contrastive",
        "distil": "contrastive",
        "infonce": "contrastive",
        "ByGroup": "grouped",
        "make_head_task": "head_task",
        "Imitator": "imitation",
        "check_imitation": "imitation",
        "check_same_tokens": "imitation",
        "precision_for": "learner",
        "Batches": "batches",
        "ByLength": "batches",
        "Order": "batches",
        "TrainResult": "loop",
        "TrainSettings": "loop",
        "train": "loop",
        "Heads": "losses",
        "distilbert": "losses",
        "leaf": "losses",
        "minilm": "losses",
        "tinybert": "losses",
        "uniform_layers": "losses",
        "Nest": "nesting",
        "make_nesting": "nesting",
        "rows_of_all_processes": "own_texts",
        "LinearMap": "ridge",
        "fit_ridge": "ridge",
        "constant": "schedule",
        "leaf_cycles": "schedule",
        "linear": "schedule",
        "Prompts": "tuple_batches",
        "count_zeros": "zeros",
        "zeros_kept": "zeros",
        "Gradients": "fisher",
        "measure_gradients": "fisher",
        "measure_norms": "fisher",
    },
)
