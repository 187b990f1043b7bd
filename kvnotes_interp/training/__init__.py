"""Distillation: train what makes a cache so that the frozen model, reading it, answers as with the full context.

    writer = kv.operators.new_writer(model, "sempic")
    train, validation = kv.training.draw("biography", samples=1024, validation=64, docs=(2, 3, 5, 7), seed=0)
    trained = kv.training.distill(kv.training.Writing(model, writer), model, train, validation, out="runs/bio")
    trained.plot()

The loop is the same for every method (`Method`): the teacher is the model itself with the whole context, the student is
the same model, frozen, on the method's caches. `runs/bio/best` then holds what was learned.
"""

from kvnotes_interp.training.compacting import Compacting
from kvnotes_interp.training.distill import distill
from kvnotes_interp.training.examples import Example, Part, draw, draw_parts, examples_of
from kvnotes_interp.training.loss import kl_to_teacher
from kvnotes_interp.training.method import Method
from kvnotes_interp.training.reader import answer_logits
from kvnotes_interp.training.selecting import Selecting
from kvnotes_interp.training.settings import Settings
from kvnotes_interp.training.teacher import Target, teach
from kvnotes_interp.training.trained import Trained
from kvnotes_interp.training.writing import Writing

__all__ = [
    "Compacting",
    "Example",
    "Method",
    "Part",
    "Selecting",
    "Settings",
    "Target",
    "Trained",
    "Writing",
    "answer_logits",
    "distill",
    "draw",
    "draw_parts",
    "examples_of",
    "kl_to_teacher",
    "teach",
]
